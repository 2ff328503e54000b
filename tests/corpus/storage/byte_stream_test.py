"""Tests of byte streams over objects: the same bytes as a file, with few requests."""

import io
import os
import random

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import byte_stream
from maxtext_olmo.corpus.storage import stores
from tests import object_server

_DATA = random.Random(0).randbytes(20_000_003)


class ByteStreamTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.server = self.enter_context(object_server.ObjectServer({"b/x": _DATA, "b/empty": b""}))
    self.url = f"{self.server.url}/b/x"

  def ranges(self):
    return [what for method, _, what in self.server.requests if method == "GET"]

  def test_a_stream_has_the_bytes_of_a_file(self):
    rng = random.Random(1)
    path = self.create_tempfile("x", _DATA).full_path
    with byte_stream.open_bytes(self.url) as stream, byte_stream.open_bytes(path) as file:
      for _ in range(200):
        place, size = rng.randrange(len(_DATA) + 100), int(10 ** rng.uniform(0, 6))
        if rng.random() < 0.3:
          self.assertEqual(stream.seek(place), file.seek(place))
        self.assertEqual(stream.read(size), file.read(size))
        self.assertEqual(stream.readline(), file.readline())
        self.assertEqual(stream.tell(), file.tell())
      for whence in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
        file.seek(1000), stream.seek(1000)
        self.assertEqual(
            stream.seek(-5 if whence else 5, whence), file.seek(-5 if whence else 5, whence)
        )
        self.assertEqual(stream.read(3), file.read(3))

  def test_a_stream_read_to_its_end_sends_few_requests_and_none_twice(self):
    with byte_stream.open_bytes(self.url) as stream:
      self.assertEqual(b"".join(iter(lambda: stream.read(1000), b"")), _DATA)
    self.assertLess(len(self.ranges()), 10)
    self.assertLen(set(self.ranges()), len(self.ranges()))

  def test_the_beginning_takes_one_small_request(self):
    with byte_stream.open_bytes(self.url) as stream:
      self.assertEqual(stream.read(10), _DATA[:10])
    (asked,) = self.ranges()
    self.assertLess(int(asked.rpartition("-")[2]), 1 << 20)

  def test_an_empty_object_ends_at_once(self):
    self.assertEqual(byte_stream.open_bytes(f"{self.server.url}/b/empty").read(), b"")

  def test_errors_are_typed(self):
    with self.assertRaisesRegex(errors.MissingFileError, "b/none"):
      byte_stream.open_bytes(f"{self.server.url}/b/none")
    with byte_stream.open_bytes(self.url) as stream:
      with self.assertRaises(ValueError):
        stream.seek(-1)
      with self.assertRaises(io.UnsupportedOperation):
        stream.write(b"")

  def test_a_silent_store_is_not_an_unreadable_file(self):
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(patience=0.2, first_patience=0.2))
    with byte_stream.open_bytes(self.url) as stream:
      self.server.faults = lambda number, path: "503"
      with self.assertRaises(errors.StoreUnavailableError):
        stream.read()


if __name__ == "__main__":
  absltest.main()
