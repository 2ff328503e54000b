"""Patterns for paths, with OLMo-core's rules: `*` within a directory, `**` across directories.

    data/*.npy         the files of data whose names end with .npy, hidden ones included
    data/**/*.npy      those of data and of all directories below it
    data/part-?.npy    a file with this very name: other wildcards have no meaning

Matches are sorted as text, by code point of the whole path, so `part-10` comes before `part-2`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import router
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import MissingFileError


def fixed_directory(pattern: str) -> str:
  """Returns the directories of a pattern before its first wildcard.

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
          " from a bucket (gs://, s3:// or az://)."
      )
    storage = open_storage() if storage is None else storage
    below: Iterable[str] = storage.remote.list_below(directory)
  else:
    below = _files_below(directory or ".")
  found = sorted(path for path in below if regex.fullmatch(path))
  if not found:
    raise MissingFileError(
        f"No file matches {pattern}. Check the directory {directory or '.'!r}; if the files are"
        " elsewhere on this machine, give their directory (--base)."
    )
  return found


def _regex(pattern: str) -> re.Pattern[str]:
  wildcards = {"**/": ".*", "**": ".*", "*": "[^/]*"}
  pieces = re.split(r"(\*\*/|\*\*|\*)", pattern)
  return re.compile("".join(wildcards.get(piece, re.escape(piece)) for piece in pieces), re.DOTALL)


def _files_below(directory: str) -> Iterator[str]:
  for folder, _, names in os.walk(directory, followlinks=True):
    for name in names:
      path = os.path.join(folder, name)
      yield path.removeprefix("./") if directory == "." else path
