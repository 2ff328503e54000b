"""Tests of the storage for any path."""

import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import remote
from tests import memory_storage
from tests import object_server

STARTS_PROCESSES = True


class RouterTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "x").write_bytes(b"0123456789")
    self.server = self.enter_context(object_server.ObjectServer({"b/x": b"abcdefghij"}))
    self.paths = [str(folder / "x"), f"{self.server.url}/b/x"]
    self.storage = storage_lib.open_storage()

  def _fill(self, storage, sources):
    sources = np.array(sources)
    out = np.zeros(2 * len(sources), np.uint8)
    places = 2 * np.arange(len(sources))
    storage.fill(self.paths, sources, places + 1, np.full(len(sources), 2), out, places)
    return out.tobytes()

  def test_each_path_goes_to_its_storage(self):
    self.assertIsInstance(self.storage, storage_lib.Storage)
    for path, content in zip(self.paths, (b"0123456789", b"abcdefghij")):
      self.assertEqual(self.storage.read(path), content)
      self.assertEqual(self.storage.read(path, 2, 3), content[2:5])
      self.assertEqual(b"".join(self.storage.pieces(path, piece_bytes=4)), content)
      self.assertEqual(self.storage.size(path), 10)
      self.assertTrue(self.storage.exists(path))
      self.assertFalse(self.storage.exists(path + "y"))
    self.storage.close()

  def test_one_call_reads_files_and_objects(self):
    self.assertEqual(self._fill(self.storage, [0, 1, 1, 0]), b"12defg78")
    copy = pickle.loads(pickle.dumps(self.storage))
    self.assertEqual(self._fill(copy, [1, 0]), b"bc34")

  def test_files_are_pinned_if_there_are_no_objects(self):
    self.assertIsNotNone(self.storage.pin(self.paths, np.array([0])))
    self.assertIsNone(self.storage.pin(self.paths, np.array([0, 1])))

  def test_it_steps_aside_where_one_storage_is_enough(self):
    narrowed = storage_lib.narrowed
    self.assertIsInstance(narrowed(self.storage, self.paths[:1]), storage_lib.LocalStorage)
    self.assertIsInstance(narrowed(self.storage, self.paths[1:]), remote.RemoteStorage)
    self.assertIs(narrowed(self.storage, self.paths), self.storage)
    other = memory_storage.MemoryStorage({})
    self.assertIs(narrowed(other, self.paths), other)

  def test_traffic_and_versions_are_those_of_the_objects(self):
    self.assertIsNone(self.storage.traffic)
    self.assertIsNone(self.storage.version(self.paths[0]))
    self.assertIsNone(self.storage.version(self.paths[1]))
    self.storage.size(self.paths[1])
    self.assertEqual(self.storage.version(self.paths[1]), f"10 {self.server.etag('b/x')}")
    self.assertEqual(self.storage.traffic.counts()["requests"], 1)

  def test_local_files_need_no_obstore(self):
    code = (
        "import sys\n"
        "sys.modules['obstore'] = None\n"
        "import maxtext_olmo\n"
        "from maxtext_olmo.corpus.storage import open_storage\n"
        f"print(open_storage().read({self.paths[0]!r}))\n"
        "try:\n"
        "  open_storage().read('gs://b/x')\n"
        "except maxtext_olmo.ConfigError as error:\n"
        "  print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    self.assertRegex(done.stdout, r"b'0123456789'\n.*obstore.*not installed.*\[cloud\]")


if __name__ == "__main__":
  absltest.main()
