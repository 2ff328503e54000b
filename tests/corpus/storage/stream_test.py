"""Tests of a file of a storage as a stream."""

import gzip

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.errors import CorpusError
from tests import memory_storage


class StreamTest(parameterized.TestCase):

  @parameterized.product(piece_bytes=(1, 7, 1 << 20), wanted=(1, 10, -1))
  def test_a_stream_has_the_bytes_of_the_file(self, piece_bytes, wanted):
    content = bytes(range(256)) * 5
    storage = memory_storage.MemoryStorage({"mem://x": content})
    with storage_lib.open_stream(storage, "mem://x", piece_bytes) as stream:
      found = b"".join(iter(lambda: stream.read(wanted), b""))
    self.assertEqual(found, content)

  def test_compressed_files_of_several_members_are_read(self):
    content = gzip.compress(b"one\n") + gzip.compress(b"two\n")
    storage = memory_storage.MemoryStorage({"mem://x": content})
    with gzip.open(storage_lib.open_stream(storage, "mem://x", 5), "rt") as file:
      self.assertEqual(file.readlines(), ["one\n", "two\n"])

  def test_the_error_of_the_storage_comes_through(self):
    with self.assertRaisesRegex(CorpusError, "no mem://y"):
      storage_lib.open_stream(memory_storage.MemoryStorage({}), "mem://y").read()


if __name__ == "__main__":
  absltest.main()
