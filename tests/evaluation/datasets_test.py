"""Tests for the datasets that sort, pad and distribute rows."""

import doctest
import pickle

import grain
import numpy as np
from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.evaluation import datasets


def rows_of(lengths):
  return grain.MapDataset.source([{"inputs": np.full((1, n), n), "n": n} for n in lengths])


class LMEvalDatasetsTest(absltest.TestCase):

  def test_the_documented_examples_hold(self):
    found = doctest.testmod(datasets)
    self.assertGreater(found.attempted, 10)
    self.assertEqual(found.failed, 0)

  def test_every_row_of_a_batch_gets_positions_of_its_own(self):
    made = datasets.CompleteLLMIndexedBatch().map(
        {"inputs": np.zeros((3, 4)), "targets": np.zeros((3, 4)), "idx": np.array([4, 5, 6])}
    )
    np.testing.assert_array_equal(made["inputs_position"], np.tile(np.arange(4), (3, 1)))
    np.testing.assert_array_equal(made["document_idx"], [5, 6, 7])
    np.testing.assert_array_equal(made["sequence_idx"], [0, 0, 0])
    self.assertFalse(made["_document_borders"].any())
    for name in ("inputs_position", "targets_position", "document_idx", "sequence_idx"):
      self.assertEqual(made[name].dtype, np.int32, name)

  def test_completing_needs_no_object_and_keeps_what_is_given(self):
    given = {
        "inputs": np.zeros((1, 2)),
        "targets": np.zeros((1, 2)),
        "idx": 0,
        "inputs_position": np.array([[4, 5]]),
        "sequence_idx": np.array([3]),
        "_document_borders": np.array([[True, False]]),
    }
    made = datasets.CompleteLLMIndexedBatch.map(item=given)
    for name in ("inputs_position", "sequence_idx", "_document_borders"):
      np.testing.assert_array_equal(made[name], given[name])

  def test_completing_a_row_leaves_the_record_as_it_was(self):
    record = {"inputs": np.zeros((1, 2)), "targets": np.zeros((1, 2)), "idx": 0}
    datasets.CompleteLLMIndexedBatch().map(record)
    self.assertEqual(set(record), {"inputs", "targets", "idx"})

  def test_the_filler_row_has_the_fields_of_a_completed_one(self):
    segments = {f"{side}_segmentation": np.ones((1, 1)) for side in ("inputs", "targets")}
    made = datasets.CompleteLLMIndexedBatch().map(
        {"inputs": np.zeros((1, 1)), "targets": np.zeros((1, 1)), "idx": 0, **segments}
    )
    filler = datasets.empty_llm_indexed_sample()
    self.assertEqual(set(filler), set(made))
    self.assertEqual({n: a.shape for n, a in filler.items()}, {n: a.shape for n, a in made.items()})
    self.assertFalse(any(array.any() for array in filler.values()))

  @settings(deadline=None)
  @given(st.integers(0, 30), st.integers(1, 9), st.integers(0, 40))
  def test_padded_datasets_have_whole_batches_only(self, size, multiple, min_length):
    source = grain.MapDataset.source(list(range(100, 100 + size)))
    padded = datasets.PadBatchDataset(source, multiple, min_length, -1)
    self.assertEqual(len(padded) % multiple, 0)
    self.assertGreaterEqual(len(padded), max(size, min_length))
    self.assertLess(len(padded) - max(size, min_length), multiple)
    self.assertEqual([padded[i] for i in range(size)], list(range(100, 100 + size)))
    self.assertEqual(
        {padded[i] for i in range(size, len(padded))}, {-1} if len(padded) > size else set()
    )
    if len(padded):
      self.assertEqual(padded[len(padded) + 1], padded[1 % len(padded)])
    else:
      with self.assertRaisesRegex(errors.OrderError, "is empty, so it has no element 0"):
        padded[0]  # pylint: disable=pointless-statement

  def test_they_repeat_as_datasets_of_grain_do(self):
    numbers = grain.MapDataset.source([3, 1, 2])
    found = datasets.SortedDataset(numbers, lambda x: x).repeat(2)
    self.assertEqual(found[5], 3)
    self.assertEqual(list(found), [1, 2, 3, 1, 2, 3])
    padded = datasets.PadBatchDataset(numbers, 4, 0, 0).repeat(2)
    self.assertEqual(list(padded), [3, 1, 2, 0, 3, 1, 2, 0])
    dealt = datasets.MultihostSortedRemapDataset(grain.MapDataset.range(8), 4, 2).repeat(2)
    self.assertEqual(list(dealt)[8:], [0, 1, 4, 5, 2, 3, 6, 7])
    rows = datasets.PadSequenceInBatchDataset(rows_of([9, 8, 3]), batch_size=2, multiple_of=2)
    self.assertEqual([row["inputs"].shape[1] for row in rows.repeat(2)], [10, 10, 4] * 2)

  def test_their_element_spec_is_that_of_the_dataset(self):
    class Row(grain.transforms.Map):

      def map(self, element):
        return {"inputs": np.zeros((1, element + 1), np.int32), "n": np.int64(element)}

      def output_spec(self, input_spec):
        return {"inputs": grain.experimental.ShapeDtypeStruct((1, None), np.int32), "n": input_spec}

    numbers = grain.MapDataset.range(8)
    for dataset in (
        datasets.SortedDataset(numbers, lambda x: x),
        datasets.PadBatchDataset(numbers, 4, 0, 0),
        datasets.MultihostSortedRemapDataset(numbers, 4, 2),
    ):
      spec = grain.experimental.get_element_spec(dataset)
      self.assertEqual((spec.shape, spec.dtype), ((), np.int64))
    padded = datasets.PadSequenceInBatchDataset(numbers.map(Row()), 2, 2)
    spec = grain.experimental.get_element_spec(padded)
    self.assertEqual((spec["inputs"].shape, spec["n"].shape), ((1, None), ()))

  def test_a_ragged_last_group_is_padded_to_its_own_longest(self):
    padded = datasets.PadSequenceInBatchDataset(rows_of([9, 8, 3]), batch_size=2, multiple_of=2)
    self.assertEqual([padded[i]["inputs"].shape[1] for i in range(3)], [10, 10, 4])

  def test_values_that_are_not_sequences_are_unchanged(self):
    padded = datasets.PadSequenceInBatchDataset(rows_of([3]), batch_size=1, multiple_of=8)
    self.assertEqual(padded[0]["n"], 3)
    np.testing.assert_array_equal(padded[0]["inputs"], [[3, 3, 3, 0, 0, 0, 0, 0]])

  def test_a_group_is_read_once_for_its_length_not_once_per_element(self):
    read = []
    source = rows_of(range(1, 17)).map(lambda row: read.append(row["n"]) or row)
    padded = datasets.PadSequenceInBatchDataset(source, batch_size=16, multiple_of=4)
    for i in range(16):
      self.assertEqual(padded[i]["inputs"].shape[1], 16)
    self.assertLen(read, 32)

  @settings(deadline=None)
  @given(st.lists(st.integers(0, 5), max_size=20), st.booleans())
  def test_sorting_is_stable(self, values, reverse):
    source = grain.MapDataset.source([*enumerate(values)])
    found = datasets.SortedDataset(source, lambda pair: pair[1], reverse=reverse)
    self.assertEqual(
        [found[i] for i in range(len(found))],
        sorted(enumerate(values), key=lambda pair: pair[1], reverse=reverse),
    )

  @settings(deadline=None)
  @given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
  def test_together_the_hosts_have_each_global_batch_in_order(self, hosts, local, steps):
    batch = hosts * local
    source = grain.MapDataset.source(list(range(batch * steps)))
    dealt = datasets.MultihostSortedRemapDataset(source, batch, hosts)
    share = len(dealt) // hosts
    for step in range(steps):
      rows = [dealt[h * share + step * local + i] for h in range(hosts) for i in range(local)]
      self.assertEqual(rows, list(range(step * batch, (step + 1) * batch)))

  def test_batches_that_do_not_divide_over_hosts_are_an_error(self):
    source = grain.MapDataset.source(list(range(8)))
    with self.assertRaisesRegex(errors.ConfigError, "4 rows does not divide over 3 hosts"):
      datasets.MultihostSortedRemapDataset(source, 4, 3)
    with self.assertRaisesRegex(
        errors.ConfigError, "8 elements are not a whole number of batches of 3"
    ):
      datasets.MultihostSortedRemapDataset(source, 3, 1)
    with self.assertRaisesRegex(errors.ConfigError, "batch_size=0 must be positive"):
      datasets.PadSequenceInBatchDataset(source, 0)

  def test_rows_that_are_missing_from_a_batch_are_filled_in(self):
    joined = datasets._pad_batch_multiple([np.ones((1, 3))], multiple_of=2, batch_size_pad=3)
    np.testing.assert_array_equal(joined, [[1, 1, 1, 0], [0] * 4, [0] * 4])
    scalars = datasets._pad_batch_multiple([np.int32(3), np.int32(4)], batch_size_pad=3)
    np.testing.assert_array_equal(scalars, [3, 4, 0])
    flat = datasets._pad_batch_multiple([np.array([1]), np.array([2])])
    np.testing.assert_array_equal(flat, [1, 2])

  def test_datasets_can_be_pickled_to_a_worker(self):
    padded = datasets.PadBatchDataset(
        rows_of([3, 1, 2]), 4, 0, {"inputs": np.zeros((1, 1)), "n": 0}
    )
    ordered = datasets.SortedDataset(padded, datasets.token_length)
    made = datasets.PadSequenceInBatchDataset(ordered, 2, 2)
    self.assertEqual(made[0]["inputs"].shape, (1, 2))
    copy = pickle.loads(pickle.dumps(made))
    self.assertEqual([copy[i]["n"] for i in range(4)], [made[i]["n"] for i in range(4)])


if __name__ == "__main__":
  absltest.main()
