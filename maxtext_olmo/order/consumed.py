"""A bitmap file of the instances that a run has trained on, and an order of the other instances.

A run that another loader began may have seen any subset of an epoch. The file records the subset
with one bit per instance. The bits stay on disk, and a small table after them makes it cheap to
find the k-th clear bit:

    bits     1 1 0 1 | 0 0 1 1 | 1 0 0 0        blocks of 4 here, of 4096 in the file
    table    0         1         3              clear bits before each block
    select(4): 3 clear bits precede block 2, so rank 4 is the second clear bit of block 2, bit 10

The table of a billion instances takes 2 MB, and a lookup reads one block.

The file is little-endian. Its header has 8 bytes of magic; the format version, the number of
instances and the number of clear bits, as 64-bit integers; the SHA-256 of everything after the
header; the SHA-256 of the corpus's fingerprint; and 32 zero bytes. The bits and the table follow.
Opening the file compares every header field with the index or the bits, so a damaged header is
detected too.

`RemainderOrder` is the rest of an epoch that another loader began, followed by the epochs of a
plain order. Epoch 0 has only the instances that were not consumed, each once, shuffled. From epoch
1 on, each epoch has all instances, in the plain order:

    10 instances, consumed {0, 3, 4, 7, 8, 9}        position   0 1 2 3 | 4 5 6 … 13 | 14 …
                                                     epoch      0       | 1          | 2
                                                     instances  5 1 6 2 | all ten    | all ten
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from typing import Any, Protocol, Self

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import local_copy
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.order import base
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import feistel

_MAGIC = b"OLMOSEEN"
_FORMAT = 1
_HEADER = struct.Struct("<8sQQQ32s32s32s")
_ZEROS = bytes(32)
_WORD = 64
_WORDS_PER_BLOCK = 64
_BLOCK = _WORD * _WORDS_PER_BLOCK


def write_consumed(path: str | os.PathLike[str], consumed: np.ndarray, fingerprint: str) -> None:
  """Writes the bitmap of a corpus.

  Args:
    path: Path of the file.
    consumed: For each instance, whether it was consumed (bool).
    fingerprint: Fingerprint of the corpus.
  """
  write_bits(path, np.packbits(consumed, bitorder="little"), len(consumed), fingerprint)


def write_bits(
    path: str | os.PathLike[str], packed: np.ndarray, count: int, fingerprint: str
) -> None:
  """Writes the bitmap of `count` instances from bits that are packed with `bitorder="little"`."""
  words = -(-count // _WORD)
  bits = np.full(words * (_WORD // 8), 0xFF, np.uint8)
  bits[: len(packed)] = packed
  if count % 8:
    # Bits after the last instance count as consumed, so that they are never selected.
    bits[count // 8] |= 0xFF << (count % 8) & 0xFF
  clear = _clear_bits(bits.view("<u8"))
  table = np.concatenate([[0], np.cumsum(clear)[:-1]]).astype("<u8")
  digest = hashlib.sha256(bits.tobytes())
  digest.update(table.tobytes())
  header = _HEADER.pack(
      _MAGIC, _FORMAT, count, int(clear.sum()), digest.digest(), _sha256(fingerprint), _ZEROS
  )
  with writing.open_output(path) as file:
    file.write(header)
    file.write(bits.tobytes())
    file.write(table.tobytes())


class Consumed:
  """Opens a bitmap file of consumed instances, and checks that it belongs to a corpus.

  Args:
    path: Path or URL of the file.
    fingerprint: Fingerprint of the corpus.
    num_instances: Number of instances of the corpus.
    storage: Storage that holds the file; `open_storage()` by default.
    cache_dir: Directory for a local copy if `path` is a URL; None reads the object itself.
  """

  def __init__(
      self,
      path: str | os.PathLike[str],
      *,
      fingerprint: str,
      num_instances: int,
      storage: Storage | None = None,
      cache_dir: str | None = None,
  ):
    self._path = urls.without_secrets(path)
    self._storage = open_storage() if storage is None else storage
    self._file = self._path
    if cache_dir is not None:
      self._file = local_copy.local_path(self._path, self._storage, cache_dir)
    size = self._storage.size(self._file)
    header = self._storage.read(self._file, 0, min(size, _HEADER.size))
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
      raise errors.CorpusError(
          f"{self._path} is not a bitmap of consumed instances. `maxtext-olmo maxtext migrate`"
          " writes one."
      )
    _, version, count, remaining, digest, corpus, zeros = _HEADER.unpack(header)
    if version != _FORMAT:
      raise errors.CorpusError(
          f"{self._path} has format {version}; this version reads format {_FORMAT}. Migrate again."
      )
    if corpus != _sha256(fingerprint) or count != num_instances:
      raise errors.CorpusError(
          f"{self._path} is the bitmap of a different corpus: it has {count} instances, but this"
          f" index has {num_instances} and the fingerprint {fingerprint}. Set olmo_consumed_path to"
          " the file made for this index, or migrate again."
      )
    self.num_instances: int = count
    self.digest: str = digest.hex()
    words, blocks = -(-count // _WORD), -(-count // _BLOCK)
    if size != _HEADER.size + 8 * (words + blocks):
      raise self._damaged("size in bytes", size, _HEADER.size + 8 * (words + blocks))
    found = hashlib.sha256()
    for piece in self._storage.pieces(self._file, _HEADER.size):
      found.update(piece)
    if found.digest() != digest:
      raise self._damaged("SHA-256", found.hexdigest(), self.digest)
    self._words = file_array.FileArray(
        self._storage, self._file, "<u8", _HEADER.size, words, block_bytes=8 * _WORDS_PER_BLOCK
    )
    self.num_remaining = 0
    if count:
      clear = _clear_bits(self._words[np.arange((blocks - 1) * _WORDS_PER_BLOCK, words)])
      self.num_remaining = int(self._table[-1]) + int(clear[0])
    if remaining != self.num_remaining:
      raise self._damaged("number of clear bits", self.num_remaining, remaining)
    if zeros != _ZEROS:
      raise self._damaged("padding", zeros.hex(), _ZEROS.hex())

  def _damaged(self, what: str, found: Any, recorded: Any) -> errors.CorpusError:
    return errors.CorpusError(
        f"{self._path} is damaged: its {what} is {found}, expected {recorded}. Migrate again."
    )

  @functools.cached_property
  def _table(self) -> np.ndarray:
    """The number of clear bits before each block."""
    offset = _HEADER.size + 8 * len(self._words)
    blocks = -(-self.num_instances // _BLOCK)
    return file_array.FileArray(self._storage, self._file, "<u8", offset, blocks).load()

  def __getstate__(self) -> dict[str, Any]:
    # Workers read the table from the file, which is faster than pickling it for a large corpus.
    return {k: v for k, v in self.__dict__.items() if k != "_table"}

  def close(self) -> None:
    """Closes the file; it is reopened when needed."""
    self._storage.close()

  def select(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the unconsumed instance (int64) at each rank; ranks are in corpus order."""
    ranks = np.asarray(ranks, np.int64)
    if ranks.size == 0:
      return ranks
    if not (0 <= ranks.min() and ranks.max() < self.num_remaining):
      raise errors.OrderError(
          f"{self.num_remaining} instances remain, but ranks {ranks.min()} to {ranks.max()} were"
          " requested."
      )
    words, table = self._words, self._table
    block = np.searchsorted(table, ranks.astype(np.uint64), side="right") - 1
    rest = ranks - table[block].astype(np.int64)
    needed, which = np.unique(block, return_inverse=True)
    clear = ~words.blocks(needed)
    inside = needed[:, None] * _WORDS_PER_BLOCK + np.arange(_WORDS_PER_BLOCK) < len(words)
    clear[~inside] = 0
    clear = clear[which]
    upto = np.cumsum(np.bitwise_count(clear), axis=1, dtype=np.int64)
    word = (upto <= rest[:, None]).sum(axis=1)
    rows = np.arange(len(ranks))
    rest -= np.where(word > 0, upto[rows, word - 1], 0)
    bits = np.unpackbits(
        np.ascontiguousarray(clear[rows, word]).astype("<u8").view(np.uint8).reshape(-1, 8),
        axis=1,
        bitorder="little",
    )
    bit = (np.cumsum(bits, axis=1) <= rest[:, None]).sum(axis=1)
    return (block * _WORDS_PER_BLOCK + word) * _WORD + bit

  def ranks(self, instances: np.ndarray) -> np.ndarray:
    """Returns the rank (int64) of each instance among unconsumed ones; -1 if it was consumed."""
    instances = np.asarray(instances, np.int64)
    inside = (instances >= 0) & (instances < self.num_instances)
    if not inside.any():
      return np.full(instances.shape, -1, np.int64)
    before, is_clear = self._look_up(np.where(inside, instances, 0))
    return np.where(inside & is_clear, before, -1)

  def remaining_before(self, instances: np.ndarray) -> np.ndarray:
    """Returns the number of unconsumed instances before each given instance."""
    instances = np.asarray(instances, np.int64)
    inside = instances < self.num_instances
    if not inside.any():
      return np.full(instances.shape, self.num_remaining, np.int64)
    return np.where(inside, self._look_up(np.where(inside, instances, 0))[0], self.num_remaining)

  def _look_up(self, instances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of clear bits before each instance, and whether its own bit is clear."""
    word, bit = np.divmod(instances, _WORD)
    block, place = np.divmod(word, _WORDS_PER_BLOCK)
    needed, which = np.unique(block, return_inverse=True)
    clear = ~self._words.blocks(needed)[which]
    counts = np.bitwise_count(clear) * (np.arange(_WORDS_PER_BLOCK) < place[:, None])
    own, bit = clear[np.arange(len(word)), place], bit.astype(np.uint64)
    before = counts.sum(axis=1, dtype=np.int64)
    before += np.bitwise_count(own & ((np.uint64(1) << bit) - np.uint64(1)))
    is_clear = (own >> bit & np.uint64(1)).astype(np.bool_)
    return self._table[block].astype(np.int64) + before, is_clear


def _clear_bits(words: np.ndarray) -> np.ndarray:
  """Counts the clear bits of each block of words."""
  counts = np.bitwise_count(~words).astype(np.int64)
  return np.add.reduceat(counts, np.arange(0, len(words), _WORDS_PER_BLOCK))


def _sha256(text: str) -> bytes:
  return hashlib.sha256(text.encode()).digest()


class Remaining(Protocol):
  """Interface to the unconsumed chunks of a whole bitmap, or of a part of a bitmap."""

  num_instances: int
  num_remaining: int
  digest: str

  def select(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the chunks at the given ranks among the remaining chunks."""

  def ranks(self, instances: np.ndarray) -> np.ndarray:
    """Returns the rank of each chunk among the remaining chunks; -1 for a consumed chunk."""

  def close(self) -> None:
    """Closes open files, which are reopened when needed."""


class RemainderOrder(base.Order):
  """An order whose epoch 0 has only unconsumed chunks, and whose later epochs follow a plain order.

  Args:
    consumed: Bitmap over all chunks of the plain order. Marked chunks were trained on before.
    plain: Order of the epochs after epoch 0.
    shuffles: Whether epoch 0 is shuffled; otherwise it is in corpus order.
  """

  def __init__(self, consumed: Remaining, plain: base.Order, *, shuffles: bool = True):
    count, size = plain.num_instances, plain.chunk_size
    # An epoch must have at least one place. If nothing remains, this order therefore begins with
    # epoch 1 of the plain order.
    rest = ((0, consumed.num_remaining * size), (1, count))
    super().__init__(
        num_instances=count,
        seed=plain.seed,
        chunk_size=size,
        epochs=epochs_lib.Epochs(rest if consumed.num_remaining else ((0, count),)),
    )
    if plain.drops_tails:
      raise errors.ConfigError(
          f"olmo_order={plain.name} lets no batch span epochs, so it cannot follow the rest of an"
          " epoch (olmo_consumed_path). Use a different olmo_order."
      )
    if consumed.num_instances * size != plain.num_instances:
      raise errors.OrderError(
          f"The bitmap has {consumed.num_instances} chunks, but the order has {count // size}."
      )
    self.name = f"{plain.name} after the rest of bitmap {consumed.digest[:16]}"
    self.remaining = consumed.num_remaining
    self._consumed = consumed
    self._plain = plain
    self._shuffle = (
        feistel.Bijection(self.remaining, "remainder", self.seed, consumed.digest)
        if self.remaining and shuffles
        else None
    )

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    if epoch > 0 or not self.remaining:
      places = places * self.chunk_size
      return self._plain.ids(epoch + (not self.remaining), places) // self.chunk_size
    return self._consumed.select(places if self._shuffle is None else self._shuffle(places))

  def _chunk_places(self, epoch: int, chunks: np.ndarray) -> np.ndarray:
    if epoch > 0 or not self.remaining:
      found = self._plain.places(epoch + (not self.remaining), chunks * self.chunk_size)
      return found // self.chunk_size
    places = self._consumed.ranks(chunks)
    if self._shuffle is not None:
      places[places >= 0] = self._shuffle.inverse(places[places >= 0])
    return places

  def close(self) -> None:
    """Closes the files of the bitmap and of the plain order."""
    self._consumed.close()
    self._plain.close()

  def with_epochs(self, epochs: epochs_lib.Epochs) -> Self:
    """Returns this order if the epoch lengths are unchanged, and raises ConfigError otherwise."""
    if epochs != epochs_lib.Epochs.constant(self.num_instances):
      raise errors.ConfigError(
          "The corpus cannot be extended with olmo_consumed_path, because its bitmap belongs to the"
          " corpus as it was before. Use the index that the bitmap was made for."
      )
    return self
