"""Runs the commands of the guide to object stores, with nginx in place of a bucket."""

import pathlib
import shlex
import shutil
import subprocess
import sys

from absl.testing import absltest

from tests import distributed
from tests import doc_blocks
from tests.cloud import servers

STARTS_PROCESSES = True

_PAGE = doc_blocks.ROOT / "docs" / "guides" / "storage.md"
_TAKES_NO_STORE = ("pip ", "make ")


class GuideTest(absltest.TestCase):

  @servers.needs("nginx")
  def test_the_commands_of_the_guide_run_as_they_are_printed(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    served = folder / "served" / "my-bucket" / "olmo"
    make = f"corpus make --output {served} --pattern *.md {doc_blocks.ROOT}/docs/guides"
    self.run_command(folder, make)
    for label in ("docs", "more"):
      shutil.copytree(served / "bytes" / "guides", served / "bytes" / label)
    lines = [f"{label},{{TOKENIZER}}/{label}/part-00000.npy\n" for label in ("docs", "more")]
    (served / "mix.txt").write_text("".join(lines))
    work = folder / "work"
    work.mkdir()
    ran = 0
    with servers.start_nginx(folder / "served") as nginx:
      for block in doc_blocks.blocks(_PAGE):
        command = block.text.replace("\\\n", " ").strip()
        if block.language != "sh" or command.startswith(_TAKES_NO_STORE):
          continue
        if "--endpoint" in command:  # Of a server that does not exist here.
          continue
        words = command.removeprefix("maxtext-olmo ")
        with self.subTest(f"{block.page}:{block.line}"):
          options = f" --endpoint {nginx.url} --anonymous"
          short = " --seconds 2" if words.startswith("storage test") else ""
          # Whether the store is fast enough depends on the machine.
          codes = (0, 1) if short else (0,)
          self.run_command(work, words + options + short, codes)
          ran += 1
    self.assertGreaterEqual(ran, 5)
    self.assertEqual(
        (work / "slice" / "bytes" / "docs" / "part-00000.npy").read_bytes(),
        (served / "bytes" / "docs" / "part-00000.npy").read_bytes(),
    )

  def run_command(self, folder, words, codes=(0,)):
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_olmo", *shlex.split(words)],
        cwd=folder,
        env=distributed.child_environment(servers.NO_METADATA),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertIn(done.returncode, codes, f"{words}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
  absltest.main()
