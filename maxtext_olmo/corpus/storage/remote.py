"""Storage in object stores and on web servers: one GET per range, checked against the index.

Each GET carries the ETag that the index recorded or, where it recorded none, the first one this run
has seen, so a replaced object is an error and never other bytes. Each answer also brings the size
of the whole object, which is compared with the expected size; so nothing is asked before the first
read. A request that fails for a passing reason is repeated: with jitter, for as long as it takes,
and with a warning in the log.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import base
from maxtext_olmo.corpus.storage import failures
from maxtext_olmo.corpus.storage import pace as pace_lib
from maxtext_olmo.corpus.storage import ranges
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.storage import traffic as traffic_lib
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

_MAX_THREADS = 256
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0
_WARN_AFTER, _WARN_EVERY = 5.0, 30.0
_PIECES_AHEAD = 4


class Identity(NamedTuple):
  """What tells an object from another one that replaced it.

  Attributes:
    size: Size in bytes; None if it is not known.
    tag: ETag or, if the server sends none, the time of the last change; "" if it is not known.
  """

  size: int | None = None
  tag: str = ""


class _Answer(NamedTuple):
  identity: Identity
  data: Any  # A buffer.


class _Object(NamedTuple):
  url: str
  store: Any
  name: str  # Of the store.
  key: str
  pace: pace_lib.Pace


class RemoteStorage:
  """Reads objects by URL; can be pickled, and shared by threads.

  Not usable in a child that was forked after the parent has read from a store: that is an error.

  Args:
    options: How the stores are reached.
    known: Identity of objects, by URL, that another storage has found.

  Attributes:
    traffic: Counters of the requests of this storage.
  """

  def __init__(
      self,
      options: stores.StoreOptions = stores.StoreOptions(),
      known: Mapping[str, Identity] | None = None,
  ):
    self.options = options
    self.traffic = traffic_lib.Traffic()
    self._known: dict[str, Identity] = dict(known or {})
    self._objects: dict[str, _Object] = {}  # By path.
    self._paces: dict[str, pace_lib.Pace] = {}  # By the name of the store.
    self._answered: set[str] = set()
    self._warned: dict[str, float] = {}
    self._lock = threading.Lock()
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None

  def __reduce__(self) -> tuple[Any, ...]:
    return _restore, (self.options, self._known, urls.all_secrets())

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.options})"

  def wants_concurrency(self, paths: Sequence[str]) -> bool:
    """Returns True: a request takes milliseconds, however many are in flight."""
    return bool(paths)

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Sets the size, and the ETag if it is known, that every later answer must have."""
    self._known[path] = Identity(size, _quoted(etag or ""))

  def close(self) -> None:
    """Stops the threads; the storage remains usable."""
    with self._lock:
      pool, self._pool = self._pool, None
    if pool is not None:
      pool.shutdown(wait=False, cancel_futures=True)

  def identity(self, path: str) -> Identity:
    """Returns the size and ETag that an object has now."""
    target = self._locate(path)

    def ask() -> _Answer:
      return _Answer(_identity(stores.obstore().head(target.store, target.key)), b"")

    return self._repeat(target, f"find {target.url}", ask).identity

  def size(self, path: str) -> int:
    """Returns the size of an object; from then on, a replaced object is an error."""
    found = self.identity(path)
    self._note_identity(path, found)
    return found.size or 0

  def version(self, path: str) -> str | None:
    """Returns what identifies the content of an object, or None if it is not known yet.

    Sends no request; `size` finds it out.
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
    """Yields the bytes that `read` would return, in pieces; requests the next ones in advance."""
    return self._pieces(path, offset, size, piece_bytes)

  def _pieces(
      self, path: str, offset: int, size: int | None, piece_bytes: int, largest: int | None = None
  ) -> Iterator[bytes]:
    target = self._locate(path)
    # The first answer tells which object it is; the others must be parts of the same one.
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
      first, end = _Answer(Identity(), None), offset + size
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

  def _get_small(self, target: _Object) -> _Answer:
    """Returns an object, but without its data if that is too much for one request."""

    def ask() -> _Answer:
      result = stores.obstore().get(target.store, target.key)
      identity = _identity(result.meta)
      small = (identity.size or 0) <= ranges.MOST_BYTES
      return _Answer(identity, result.bytes() if small else None)

    return self._repeat(target, f"read {target.url}", ask)

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Reads several byte ranges into one buffer, in parallel; ranges that touch in one request."""
    ranges.check_output(out, sizes, places)
    requests = ranges.plan_requests(sources, offsets, sizes, places)

    def read(request: ranges.Request) -> None:
      answer = self._get_known(paths[request.source], request.start, request.end)
      data = np.frombuffer(answer, np.uint8)
      for start, size, place in request.copies:
        out[place : place + size] = data[start - request.start : start - request.start + size]

    if len(requests) == 1:
      read(requests[0])
      return
    pool = self._threads()
    running = [pool.submit(read, request) for request in requests]
    try:
      for future in running:
        future.result()
    except BaseException:
      for future in running:
        future.cancel()
      concurrent.futures.wait(running)  # No thread may write to `out` after this call.
      raise

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> base.Pinned | None:
    """Returns None: objects have no descriptors."""
    del paths, sources
    return None

  def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
    stores.obstore()  # Raises in a forked child, where the threads of the pool do not exist.
    with self._lock:
      if self._pool is None:
        self._pool = concurrent.futures.ThreadPoolExecutor(_MAX_THREADS, "olmo-get")
      return self._pool

  def _get_known(self, path: str, start: int, end: int) -> Any:
    """Returns a range of an object, which must be the one that is known by this path."""
    target, known = self._locate(path), self._known.get(path, Identity())
    answer = self._get(target, start, end, known)
    if known.size is None or not known.tag:
      # Another thread may have seen another object meanwhile.
      known = self._note_identity(path, answer.identity)
      _check_identity(target.url, start, end, known, answer.identity)
    return answer.data

  def _note_identity(self, path: str, found: Identity) -> Identity:
    """Completes what is known of an object, and returns it."""
    with self._lock:
      first = self._known.get(path, Identity())
      known = Identity(found.size if first.size is None else first.size, first.tag or found.tag)
      self._known[path] = known
    return known

  def _get(self, target: _Object, start: int, end: int, expected: Identity) -> _Answer:
    """Returns bytes [start, end) of an object; raises if it is not the expected one."""
    options: dict[str, Any] = {"range": (start, end)}
    if expected.tag.startswith('"'):  # A weak tag never matches, and is compared below.
      options["if_match"] = expected.tag

    def ask() -> _Answer:
      result = stores.obstore().get(target.store, target.key, options=options)
      identity = _identity(result.meta)
      _check_identity(target.url, start, end, expected, identity)
      data = result.bytes()
      if len(data) != end - start:
        raise _too_short(target.url, start, end, identity)
      return _Answer(identity, data)

    return self._repeat(target, f"read bytes {start} to {end} of {target.url}", ask)

  def _repeat(self, target: _Object, what: str, ask: Callable[[], _Answer]) -> _Answer:
    """Sends a request until it is answered, or until it is clear that it never will be."""
    pace, traffic = target.pace, self.traffic
    backoff, began = _FIRST_BACKOFF, time.monotonic()
    while True:
      _sleep(pace.delay())
      sent = time.monotonic()
      traffic.began()
      try:
        answer = ask()
      except CorpusError:
        traffic.failed(retried=False, throttled=False)
        raise
      except Exception as error:
        failure = failures.explain(error, what)
        traffic.failed(retried=failure.repeat, throttled=failure.throttled)
        if not failure.repeat:
          raise failure.error from None  # The cause may contain what was signed.
        if failure.throttled:
          pace.slow_down()
        self._note_failure(target.name, failure, time.monotonic() - began)
      else:
        traffic.ended(time.monotonic() - sent, len(answer.data or b""))
        self._note_answer(target.name)
        return answer
      _sleep(backoff * random.uniform(0.5, 1.0))
      backoff = min(2 * backoff, _LONGEST_BACKOFF)

  def _locate(self, path: str) -> _Object:
    stores.obstore()  # Raises in a forked child.
    found = self._objects.get(path)
    if found is None:
      url = urls.without_secrets(path)
      location = urls.split(url)
      name = f"{location.scheme}://{location.host}"
      store = stores.open_store(url, self.options)
      with self._lock:
        pace = self._paces.setdefault(name, pace_lib.Pace())
      found = _Object(url, store, name, urls.store_key(location), pace)
      self._objects[path] = found
    return found

  def _note_failure(self, store: str, failure: failures.Failure, seconds: float) -> None:
    """Warns that a store does not answer; raises if it has been waited for long enough."""
    outage = self.traffic.store_fails(store, failure.reason)
    answered = store in self._answered
    patience = self.options.patience if answered else self.options.first_patience
    if seconds > patience:
      raise CorpusError(f"{failure.error} Gave up after {seconds:.0f} s.") from None
    with self._lock:
      now = time.monotonic()
      due = outage > _WARN_AFTER and now - self._warned.get(store, -_WARN_EVERY) >= _WARN_EVERY
      if due:
        self._warned[store] = now
    if due:
      logging.warning(
          "%s has not answered for %.0f s: %s. Requests are repeated; reading continues as soon as"
          " it answers.",
          store,
          outage,
          failure.reason,
      )

  def _note_answer(self, store: str) -> None:
    self._answered.add(store)
    outage = self.traffic.store_answers(store)
    if outage > _WARN_AFTER:
      self._warned.pop(store, None)
      logging.info("%s answers again, after %.0f s.", store, outage)


def _restore(
    options: stores.StoreOptions,
    known: Mapping[str, Identity],
    secrets: Mapping[str, urls.Secrets],
) -> RemoteStorage:
  """Makes the copy of a storage in another process, with the credentials that its URLs carried."""
  urls.remember(secrets)
  return RemoteStorage(options, known)


def _sleep(seconds: float) -> None:
  """Sleeps; raises if the interpreter is about to exit, which waits for all threads."""
  end = time.monotonic() + seconds
  while (left := end - time.monotonic()) > 0:
    time.sleep(min(left, 0.5))
    if not threading.main_thread().is_alive():
      raise CorpusError("The process is exiting; the request is not repeated.")


def _identity(meta: Mapping[str, Any]) -> Identity:
  tag = _quoted(meta.get("e_tag") or "") or f"changed {meta['last_modified'].isoformat()}"
  return Identity(int(meta["size"]), tag)


def _quoted(etag: str) -> str:
  """Returns an ETag in quotes; Azure omits them in listings."""
  return etag if not etag or etag.startswith(('"', "W/", "changed ")) else f'"{etag}"'


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
