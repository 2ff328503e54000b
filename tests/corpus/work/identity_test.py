"""Tests of the identities of files."""

import os
import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import identity
from tests import object_server
from tests.memory_storage import MemoryStorage


class IdentityTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path, "x")
    self.path.write_bytes(b"abc")

  def test_a_file_of_the_same_size_with_a_new_time_has_another_identity(self):
    first = identity.file_identity(open_storage(), str(self.path))
    self.assertEqual(identity.file_identity(open_storage(), str(self.path)), first)
    os.utime(self.path, ns=(5, 5))
    self.assertNotEqual(identity.file_identity(open_storage(), str(self.path)), first)

  def test_a_missing_file_has_an_identity_and_a_directory_has_none(self):
    gone, folder = str(self.path) + "x", str(self.path.parent)
    found = identity.find_identities(open_storage(), [str(self.path), gone, folder])
    self.assertEqual(found[gone], "missing")
    self.assertIsNone(found[folder])
    self.assertEqual(identity.combined([folder], found), identity.UNKNOWN)
    self.assertNotEqual(identity.combined([gone], found), identity.UNKNOWN)

  def test_paths_are_part_of_a_combined_identity(self):
    same = {"/a": "3 1", "/b": "3 1"}
    self.assertNotEqual(identity.combined(["/a"], same), identity.combined(["/b"], same))

  def test_an_object_is_identified_by_its_etag(self):
    server = self.enter_context(object_server.ObjectServer({"b/x": b"abc"}))
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    storage = open_storage()
    first = identity.file_identity(storage, "s3://b/x")
    self.assertEqual(identity.size_and_etag(storage, "s3://b/x"), (3, server.etag("b/x")))
    server.objects["b/x"] = b"abd"
    # Although the storage knows the object, what counts is what it is now.
    self.assertNotEqual(identity.file_identity(storage, "s3://b/x"), first)
    self.assertEqual(identity.file_identity(storage, "s3://b/y"), "missing")

  def test_another_storage_gives_the_size(self):
    self.assertEqual(identity.file_identity(MemoryStorage({"x": b"abc"}), "x"), "3")
    self.assertEqual(identity.size_and_etag(MemoryStorage({"x": b"abc"}), "x"), (3, None))


if __name__ == "__main__":
  absltest.main()
