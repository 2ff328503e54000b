"""Local copies of objects that are read in small pieces, such as document indexes and bitmaps.

A step needs a few values from random places of such a file. From an object store, each would be a
request. So a run copies the object to a local directory once, and reads the copy:

    gs://bucket/index.json.documents, ETag "5f2c"    DIR/index.json.documents.0c1d2e3f4a5b6c7d
    the same URL, replaced: ETag "8e01"              DIR/index.json.documents.93b1f07c2ad4e856

The name contains a digest of the URL, the size and the ETag, so a copy of a replaced object is
never used. A copy is written under a temporary name and renamed, so it is either complete or
absent. The processes of a host share it, and later runs reuse it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import time

from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import router

_LOG_FROM = 64 << 20
_NAME_CHARACTERS = 40  # So that names stay below 255 bytes, even with suffixes.


def local_path(path: str, storage: base.Storage, directory: str, *, download: bool = True) -> str:
  """Returns the path of a local copy of an object, and downloads it first if there is none.

  Sends only one request if there is a copy.

  Args:
    path: Path or URL. A local path is returned unchanged.
    storage: Storage that holds the object. Only `StorageRouter` can identify objects; with any
      other storage, the path is returned unchanged.
    directory: Local directory of the copies, which is created if it is missing.
    download: Whether to download a missing copy. If not, `path` is returned if there is no copy.

  Raises:
    CorpusError: The object is missing, cannot be read or was replaced during the download.
    WriteError: The copy cannot be written.
  """
  if not urls.is_url(path) or not isinstance(storage, router.StorageRouter):
    return path
  size, etag, copy = _identify(path, storage, directory)
  if _is_complete(copy, size):
    return copy
  if not download:
    return path
  try:
    with contextlib.ExitStack() as stack:
      with atomic.write_errors(copy):
        if stack.enter_context(atomic.locked(copy)):
          _remove_partial_copies(copy)
      # The previous holder of the lock may have downloaded it.
      if not _is_complete(copy, size):
        storage.expect(path, size, etag)
        _download(path, size, storage, copy)
  except errors.WriteError as error:
    raise errors.WriteError(
        f"{error} A local copy of {path} takes {size:,} bytes; set olmo_order_cache_dir to a"
        " directory with room for it."
    ) from error
  return copy


def _identify(
    url: str, storage: router.StorageRouter, directory: str
) -> tuple[int, str | None, str]:
  """Asks for the current version of an object; returns its size, its ETag and the copy's path."""
  identity = storage.remote.identity(url)
  digest = hashlib.sha256(f"{url} {identity.size} {identity.tag}".encode()).hexdigest()[:16]
  name = url.rpartition("/")[2][-_NAME_CHARACTERS:]
  return identity.size or 0, identity.etag, os.path.join(directory, f"{name}.{digest}")


def _is_complete(copy: str, size: int) -> bool:
  return os.path.isfile(copy) and os.path.getsize(copy) == size


def _download(url: str, size: int, storage: base.Storage, copy: str) -> None:
  is_large, began = size >= _LOG_FROM, time.monotonic()
  if is_large:
    logging.info("Copying %s (%s bytes) to %s", url, f"{size:,}", copy)
  with contextlib.suppress(_CopiedMeanwhile), atomic.atomic_writer(copy) as file:
    for piece in storage.pieces(url, 0, size):
      file.write(piece)
    file.flush()
    os.fsync(file.fileno())
    if _is_complete(copy, size):
      raise _CopiedMeanwhile
  if is_large:
    logging.info("Copied %s in %.0f s", url, time.monotonic() - began)


class _CopiedMeanwhile(Exception):
  """Without locks, another process made the same copy and may have opened it, so it must stay."""


def _remove_partial_copies(copy: str) -> None:
  """Removes what killed downloads have left; the caller must hold the lock."""
  folder, name = os.path.split(copy)
  for left_over in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.tmp")):
    os.unlink(left_over)
