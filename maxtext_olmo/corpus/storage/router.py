"""The storage for any path: passes local paths and URLs to the storages that read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import local as local_lib

if TYPE_CHECKING:
  from maxtext_olmo.corpus.storage import remote as remote_lib
  from maxtext_olmo.corpus.storage import stores
  from maxtext_olmo.corpus.storage import traffic as traffic_lib


def open_storage(
    options: stores.StoreOptions | None = None, *, max_open_files: int | None = None
) -> StorageRouter:
  """Returns a storage for local paths and URLs; opens nothing yet.

  >>> storage = open_storage()
  >>> storage.wants_concurrency(["/data/part.npy"])
  0
  >>> storage.wants_concurrency(["/data/part.npy", "gs://bucket/part.npy"])
  256

  Args:
    options: Options for connecting to object stores; None uses the defaults of this process.
    max_open_files: As for `LocalStorage`.
  """
  return StorageRouter(local_lib.LocalStorage(max_open_files), options)


def narrowed(storage: base.Storage, paths: Sequence[str]) -> base.Storage:
  """Returns the storage inside a router that can read all these paths, or the router itself.

  Calling the inner storage directly saves a check of each path. A storage that is not a router is
  returned unchanged.
  """
  if not isinstance(storage, StorageRouter):
    return storage
  remote = [urls.is_url(path) for path in paths]
  if not any(remote):
    return storage.local
  return storage.remote if all(remote) else storage


class StorageRouter:
  """Passes each path to the storage for local files or to the one for object stores.

  Args:
    local: Storage for local files.
    options: Options for connecting to object stores.
    remote: Storage for URLs; by default, opened when the first URL is read.
  """

  def __init__(
      self,
      local: local_lib.LocalStorage,
      options: stores.StoreOptions | None = None,
      remote: remote_lib.RemoteStorage | None = None,
  ):
    self.local = local
    self._options = options
    self._remote = remote

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.local, self._options, self._remote)

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.local}, {self._options})"

  @property
  def remote(self) -> remote_lib.RemoteStorage:
    """Storage for URLs."""
    if self._remote is None:
      from maxtext_olmo.corpus.storage import remote as remote_lib

      self._remote = remote_lib.RemoteStorage(self._options)
    return self._remote

  @property
  def traffic(self) -> traffic_lib.Traffic | None:
    """Counters of the requests to object stores; None before the first URL is used."""
    return None if self._remote is None else self._remote.traffic

  def version(self, path: str) -> str | None:
    """Returns a string that identifies an object's content; None for a file, or if unknown."""
    return self.remote.version(path) if urls.is_url(path) else None

  def _of(self, path: str) -> base.Storage:
    return self.remote if urls.is_url(path) else self.local

  def wants_concurrency(self, paths: Sequence[str]) -> int:
    """Returns how many reads should be in flight; 0 if none of the paths is a URL."""
    return self.remote.wants_concurrency(paths) if any(map(urls.is_url, paths)) else 0

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Sets the size and ETag that an index recorded for a file."""
    self._of(path).expect(path, size, etag)

  def size(self, path: str) -> int:
    """Returns the size of a file or an object."""
    return self._of(path).size(path)

  def exists(self, path: str) -> bool:
    """Returns whether there is a file or an object at `path`."""
    return self._of(path).exists(path)

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest."""
    return self._of(path).read(path, offset, size)

  def pieces(
      self, path: str, offset: int = 0, size: int | None = None, piece_bytes: int = base.PIECE_BYTES
  ) -> Iterator[bytes]:
    """Yields the bytes that `read` would return, in pieces."""
    return self._of(path).pieces(path, offset, size, piece_bytes)

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Reads several byte ranges into one buffer."""
    remote = np.array([urls.is_url(paths[source]) for source in sources.tolist()], bool)
    for some, storage in ((~remote, self.local), (remote, self.remote if remote.any() else None)):
      if storage is not None:
        storage.fill(paths, sources[some], offsets[some], sizes[some], out, places[some])

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns open descriptors; None if one of the files is in an object store."""
    if any(urls.is_url(paths[source]) for source in np.unique(sources).tolist()):
      return None
    return self.local.pin(paths, sources)

  def close(self) -> None:
    """Closes open files and connections; the storage remains usable."""
    self.local.close()
    if self._remote is not None:
      self._remote.close()
