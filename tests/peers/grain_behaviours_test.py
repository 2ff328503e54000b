"""Tests that datasets, iterators and sources of this package behave as Grain's do."""

import itertools
import pickle

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from tests.loader import cases

_ROWS = (None, "planned", "first_fit", "best_fit", "concat_then_split")


def _rows(packing=None, num_epochs=1):
  rng = np.random.default_rng(0)
  documents = [{"inputs": rng.integers(1, 90, size)} for size in rng.integers(1, 9, 12)]
  return maxtext_olmo.make_grain_llm_dataset(
      0, 1, documents, 4, 8, True, 3, num_epochs, packing=packing
  )


def _map_datasets():
  numbers = grain.MapDataset.range(8)
  rows = grain.MapDataset.source([{"a": np.full((1, size), size)} for size in (3, 2, 4, 2)])
  return {
      "sorted": maxtext_olmo.SortedDataset(numbers, lambda x: -x),
      "padded": maxtext_olmo.PadBatchDataset(numbers, 5, 0, -1),
      "padded_sequences": maxtext_olmo.PadSequenceInBatchDataset(rows, 2, 4),
      "remapped": maxtext_olmo.MultihostSortedRemapDataset(numbers, 4, 2),
  }


class MapDatasetTest(parameterized.TestCase):

  def assert_same(self, found, expected):
    np.testing.assert_equal(list(found), list(expected))

  @parameterized.parameters(*_map_datasets())
  def test_an_index_is_taken_modulo_the_length(self, name):
    dataset = _map_datasets()[name]
    elements = [dataset[number] for number in range(len(dataset))]
    self.assert_same(dataset, elements)
    for number in (len(dataset), 3 * len(dataset) + 2, -1):
      np.testing.assert_equal(dataset[number], elements[number % len(dataset)])
    self.assert_same(dataset.repeat(2), elements * 2)
    self.assert_same(itertools.islice(dataset.repeat(), 3 * len(elements)), elements * 3)

  @parameterized.parameters(*_map_datasets())
  def test_they_are_sliced_shuffled_mapped_and_batched(self, name):
    dataset = _map_datasets()[name]
    elements = list(dataset)
    self.assert_same(dataset[1::2], elements[1::2])
    self.assert_same(dataset.slice(slice(0, 3)), elements[:3])
    self.assert_same(dataset.map(lambda element: [element]), [[element] for element in elements])
    shuffled = list(dataset.shuffle(seed=1))
    self.assertCountEqual(map(repr, shuffled), map(repr, elements))
    batched = dataset.batch(2, batch_fn=list)
    self.assert_same(itertools.chain(*batched), elements)
    grain.experimental.assert_equal_output_after_checkpoint(dataset.to_iter_dataset())

  @parameterized.parameters(*_map_datasets())
  def test_they_survive_pickling(self, name):
    dataset = _map_datasets()[name]
    if name != "sorted":  # Its key is a lambda.
      self.assert_same(pickle.loads(pickle.dumps(dataset)), dataset)


class RowsTest(parameterized.TestCase):

  @parameterized.parameters(*_ROWS)
  def test_they_continue_from_every_checkpoint(self, packing):
    grain.experimental.assert_equal_output_after_checkpoint(_rows(packing))
    endless = grain.experimental.LimitIterDataset(_rows(packing, num_epochs=None), 7)
    grain.experimental.assert_equal_output_after_checkpoint(endless)
    sliced = _rows(packing).slice(slice(1, None, 2)).map(dict)
    grain.experimental.assert_equal_output_after_checkpoint(sliced)

  @parameterized.parameters(*_ROWS)
  def test_iterators_are_independent_and_end_for_good(self, packing):
    rows = _rows(packing)
    expected = list(rows)
    one, other = iter(rows), iter(rows)
    for row in expected:
      np.testing.assert_equal(next(one), row)
    for _ in range(2):
      with self.assertRaises(StopIteration):
        next(one)
    np.testing.assert_equal(next(other), expected[0])

  @parameterized.parameters(*_ROWS)
  def test_transformations_of_grain_apply(self, packing):
    rows = _rows(packing)
    expected = [row["inputs"] for row in rows]
    found = rows.map(lambda row: row["inputs"])
    np.testing.assert_equal(list(found), expected)
    np.testing.assert_equal(np.concatenate(list(found.batch(3))), expected)
    long = found.filter(lambda ids: np.count_nonzero(ids) > 4)
    np.testing.assert_equal(list(long), [ids for ids in expected if np.count_nonzero(ids) > 4])
    ahead = grain.experimental.ThreadPrefetchIterDataset(found, prefetch_buffer_size=2)
    np.testing.assert_equal(list(ahead), expected)
    mixed = grain.IterDataset.mix([_rows(packing, None), _rows(packing, None)], [1, 1])
    first = next(iter(mixed))
    np.testing.assert_equal(first["inputs"], expected[0])

  @parameterized.parameters(*_ROWS)
  def test_the_element_spec_is_what_comes(self, packing):
    batches = _rows(packing).batch(2, drop_remainder=True)
    for dataset in (_rows(packing), batches):
      spec = grain.experimental.get_element_spec(dataset)
      first = next(iter(dataset))
      self.assertEqual(
          {name: (value.shape, value.dtype) for name, value in spec.items()},
          {name: (value.shape, value.dtype) for name, value in first.items()},
      )


class CorpusTest(cases.LoaderCase):

  def test_the_batches_of_a_host_are_a_map_dataset(self):
    train = self.train(olmo_num_epochs=1)
    batches = train.host_batches()
    length = len(batches)
    tokens = [batches[step]["tokens"].copy() for step in range(length)]
    np.testing.assert_array_equal(batches[length + 2]["tokens"], tokens[2])
    np.testing.assert_array_equal(batches.repeat(2)[2 * length - 1]["tokens"], tokens[-1])
    np.testing.assert_array_equal(batches[3:][1]["tokens"], tokens[4])
    sizes = batches.map(lambda batch: batch["tokens"].shape)
    self.assertEqual(set(sizes), {tokens[0].shape})
    spec = grain.experimental.get_element_spec(batches)
    self.assertEqual(
        {name: (value.shape, value.dtype) for name, value in spec.items()},
        {name: (value.shape, value.dtype) for name, value in batches[0].items()},
    )

  def test_a_train_iterator_is_an_iterator_of_grain(self):
    train = self.train(olmo_num_epochs=1)
    self.assertIsInstance(train, grain.DatasetIterator)
    self.assertIs(iter(train), train)
    next(train)
    state = train.get_state()
    expected = cases.take(train, 2)
    train.set_state(state)
    self.assert_equal_batches(cases.take(train, 2), expected)

  def test_a_source_reads_by_number_and_says_what_it_is(self):
    index = maxtext_olmo.load_index(self.index_path)
    source = maxtext_olmo.OlmoNpyDataSource(index)
    self.assertIsInstance(source, grain.sources.RandomAccessDataSource)
    dataset = grain.MapDataset.source(source)
    self.assertLen(dataset, len(source))
    np.testing.assert_array_equal(dataset[len(source) + 3]["tokens"], source[3]["tokens"])
    self.assertEqual(repr(pickle.loads(pickle.dumps(source))), repr(source))


if __name__ == "__main__":
  absltest.main()
