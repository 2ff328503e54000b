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


if __name__ == "__main__":
  absltest.main()
