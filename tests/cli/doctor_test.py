"""Tests of `maxtext-olmo doctor` on one process."""

import contextlib
import io
import pathlib

from absl.testing import absltest

from maxtext_olmo.cli import main as main_lib
from tests import corpora
from tests.cli import runner
from tests.trainers import launched


class _Terminal(io.StringIO):

  def isatty(self):
    return True


class DoctorTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    index, _ = corpora.write_corpus(self.dir, sequence_length=16)
    self.keys = launched.flags(dataset_type="olmo_grain", olmo_index_path=index, vocab_size=100)

  def test_a_config_in_order_is_ok(self):
    code, out, err = runner.run("doctor", *self.keys)
    self.assertEqual(code, 0, out + err)
    self.assertRegex(out, r"\nok       index: \S+index.json: 4 files")
    self.assertRegex(out, r"\nok: \d+ ok, \d+ warnings?, 0 wrong\n$")

  def test_the_arguments_of_train_are_accepted(self):
    code, out, err = runner.run("doctor", "--config=tiny", *self.keys)
    self.assertEqual(code, 0, out + err)
    self.assertRegex(out, r"\nok       config: valid, dataset_type=olmo_grain\n")

  def test_without_a_config_the_host_is_checked(self):
    code, out, err = runner.run("doctor")
    self.assertEqual(code, 0, out + err)
    self.assertIn("versions", out)
    self.assertNotIn("index", out)

  def test_a_terminal_gets_a_table(self):
    terminal = _Terminal()
    with contextlib.redirect_stdout(terminal):
      self.assertEqual(main_lib.main(["doctor"]), 0)
    self.assertRegex(terminal.getvalue(), r"\n│.*ok .*│.*clock .*│.*UTC")

  def test_what_is_wrong_comes_with_a_remedy_and_code_1(self):
    bad = self.dir / "bad.json"
    bad.write_text("not an index")
    code, out, _ = runner.run("doctor", "tiny", *self.keys, f"--config.olmo_index_path={bad}")
    self.assertEqual(code, 1)
    self.assertRegex(out, r"\nwrong    index: The index \S+ is not valid JSON.*\n {11}make")
    self.assertRegex(out, r"\nNOT OK: .* 1 wrong\n$")

  def test_a_yaml_file_has_data_keys(self):
    path = self.dir / "run.yml"
    path.write_text("dataset_type: olmo_grain\nolmo_index_path: /no.json\nbase_emb_dim: 4\n")
    code, out, _ = runner.run("doctor", path, "--config.vocab_size=100")
    self.assertEqual(code, 1, out)
    self.assertRegex(out, r"\nwrong    config: .*olmo_index_path.*/no.json")

  def test_errors_of_the_command_line_have_code_2(self):
    for words in (["/no.py"], ["--wait=0"], ["--config.stpes=3"], ["tiny", "--config=tiny"]):
      code, out, err = runner.run("doctor", *words)
      self.assertEqual(code, 2, out)
      self.assertRegex(err, r"(?m)^error: ")


if __name__ == "__main__":
  absltest.main()
