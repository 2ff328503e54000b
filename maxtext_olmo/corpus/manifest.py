"""AI2's mix manifests, which list the token files of a corpus in order.

A manifest has one file per line, as `label,path`; blank lines and lines that begin with `#` are
ignored:

    # a comment
    wiki,preprocessed/wiki/{TOKENIZER}/part-00-00000.npy

`{TOKENIZER}` stands for the tokenizer's name. The order of the lines is the order of the instances.

The manifests of OLMo 2's annealing stage have paths without labels. The label is then the second
component of the path, as in OLMo-core:

    preprocessed/dclm/documents/part-00-00000.npy       the label is dclm
"""

import collections
import dataclasses
import os
import posixpath
import re
from collections.abc import Sequence

from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.errors import CorpusError

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_SHOWN = 10


@dataclasses.dataclass(frozen=True, slots=True)
class MixEntry:
  """One line of a manifest: a token file, its label and its line number (from 1)."""

  label: str
  path: str
  line: int


def read_mix(
    path: str | os.PathLike[str], *, tokenizer: str | None = None, storage: Storage | None = None
) -> tuple[MixEntry, ...]:
  """Reads a manifest and fills in `{TOKENIZER}`.

  Args:
    path: Path of the manifest.
    tokenizer: Name that replaces `{TOKENIZER}`.
    storage: Storage that holds the manifest; `open_storage()` by default.

  Raises:
    CorpusError: The manifest is missing or empty, or has a malformed line; no line is skipped.
  """
  name = urls.without_secrets(path)
  storage = open_storage() if storage is None else storage
  try:
    data = storage.read(name)
  except CorpusError as error:
    why = reason(error).rstrip(".")
    raise type(error)(f"Cannot read the mix file {name}: {why}.") from error
  try:
    lines = data.decode("utf-8-sig").splitlines()  # Some editors write a BOM first.
  except UnicodeDecodeError as error:
    raise CorpusError(
        f"The mix file {name} is not UTF-8 text (byte {error.start}). Check that it is not a token"
        " file."
    ) from error

  entries, problems = [], []
  stripped = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
  named = [(number, line) for number, line in stripped if line and not line.startswith("#")]
  unlabelled = all(_second_part(line) for _, line in named)
  for number, line in named:
    try:
      entries.append(
          _parse_line(f"{_second_part(line)},{line}" if unlabelled else line, number, tokenizer)
      )
    except CorpusError as error:
      problems.append(f"  {name}:{number}: {error}")
  if problems:
    count = "1 malformed line" if len(problems) == 1 else f"{len(problems)} malformed lines"
    raise CorpusError(
        f"The mix file {name} has {count}; each line must be `label,path`:\n{_listed(problems)}"
    )
  if not entries:
    raise CorpusError(f"The mix file {name} names no files: each line must be `label,path`.")
  return tuple(entries)


def check_inside(entries: Sequence[MixEntry], name: str, base: str) -> None:
  """Raises CorpusError if a line of the manifest `name` names a file outside the base."""
  outside = [entry for entry in entries if paths.leaves(base, entry.path)]
  if outside:
    lines = _listed([f"  {name}:{entry.line}: {entry.path}" for entry in outside])
    raise CorpusError(
        f"In the mix file {name}, {len(outside)} of {len(entries)} files are outside the base"
        f" {base}:\n{lines}\nGive the directory that holds all files (--base), or, if you trust the"
        " mix file, allow files outside the base (--allow-outside)."
    )


def describe_repeats(entries: Sequence[MixEntry]) -> str:
  """Returns a sentence about files that are listed more than once; "" if there are none."""
  counts = collections.Counter(posixpath.normpath(entry.path) for entry in entries)
  path, most = counts.most_common(1)[0]
  if most == 1:
    return ""
  repeated = sum(count > 1 for count in counts.values())
  return (
      f"{repeated:,} of {len(counts):,} files are listed more than once ({path} {most} times), and"
      " are read as often as they are listed."
  )


def _listed(lines: Sequence[str]) -> str:
  more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
  return "\n".join([*lines[:_SHOWN], *more])


def _second_part(line: str) -> str:
  """Returns the label that the path on a line implies; "" if the line is not just a path."""
  parts = line.split("/")
  return parts[1] if len(parts) > 2 and "," not in line else ""


def _parse_line(line: str, number: int, tokenizer: str | None) -> MixEntry:
  if "\0" in line:
    raise CorpusError(f"a label or path must not contain a NUL character: {line!r}")
  if (commas := line.count(",")) != 1:
    raise CorpusError(f"expected exactly one comma, found {commas}: {line!r}")
  label, path = (part.strip() for part in line.split(","))
  if not (label and path):
    what = "path after" if label else "label before"
    raise CorpusError(f"the {what} the comma is empty: {line!r}")
  for placeholder in _PLACEHOLDER.findall(path):
    if placeholder != "{TOKENIZER}":
      raise CorpusError(
          f"unknown placeholder {placeholder}, expected {{TOKENIZER}} or none: {line!r}"
      )
    if not tokenizer:
      raise CorpusError(
          f"the path needs a tokenizer's name for {{TOKENIZER}}, but none was given: {line!r}"
      )
    path = path.replace(placeholder, tokenizer)
  return MixEntry(label=label, path=path, line=number)
