"""Tests of the places that copies are written to."""

import pathlib

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import copy_targets


class DirectoryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.base = pathlib.Path(self.create_tempdir().full_path)
    self.target = copy_targets.open_target(str(self.base))

  def write(self, content, tag="1", pieces=None):
    digests = copy_targets.Digests(None)

    def read(offset):
      for piece in pieces or [content[offset:]]:
        digests.update(piece)
        yield piece

    return self.target.write("a/x", len(content), tag, read, digests), digests.own

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

  def test_a_directory_that_cannot_be_written_is_an_error(self):
    (self.base / "a").write_text("a file")
    with self.assertRaises(errors.WriteError):
      self.write(b"0123")

  def test_removing_what_is_not_there_is_no_error(self):
    self.target.remove("none")


if __name__ == "__main__":
  absltest.main()
