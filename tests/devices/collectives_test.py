"""Tests that all processes fail, decide and compare together."""

from __future__ import annotations

from typing import Any

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

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


OUTCOME = "tests.devices.multihost_cases:outcome"


def _batch(value: int, rows: int = 1, columns: int = 2) -> dict[str, np.ndarray]:
  return {"x": np.full((rows, columns), value, np.int32)}


def _outcomes(*batches: list[Any], **kwargs: Any) -> list[tuple[list[Any], str]]:
  return distributed.run(OUTCOME, processes=len(batches), args=(batches,), kwargs=kwargs)


class BatchAgreementTest(parameterized.TestCase):

  @parameterized.parameters({"iterator_length": 5}, {"pad_shapes": True})
  def test_a_host_that_runs_out_stops_all_with_one_error(self, **kwargs: Any):
    results = _outcomes([_batch(1), _batch(2)], [_batch(3)], **kwargs)
    self.assertEqual(results[0], results[1])
    self.assertEqual(results[0][0], [{"x": [[1, 1], [3, 3]]}])
    of = " of 5" if "iterator_length" in kwargs else ""
    self.assertStartsWith(
        results[0][1],
        f"OrderError: process 1 of 2 ran out of data at step 1{of}, while process 0 still had",
    )

  def test_several_hosts_that_run_out_are_all_named(self):
    some, none = [_batch(1)], []
    results = _outcomes(none, some, none, some, iterator_length=1)
    self.assertLen({text for _, text in results}, 1)
    self.assertIn(
        "processes 0, 2 of 4 ran out of data at step 0 of 1, while processes 1, 3 still had",
        results[0][1],
    )

  def test_hosts_that_end_together_end_the_epoch(self):
    results = _outcomes([_batch(1)], [_batch(2)], iterator_length=5)
    self.assertEqual([text for _, text in results], ["end after step_counter=1"] * 2)

  def test_unequal_shapes_are_padded_to_the_largest(self):
    left = [_batch(1, rows=2, columns=3), _batch(2)]
    right = [_batch(3, rows=1, columns=4), _batch(4)]
    for seen, text in _outcomes(left, right, pad_shapes=True, pad_value=9):
      self.assertEqual(text, "end after step_counter=2")
      self.assertEqual(seen[0]["x"], [[1, 1, 1, 9], [1, 1, 1, 9], [3, 3, 3, 3], [9, 9, 9, 9]])
      self.assertEqual(seen[1]["x"], [[2, 2], [4, 4]])

  def test_unequal_shapes_without_padding_stop_all(self):
    results = _outcomes([_batch(1, rows=2)], [_batch(1, rows=1)], iterator_length=1)
    self.assertEqual(results[0], results[1])
    self.assertIn(
        "CorpusError: At step 0 of 1, process 1 of 2 delivered different shapes than process 0:"
        " batch['x'] is (2, 2) on process 0 and (1, 2) on process 1. Set pad_shapes=True",
        results[0][1],
    )

  def test_unequal_structures_stop_all(self):
    results = _outcomes([_batch(1)], [{"y": np.zeros((1, 2), np.int32)}], pad_shapes=True)
    for process, (_, text) in enumerate(results):
      self.assertIn("process 1 of 2 delivered a batch of a different structure than process", text)
      self.assertIn(f"process {process} has batch['{'xy'[process]}']: int32, 2 axes", text)

  def test_an_error_of_one_host_reaches_the_others_with_its_text(self):
    broken = errors.CorpusError("part-3.npy: bytes 0..8 expected, 4 found")
    results = _outcomes([_batch(1), broken], [_batch(2), _batch(3)], iterator_length=4)
    self.assertEqual(results[0][1], f"CorpusError: {broken}")
    self.assertEqual(
        results[1][1],
        "CorpusError: process 0 of 2 could not load the batch of step 1 of 4: CorpusError:"
        f" {broken}",
    )


if __name__ == "__main__":
  absltest.main()
