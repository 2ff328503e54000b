"""Tests of the data sources."""

import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import shutil

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import OrderError
from tests import corpora
from tests import memory_storage

STARTS_PROCESSES = True


def _read_in_child(source, queue) -> None:
  queue.put((repr(source), source.read(np.arange(len(source))).tolist()))


class SourceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def _source(self, **kwargs) -> tuple[source_lib.OlmoNpyDataSource, np.ndarray]:
    path, rows = corpora.write_corpus(self.dir, **kwargs)
    return source_lib.OlmoNpyDataSource(index_lib.load_index(path)), rows

  @parameterized.product(dtype=("uint8", "uint16", "uint32", "uint64"), longest=(None, 16))
  def test_instances_are_the_tokens_of_the_files(self, dtype, longest):
    source, rows = self._source(dtype=dtype, max_target_sequence_length=longest)
    self.assertLen(source, len(rows))
    ids = np.random.default_rng(0).permutation(len(rows))
    found = source.read(ids)
    self.assertEqual(found.dtype, np.dtype(dtype))
    np.testing.assert_array_equal(found, rows[ids])

  def test_an_item_is_writable_and_names_its_file(self):
    source, rows = self._source()
    item = source[np.int64(42)]
    np.testing.assert_array_equal(item["tokens"], rows[42])
    self.assertEqual((item["instance_id"], item["file_id"]), (42, 1))
    self.assertIs(type(item["instance_id"]), int)
    item["tokens"][:] = 0
    np.testing.assert_array_equal(source[42]["tokens"], rows[42])

  def test_tokens_after_a_header_are_read_without_it(self):
    np.save(self.dir / "x.npy", np.arange(10, dtype=np.uint32))
    index = index_lib.build_index([(str(self.dir / "x.npy"), "l")], 5, tokenizer="t")
    source = source_lib.OlmoNpyDataSource(index)
    np.testing.assert_array_equal(source.read(np.arange(2)), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])

  def test_it_is_a_source_for_grain(self):
    source, rows = self._source()
    self.assertIsInstance(source, grain.sources.RandomAccessDataSource)
    dataset = grain.MapDataset.source(source)
    np.testing.assert_array_equal(dataset[7]["tokens"], rows[7])

  def test_an_empty_request_reads_nothing(self):
    source, _ = self._source()
    self.assertEqual(source.read(np.array([], np.int64)).shape, (0, 8))

  @parameterized.parameters(-1, 123)
  def test_an_id_out_of_range_is_an_order_error(self, bad):
    source, _ = self._source()
    with self.assertRaisesRegex(OrderError, f"Instance {bad} does not exist: the corpus has 123"):
      source[bad]

  @parameterized.parameters(False, True)
  def test_moved_files_are_found_through_a_remap_or_a_new_base(self, remap):
    source, rows = self._source()
    shutil.move(self.dir / "data", self.dir / "moved")
    path = self.dir / "index.json"
    if remap:
      moved = source_lib.OlmoNpyDataSource(
          index_lib.load_index(path), path_remap={f"{self.dir}/data": f"{self.dir}/moved"}
      )
    else:
      moved = source_lib.OlmoNpyDataSource(index_lib.load_index(path, base=self.dir / "moved"))
    np.testing.assert_array_equal(moved.read(np.arange(len(rows))), rows)
    self.assertEqual(repr(moved), repr(source))
    self.assertIn("/moved/", moved.files.where(0, 0))

  def test_the_repr_distinguishes_streams_and_shows_no_path(self):
    source, _ = self._source(max_target_sequence_length=8)
    self.assertNotIn(str(self.dir), repr(source))
    shorter = source_lib.OlmoNpyDataSource(source.index.with_sequence_length(4))
    self.assertNotEqual(repr(shorter), repr(source))
    self.assertEqual(
        repr(source),
        f"OlmoNpyDataSource(fingerprint='{source.index.fingerprint}', sequence_length=8,"
        " dtype='uint16')",
    )

  def test_a_path_of_the_index_resolves_to_where_it_is_read(self):
    index = self._source()[0].index
    source = source_lib.OlmoNpyDataSource(index, path_remap={f"{self.dir}/data": "/mnt/olmo"})
    for number, entry in enumerate(index.files):
      resolved = source._resolve_path(entry.path)
      self.assertEqual(resolved, source.files.paths[number])
      self.assertStartsWith(resolved, "/mnt/olmo/")

  def test_pickling_keeps_index_remap_and_limit(self):
    path, rows = corpora.write_corpus(self.dir)
    source = source_lib.OlmoNpyDataSource(
        index_lib.load_index(path, base="/nowhere"),
        path_remap={"/nowhere": f"{self.dir}/data"},
        max_open_files=5,
    )
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.read(np.arange(len(rows))), rows)
    self.assertEqual(again.files.storage.max_open_files, 5)
    self.assertEqual(repr(again), repr(source))

  @parameterized.parameters("fork", "spawn")
  def test_a_child_process_reads_the_same(self, method):
    source, rows = self._source()
    source.read(np.arange(len(rows)))
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(source, queue))
    child.start()
    result = queue.get()
    child.join()
    self.assertEqual(result, (repr(source), rows.tolist()))

  def test_a_storage_may_be_given(self):
    path, rows = corpora.write_corpus(self.dir)
    storage = memory_storage.MemoryStorage(
        {f"mem://{file.name}": file.read_bytes() for file in (self.dir / "data").iterdir()}
    )
    index = dataclasses.replace(index_lib.load_index(path), base="mem://")
    source = source_lib.OlmoNpyDataSource(index, storage=storage)
    np.testing.assert_array_equal(source.read(np.arange(len(rows))), rows)
    self.assertIs(source.files.storage, storage)

  def test_a_truncated_file_is_an_error_not_a_short_row(self):
    source, _ = self._source()
    with open(self.dir / "data" / "part-001.npy", "r+b") as file:
      file.truncate(20)
    np.testing.assert_array_equal(source[41]["tokens"].shape, (8,))
    with self.assertRaisesRegex(
        CorpusError, "part-001.npy is too short: expected bytes 16 to 32, .* byte 20"
    ):
      source[42]

  def test_tokens_beyond_four_gigabytes(self):
    path = self.dir / "big.npy"
    with open(path, "wb") as file:
      file.seek((5 << 30) - 16)
      np.arange(1, 5, dtype=np.uint32).tofile(file)
    index = index_lib.build_index([(str(path), "l")], 8, tokenizer="t")
    source = source_lib.OlmoNpyDataSource(index)
    np.testing.assert_array_equal(source[len(source) - 1]["tokens"], [0, 0, 0, 0, 1, 2, 3, 4])


class OlmoDocumentSourceTest(parameterized.TestCase):

  def make(self, dtype="uint16", **kwargs):
    directory = self.create_tempdir().full_path
    path, _ = corpora.write_corpus(directory, dtype=dtype)
    self.index = index_lib.load_index(path)
    documents = documents_lib.build_documents(self.index, path + ".documents", 0)
    self.tokens = [np.fromfile(self.index.resolve(i), dtype) for i in range(len(self.index.files))]
    return source_lib.OlmoDocumentSource(self.index, documents, **kwargs)

  @parameterized.parameters("uint8", "uint16", "uint32", "uint64")
  def test_the_documents_are_the_tokens_of_the_files_in_order(self, dtype):
    source = self.make(dtype)
    found = [source[i]["inputs"] for i in range(len(source))]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(self.tokens))
    for tokens in found:
      self.assertEqual(tokens.dtype, np.int32)
      self.assertNotIn(0, tokens[:-1])
    self.assertEqual([len(t) for t in found], source.lengths(np.arange(len(source))).tolist())

  def test_parts_of_documents_are_written_to_their_arrays(self):
    source = self.make("uint32")
    row = np.zeros(10, np.int32)
    whole = [source[i]["inputs"] for i in (3, 1)]
    starts = np.array([1, 0])
    lengths = np.array([len(whole[0]) - 1, min(2, len(whole[1]))])
    row = np.zeros(lengths.sum(), np.int32)
    read = source.read_parts(np.array([3, 1]), starts, lengths, np.split(row, [lengths[0]]))
    np.testing.assert_array_equal(row, np.concatenate([whole[0][1:], whole[1][: lengths[1]]]))
    self.assertEqual(read, 4 * len(row))

  def test_it_is_a_grain_source_and_survives_pickling(self):
    source = self.make()
    dataset = grain.MapDataset.source(source).seed(1).shuffle()
    self.assertLen(dataset, len(source))
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again[5]["inputs"], source[5]["inputs"])
    self.assertEqual(repr(again), repr(source))
    self.assertIs(maxtext_olmo.OlmoDocumentSource, source_lib.OlmoDocumentSource)

  def test_a_document_that_does_not_exist_is_an_error(self):
    source = self.make()
    for number in (-1, len(source)):
      with self.assertRaisesRegex(OrderError, f"Document {number} does not exist"):
        source[number]

  @parameterized.parameters("uint16", "uint32")
  def test_a_token_outside_the_vocabulary_names_file_and_byte(self, dtype):
    source = self.make(dtype, vocab_size=50)
    bad = next(i for i in range(len(self.tokens[0])) if self.tokens[0][i] >= 50)
    with self.assertRaises(CorpusError) as caught:
      for i in range(len(source)):
        source[i]
    self.assertIn(f"byte {bad * np.dtype(dtype).itemsize}", str(caught.exception))
    self.assertIn(os.path.basename(self.index.resolve(0)), str(caught.exception))

  def test_labels_returns_the_documents_of_each_label(self):
    source = self.make()
    labels = source.labels()
    self.assertEqual(set(labels), {"label-0", "label-1"})
    numbers = sorted(
        i for ranges in labels.values() for start, end in ranges for i in range(start, end)
    )
    self.assertEqual(numbers, list(range(len(source))))


if __name__ == "__main__":
  absltest.main()
