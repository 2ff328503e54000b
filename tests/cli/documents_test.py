"""`maxtext-olmo index documents`."""

import contextlib
import io
import os

from absl.testing import absltest

from maxtext_olmo.cli import main as main_lib
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from tests import corpora


class DocumentsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.path, _ = corpora.write_corpus(self.create_tempdir().full_path)

  def run_command(self, *args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = main_lib.main(["index", "documents", self.path, *args])
    return code, out.getvalue(), err.getvalue()

  def test_it_writes_the_sidecar_file_and_checks_it(self):
    code, out, _ = self.run_command("--eos-id", "0", "--workers", "2")
    self.assertEqual(code, 0)
    documents = documents_lib.load_documents(
        self.path + ".documents", index_lib.load_index(self.path), 0
    )
    self.assertIn(f"{documents.num_documents:,} documents, {documents.num_tokens:,} tokens", out)
    code, out, _ = self.run_command("--eos-id", "0", "--verify")
    self.assertEqual(code, 0)
    self.assertIn("is whole", out)

  def test_damage_and_wrong_places_are_one_line_on_stderr(self):
    code, _, err = self.run_command("--eos-id", "0", "--verify")
    self.assertEqual(code, 2)
    self.assertIn("makes one", err)
    code, _, err = self.run_command("--eos-id", "0", "--output", "/nowhere/at/all")
    self.assertEqual(code, 2)
    self.assertIn("does not exist", err)
    self.run_command("--eos-id", "0")
    with open(self.path + ".documents", "r+b") as file:
      file.seek(-1, os.SEEK_END)
      file.write(b"\xff")
    code, _, err = self.run_command("--eos-id", "0", "--verify")
    self.assertEqual(code, 2)
    self.assertIn("is damaged", err)


if __name__ == "__main__":
  absltest.main()
