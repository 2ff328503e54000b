"""Reads ranges of files in chunks that fit into the processor's cache.

Each thread always reads into the same buffer, so that the bytes of a chunk are still in the cache
when they are hashed, compared or counted.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Iterator

import numpy as np

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.work.pieces import Piece
from maxtext_olmo.corpus.work.pieces import SourceFile
from maxtext_olmo.errors import CorpusError

CHUNK_BYTES = 512 << 10
# Requests to a store cost more than cache misses.
_REMOTE_CHUNK_BYTES = 8 << 20

_thread = threading.local()


def stop_with(event: threading.Event) -> None:
  """Makes reads of this thread end with a CancelledError once the event is set."""
  _thread.stop = event


def raise_if_stopped() -> None:
  """Raises CancelledError if this thread must stop; for work that reads files itself."""
  stop: threading.Event | None = getattr(_thread, "stop", None)
  if stop is not None and stop.is_set():
    raise concurrent.futures.CancelledError


def read_range(storage: Storage, path: str, start: int, end: int) -> Iterator[np.ndarray]:
  """Yields bytes [start, end) of a file in chunks (uint8) of CHUNK_BYTES; the last may be shorter.

  A chunk is valid until the next one is requested: copy what you need to keep.

  Raises:
    CorpusError: The file cannot be read, or ends before `end`.
  """
  stop: threading.Event | None = getattr(_thread, "stop", None)
  for chunk in _chunks(storage, path, start, end):
    if stop is not None and stop.is_set():
      raise concurrent.futures.CancelledError
    yield chunk


def read_tokens(storage: Storage, piece: Piece) -> Iterator[np.ndarray]:
  """Yields the tokens of a piece in chunks; a chunk is valid until the next one is requested."""
  dtype = piece.source.token_dtype
  expect(storage, piece.source)
  for chunk in read_range(storage, piece.source.path, piece.start, piece.end):
    yield chunk.view(dtype)


def expect(storage: Storage, source: SourceFile) -> None:
  """Makes sure that tokens come from the file that the index describes.

  A file is checked now. The storage checks an object with each read, by its size and ETag.

  Raises:
    CorpusError: The file is missing, or its size differs from the one in the index.
  """
  if urls.is_url(source.path):
    storage.expect(source.path, source.size, source.etag)
  elif (found := storage.size(source.path)) != source.size:
    raise CorpusError(
        f"{source.path}: expected {source.size} bytes, found {found}. The file was replaced or"
        " changed after the index was built: restore it, or build the index again."
    )


def _chunks(storage: Storage, path: str, start: int, end: int) -> Iterator[np.ndarray]:
  if start >= end:
    return
  buffer = thread_buffer()
  pinned = storage.pin((path,), np.zeros(1, np.int64))
  if pinned is None:
    for data in storage.pieces(path, start, end - start, _REMOTE_CHUNK_BYTES):
      for at in range(0, len(data), CHUNK_BYTES):
        some = np.frombuffer(data, np.uint8, min(CHUNK_BYTES, len(data) - at), at)
        buffer[: len(some)] = some
        yield buffer[: len(some)]
    return
  descriptor = int(pinned.descriptors[0])
  while start < end:
    chunk = buffer[: min(len(buffer), end - start)]
    try:
      got = os.preadv(descriptor, [chunk.data], start)
    except OSError:
      got = -1
    if got != len(chunk):
      # Rare, and slower: completes a short read, or raises an error that names the file and bytes.
      chunk[:] = np.frombuffer(storage.read(path, start, len(chunk)), np.uint8)
    yield chunk
    start += len(chunk)


def thread_buffer() -> np.ndarray:
  """Returns the buffer of this thread, of CHUNK_BYTES (uint8)."""
  if not hasattr(_thread, "buffer"):
    _thread.buffer = np.empty(CHUNK_BYTES, np.uint8)
  buffer: np.ndarray = _thread.buffer
  return buffer
