"""Finds the code and the commands of the documentation.

A block is code if it is fenced as python, sh or bash, or if it is indented and begins with a
command. It runs in a test, unless the line before it says why not:

    <!-- not run: needs an OLMo mix -->

Python that a block relies on, but that a reader need not see, comes before it:

    <!-- run first
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    -->
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")
_RUN_FIRST = "<!-- run first"
_COMMANDS = (
    "maxtext-olmo ",
    "python -m ",
    "python ",
    "pip ",
    "uv ",
    "make ",
    "export ",
    "git ",
    "mkdir ",
)
_LANGUAGES = {"python": "python", "sh": "sh", "bash": "sh", "console": "sh"}


@dataclasses.dataclass(frozen=True)
class Block:
  """Code or commands of a page.

  Attributes:
    page: The page, relative to the repository.
    line: The line on which the block begins, from 1.
    language: "python" or "sh".
    text: The code.
    not_run: Why it is not run; empty if it is.
  """

  page: str
  line: int
  language: str
  text: str
  not_run: str


def script(page: pathlib.Path) -> str:
  """Returns a Python program that runs the blocks of a page, one after the other.

  Commands run in a shell that stops at the first failure; all Python shares one namespace.
  """
  lines = ["import subprocess", "_shared = {'__name__': '__main__'}"]
  for block in blocks(page):
    if block.not_run:
      continue
    where = f"{block.page}:{block.line}"
    lines.append(f"print('running', {where!r}, flush=True)")
    if block.language == "sh":
      lines.append(f"subprocess.run(['bash', '-euc', {block.text!r}], check=True)")
    else:
      lines.append(f"exec(compile({block.text!r}, {where!r}, 'exec'), _shared)")
  return "\n".join(lines) + "\n"


def pages() -> list[pathlib.Path]:
  """Returns the pages of the documentation, the README first."""
  return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: pathlib.Path) -> list[Block]:
  """Returns the code and commands of a page, in order."""
  found: list[Block] = []
  lines = page.read_text().splitlines()
  number, reason = 0, ""
  while number < len(lines):
    line = lines[number]
    fence = re.match(r"(`{3,})(\S*)", line)
    if fence:
      end = lines.index(fence[1], number + 1)
      body, language, start = lines[number + 1 : end], _LANGUAGES.get(fence[2], ""), number + 1
      number = end + 1
    elif line.startswith("    ") and not (number and lines[number - 1].strip()):
      end = next(
          (i for i in range(number, len(lines)) if lines[i].strip() and lines[i][:4].strip()),
          len(lines),
      )
      body, start = [text[4:] for text in lines[number:end]], number
      language = "sh" if line.strip().startswith(_COMMANDS) else ""
      number = end
    elif line == _RUN_FIRST:
      end = lines.index("-->", number)
      body, language, start = lines[number + 1 : end], "python", number + 1
      number = end + 1
    else:
      match = _NOT_RUN.match(line)
      if match or line.strip():
        reason = match[1] if match else ""
      number += 1
      continue
    if language:
      path = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else str(page)
      text = "\n".join(body).rstrip() + "\n"
      found.append(Block(path, start + 1, language, text, reason))
    reason = ""
  return found
