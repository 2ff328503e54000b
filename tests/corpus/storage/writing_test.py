"""Tests of writing files and objects."""

import pathlib
import traceback

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import WriteError
from tests import object_server


class WritingTest(parameterized.TestCase):

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

  @parameterized.parameters("403", "400")
  def test_a_signature_is_used_but_not_shown(self, fault):
    stores.use_by_default(stores.StoreOptions())
    url = self.server.url.replace("//", "//user:hunter2@") + "/b/x?sig=c2lnbmF0dXJl"
    self.server.faults = lambda number, path: fault
    with self.assertRaises(WriteError) as caught:
      writing.write_file(url, b"new")
    self.assertIn("c2lnbmF0dXJl", self.server.requests[-1][1])
    shown = "".join(traceback.format_exception(caught.exception))
    for secret in ("c2lnbmF0dXJl", "hunter2"):
      self.assertNotIn(secret, shown)

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


class AnonymousTest(absltest.TestCase):

  def test_writing_to_gcs_without_credentials_is_refused_at_once(self):
    options = stores.StoreOptions("http://127.0.0.1:1", anonymous=True)
    with stores.use_in_block(options), self.assertRaisesRegex(ConfigError, "only for reading"):
      writing.write_file("gs://bucket/x", "text")


if __name__ == "__main__":
  absltest.main()
