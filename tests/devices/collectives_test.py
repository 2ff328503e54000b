"""Tests that processes fail, decide and compare as one."""

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from tests import distributed

STARTS_PROCESSES = True

_CASES = "tests.devices.collectives_cases:"


class AgreementTest(absltest.TestCase):

  def failures(self, case, *args, processes=2):
    with self.assertRaises(distributed.DistributedError) as caught:
      distributed.run(_CASES + case, processes=processes, args=args)
    self.assertLen(caught.exception.failures, processes)
    return [failure.error for failure in caught.exception.failures]

  def test_all_continue_if_none_fails(self):
    self.assertEqual(distributed.run(_CASES + "act", args=((),)), [0, 1])

  def test_a_failure_on_one_process_is_raised_on_all(self):
    mine, theirs = self.failures("act", (1,))
    self.assertIsInstance(theirs, errors.CorpusError)
    self.assertIsInstance(mine, errors.MaxtextOlmoError)
    self.assertRegex(
        str(mine),
        "Process 1 of 2 failed while opening the index.*CorpusError: the mount is missing on 1",
    )

  def test_process_0_decides_for_all(self):
    expected = {"step": 7, "text": "ä" * 100}
    self.assertEqual(distributed.run(_CASES + "decide", args=(False,)), [expected] * 2)

  def test_if_process_0_fails_all_say_what_it_was_doing(self):
    mine, theirs = self.failures("decide", True)
    self.assertIsInstance(mine, OSError)
    self.assertIsInstance(theirs, errors.MaxtextOlmoError)
    self.assertEqual(
        str(theirs),
        "Process 0 failed while looking for checkpoints, so all processes stop: OSError:"
        " checkpoint_dir is gone",
    )

  def test_different_values_are_an_error_that_names_them_on_all(self):
    for error in self.failures("compare", [{"seed": 1, "n": 3}, {"seed": 2, "n": 3}]):
      self.assertIsInstance(error, errors.ConfigError)
      self.assertIn("Processes 0 and 1 would read different streams: {'seed': (1, 2)}", str(error))

  def test_texts_of_any_length_are_gathered(self):
    texts = ["", "x" * 1000 + "ü"]
    self.assertEqual(distributed.run(_CASES + "gather", args=(texts,)), [texts] * 2)

  def test_one_process_agrees_with_itself(self):
    self.assertEqual(collectives.run_on_all_processes(lambda: 5, "counting"), 5)
    self.assertEqual(collectives.from_process_0(lambda: [1], "counting"), [1])
    collectives.check_equal({"a": 1})
    with self.assertRaises(ZeroDivisionError):
      collectives.run_on_all_processes(lambda: 1 // 0, "dividing")


if __name__ == "__main__":
  absltest.main()
