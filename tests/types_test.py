"""Tests that type checkers see the types of the public names."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest

STARTS_PROCESSES = True

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def _check(file: pathlib.Path) -> str:
  """Returns what mypy says about a user's file, as strict as it can be."""
  cache = os.path.join(absltest.get_default_test_tmpdir(), "mypy_cache")  # Both tests share it.
  done = subprocess.run(
      [
          *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"),
          *("--follow-imports=silent", "--ignore-missing-imports", f"--cache-dir={cache}"),
          str(file),
      ],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=False,
  )
  return done.stdout + done.stderr


class TypesTest(absltest.TestCase):

  def test_a_users_trainer_passes_the_strictest_check(self):
    self.assertEqual(_check(_ROOT / "tests" / "typed_user.py"), "")

  def test_a_users_mistakes_are_found(self):
    text = "import maxtext_olmo\n"
    mistakes = (
        ("maxtext_olmo.load_index(3)", "arg-type"),
        ("maxtext_olmo.no_such_name", "attr-defined"),
        ("maxtext_olmo.get_config(1)", "call-arg"),
    )
    file = self.create_tempfile("user.py", text + "\n".join(line for line, _ in mistakes))
    said = _check(pathlib.Path(file.full_path)).splitlines()
    for number, (line, code) in enumerate(mistakes, start=2):
      with self.subTest(line):
        self.assertTrue(any(f":{number}: error" in s and f"[{code}]" in s for s in said), said)


if __name__ == "__main__":
  absltest.main()
