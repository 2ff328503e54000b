"""Tests of writing files and objects."""

import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import WriteError
from tests import object_server


class WritingTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.server = self.enter_context(object_server.ObjectServer())
    stores.use_by_default(stores.StoreOptions(self.server.url, "here", True))
    self.addCleanup(stores.use_by_default, stores.StoreOptions())

  def test_files_and_objects_are_written(self):
    local = str(pathlib.Path(self.create_tempdir().full_path) / "x")
    for path in (local, "s3://b/dir/x", f"{self.server.url}/b/y"):
      writing.write_file(path, "text")
      self.assertEqual(storage_lib.open_storage().read(path), b"text")
    self.assertEqual(self.server.objects, {"b/dir/x": b"text", "b/y": b"text"})

  def test_an_error_leaves_the_old_object(self):
    writing.write_file("s3://b/x", b"old")
    with self.assertRaises(ZeroDivisionError), writing.open_output("s3://b/x") as file:
      file.write(b"new")
      raise ZeroDivisionError
    self.assertEqual(self.server.objects["b/x"], b"old")

  def test_a_refused_write_is_a_write_error(self):
    self.server.faults = lambda number, path: "403"
    with self.assertRaisesRegex(WriteError, "Cannot write s3://b/x: access is denied"):
      writing.write_file("s3://b/x", b"new")

  def test_a_store_that_never_answered_is_given_up_soon(self):
    stores.use_by_default(stores.StoreOptions("http://127.0.0.1:1", "here", True, first_patience=1))
    with self.assertRaisesRegex(WriteError, "s3://b/x: .*cannot be reached.*Gave up after"):
      writing.write_file("s3://b/x", b"new")

  def test_permission_to_write_suffices(self):
    self.server.faults = (
        lambda number, path: "403" if self.server.requests[number][0] == "HEAD" else ""
    )
    writing.write_file("s3://b/x", b"new")
    self.assertEqual(self.server.objects, {"b/x": b"new"})


if __name__ == "__main__":
  absltest.main()
