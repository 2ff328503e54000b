"""Patterns for paths, with OLMo-core's rules: `*` within a directory, `**` across directories.

    data/*.npy         files in data whose names end with .npy, including hidden files
    data/**/*.npy      such files in data and in all directories below it
    data/part-?.npy    the file with exactly this name: there are no other wildcards

Matches are sorted as text, by code point of the whole path, so `part-10` comes before `part-2`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import router
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import MissingFileError


def fixed_directory(pattern: str) -> str:
  """Returns the directory part of a pattern before its first wildcard.

  >>> fixed_directory("/data/web/*/part-*.npy")
  '/data/web'
  """
  fixed = pattern.partition("*")[0]
  return fixed.rpartition("/")[0] or ("/" if pattern.startswith("/") else "")


def expand(pattern: str, storage: router.StorageRouter | None = None) -> list[str]:
  """Returns the files or objects that match a pattern, sorted as text.

  Args:
    pattern: Path or URL with wildcards.
    storage: Storage that lists URLs; `open_storage()` by default.

  Raises:
    ConfigError: The pattern is the address of a web server, which cannot list files.
    MissingFileError: No file matches.
  """
  directory = fixed_directory(pattern)
  regex = _regex(pattern)
  if urls.is_url(pattern):
    if urls.split(pattern).scheme in urls.HTTP:
      raise ConfigError(
          f"{pattern} is a pattern, but a web server cannot list its files. Name each file, or read"
          " from a bucket (gs://, s3:// or az://). For `olmo-core import`, build an index that"
          " names each file, and pass it with --index."
      )
    storage = open_storage() if storage is None else storage
    below: Iterable[str] = storage.remote.list_below(directory)
  else:
    below = _files_below(directory, pattern)
  found = sorted(path for path in below if regex.fullmatch(path))
  if not found:
    raise MissingFileError(
        f"No file matches {pattern}. Check the directory {directory or '.'!r}; if the files are"
        " elsewhere on this machine, give their directory (--base)."
    )
  return found


def _regex(pattern: str) -> re.Pattern[str]:
  wildcards = {"**/": ".*", "**": ".*", "*": "[^/]*"}
  pieces = filter(None, re.split(r"(\*\*/|\*\*|\*)", pattern))
  # Equal wildcards in a row match the same paths as one, but matching could take exponential time.
  once = (text for text, _ in itertools.groupby(wildcards.get(p, re.escape(p)) for p in pieces))
  return re.compile("".join(once), re.DOTALL)


def _files_below(directory: str, pattern: str) -> Iterator[str]:
  """Yields the files in all directories that may hold matches of a pattern.

  Args:
    directory: Directory part of the pattern before its first wildcard.
    pattern: The pattern. Without `**`, the search goes only as deep as the pattern itself.
  """
  shallow = pattern.partition("**")[0]
  levels = shallow.removeprefix(directory).lstrip("/").split("/")
  deep = shallow != pattern
  for folder, folders, names in os.walk(directory or ".", followlinks=True):
    for name in names:
      yield os.path.join(folder, name) if directory else os.path.join(folder, name)[2:]
    below = os.path.relpath(folder, directory or ".")
    level = 0 if below == "." else below.count("/") + 1
    if level < len(levels) - 1:
      folders[:] = [name for name in folders if _regex(levels[level]).fullmatch(name)]
    elif not deep:
      folders.clear()
    folders[:] = [name for name in folders if not _leads_back(folder, name)]


def _leads_back(folder: str, name: str) -> bool:
  """Returns whether a directory is a symbolic link to one of the directories above it."""
  path = os.path.join(folder, name)
  if not os.path.islink(path):
    return False
  real, target = os.path.realpath(folder), os.path.realpath(path)
  return os.path.commonpath([real, target]) == target
