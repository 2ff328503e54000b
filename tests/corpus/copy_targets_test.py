"""Tests of the places that copies are written to."""

import pathlib
import traceback

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import copy_targets
from maxtext_olmo.corpus.storage import stores
from tests import object_server


class DirectoryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.base = pathlib.Path(self.create_tempdir().full_path)
    self.target = copy_targets.open_target(str(self.base))

  def write(self, content, tag="1", pieces=None, problem=None):
    digests = copy_targets.Digests(None)

    def read(offset):
      for piece in pieces or [content[offset:]]:
        digests.update(piece)
        yield piece

    written = self.target.write("a/x", len(content), tag, read, digests, lambda: problem)
    return written, digests.own

  def test_a_record_outlives_the_process_and_half_a_line(self):
    _, checksum = self.write(b"0123")
    self.target.record("a/x", 4, "1", checksum)
    with open(self.base / ".copied", "a", encoding="utf-8") as file:
      file.write('{"path": "half')
    again = copy_targets.Directory(str(self.base))
    self.assertEqual(again.checksum_of("a/x", 4, "1"), checksum)
    self.assertIsNone(again.checksum_of("a/x", 4, "2"))
    self.assertIsNone(again.checksum_of("a/y", 4, "1"))

  def test_a_copy_of_the_wrong_size_never_gets_its_name(self):
    with self.assertRaisesRegex(errors.CorpusError, "has 2 bytes instead of 4"):
      self.write(b"0123", pieces=[b"01"])
    self.assertEqual([path.name for path in self.base.rglob("*")], ["a"])

  def test_a_copy_with_a_problem_never_gets_its_name_and_is_not_continued(self):
    content = b"0" * (copy_targets.PIECE_BYTES + 1)
    with self.assertRaisesRegex(errors.CorpusError, "the file is wrong"):
      self.write(content, problem="the file is wrong")
    self.assertEqual([path.name for path in self.base.rglob("*")], ["a"])
    self.assertEqual(self.write(content)[0], len(content))

  def test_a_directory_that_cannot_be_written_is_an_error(self):
    (self.base / "a").write_text("a file")
    with self.assertRaises(errors.WriteError):
      self.write(b"0123")

  def test_removing_what_is_not_there_is_no_error(self):
    self.target.remove("none")


class BucketTest(absltest.TestCase):

  def test_a_copy_that_cannot_be_removed_is_named_without_its_signature(self):
    server = self.enter_context(object_server.ObjectServer({"b/x": b"0123"}))
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url))
    target = copy_targets.open_target("az://b@account?sv=1&sig=c2lnbmF0dXJl")
    server.faults = lambda number, path: "403"
    with self.assertRaisesRegex(
        errors.CorpusError, "Cannot remove the wrong copy az://b@account/x: access is denied"
    ) as caught:
      target.remove("x")
    self.assertIn("c2lnbmF0dXJl", server.requests[-1][1])
    self.assertNotIn("c2lnbmF0dXJl", "".join(traceback.format_exception(caught.exception)))


if __name__ == "__main__":
  absltest.main()
