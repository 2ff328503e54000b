"""The orders of OLMo-core and MaxText, which can only be computed as whole arrays.

`olmo_core` is the order of `NumpyFSLDataLoader` of OLMo-core 3, bit for bit: each epoch is shuffled
with the seed plus the epoch, chunks of `max_target_sequence_length` tokens stay together, and no
batch crosses the end of an epoch. `maxtext` is the order that MaxText documents for `olmo_grain`;
MaxText's own loader follows it on one host only.

Each array is a file that all processes of a host read. Workers therefore need no copy of it:

    4096 bytes   a line of JSON, padded: kind, size, seed, epoch, and the checksum of the rest
    4 · n bytes  the permutation, uint32, little endian

A file is built once per host, when it is first needed: the first process holds a lock and builds
it, and the others wait. It is written under a temporary name and renamed, so it is either complete
or absent. A file that does not match its name (wrong size, header or checksum) is rebuilt. The
checksum is computed only if the file is new or has changed: a small file next to it, the mark,
records the inode, size and times of the file that was verified. Building a file takes the memory of
one array. Reading takes memory only for the places that are read.

Both orders use NumPy's current shuffle. NumPy guarantees the raw 64-bit outputs of PCG64 for all
versions, but not the result of `Generator.shuffle`, which currently works like this:

    u32()    the low half of a raw output first, then its high half
    for i = n-1 … 1:  j = u32() & (2**bitlength(i) - 1), drawn again until j <= i;  swap a[i], a[j]

If shuffling a small array shows that NumPy has changed, the loop runs in Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import xxhash
from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.order import base

MAX_SIZE = (1 << 32) - 1
_RAW_BLOCK = 1 << 17
# The numbers 0 to 20, shuffled with seed 34521. This is small enough to check every time, and uses
# masks of all lengths up to 5 bits.
_CHECK_SEED = 34521
_CHECK = (20, 8, 0, 6, 17, 15, 3, 19, 9, 2, 11, 12, 7, 1, 16, 4, 5, 18, 13, 14, 10)


def shuffled(n: int, seed: int) -> np.ndarray:
  """Returns the numbers 0 to n - 1 as uint32, shuffled with a seed."""
  if not 1 <= n < MAX_SIZE:
    raise errors.OrderError(f"A stored order must have 1 to 2**32 - 2 places, got {n}.")
  if tuple(_with_numpy(len(_CHECK), _CHECK_SEED).tolist()) == _CHECK:
    return _with_numpy(n, seed)
  logging.warning(
      "NumPy %s shuffles differently from the version that defined this order, so the order is"
      " built in Python, which takes minutes for a large corpus. Install an older NumPy to build it"
      " faster.",
      np.__version__,
  )
  return with_python(n, seed)


def _with_numpy(n: int, seed: int) -> np.ndarray:
  numbers = np.arange(n, dtype=np.uint32)
  np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)
  return numbers


def with_python(n: int, seed: int) -> np.ndarray:
  """Computes the same array as `shuffled` in Python, so that it is correct with any NumPy."""
  numbers = np.arange(n, dtype=np.uint32)
  cells, raw = numbers.data, np.random.PCG64(seed)
  halves: Iterator[int] = iter(())
  for i in range(n - 1, 0, -1):
    mask = (1 << i.bit_length()) - 1
    while True:
      draw = next(halves, None)
      if draw is None:
        block = raw.random_raw(min(_RAW_BLOCK, i + 16)).astype("<u8", copy=False)
        halves = iter(block.view("<u4").tolist())
      elif (j := draw & mask) <= i:
        break
    cells[i], cells[j] = cells[j], cells[i]
  return numbers


def combine_seed_epoch(seed: int, epoch: int) -> int:
  """Returns the 64-bit seed with which MaxText's order shuffles an epoch."""
  digest = hashlib.sha256(f"olmo-shuffle:{int(seed)}:{int(epoch)}".encode()).digest()
  return int.from_bytes(digest[:8], "little")


HEADER_BYTES = 4096
_MAGIC = "maxtext_olmo order"
_VERSION = 1
_LOG_FROM = 50_000_000
_PIECE_BYTES = 4 << 20
_MARK_BYTES = 1 << 10

# The inode, the size, and the times of the last modification and change of a file. If all four are
# equal, the file is the one that was verified.
FileId = tuple[int, int, int, int]


def default_cache_dir() -> str:
  """Returns the default directory of stored orders, in the user's cache directory."""
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return os.path.join(base, "maxtext_olmo", "orders")


@dataclasses.dataclass(frozen=True)
class OrderFile:
  """The file of one epoch's permutation of `n` chunks.

  Attributes:
    kind: System that defines the order: `olmo_core` or `maxtext`.
    n: Number of chunks that are permuted.
    seed: Seed of the run.
    epoch: Epoch, counted from 0.
    chunk: Number of instances per chunk.
    directory: Directory of the cache.
  """

  kind: str
  n: int
  seed: int
  epoch: int
  chunk: int
  directory: str

  @property
  def path(self) -> str:
    """Path of the file; its name includes everything that determines its content."""
    name = f"{self.kind}-n{self.n}-chunk{self.chunk}-seed{self.seed}-epoch{self.epoch}.order"
    return os.path.join(self.directory, name)

  @property
  def shuffle_seed(self) -> int:
    """The seed of the shuffle; OLMo-core counts epochs from 1."""
    if self.kind == "olmo_core":
      return self.seed + self.epoch + 1
    return combine_seed_epoch(self.seed, self.epoch)

  def open(self, trusted: FileId | None = None) -> tuple[file_array.FileArray, FileId]:
    """Opens the permutation, and builds the file first if it is missing or wrong.

    Args:
      trusted: File id that an earlier `open` returned, perhaps in a parent process. The checksum of
        that file is not computed again.

    Returns:
      The permutation, and the id of the file to pass as `trusted` later.
    """
    found = self._find(trusted)
    if found is not None:
      return found
    with building(self.path):
      # The previous holder of the lock may have built it.
      found = self._find(trusted)
      if found is None:
        self._build()
        found = self._find(None)
    if found is None:
      raise errors.OrderError(
          f"{self.path} does not read back as it was written: the disk is damaged, or another"
          " program changes the file. Choose a different olmo_order_cache_dir."
      )
    return found

  def _find(self, trusted: FileId | None) -> tuple[file_array.FileArray, FileId] | None:
    """Opens the permutation if the file exists and belongs to this order; otherwise None."""
    storage = LocalStorage(max_open_files=1)
    try:
      stat = os.stat(self.path)
      header = json.loads(storage.read(self.path, 0, HEADER_BYTES))
    except (OSError, errors.CorpusError, ValueError, RecursionError):
      return None  # The file is missing, or is not an order file; `_build` replaces it.
    if stat.st_size != HEADER_BYTES + 4 * self.n or not isinstance(header, dict):
      return None
    checksum = header.get("checksum")
    if header != {**self._description(), "checksum": checksum}:
      return None
    found = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    mark = _Mark(f"{self.path}.verified")
    if found != trusted and not mark.names(found):
      if _checksum(_pieces(storage, self.path, stat.st_size)) != checksum:
        return None
      mark.write(found)
    return file_array.FileArray(storage, self.path, "<u4", HEADER_BYTES, self.n), found

  def _description(self) -> dict[str, Any]:
    values = dataclasses.asdict(self)
    del values["directory"]
    return {"magic": _MAGIC, "version": _VERSION, **values}

  def _build(self) -> None:
    """Shuffles and writes the file; the caller must hold the lock."""
    for left_over in glob.glob(
        os.path.join(glob.escape(self.directory), f".{os.path.basename(self.path)}.*.tmp")
    ):
      with atomic.write_errors(left_over):
        os.unlink(left_over)
    if os.path.exists(self.path):
      logging.warning("%s is damaged, or does not match its name; rebuilding it.", self.path)
    began = time.monotonic()
    if self.n >= _LOG_FROM:
      logging.info("Building the %s order of epoch %d: %s", self.kind, self.epoch, self.path)
    numbers = shuffled(self.n, self.shuffle_seed).astype("<u4", copy=False)
    header = json.dumps({**self._description(), "checksum": _checksum([numbers.data])})
    try:
      with atomic.atomic_writer(self.path) as file:
        file.write(header.encode().ljust(HEADER_BYTES - 1) + b"\n")
        file.write(numbers.data)
    except errors.WriteError as error:
      raise errors.WriteError(
          f"{error} A stored order takes {HEADER_BYTES + 4 * self.n:,} bytes per epoch; set"
          " olmo_order_cache_dir to a directory with room for it."
      ) from error
    if self.n >= _LOG_FROM:
      logging.info("Built %s in %.0f s", self.path, time.monotonic() - began)


@dataclasses.dataclass(frozen=True)
class _Mark:
  """A small file that identifies the file whose checksum was verified."""

  path: str

  def names(self, file: FileId) -> bool:
    """Returns whether the mark identifies the given file."""
    try:
      with open(self.path, "rb", opener=atomic.open_at_once) as mark:
        return mark.read(_MARK_BYTES) == self._content(file)
    except OSError:
      return False

  def write(self, file: FileId) -> None:
    """Records that a file was verified, if the directory is writable."""
    with contextlib.suppress(errors.WriteError):
      atomic.write_atomically(self.path, self._content(file))

  def _content(self, file: FileId) -> bytes:
    return json.dumps(file).encode()


@contextlib.contextmanager
def building(path: str) -> Iterator[None]:
  """Holds the lock of a cache file; the lock is released even if the process dies."""
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(atomic.locked(path))
    except (OSError, ValueError) as error:
      raise errors.ConfigError(
          f"The directory of stored orders, {os.path.dirname(path)!r}, cannot be written: {error}."
          " Set olmo_order_cache_dir to a writable directory."
      ) from error
    yield


def _checksum(pieces: Iterable[bytes | memoryview]) -> str:
  hashed = xxhash.xxh3_64()
  for piece in pieces:
    hashed.update(piece)
  return "xxh3:" + hashed.hexdigest()


def _pieces(storage: LocalStorage, path: str, size: int) -> Iterator[memoryview]:
  """Yields the content of an order file after its header, in pieces that share one buffer."""
  buffer, nothing = np.empty(_PIECE_BYTES, np.uint8), np.zeros(1, np.int64)
  for offset in range(HEADER_BYTES, size, _PIECE_BYTES):
    count = min(_PIECE_BYTES, size - offset)
    storage.fill([path], nothing, np.array([offset]), np.array([count]), buffer, nothing)
    yield buffer[:count].data


class StoredOrder(base.Order):
  """An order with one permutation file per epoch in `cache_dir`, built when first needed."""

  def __init__(self, *, num_instances: int, seed: int, chunk_size: int = 1):
    super().__init__(num_instances=num_instances, seed=seed, chunk_size=chunk_size)
    if seed < 0:
      raise errors.ConfigError(f"The {self.name} order needs a seed of 0 or more, got {seed}.")
    self.cache_dir = default_cache_dir()
    self._trusted: dict[int, FileId] = {}
    self._arrays: dict[int, file_array.FileArray] = {}

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    try:
      return self._open(epoch)[places].astype(np.int64)
    except errors.CorpusError as error:
      first, last = HEADER_BYTES + 4 * int(places.min()), HEADER_BYTES + 4 * int(places.max()) + 4
      raise errors.OrderError(
          f"{self.file(epoch).path} changed while it was in use: bytes {first} to {last} can no"
          " longer be read. Resume the run, which builds the file again."
      ) from error

  def close(self) -> None:
    """Closes the files."""
    self._arrays = {}

  def prepare(self, position: int) -> None:
    """Opens the array of a position's epoch, so that workers need not compute its checksum."""
    self._open(self.epochs.epoch(position))

  def file(self, epoch: int) -> OrderFile:
    """Returns the file of an epoch."""
    return OrderFile(
        kind=self.name,
        n=self.epochs.length(epoch) // self.chunk_size,
        seed=self.seed,
        epoch=epoch,
        chunk=self.chunk_size,
        directory=self.cache_dir,
    )

  def _open(self, epoch: int) -> file_array.FileArray:
    if (found := self._arrays.get(epoch)) is not None:
      return found
    array, trusted = self.file(epoch).open(self._trusted.get(epoch))
    # A batch and its prefetched successors span at most two epochs. The dict is replaced and never
    # modified, so threads need no lock.
    self._arrays = {**dict(list(self._arrays.items())[-1:]), epoch: array}
    self._trusted = {**self._trusted, epoch: trusted}
    return array

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "_arrays": {}}


class OlmoCoreOrder(StoredOrder):
  """The order of OLMo-core's fixed-length loader; OLMo-core's epoch 1 is epoch 0 here."""

  name = "olmo_core"
  drops_tails = True
  foreign = True


class MaxTextOrder(StoredOrder):
  """The order that MaxText documents for `olmo_grain`; `OlmoIndexSampler` divides it by host."""

  name = "maxtext"
  foreign = True
