"""Tests that the code and the commands of the documentation run."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from tests import corpora
from tests import doc_blocks

STARTS_PROCESSES = True

_QUICKSTART = doc_blocks.ROOT / "docs" / "guides" / "quickstart.md"
_EOS = 100257


def _name(page: pathlib.Path) -> str:
  return str(page.relative_to(doc_blocks.ROOT).with_suffix("")).replace("/", "_")


def _pages_that_run() -> list[tuple[str, pathlib.Path]]:
  return [
      (_name(page), page)
      for page in doc_blocks.pages()
      if any(not block.not_run for block in doc_blocks.blocks(page))
  ]


def _write_mix(directory: pathlib.Path) -> None:
  """Writes `index.json`, a small corpus with labels, ids and windows as OLMo's mixes have them."""
  files = []
  for number, label in enumerate(("wikipedia", "stack-edu_Python", "web")):
    path = directory / "mix" / label / "part-0.npy"
    tokens = corpora.write_tokens(path, 30_000, seed=number, vocab_size=100_000, dtype="uint32")
    tokens[::500] = _EOS
    np.asarray(tokens, "<u4").tofile(path)
    files.append((str(path), label))
  index = maxtext_olmo.build_index(
      files, 8192, tokenizer="dolma2", dtype="uint32", base=str(directory / "mix")
  )
  index.save(str(directory / "index.json"))


class BlocksTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = pathlib.Path(tempfile.mkdtemp(prefix="doc_blocks_"))
    cls.addClassCleanup(shutil.rmtree, cls.directory)
    shutil.copytree(doc_blocks.ROOT / "docs" / "guides", cls.directory / "docs")
    _write_mix(cls.directory)
    corpus = next(b for b in doc_blocks.blocks(_QUICKSTART) if "corpus make" in b.text)
    cls.run_program(
        f"import subprocess; subprocess.run(['bash', '-euc', {corpus.text!r}], check=True)"
    )

  @classmethod
  def run_program(cls, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cls.directory,
        env={
            **os.environ,
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            "PYTHONPATH": str(doc_blocks.ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cls.directory / "programs"),
            "XDG_CACHE_HOME": str(cls.directory / "cache"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
      raise AssertionError(done.stdout[-5000:])

  @parameterized.named_parameters(*_pages_that_run())
  def test_a_page_runs_as_it_is_printed(self, page: pathlib.Path):
    # The quickstart makes `data` itself.
    for folder in ("checkpoints", "my-run", *(["data"] if page == _QUICKSTART else [])):
      shutil.rmtree(self.directory / folder, ignore_errors=True)
    self.run_program(doc_blocks.script(page))


class ParseTest(absltest.TestCase):

  def blocks(self, text: str) -> list[doc_blocks.Block]:
    return doc_blocks.blocks(pathlib.Path(self.create_tempfile("page.md", text).full_path))

  def test_fenced_and_indented_code_is_found_and_output_is_not(self):
    found = self.blocks(
        "# Title\n\n    maxtext-olmo index show x\n    maxtext-olmo verify x\n\n"
        "    label  tokens\n\nText\n```python\nx = 1\n```\n```text\noutput\n```\n"
        "- an item\n      continued\n"
    )
    self.assertEqual(
        [(b.language, b.line, b.text) for b in found],
        [
            ("sh", 3, "maxtext-olmo index show x\nmaxtext-olmo verify x\n\nlabel  tokens\n"),
            ("python", 10, "x = 1\n"),
        ],
    )

  def test_a_marked_block_says_why_it_does_not_run_and_the_next_one_runs(self):
    found = self.blocks(
        "<!-- not run: no mix -->\n```sh\nfalse\n```\n\n```sh\ntrue\n```\n"
        "<!-- not run: for the block that follows -->\nText in between.\n\n    make x\n"
    )
    self.assertEqual([b.not_run for b in found], ["no mix", "", ""])

  def test_what_runs_first_is_python(self):
    found = self.blocks("<!-- run first\nx = 1\n-->\n```python\nassert x == 1\n```\n")
    self.assertEqual([b.text for b in found], ["x = 1\n", "assert x == 1\n"])
    exec(doc_blocks.script(pathlib.Path(self.create_tempfile("empty.md", "").full_path)))


if __name__ == "__main__":
  absltest.main()
