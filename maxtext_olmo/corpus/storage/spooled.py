"""A storage that reads ranges from a spool and, if they are not there, from the store.

    fill ──▶ spool ──missing──▶ being staged? ──no──▶ store ──copy──▶ spool, if it has room
    stage ─▶ spool ──missing──▶ store ──▶ spool

`fill` is called for the steps that the trainer is about to take. `stage` is called for later steps,
and only puts ranges into the spool. Ranges that `fill` reads from the store are also put into the
spool while it has room, so that a corpus smaller than the spool is requested only once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spool_file

_MAX_PENDING_BYTES = 1 << 26
# How long `stage` waits, at most, for the trainer's reads to end before it sends its own requests.
_POLITE_SECONDS = 0.5
_MAX_QUESTIONS = 16


class _Staging:
  """Ranges that are being fetched for the spool.

  Attributes:
    names: Names of the ranges.
    data: Buffer that the ranges are read into.
    places: Where each range begins in `data`.
    ended: Set when the read has succeeded or failed.
    succeeded: Whether the ranges have been read.
  """

  def __init__(self, names: np.ndarray, data: np.ndarray, places: np.ndarray):
    self.names = names
    self.data = data
    self.places = places
    self.ended = threading.Event()
    self.succeeded = False
    self._by_name = {name.tobytes(): i for i, name in enumerate(names)}

  def find(self, name: np.ndarray) -> int | None:
    """Returns the index of a range in `names`; None if it is not there."""
    return self._by_name.get(name.tobytes())


class SpooledStorage:
  """Reads byte ranges through a spool. It can be pickled and shared between threads.

  Only `fill` uses the spool, and only for files whose version the storage knows (see
  `RemoteStorage.version`), so that bytes of a replaced file are never used.

  Args:
    storage: The storage of the files.
    spool: The spool.

  Attributes:
    storage: The storage of the files.
    spool: The spool.
    hits: Number of ranges that `fill` found in the spool.
    misses: Number of ranges that `fill` did not find in the spool.
  """

  def __init__(self, storage: base.Storage, spool: spool_lib.Spool):
    self.storage = storage
    self.spool = spool
    self.hits = self.misses = 0
    self._digests: dict[str, tuple[int, int]] = {}
    self._asked: set[str] = set()  # Files whose version was requested; not all have one.
    self._staging: _Staging | None = None
    # How often staging has begun or ended, and how often `fill` has ended reading from the store.
    self._stagings = self._direct_reads = 0
    self._reading = 0
    # Ranges that `fill` is reading from the store, or that are about to be put into the spool.
    self._direct: collections.Counter[bytes] = collections.Counter()
    self._idle = threading.Condition()
    self._fetch_lock = threading.Lock()  # Held while ranges are fetched for the spool.
    self._writer: concurrent.futures.ThreadPoolExecutor | None = None
    self._pending_bytes = 0

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.storage, self.spool)

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.storage}, {self.spool})"

  @property
  def traffic(self) -> Any:
    """The request counters of `storage`; None if it has none."""
    return getattr(self.storage, "traffic", None)

  @property
  def reads_directly(self) -> bool:
    """Whether `fill` is reading from the store, or what it has read is not in the spool yet."""
    return bool(self._direct)

  def version(self, path: str) -> str | None:
    """Returns a string that identifies the content of a file; None if it is not known."""
    version = getattr(self.storage, "version", None)
    return None if version is None else version(path)

  def wants_concurrency(self, paths: Sequence[str]) -> int:
    """Returns how many reads the storage of the files wants in flight."""
    return self.storage.wants_concurrency(paths)

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Sets the size and ETag that an index recorded for a file."""
    self.storage.expect(path, size, etag)

  def size(self, path: str) -> int:
    """Returns the size of a file."""
    return self.storage.size(path)

  def exists(self, path: str) -> bool:
    """Returns whether there is a file at `path`."""
    return self.storage.exists(path)

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns bytes of a file; does not use the spool."""
    return self.storage.read(path, offset, size)

  def pieces(
      self, path: str, offset: int = 0, size: int | None = None, piece_bytes: int = base.PIECE_BYTES
  ) -> Iterator[bytes]:
    """Yields bytes of a file in pieces; does not use the spool."""
    return self.storage.pieces(path, offset, size, piece_bytes)

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns open descriptors, if the storage of the files has them."""
    return self.storage.pin(paths, sources)

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Reads several byte ranges into one buffer, from the spool if it has them."""
    if not len(sizes) or self.spool.off:
      self.storage.fill(paths, sources, offsets, sizes, out, places)
      return
    names, known = self._names(paths, sources, offsets, sizes)
    served = np.zeros(len(names), np.bool_)
    while True:
      with self._idle:
        staging, stagings = self._staging, self._stagings
      wanted = np.flatnonzero(known & ~served)
      served[wanted] = self.spool.read(names[wanted], out, places[wanted])
      failed = False
      if staging is not None and not served.all():
        failed = not _take_staged(staging, names, known & ~served, served, out, places)
      left = np.flatnonzero(~served)
      direct = _as_bytes(names[left[known[left]]])
      with self._idle:
        # If staging has begun or ended since the search, these ranges may be there now. If staging
        # has failed, this call reads them itself, and raises the error.
        if not direct or failed or self._stagings == stagings:
          self._reading += bool(len(left))
          self._direct.update(direct)
          break
    self.hits += len(names) - len(left)
    self.misses += len(left)
    if not len(left):
      return
    try:
      self.storage.fill(paths, sources[left], offsets[left], sizes[left], out, places[left])
      names, known = self._names(paths, sources[left], offsets[left], sizes[left])
      self._keep(names[known], out, places[left][known])
    finally:
      with self._idle:
        self._reading -= 1
        self._forget_direct(direct)

  def stage(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      step: int,
      stopped: Callable[[], bool] = lambda: False,
  ) -> bool:
    """Puts ranges into the spool and keeps them there until a step is done.

    Only one thread fetches ranges at a time; others wait. Ranges that are too large for the spool,
    and ranges of files without versions, are left out.

    Args:
      paths: Paths of the files.
      sources: The file of each range, as an index into `paths`.
      offsets: The first byte of each range.
      sizes: The number of bytes of each range.
      step: Last step that needs the ranges.
      stopped: Returns whether the caller no longer needs the ranges.

    Returns:
      Whether the ranges are in the spool; False if the spool is full or turned off, or if the
      caller stopped.
    """
    self._learn_versions([paths[source] for source in np.unique(sources).tolist()])
    _, known = self._names(paths, sources, offsets, sizes)
    fits = known & (sizes <= self.spool.max_range_bytes)
    table = np.stack([sources[fits], offsets[fits], sizes[fits]], axis=1).astype(np.int64)
    sources, offsets, sizes = np.unique(table, axis=0).T
    names, _ = self._names(paths, sources, offsets, sizes)
    self._wait_for_direct(names)
    if stopped():
      return False
    if self.spool.claim(names, step).all():
      return not self.spool.off
    with self._fetch_lock:  # In an outage, another thread may hold it for as long as that lasts.
      if stopped():
        return False
      missing = ~self.spool.claim(names, step)
      if not missing.any():
        return not self.spool.off
      sources, offsets, sizes, names = (a[missing] for a in (sources, offsets, sizes, names))
      return self._fetch(paths, sources, offsets, sizes, names, step, stopped)

  def _fetch(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      names: np.ndarray,
      step: int,
      stopped: Callable[[], bool],
  ) -> bool:
    """Requests ranges and puts them into the spool; returns False if it is full or turned off."""
    places = np.cumsum(sizes) - sizes
    if not self.spool.reserve(int(sizes.sum()) + spool_file.RANGE_OVERHEAD * len(sizes)):
      return False
    data = np.empty(int(sizes.sum()), np.uint8)
    with self._idle:
      self._idle.wait_for(lambda: not self._reading, timeout=_POLITE_SECONDS)
    staging, left = self._begin_staging(names, data, places)
    try:
      self.storage.fill(paths, sources[left], offsets[left], sizes[left], data, places[left])
      staging.succeeded = True
      staging.ended.set()
      return self.spool.put(names, data, places, step=None if stopped() else step)
    finally:
      staging.ended.set()
      with self._idle:
        self._staging = None
        self._stagings += 1

  def _begin_staging(
      self, names: np.ndarray, data: np.ndarray, places: np.ndarray
  ) -> tuple[_Staging, np.ndarray]:
    """Announces the ranges to be fetched; returns them, and their indices in `names`.

    Other ranges are copied to `data`: `fill` has put them into the spool meanwhile, or the spool
    has them in files that hold too few ranges of upcoming steps to be kept.
    """
    while True:
      with self._idle:
        direct_reads = self._direct_reads
      left = np.flatnonzero(~self.spool.read(names, data, places))
      with self._idle:
        self._wait_for_direct(names[left])
        # If `fill` has ended reading since the search, the ranges may be in the spool now.
        if self._direct_reads == direct_reads:
          staging = self._staging = _Staging(names[left], data, places[left])
          self._stagings += 1
          return staging, left

  def counts(self) -> dict[str, float]:
    """Returns the number of ranges found and not found in the spool, and the bytes that it uses."""
    return {"hits": self.hits, "misses": self.misses, "bytes": self.spool.used_bytes}

  def flush(self) -> None:
    """Waits until everything `fill` has read is in the spool and visible to other processes."""
    with self._idle:
      writer, self._writer = self._writer, None
    if writer is not None:
      writer.shutdown(wait=True)
    self.spool.flush()

  def close(self) -> None:
    """Closes open files and connections; the storage remains usable."""
    self.flush()
    self.spool.close()
    self.storage.close()

  def _keep(self, names: np.ndarray, data: np.ndarray, places: np.ndarray) -> None:
    """Puts copies of ranges into the spool, in a thread; skips them if the thread falls behind."""
    sizes = names[:, 3].astype(np.int64)
    total = int(sizes.sum())
    if not total or self.spool.full or self._pending_bytes + total > _MAX_PENDING_BYTES:
      return
    ends = np.cumsum(sizes)
    copy = np.empty(total, np.uint8)
    for place, end, size in zip(places.tolist(), ends.tolist(), sizes.tolist()):
      copy[end - size : end] = data[place : place + size]
    with self._idle:
      if self._writer is None:
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "olmo-spool-keep")
      # This fails if the interpreter is exiting, so it comes first. `_put` ends with the same lock.
      self._writer.submit(self._put, names, copy, ends - sizes)
      self._pending_bytes += total
      self._direct.update(_as_bytes(names))

  def _put(self, names: np.ndarray, data: np.ndarray, places: np.ndarray) -> None:
    try:
      self.spool.put(names, data, places, may_delete=False)
      self.spool.flush(older_than=1.0)
    finally:
      with self._idle:
        self._pending_bytes -= len(data)
        self._forget_direct(_as_bytes(names))

  def _learn_versions(self, paths: Sequence[str]) -> None:
    """Requests the versions that are not known yet, once per file."""
    unknown = [p for p in paths if p not in self._asked and self._digest(p) is None]
    if unknown:
      with concurrent.futures.ThreadPoolExecutor(min(len(unknown), _MAX_QUESTIONS)) as pool:
        list(pool.map(self.storage.size, unknown))
      self._asked.update(unknown)

  def _wait_for_direct(self, names: np.ndarray) -> None:
    """Waits until none of the ranges is being read by `fill`, which puts them into the spool."""
    wanted = {*_as_bytes(names)}
    with self._idle:
      self._idle.wait_for(lambda: not wanted & self._direct.keys())

  def _forget_direct(self, names: list[bytes]) -> None:
    self._direct_reads += 1
    self._direct.subtract(names)
    for name in names:
      if not self._direct[name]:
        del self._direct[name]
    self._idle.notify_all()

  def _names(
      self, paths: Sequence[str], sources: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the names of ranges, and a mask of those whose file has a known version."""
    used, inverse = np.unique(sources, return_inverse=True)
    digests = np.zeros((len(used), 2), np.uint64)
    known = np.zeros(len(used), np.bool_)
    for i, source in enumerate(used.tolist()):
      digest = self._digest(paths[source])
      if digest is not None:
        digests[i], known[i] = digest, True
    return spool_file.make_names(digests, inverse, offsets, sizes), known[inverse]

  def _digest(self, path: str) -> tuple[int, int] | None:
    found = self._digests.get(path)
    if found is None:
      version = self.version(path)
      if version is None:
        return None
      found = self._digests[path] = spool_file.file_digest(path, version)
    return found


def _as_bytes(names: np.ndarray) -> list[bytes]:
  return [name.tobytes() for name in names]


def _take_staged(
    staging: _Staging,
    names: np.ndarray,
    wanted: np.ndarray,
    served: np.ndarray,
    out: np.ndarray,
    places: np.ndarray,
) -> bool:
  """Waits for wanted ranges that are being staged, copies them, and marks them as served.

  Returns:
    False if wanted ranges were being staged and could not be read.
  """
  found = {i: staging.find(names[i]) for i in np.flatnonzero(wanted).tolist()}
  found = {i: number for i, number in found.items() if number is not None}
  if not found:
    return True
  staging.ended.wait()
  if not staging.succeeded:
    return False
  for i, number in found.items():
    place, size, start = int(places[i]), int(names[i, 3]), int(staging.places[number])
    out[place : place + size] = staging.data[start : start + size]
    served[i] = True
  return True
