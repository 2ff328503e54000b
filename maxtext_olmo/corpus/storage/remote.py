"""Storage in object stores and on web servers: one GET per range, checked against the index.

Each GET carries the ETag that the index recorded or, if it recorded none, the first one that this
run has seen, so that reading a replaced object fails. Each response also contains the size of the
whole object, which is compared with the expected size. So no separate request for the metadata is
needed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import failures
from maxtext_olmo.corpus.storage import in_flight
from maxtext_olmo.corpus.storage import pace as pace_lib
from maxtext_olmo.corpus.storage import ranges
from maxtext_olmo.corpus.storage import requests as requests_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

_PIECES_AHEAD = 4
_NO_ETAG = "changed "


class Identity(NamedTuple):
  """The size and version of an object, which show whether it has been replaced.

  Attributes:
    size: Size in bytes; None if it is not known.
    tag: ETag or, if the server sends none, the time of the last change; "" if it is not known.
  """

  size: int | None = None
  tag: str = ""

  @property
  def etag(self) -> str | None:
    """The ETag; None if the server sends none."""
    return None if not self.tag or self.tag.startswith(_NO_ETAG) else self.tag


_UNKNOWN = Identity()


class _Answer(NamedTuple):
  identity: Identity
  data: Any  # A buffer.
  objects: Mapping[str, Identity] = types.MappingProxyType({})


class RemoteStorage:
  """Reads objects by URL. It can be pickled and shared between threads.

  A process that was forked after its parent had read from a store cannot use it: every method that
  needs the store raises an error there.

  Args:
    options: Options for connecting to the stores; None uses the defaults of this process.
    known: Identities of objects that another storage has found, by URL.
    expected: Identities of objects that another storage was told to expect, by URL.

  Attributes:
    traffic: Counters of the requests of this storage.
  """

  def __init__(
      self,
      options: stores.StoreOptions | None = None,
      known: Mapping[str, Identity] | None = None,
      expected: Mapping[str, Identity] | None = None,
  ):
    self.options = stores.default_options() if options is None else options
    self._requests = requests_lib.Requests(self.options)
    self.traffic = self._requests.traffic
    self._known: dict[str, Identity] = dict(known or {})
    # Separate from `_known`, which also has objects that no index names and that may be replaced.
    self._expected: dict[str, Identity] = dict(expected or {})
    self._lock = threading.Lock()
    self._in_flight: in_flight.InFlight | None = None

  def __reduce__(self) -> tuple[Any, ...]:
    identities = (self._known, self._expected)
    return _restore, (self.options, *identities, urls.all_secrets(), pace_lib.sharing())

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.options})"

  def wants_concurrency(self, paths: Sequence[str]) -> int:
    """Returns how many requests may be in flight; the limit adapts to the measured latency."""
    threads = self._in_flight
    return 0 if not paths else in_flight.MOST_THREADS if threads is None else threads.limit

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Sets the size and, if known, the ETag that every later read of a range must find.

    Reads of whole objects (without a size) still return the object that is there.
    """
    self._known[path] = self._expected[path] = Identity(size, _quoted(etag or ""))

  def close(self) -> None:
    """Stops the threads and abandons pending requests; the storage remains usable."""
    with self._lock:
      threads, self._in_flight = self._in_flight, None
    if threads is not None:
      threads.close()
    self._requests.stop()

  def identity(self, path: str) -> Identity:
    """Returns the current size and ETag of an object."""
    target = self._requests.locate(path)

    def ask() -> _Answer:
      return _Answer(_identity(stores.obstore().head(target.store, target.key)), b"")

    return self._requests.send(target, lambda: f"find {target.url}", ask).identity

  def list_folder(self, path: str) -> dict[str, Identity]:
    """Returns the objects directly below a URL, keyed by URL; web servers do not support this."""
    target = self._requests.locate(path)

    def ask() -> _Answer:
      found = stores.obstore().list_with_delimiter(target.store, target.key or None)
      objects = {f"{target.name}/{meta['path']}": _identity(meta) for meta in found["objects"]}
      return _Answer(_UNKNOWN, None, objects)

    return dict(self._requests.send(target, lambda: f"list {target.url}", ask).objects)

  def list_below(self, path: str) -> list[str]:
    """Returns the URLs of all objects below a URL, at any depth; not supported by web servers."""
    target = self._requests.locate(path)

    def ask() -> _Answer:
      found = stores.obstore().list(target.store, target.key or None).collect()
      objects = {f"{target.name}/{meta['path']}": _identity(meta) for meta in found}
      return _Answer(_UNKNOWN, None, objects)

    return list(self._requests.send(target, lambda: f"list {target.url}", ask).objects)

  def size(self, path: str) -> int:
    """Returns the size of an object; from then on, a replaced object is an error."""
    found = self.identity(path)
    self._note_identity(path, found)
    return found.size or 0

  def version(self, path: str) -> str | None:
    """Returns a string that identifies the content of an object, or None if it is not known yet.

    Sends no request. After a call of `size`, which sends one, the version is known.
    """
    known = self._known.get(path)
    return f"{known.size} {known.tag}" if known is not None and known.tag else None

  def exists(self, path: str) -> bool:
    """Returns whether there is an object at `path`."""
    try:
      self.identity(path)
    except MissingFileError:
      return False
    return True

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest of the object."""
    return b"".join(self._pieces(path, offset, size, base.PIECE_BYTES, base.LARGEST_WHOLE))

  def pieces(
      self,
      path: str,
      offset: int = 0,
      size: int | None = None,
      piece_bytes: int = base.PIECE_BYTES,
  ) -> Iterator[bytes]:
    """Yields the bytes that `read` would return, in pieces; requests the next pieces early."""
    return self._pieces(path, offset, size, piece_bytes)

  def _pieces(
      self, path: str, offset: int, size: int | None, piece_bytes: int, largest: int | None = None
  ) -> Iterator[bytes]:
    target = self._requests.locate(path)
    # Unless the index identifies the object, the first response does; all others must be parts of
    # the same object.
    if size is None:
      first = self._get_small(target)
      end = first.identity.size or 0
      if largest is not None and end > largest:
        raise base.too_large(target.url, end)
      if first.data is not None:
        data = bytes(memoryview(first.data)[offset:])
        yield from (data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes))
        return
    else:
      first, end = _Answer(self._expected.get(path, _UNKNOWN), None), offset + size
    step = min(piece_bytes, ranges.MOST_BYTES)
    bounds = iter([(start, min(start + step, end)) for start in range(offset, end, step)])
    coming: collections.deque[concurrent.futures.Future[_Answer]] = collections.deque()
    waiting: list[Any] = []
    held, identity = 0, first.identity
    try:
      while True:
        if identity.tag:
          ahead = max(_PIECES_AHEAD, 2 * piece_bytes // step) - len(coming)
          for start, stop in itertools.islice(bounds, max(0, ahead)):
            coming.append(self._threads().submit(self._get, target, start, stop, identity))
          answer = coming.popleft().result() if coming else None
        else:
          only = next(bounds, None)
          answer = None if only is None else self._get(target, *only, identity)
        if answer is not None:
          identity = answer.identity
          waiting.append(answer.data)
          held += len(answer.data)
        if waiting and (held >= piece_bytes or answer is None):
          yield b"".join(waiting)
          waiting, held = [], 0
        if answer is None:
          return
    finally:
      for future in coming:
        future.cancel()

  def _get_small(self, target: requests_lib.Target) -> _Answer:
    """Returns an object, without its data if it is too large for one request."""

    def ask() -> _Answer:
      result = stores.obstore().get(target.store, target.key)
      identity = _identity(result.meta)
      small = (identity.size or 0) <= ranges.MOST_BYTES
      return _Answer(identity, result.bytes() if small else None)

    return self._requests.send(target, lambda: f"read {target.url}", ask)

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Reads several byte ranges into one buffer in parallel; merges adjacent ranges."""
    ranges.check_output(out, sizes, places)
    requests = ranges.plan_requests(sources, offsets, sizes, places)

    # Copying to a memoryview keeps the GIL. A NumPy assignment would release it, and then compete
    # with the other threads to get it back.
    octets = out.data

    def read(request: ranges.Request) -> None:
      answer = self._get_known(paths[request.source], request.start, request.end)
      data = memoryview(answer)
      for start, size, place in request.copies:
        octets[place : place + size] = data[start - request.start : start - request.start + size]

    if len(requests) == 1:
      read(requests[0])
      return
    self._threads().run(read, requests)

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns None: objects have no descriptors."""
    del paths, sources
    return None

  def _threads(self) -> in_flight.InFlight:
    stores.obstore()  # Raises in a forked child, where the threads do not exist.
    with self._lock:
      if self._in_flight is None:
        self._in_flight = in_flight.InFlight()
      return self._in_flight

  def _get_known(self, path: str, start: int, end: int) -> Any:
    """Returns a range of an object; raises if the object at this path was replaced."""
    target, known = self._requests.locate(path), self._known.get(path, _UNKNOWN)
    answer = self._get(target, start, end, known)
    if known.size is None or not known.tag:
      # Meanwhile, another thread may have seen a different object.
      known = self._note_identity(path, answer.identity)
      _check_identity(target.url, start, end, known, answer.identity)
    return answer.data

  def _note_identity(self, path: str, found: Identity) -> Identity:
    """Adds the size and tag that were found to what is known of an object; returns the result."""
    with self._lock:
      first = self._known.get(path, _UNKNOWN)
      known = Identity(found.size if first.size is None else first.size, first.tag or found.tag)
      self._known[path] = known
    return known

  def _get(self, target: requests_lib.Target, start: int, end: int, expected: Identity) -> _Answer:
    """Returns bytes [start, end) of an object; raises if it is not the expected object."""
    options: dict[str, Any] = {"range": (start, end)}
    if expected.tag.startswith('"'):  # A weak tag never satisfies If-Match; it is compared below.
      options["if_match"] = expected.tag

    def ask() -> _Answer:
      result = stores.obstore().get(target.store, target.key, options=options)
      identity, meta = expected, result.meta
      if meta["e_tag"] != expected.tag or meta["size"] != expected.size:
        identity = _identity(meta)
        _check_identity(target.url, start, end, expected, identity)
      data = result.bytes()
      if len(data) != end - start:
        raise _too_short(target.url, start, end, identity)
      return _Answer(identity, data)

    return self._requests.send(
        target,
        lambda: f"read bytes {start} to {end} of {target.url}",
        ask,
        known=bool(expected.tag),
    )


def _restore(
    options: stores.StoreOptions,
    known: Mapping[str, Identity],
    expected: Mapping[str, Identity],
    secrets: Mapping[str, urls.Secrets],
    processes: int,
) -> RemoteStorage:
  """Rebuilds a pickled storage in another process, with the credentials of its URLs."""
  urls.remember(secrets)
  pace_lib.share_with(processes)
  return RemoteStorage(options, known, expected)


def _identity(meta: Mapping[str, Any]) -> Identity:
  tag = _quoted(meta.get("e_tag") or "") or f"{_NO_ETAG}{meta['last_modified']}"
  return Identity(int(meta["size"]), tag)


def _quoted(etag: str) -> str:
  """Returns an ETag in quotes; Azure omits them in listings."""
  return etag if not etag or etag.startswith(('"', "W/", _NO_ETAG)) else f'"{etag}"'


def _check_identity(url: str, start: int, end: int, expected: Identity, found: Identity) -> None:
  where = f"bytes {start} to {end} of {url}"
  if expected.size is not None and expected.size != found.size:
    raise CorpusError(
        f"Cannot read {where}: expected an object of {expected.size} bytes, found {found.size}."
        f" {failures.REPLACED}"
    )
  if expected.tag and expected.tag != found.tag:
    raise CorpusError(
        f"Cannot read {where}: expected the ETag {expected.tag}, found {found.tag}."
        f" {failures.REPLACED}"
    )


def _too_short(url: str, start: int, end: int, found: Identity) -> CorpusError:
  return CorpusError(
      f"{url} is too short: expected bytes {start} to {end}, but it ends at byte {found.size}. It"
      " was truncated or replaced after the index was built: restore it, or build the index again"
      " and start a new run."
  )
