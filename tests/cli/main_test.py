"""Tests of the command line as a whole."""

import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from docs import reference
from maxtext_olmo.cli import main as main_lib
from maxtext_olmo.errors import CorpusError
from tests.cli import runner

STARTS_PROCESSES = True


class CliTest(parameterized.TestCase):

  def test_help_lists_every_command(self):
    code, out, _ = runner.run("--help")
    self.assertEqual(code, 0)
    for name in main_lib.COMMANDS:
      self.assertRegex(out, rf"\n    {name}\s+\w")

  def test_version_is_that_of_the_package(self):
    code, out, _ = runner.run("--version")
    self.assertEqual((code, out), (0, f"maxtext-olmo {maxtext_olmo.__version__}\n"))

  def test_help_imports_nothing_heavy(self):
    code = (
        "import sys\n"
        "from maxtext_olmo.cli import main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'grain', 'numpy', 'rich', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)

  def test_reading_an_index_and_verifying_import_no_jax(self):
    code = (
        "import sys\n"
        "from maxtext_olmo.cli import main as cli\n"
        "assert cli.main(['index', 'show', '/no']) == cli.main(['verify', '/no']) == 2\n"
        "heavy = {'jax', 'grain'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)

  def test_help_before_a_command_lists_all_commands(self):
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_olmo", "--help", "verify"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in main_lib.COMMANDS:
      self.assertIn(f"\n    {name}", done.stdout)

  def test_every_flag_of_every_command_says_its_default_or_that_it_is_required(self):
    leaves = reference.leaves(main_lib.make_parser())
    self.assertGreater(len(leaves), 4)
    for leaf in leaves:
      for action in leaf._actions:
        if action.option_strings and action.dest != "help":
          self.assertRegex(
              action.help or "", r"\(default: |\(required\)", f"{leaf.prog} {action.dest}"
          )

  def test_the_module_runs_as_the_command(self):
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_olmo", "index", "show", "/no/index.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 2)
    self.assertEqual(
        done.stderr,
        "error: Cannot read the index /no/index.json: No such file or directory. `maxtext-olmo"
        " index build` makes one.\n",
    )

  def test_debug_shows_the_traceback(self):
    with self.assertRaises(CorpusError):
      main_lib.main(["--debug", "index", "show", "/no/index.json"])

  def test_errors_of_the_file_system_are_one_line_too(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    (directory / "file").write_text("x")
    (directory / "doc.txt").write_text("x")
    code, _, err = runner.run(
        "corpus", "make", "--output", directory / "file" / "x", directory / "doc.txt"
    )
    self.assertEqual(code, 2)
    self.assertRegex(err, f"^error: Cannot write {directory}/file/x: Not a directory\\. .*\n$")

  @parameterized.parameters((), ("nonsense",), ("index",), ("verify",), ("index", "build"))
  def test_wrong_usage_is_explained(self, *argv):
    code, _, err = runner.run(*argv)
    self.assertEqual(code, 2)
    self.assertStartsWith(err, "usage: maxtext-olmo")

  def test_a_closed_pipe_is_not_an_error(self):
    directory = self.create_tempdir().full_path
    code = (
        "from tests import corpora\n"
        f"corpora.write_corpus({directory!r}, tokens_per_file=(8,) * 3000)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    command = (
        f"{sys.executable} -m maxtext_olmo index show --files {directory}/index.json | head -1;"
        f" echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    self.assertEqual(done.stderr, "")
    self.assertEqual(done.stdout.splitlines()[-1], "0")


class ArgumentsTest(parameterized.TestCase):

  @parameterized.parameters(
      (["train", "--config=x.py", "--config.steps=2"], ["--config=x.py", "--config.steps=2"]),
      (["--debug", "train", "--helpfull"], ["--helpfull"]),
      (["train"], []),
      (["maxtext", "sft", "base.yml", "steps=2"], ["base.yml", "steps=2"]),
      (["eval", "--config.steps=2"], ["--config.steps=2"]),
  )
  def test_arguments_of_another_parser_are_passed_on(self, argv, rest):
    own, passed = main_lib._split_arguments(argv)
    self.assertEqual(passed, rest)
    self.assertEqual(own, argv[: len(argv) - len(rest)])

  def test_other_commands_parse_their_own(self):
    argv = ["index", "show", "x"]
    self.assertEqual(main_lib._split_arguments(argv), (argv, []))


if __name__ == "__main__":
  absltest.main()
