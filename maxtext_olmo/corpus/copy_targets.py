"""The targets of `corpus copy`: a local directory or a bucket."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from maxtext_olmo import atomic
from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import failures
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import StoreUnavailableError

PIECE_BYTES = 8 << 20
_RECORD = ".copied"
_METADATA = "copiedfrom"  # A metadata key; Azure allows only letters and digits.


class Digests:
  """Computes two checksums of a file: one to record, and one to compare with the index."""

  def __init__(self, expected: str | None):
    self.expected = expected
    self._own = checksums.new_hash("xxh3")
    algorithm = expected.partition(":")[0] if expected else "xxh3"
    self._other = None if algorithm == "xxh3" else checksums.new_hash(algorithm)
    self._name = algorithm

  def update(self, piece: bytes) -> None:
    """Adds the next bytes of the file."""
    self._own.update(piece)
    if self._other is not None:
      self._other.update(piece)

  @property
  def own(self) -> str:
    """The checksum to record."""
    return f"xxh3:{self._own.hexdigest()}"

  @property
  def found(self) -> str:
    """The checksum to compare with the expected one."""
    return self.own if self._other is None else f"{self._name}:{self._other.hexdigest()}"


# A function that yields the bytes of a file from an offset, in pieces of PIECE_BYTES.
ReadFrom = Callable[[int], Iterator[bytes]]
# A function that returns why the bytes that were read must be rejected; None if they are valid.
Check = Callable[[], str | None]


class Target(Protocol):
  """A directory or a bucket that copies are written to."""

  base: str

  def checksum_of(self, path: str, size: int, tag: str) -> str | None:
    """Returns the checksum of a complete copy of this file; None if there is no such copy.

    If a copy exists but its checksum was not recorded, returns "".
    """

  def write(
      self, path: str, size: int, tag: str, read: ReadFrom, digests: Digests, check: Check
  ) -> int:
    """Writes a copy, and returns the number of bytes read from the source.

    Args:
      path: Path below the base.
      size: Size of the file.
      tag: Text that changes if the file is replaced.
      read: Function that reads the file from an offset.
      digests: Updated by `read`, and by this method for bytes that an earlier run wrote.
      check: Called once all bytes have been read. If it finds a problem, this method raises a
        CorpusError, and no copy becomes visible.
    """

  def record(self, path: str, size: int, tag: str, checksum: str) -> None:
    """Records that a copy is complete."""

  def remove(self, path: str) -> None:
    """Removes a copy that has turned out to be wrong, if it is there."""


def open_target(base: str) -> Target:
  """Returns the directory or bucket that a path or URL names."""
  return Bucket(base) if paths_lib.is_url(base) else Directory(base)


class Directory:
  """A local directory of copies, with a record file that has one line of JSON per copy."""

  def __init__(self, base: str):
    self.base = paths_lib.absolute(base)
    self._lock = threading.Lock()
    self._copied: dict[str, dict[str, Any]] = {}
    if os.path.exists(self._full(_RECORD)):
      with open(self._full(_RECORD), encoding="utf-8") as file:
        for line in file:
          # An interrupted write may have left an incomplete line.
          with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            self._copied[entry["path"]] = entry

  def checksum_of(self, path: str, size: int, tag: str) -> str | None:
    """Returns the checksum of a complete copy of this file; None if there is none."""
    entry = self._copied.get(path, {})
    if (entry.get("size"), entry.get("tag")) != (size, tag):
      return None
    try:
      there = os.stat(self._full(path)).st_size == size
    except OSError:
      return None
    return entry["checksum"] if there else None

  def write(
      self, path: str, size: int, tag: str, read: ReadFrom, digests: Digests, check: Check
  ) -> int:
    """Writes a copy, or completes one that was interrupted."""
    full = self._full(path)
    # The name includes the size and tag, so a partial copy of a different version is not continued.
    name = f".{os.path.basename(full)}.{_source_key(size, tag)}.part"
    part = os.path.join(os.path.dirname(full), name)
    written = 0
    with atomic.write_errors(full):
      os.makedirs(os.path.dirname(full), exist_ok=True)
      with open(part, "a+b") as file:
        # Each piece is synced before the next one is written, so only the last may have been lost
        # in a power cut.
        done = max(0, min(os.path.getsize(part), size) - 1) // PIECE_BYTES * PIECE_BYTES
        file.truncate(done)
        file.seek(0)
        for _ in range(done // PIECE_BYTES):
          digests.update(file.read(PIECE_BYTES))
        for piece in read(done):
          file.write(piece)
          file.flush()
          os.fsync(file.fileno())
          written += len(piece)
      found = os.path.getsize(part)
      if found != size:
        os.unlink(part)
        raise CorpusError(f"The copy {full} has {found} bytes instead of {size}. Copy it again.")
      if (problem := check()) is not None:
        os.unlink(part)
        raise CorpusError(problem)
      atomic.move(part, full)
    return written

  def record(self, path: str, size: int, tag: str, checksum: str) -> None:
    """Appends a line to the record."""
    entry = {"path": path, "size": size, "tag": tag, "checksum": checksum}
    with self._lock:
      lines = atomic.LineWriter(self._full(_RECORD))
      lines.write(json.dumps(entry))
      lines.close()
      self._copied[path] = entry

  def remove(self, path: str) -> None:
    """Removes a copy that has turned out to be wrong, if it is there."""
    full = self._full(path)
    with atomic.write_errors(full), contextlib.suppress(FileNotFoundError):
      os.unlink(full)

  def _full(self, path: str) -> str:
    return os.path.join(self.base, path)


class Bucket:
  """Copies in a bucket, below a URL; each object's metadata identifies the file it is a copy of."""

  def __init__(self, base: str):
    self.base = urls.without_secrets(base).rstrip("/")

  def checksum_of(self, path: str, size: int, tag: str) -> str | None:
    """Returns "" if the object is a copy of this file, else None; buckets record no checksums."""
    store, key = self._open(path)
    with self._explained_errors("look for", path):
      try:
        head = stores.obstore().head(store, key)
        if head["size"] != size or not size:
          return None
        found = stores.obstore().get(store, key, options={"range": (0, 1)}).attributes
      except FileNotFoundError:
        return None
    return "" if found.get(_METADATA) == _source_key(size, tag) else None

  def write(
      self, path: str, size: int, tag: str, read: ReadFrom, digests: Digests, check: Check
  ) -> int:
    """Uploads a copy in parts; the object becomes visible once it is complete."""
    store, key = self._open(path)
    attributes = {_METADATA: _source_key(size, tag)}
    with self._explained_errors("write", path):
      stores.obstore().put(
          store,
          key,
          _in_a_thread(_checked_before_the_end(read(0), check)),
          attributes=attributes,
          chunk_size=PIECE_BYTES,
          max_concurrency=stores.UPLOADS_AT_ONCE,
      )
      found = stores.obstore().head(store, key)["size"]
    if found != size:
      raise CorpusError(
          f"The copy {self.base}/{path} has {found} bytes instead of {size}. Copy it again."
      )
    return size

  def record(self, path: str, size: int, tag: str, checksum: str) -> None:
    """Does nothing: the metadata was written with the object."""

  def remove(self, path: str) -> None:
    """Removes a copy that has turned out to be wrong, if it is there."""
    store, key = self._open(path)
    errors = self._explained_errors("remove the wrong copy", path)
    with errors, contextlib.suppress(FileNotFoundError):
      stores.obstore().delete(store, key)

  def _open(self, path: str) -> tuple[Any, str]:
    return writing.open_target(f"{self.base}/{path}")

  @contextlib.contextmanager
  def _explained_errors(self, verb: str, path: str) -> Iterator[None]:
    """Turns obstore errors, which may contain signatures, into CorpusErrors."""
    began = time.monotonic()
    try:
      yield
    except CorpusError:
      raise
    except Exception as error:
      what = f"{verb} {self.base}/{path}"
      failure = failures.explain(error, what, time.monotonic() - began)
      if failure.repeat:
        raise StoreUnavailableError(str(failure.error)) from None
      raise failure.error from None


def _checked_before_the_end(pieces: Iterator[bytes], check: Check) -> Iterator[bytes]:
  """Yields the pieces, but the last one only after `check`; without pieces, yields b"".

  An upload whose pieces end with an error is never completed.
  """
  last = b""
  for piece in pieces:
    if last:
      yield last
    last = piece
  if (problem := check()) is not None:
    raise CorpusError(problem)
  yield last


def _in_a_thread(pieces: Iterator[bytes]) -> Iterator[bytes]:
  """Yields the pieces, each of which is read in another thread.

  obstore asks for the next piece inside its event loop, where reading from a store would panic.
  """
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    while (piece := pool.submit(next, pieces, None).result()) is not None:
      yield piece


def _source_key(size: int, tag: str) -> str:
  """Returns a short key that changes with the size or the tag of the source file."""
  return hashlib.sha256(f"{size} {tag}".encode()).hexdigest()[:16]
