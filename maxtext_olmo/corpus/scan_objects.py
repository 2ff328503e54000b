"""Finds the sizes and ETags of many objects without reading them.

If a folder holds at least three of the objects, the folder is listed. All other objects, and all
objects on web servers, take a HEAD request each. The requests run in parallel.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import StorageRouter
from maxtext_olmo.corpus.storage.remote import Identity
from maxtext_olmo.corpus.storage.remote import RemoteStorage
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

# Listing a folder costs about as much as this number of HEAD requests.
_WORTH_LISTING = 3


def scan_objects(
    paths: Sequence[str],
    dtype: np.dtype,
    storage: Storage,
    *,
    workers: int | None,
    progress: bool,
    npy_headers: bool,
) -> dict[str, scan.FileInfo]:
  """Returns the size and ETag of each token file in a store, by URL; leaves out local paths.

  Args:
    paths: Paths of token files.
    dtype: Dtype of the tokens.
    storage: Storage that holds the files.
    workers: Number of threads.
    progress: Whether to show a progress bar.
    npy_headers: Whether to look for `.npy` headers, which takes a small read of each object.
      Otherwise tokens are assumed to begin at the first byte, as in AI2's files.
  """
  remote = storage.remote if isinstance(storage, StorageRouter) else storage
  objects = [path for path in paths if urls.is_url(path)]
  if not objects or not isinstance(remote, RemoteStorage):
    return {}
  with progress_bar("Finding objects", len(objects), enabled=progress) as advance:
    identities = find_objects(remote, objects, workers=workers, advance=advance)
  found = {
      path: scan.FileInfo(size := identity.size or 0, 0, size // dtype.itemsize, identity.etag)
      for path, identity in zip(objects, identities)
  }
  if npy_headers:
    headers = scan.scan_files(objects, dtype, remote, workers=workers, progress=progress)
    for path, info in zip(objects, headers):
      found[path] = dataclasses.replace(info, etag=found[path].etag)
  return found


def find_objects(
    storage: RemoteStorage,
    paths: Sequence[str],
    *,
    workers: int | None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Identity]:
  """Returns the size and ETag of each object, in order; one error lists all missing objects.

  Args:
    storage: Storage that reads the objects.
    paths: URLs of the objects.
    workers: Number of threads; 32 by default.
    advance: Called with the number of objects that were found.
  """
  members: dict[str, list[str]] = collections.defaultdict(list)
  for path in paths:
    members[path.rpartition("/")[0]].append(path)
  folders = [
      folder
      for folder, inside in members.items()
      if len(inside) >= _WORTH_LISTING and urls.split(folder).scheme not in urls.HTTP
  ]
  found: dict[str, Identity] = {}

  def list_folder(i: int) -> None:
    try:
      listed = storage.list_folder(folders[i])
    except CorpusError:
      return  # Many buckets can be read but not listed.
    wanted = {path: listed[path] for path in members[folders[i]] if path in listed}
    found.update(wanted)
    advance(len(wanted))

  scan.map_files(list_folder, len(folders), workers=workers, block=1)
  rest = [path for path in dict.fromkeys(paths) if path not in found]

  def ask(i: int) -> None:
    found[rest[i]] = storage.identity(rest[i])
    advance(1)

  results, errors = scan.map_files(ask, len(rest), workers=workers, block=1)
  scan.all_or_error([True] * len(results), errors, "Objects cannot be indexed")
  return [found[path] for path in paths]
