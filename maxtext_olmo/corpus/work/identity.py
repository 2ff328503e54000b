"""Identities of files: short strings that change when a file is replaced.

A result is named after the identities of the files that it was computed from. If one of them has
changed since, the name differs, and the item is processed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence

from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import StorageRouter
from maxtext_olmo.corpus.storage.remote import RemoteStorage
from maxtext_olmo.errors import MissingFileError

# A result with this identity is used only by the run that made it.
UNKNOWN = "unknown"
_MISSING = "missing"
_DIGITS = 12


def file_identity(storage: Storage, path: str) -> str:
  """Returns the size and modification time of a file, or the size and ETag of an object.

  Raises:
    CorpusError: The file may exist, but its identity cannot be determined.
  """
  if isinstance(storage, StorageRouter):
    storage = storage.remote if urls.is_url(path) else storage.local
  try:
    if isinstance(storage, LocalStorage):
      storage.size(path)  # Raises an error that names the file if it is not a regular one.
      found = os.stat(path)
      return f"{found.st_size} {found.st_mtime_ns}"
    if isinstance(storage, RemoteStorage):
      identity = storage.identity(path)
      return f"{identity.size} {identity.tag}"
    return str(storage.size(path))
  except (MissingFileError, FileNotFoundError):
    return _MISSING


def size_and_etag(storage: Storage, path: str) -> tuple[int, str | None]:
  """Returns the current size of a file and, for an object in a store that sends it, its ETag."""
  if isinstance(storage, StorageRouter) and urls.is_url(path):
    storage = storage.remote
  if isinstance(storage, RemoteStorage):
    found = storage.identity(path)
    return found.size or 0, found.etag
  return storage.size(path), None


def find_identities(
    storage: Storage, paths: Iterable[str], *, workers: int | None = None
) -> dict[str, str | None]:
  """Returns the identity of each file, with one request each; None if it cannot be determined."""
  unique = sorted(set(paths))

  def find(i: int) -> str:
    return file_identity(storage, unique[i])

  found, _ = scan.map_files(find, len(unique), workers=workers)
  return dict(zip(unique, found))


def combined(paths: Sequence[str], identities: Mapping[str, str | None]) -> str:
  """Returns one short string that identifies the files that a result depends on."""
  found = [identities[path] for path in paths]
  if None in found:
    return UNKNOWN
  text = json.dumps([list(paths), found])
  return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def combined_now(storage: Storage, paths: Sequence[str]) -> str:
  """Returns `combined` for the current state of the files; raises CorpusError if unknown."""
  return combined(paths, {path: file_identity(storage, path) for path in paths})
