"""Tests of reading pieces in chunks."""

import concurrent.futures
import os
import threading

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.work import pieces
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.errors import CorpusError
from tests.corpus.work import sample_work
from tests.memory_storage import MemoryStorage


class ReadingTest(parameterized.TestCase):

  @parameterized.parameters(0, 1, reading.CHUNK_BYTES - 2, reading.CHUNK_BYTES * 2 + 6)
  def test_chunks_are_the_bytes_of_the_range_from_any_storage(self, size):
    path = os.path.join(self.create_tempdir().full_path, "x")
    data = np.random.default_rng(0).integers(0, 256, size + 20).astype(np.uint8).tobytes()
    with open(path, "wb") as file:
      file.write(data)
    for storage in (LocalStorage(), MemoryStorage({path: data})):
      found = [chunk.copy() for chunk in reading.read_range(storage, path, 8, 8 + size)]
      self.assertEqual(b"".join(chunk.tobytes() for chunk in found), data[8 : 8 + size])
      self.assertTrue(all(len(chunk) == reading.CHUNK_BYTES for chunk in found[:-1]))

  def test_a_short_file_is_an_error_that_names_the_bytes(self):
    path = os.path.join(self.create_tempdir().full_path, "x")
    np.zeros(10, np.uint8).tofile(path)
    with self.assertRaisesRegex(CorpusError, "x is too short: expected bytes 4 to 24, but it ends"):
      list(reading.read_range(LocalStorage(), path, 4, 24))

  def test_tokens_of_all_pieces_are_the_tokens_of_the_file(self):
    index = sample_work.write_corpus(self.create_tempdir().full_path)
    for piece in pieces.pieces_of(index, piece_bytes=1 << 10):
      tokens = np.fromfile(piece.source.path, np.uint16)[piece.first : piece.first + piece.count]
      chunks = [chunk.copy() for chunk in reading.read_tokens(LocalStorage(), piece)]
      np.testing.assert_array_equal(np.concatenate([tokens[:0], *chunks]), tokens)

  def test_a_file_of_another_size_is_an_error_that_says_what_to_do(self):
    index = sample_work.write_corpus(self.create_tempdir().full_path)
    piece, *_ = pieces.pieces_of(index, piece_bytes=1 << 10)
    for size in (1998, 2002):
      os.truncate(piece.source.path, size)
      with self.assertRaisesRegex(
          CorpusError, f"part-000.npy: expected 2000 bytes, found {size}.* build the index again"
      ):
        next(reading.read_tokens(LocalStorage(), piece))

  def test_reading_ends_when_the_thread_is_told_to_stop(self):
    path = os.path.join(self.create_tempdir().full_path, "x")
    np.zeros(2 * reading.CHUNK_BYTES, np.uint8).tofile(path)
    stop, read = threading.Event(), []

    def work():
      reading.stop_with(stop)
      for chunk in reading.read_range(LocalStorage(), path, 0, 2 * reading.CHUNK_BYTES):
        read.append(len(chunk))
        stop.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      self.assertIsInstance(pool.submit(work).exception(), concurrent.futures.CancelledError)
    self.assertLen(read, 1)


if __name__ == "__main__":
  absltest.main()
