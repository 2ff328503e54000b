"""Finds the text files of each label of a corpus.

    docs                   the files in docs and below it, with the label docs
    wiki=dumps/enwiki      the same, with the label wiki
    wiki='dumps/*/*.zst'   the files that match: `*` within a directory, `**` across directories
    wiki=gs://bucket/text  the objects below a prefix; an object or a pattern of a bucket work too

Hidden files are used only if they are inputs themselves.

Filters select among the files found. A filter with a `/` is compared with the path below the
input's directory, and any other with the name of the file; in both, `*` matches any characters.

    *.txt                  for all labels
    wiki=*.txt             for one label
    =year=2019/*           for all labels; the first `=` ends an empty label
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence

from maxtext_olmo.corpus import patterns as patterns_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError


@dataclasses.dataclass(frozen=True)
class Filter:
  """A pattern that selects files.

  Attributes:
    label: Label whose files it selects; empty for all labels.
    pattern: The pattern.
  """

  label: str
  pattern: str

  def matches(self, label: str, path: str) -> bool:
    """Returns whether the filter selects a file.

    Args:
      label: Label of the file.
      path: Path of the file below the directory of its input.
    """
    compared = path if "/" in self.pattern else os.path.basename(path)
    return self.label in ("", label) and fnmatch.fnmatchcase(compared, self.pattern)


def find_inputs(
    inputs: Sequence[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    label: str | None = None,
    suffixes: tuple[str, ...] | None = None,
) -> dict[str, list[str]]:
  """Returns the files of each label, in the order of the inputs.

  Args:
    inputs: Each `PATH` or `LABEL=PATH`: a file, a directory or a pattern.
    include: Filters for the files to use from directories. If there is no filter for its label, all
      files of a directory are used.
    exclude: Filters for files to leave out, however they were found.
    label: Label of inputs without one; by default, the name of the file or directory.
    suffixes: Suffixes of the files to use from directories; None for all files.

  Raises:
    ConfigError: A filter names a label that no input has.
    CorpusError: An input has no files, or filters leave none.
  """
  labeled = [_label_and_path(given, label) for given in inputs]
  labels = {name for name, _ in labeled}
  included = [_parse_filter(given, labels, "--pattern") for given in include]
  excluded = [_parse_filter(given, labels, "--exclude") for given in exclude]
  files: dict[str, list[str]] = {}
  for name, path in labeled:
    wanted = [one for one in included if one.label in ("", name)]
    found = _find(name, path, wanted, suffixes)
    kept = [file for file, below in found if not any(one.matches(name, below) for one in excluded)]
    if not kept:
      raise CorpusError(f"The filters (--exclude) leave no file of {path}.")
    files.setdefault(name, []).extend(kept)
  return files


def _label_and_path(given: str, default: str | None) -> tuple[str, str]:
  label, equals, path = given.partition("=")
  if equals and not urls.is_url(label) and not os.path.exists(given):
    return label, path
  if default is not None:
    return default, given
  if _is_pattern(given):
    return os.path.basename(os.path.abspath(patterns_lib.fixed_directory(given))), given
  name = os.path.basename(os.path.abspath(given))
  return (name if _is_directory(given) else name.split(".")[0]), given


def _is_directory(path: str) -> bool:
  if not urls.is_url(path):
    return os.path.isdir(path)
  if urls.split(path).scheme in urls.HTTP:  # A web server cannot list its files.
    return False
  return path.endswith("/") or not open_storage().exists(path)


def _is_pattern(path: str) -> bool:
  return "*" in path and not os.path.exists(path)


def _parse_filter(given: str, labels: Iterable[str], option: str) -> Filter:
  label, equals, pattern = given.partition("=")
  if not equals:
    return Filter("", given)
  if label and label not in labels:
    raise ConfigError(
        f"{option} {given}: no input has the label {label!r}. Labels: {', '.join(sorted(labels))}."
        f" For a pattern that contains =, write {option} '={given}'."
    )
  return Filter(label, pattern)


def _find(
    label: str, path: str, include: Sequence[Filter], suffixes: tuple[str, ...] | None
) -> list[tuple[str, str]]:
  """Returns the files of an input, sorted, each with its path below the input's directory."""
  if _is_pattern(path):
    base = patterns_lib.fixed_directory(path)
    pairs = [(file, os.path.relpath(file, base or ".")) for file in patterns_lib.expand(path)]
    visible = [pair for pair in pairs if not f"/{pair[1]}".count("/.")]
    if not visible:
      raise MissingFileError(f"{path} matches only hidden files. Name them as inputs.")
    return visible
  if not _is_directory(path):
    if not (open_storage().exists(path) if urls.is_url(path) else os.path.exists(path)):
      raise MissingFileError(f"There is no file or directory {path}. Check the path.")
    return [(path, os.path.basename(path))]
  found = []
  for file, below in _files_below(path):
    if f"/{below}".count("/.") or (suffixes and not below.endswith(suffixes)):
      continue
    if not include or any(one.matches(label, below) for one in include):
      found.append((file, below))
  if found:
    return sorted(found)
  if suffixes:
    raise CorpusError(f"No file below {path} has one of the suffixes {', '.join(suffixes)}.")
  wanted = " or ".join(repr(one.pattern) for one in include) or "'*'"
  raise CorpusError(f"No file below {path} matches the pattern {wanted}.")


def _files_below(path: str) -> Iterator[tuple[str, str]]:
  """Yields the files of a directory, or the objects of a prefix, each with its path below it."""
  if urls.is_url(path):
    prefix = path.rstrip("/")
    below = open_storage().remote.list_below(prefix)
    if not below:
      raise MissingFileError(f"There is no object {path}, and none below it. Check the URL.")
    yield from ((url, url.removeprefix(f"{prefix}/")) for url in below if not url.endswith("/"))
    return
  for directory, subdirectories, names in os.walk(path):
    subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
    for name in names:
      file = os.path.join(directory, name)
      yield file, os.path.relpath(file, path)
