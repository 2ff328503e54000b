import inspect
import pickle

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors

_ALL = [value for _, value in inspect.getmembers(errors, inspect.isclass)]


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(*_ALL)
  def test_an_error_survives_the_way_out_of_a_worker(self, kind):
    error = pickle.loads(pickle.dumps(kind("What happened.")))
    self.assertIs(type(error), kind)
    self.assertEqual(str(error), "What happened.")

  @parameterized.parameters(*_ALL)
  def test_one_clause_catches_all(self, kind):
    self.assertTrue(issubclass(kind, errors.MaxtextOlmoError))

  @parameterized.parameters(
      (errors.CorpusError, ValueError),
      (errors.MissingFileError, FileNotFoundError),
      (errors.WriteError, OSError),
      (errors.WorkerError, RuntimeError),
      (errors.OrderError, IndexError),
      (errors.ConfigError, ValueError),
      (errors.ResumeError, ValueError),
  )
  def test_code_that_expects_the_built_in_error_catches_it(self, kind, built_in):
    self.assertTrue(issubclass(kind, built_in))

  def test_a_restart_may_help_if_a_store_or_a_worker_is_the_cause(self):
    for cause in (errors.StoreUnavailableError("No answer."), errors.WorkerError("Killed.")):
      self.assertTrue(errors.is_transient(cause))
      wrapped = errors.WriteError("Cannot write.")
      wrapped.__cause__ = cause
      self.assertTrue(errors.is_transient(wrapped))
    for error in (errors.CorpusError("Truncated."), errors.ConfigError("Bad."), OSError("Full.")):
      self.assertFalse(errors.is_transient(error))

  def test_a_transient_cause_gives_its_type_to_the_errors_of_other_processes(self):
    wrapped = errors.ConfigError("The lease cannot be read.")
    wrapped.__cause__ = errors.WriteError("Cannot write.")
    self.assertEqual(errors.describe(wrapped), "ConfigError: The lease cannot be read.")
    wrapped.__cause__.__cause__ = errors.StoreUnavailableError("No answer.")
    text = errors.describe(wrapped)
    self.assertEqual(text, "StoreUnavailableError: The lease cannot be read.")
    self.assertTrue(errors.is_transient(errors.from_peer(text, "Process 1 failed.")))

  def test_the_errors_of_other_processes_are_transient_if_the_first_one_is(self):
    for first in (errors.StoreUnavailableError("No answer."), errors.WorkerError("Killed.")):
      other = errors.from_peer(f"{type(first).__name__}: {first}", "Process 1 failed.")
      self.assertIs(type(other), type(first))
      self.assertEqual(str(other), "Process 1 failed.")
    other = errors.from_peer("ConfigError: Bad.", "Process 1 failed.", errors.CorpusError)
    self.assertIs(type(other), errors.CorpusError)


if __name__ == "__main__":
  absltest.main()
