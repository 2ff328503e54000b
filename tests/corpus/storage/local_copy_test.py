"""Tests of local copies of objects."""

import os
import pathlib
import subprocess
import threading

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import local_copy
from tests import memory_storage
from tests import object_server

STARTS_PROCESSES = True


class LocalCopyTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.content = bytes(range(256)) * (1 << 16)  # 16 MiB, which takes several requests.
    self.server = self.enter_context(object_server.ObjectServer({"b/x": self.content}))
    self.url = f"{self.server.url}/b/x"
    self.folder = pathlib.Path(self.create_tempdir().full_path, "cache")

  def copy(self, **values):
    storage = storage_lib.open_storage()
    self.addCleanup(storage.close)
    return local_copy.local_path(self.url, storage, str(self.folder), **values)

  def copies(self):
    return sorted(name for name in os.listdir(self.folder) if not name.endswith(".lock"))

  def test_an_object_is_downloaded_once_and_later_starts_send_one_request(self):
    copy = self.copy()
    self.assertEqual(pathlib.Path(copy).read_bytes(), self.content)
    self.assertEqual([self.server.count("HEAD"), self.server.count("GET")], [1, 2])
    self.assertEqual(self.copy(), copy)
    self.assertEqual([self.server.count("HEAD"), self.server.count("GET")], [2, 2])
    self.assertEqual(self.copies(), [os.path.basename(copy)])

  def test_processes_that_start_together_download_once(self):
    self.server.latency = 0.05
    copies = []
    threads = [threading.Thread(target=lambda: copies.append(self.copy())) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertLen(copies, 4)
    self.assertLen(set(copies), 1)
    self.assertEqual(self.server.count("GET"), 2)

  def test_a_replaced_object_is_downloaded_again(self):
    before = self.copy()
    self.server.objects["b/x"] = self.content[::-1]
    after = self.copy()
    self.assertNotEqual(after, before)
    self.assertEqual(pathlib.Path(after).read_bytes(), self.content[::-1])

  def test_objects_of_the_same_name_and_content_have_copies_of_their_own(self):
    self.server.objects["c/x"] = self.content
    first, self.url = self.copy(), f"{self.server.url}/c/x"
    self.assertNotEqual(self.copy(), first)

  def test_a_server_without_etags_is_told_apart_by_size_and_time(self):
    self.server.sends_etags = False
    first = self.copy()
    self.assertEqual(self.copy(), first)
    self.server.objects["b/x"] = self.content[:-1]
    self.assertNotEqual(self.copy(), first)

  def test_an_object_replaced_during_the_download_stops_it(self):
    self.server.faults = self._replace_at_the_second_get
    with self.assertRaisesRegex(errors.CorpusError, "ETag is not the expected one"):
      self.copy()
    self.assertEmpty(self.copies())
    self.server.faults = lambda number, path: ""
    self.assertEqual(pathlib.Path(self.copy()).read_bytes(), self.content[::-1])

  def _replace_at_the_second_get(self, number, path):
    del path
    if number == 1:
      self.server.objects["b/x"] = self.content[::-1]
    return ""

  def test_a_partial_copy_is_not_used_and_is_removed(self):
    copy = self.copy()
    name = os.path.basename(copy)
    (self.folder / f".{name}.killed.tmp").write_bytes(self.content[:100])
    os.truncate(copy, 100)
    self.assertEqual(self.copy(), copy)
    self.assertEqual(pathlib.Path(copy).read_bytes(), self.content)
    self.assertEqual(self.copies(), [name])

  def test_without_download_only_an_existing_copy_is_used(self):
    self.assertEqual(self.copy(download=False), self.url)
    self.assertFalse(self.folder.exists())
    copy = self.copy()
    self.assertEqual(self.copy(download=False), copy)

  def test_local_paths_and_other_storages_are_left_as_they_are(self):
    folder = str(self.folder)
    self.assertEqual(
        local_copy.local_path("/data/x", storage_lib.open_storage(), folder), "/data/x"
    )
    memory = memory_storage.MemoryStorage({"gs://b/x": b"0"})
    self.assertEqual(local_copy.local_path("gs://b/x", memory, folder), "gs://b/x")

  def test_a_directory_that_cannot_be_written_is_an_error_with_a_remedy(self):
    self.folder.write_text("not a directory")
    with self.assertRaisesRegex(
        errors.WriteError, f"Cannot write .*{self.url} takes 16,777,216 bytes; set olmo_order_cache"
    ):
      self.copy()

  def test_a_full_disk_is_an_error_with_a_remedy_and_leaves_nothing(self):
    self.folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(self.folder)], capture_output=True
    )
    if mounted.returncode:
      self.skipTest(f"No tmpfs can be mounted: {mounted.stderr.decode()}")
    self.addCleanup(subprocess.run, ["umount", "-l", str(self.folder)], check=True)
    with self.assertRaisesRegex(errors.WriteError, "No space left.*set olmo_order_cache_dir"):
      self.copy()
    self.assertEmpty(self.copies())

  def test_a_missing_object_is_a_missing_file(self):
    self.url += "y"
    with self.assertRaises(errors.MissingFileError):
      self.copy()


if __name__ == "__main__":
  absltest.main()
