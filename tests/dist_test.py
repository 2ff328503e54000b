"""Tests a wheel as a user has it: installed in a clean environment, without a checkout.

`make dist` builds the wheel and names it in $WHEEL; without one there is nothing to test.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

from absl.testing import absltest

import maxtext_olmo
from tests import doc_blocks

STARTS_PROCESSES = True

_WHEEL = os.environ.get("WHEEL", "")


@absltest.skipUnless(_WHEEL, "`make dist` builds the wheel that this tests")
class WheelTest(absltest.TestCase):

  def test_it_holds_every_file_of_the_package(self):
    package = doc_blocks.ROOT / "maxtext_olmo"
    expected = {
        str(path.relative_to(doc_blocks.ROOT))
        for folder in (package, package / "configs")
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(_WHEEL) as wheel:
      found = {name for name in wheel.namelist() if name.startswith("maxtext_olmo/")}
    self.assertEqual(found, expected)

  def test_the_quickstart_runs_in_a_clean_environment(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["JAX_PLATFORMS"] = "cpu"
    environment["PATH"] = f"{directory}/venv/bin:{os.environ['PATH']}"

    def run(*command: str) -> str:
      done = subprocess.run(
          command,
          cwd=directory,
          env=environment,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          check=False,
      )
      self.assertEqual(done.returncode, 0, done.stdout[-5000:])
      return done.stdout

    run(sys.executable, "-m", "venv", "venv")
    run("venv/bin/python", "-m", "pip", "install", "--quiet", f"{_WHEEL}[train]")
    self.assertEqual(run("maxtext-olmo", "--version").split()[-1], maxtext_olmo.__version__)
    where = run("venv/bin/python", "-c", "import maxtext_olmo; print(maxtext_olmo.__file__)")
    self.assertIn("/venv/", where)
    shutil.copytree(doc_blocks.ROOT / "docs" / "guides", directory / "docs")
    page = doc_blocks.ROOT / "docs" / "guides" / "quickstart.md"
    run("venv/bin/python", "-c", doc_blocks.script(page))


if __name__ == "__main__":
  absltest.main()
