"""A bitmap of the train chunks of a corpus that a run has seen.

    stage 0    index A, file x, windows of 8     seen: tokens [0, 8) and [16, 24) of the file
    stage 1    index B, file x, windows of 12    [0, 12) seen    [12, 24) seen    [24, 36) not seen

A window of the new corpus counts as seen if it contains any token that was seen. A file of one
index is the same as a file of another index if their full paths, sizes and data offsets are equal.
Samples that a run skips, or that an order drops at the end of an epoch, count as seen.

The bitmap depends only on the stages. It is a file in the directory of stored orders, named after a
digest of the stages, and is built once per host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo import progress
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import joined
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import stored
from maxtext_olmo.order import stream as stream_lib

_BLOCK = 1 << 20


class SharedFiles:
  """Maps windows of one index to the windows of another index that share tokens with them."""

  def __init__(self, one: index_lib.OlmoNpyIndex, other: index_lib.OlmoNpyIndex):
    there: dict[tuple[str, int, int], list[int]] = {}
    for number, key in enumerate(joined.file_keys(other)):
      there.setdefault(key, []).append(number)
    targets = [there.get(key, []) for key in joined.file_keys(one)]
    # The other index may list a file several times. Each row has one target per file of the first
    # index; -1 stands for no target.
    self._targets = np.array(list(itertools.zip_longest(*targets, fillvalue=-1)), np.int64)
    self._starts, _ = _windows_of_files(one)
    self._other_starts, self._other_counts = _windows_of_files(other)
    self._window, self._other_window = one.window, other.window

  def overlapping(self, windows: np.ndarray) -> np.ndarray:
    """Returns the windows of the other index that overlap the given windows, with duplicates."""
    files = np.searchsorted(self._starts, windows, side="right") - 1
    first = (windows - self._starts[files]) * self._window
    low = first // self._other_window
    high = (first + self._window - 1) // self._other_window
    found = [np.zeros(0, np.int64)]
    for targets in self._targets:
      target = targets[files]
      for more in range(int((high - low).max(initial=-1)) + 1):
        here = low + more
        inside = (target >= 0) & (here <= high) & (here < self._other_counts[target])
        found.append(self._other_starts[target[inside]] + here[inside])
    return np.concatenate(found)

  @property
  def digest(self) -> str:
    """A digest that identifies the files that both indexes have."""
    return hashlib.sha256(self._targets.tobytes()).hexdigest()


def _windows_of_files(index: index_lib.OlmoNpyIndex) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first window and the number of windows of each file."""
  starts = np.array([entry.instance_offset for entry in index.files], np.int64)
  counts = np.array([entry.n_instances for entry in index.files], np.int64)
  return starts // index.chunk_size, counts // index.chunk_size


def split_like(
    index: index_lib.OlmoNpyIndex, base: index_lib.OlmoNpyIndex, base_split: stream_lib.Split
) -> stream_lib.Split:
  """Makes a split of `index` in which the tokens that `base_split` holds out are held out too."""
  if index.fingerprint == base.fingerprint:
    return base_split
  windows = np.zeros(0, np.int64)
  if base_split.num_held_out:
    windows = np.unique(SharedFiles(base, index).overlapping(base_split.held_out_windows))
  if len(windows) >= index.num_windows:
    raise errors.ConfigError(
        "Every instance of this index overlaps the held-out part (olmo_eval_instances), so none"
        " remains for training. Hold out fewer instances."
    )
  return stream_lib.Split(
      num_windows=index.num_windows,
      chunk_size=index.chunk_size,
      num_held_out=len(windows),
      key=base_split.key,
      listed=tuple(windows.tolist()),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """The samples that a run has taken from one stage.

  Attributes:
    index: Index of the stage's corpus.
    stream: Stream of the stage.
    length: Number of positions that the run takes from the stream.
    consumed_path: Path of the bitmap of instances consumed before the stage; empty if none were.
    cache_dir: Directory of the bitmap's local copy, if its path is a URL.
  """

  index: index_lib.OlmoNpyIndex
  stream: stream_lib.Stream
  length: int
  consumed_path: str = ""
  cache_dir: str | None = None

  @property
  def num_windows(self) -> int:
    """Approximate number of windows to mark as seen."""
    return min(self.length // self.index.chunk_size, self.index.num_windows)

  def windows(self) -> Iterator[np.ndarray]:
    """Yields the windows that were taken, in blocks; a window may occur more than once."""
    size = self.index.chunk_size
    chunks = -(-self.length // size)
    order = self.stream.order
    # A complete epoch of a plain order contains every train window, so the order is not needed.
    plain = not isinstance(order, mixture_lib.MixtureOrder)
    if plain and self.length >= order.epochs.start(len(order.epochs.lengths)):
      for first in range(0, order.num_instances, _BLOCK * size):
        ranks = np.arange(first, min(first + _BLOCK * size, order.num_instances), size)
        yield self.stream.split.train_ids(ranks) // size
    else:
      for first in range(0, chunks, _BLOCK):
        places = np.arange(first, min(first + _BLOCK, chunks)) * size
        yield self.stream.instance_ids(places) // size
    if self.consumed_path:
      bitmap = consumed_lib.Consumed(
          self.consumed_path,
          fingerprint=self.index.fingerprint,
          num_instances=self.index.total_instances,
          cache_dir=self.cache_dir,
      )
      for first in range(0, self.index.total_instances, _BLOCK):
        ids = np.arange(first, min(first + _BLOCK, self.index.total_instances))
        yield ids[bitmap.ranks(ids) < 0]


@dataclasses.dataclass(frozen=True, eq=False)
class SeenFile:
  """The bitmap file of the train chunks that were seen before a stage.

  Attributes:
    directory: Directory of the file.
    key: JSON-able value that includes everything that determines the bits.
    index: Index of the stage's corpus.
    split: Split of that corpus; the bits are for train windows.
    parts: Function that returns the samples that the run has taken, one `Part` per earlier stage.
  """

  directory: str
  key: Any
  index: index_lib.OlmoNpyIndex
  split: stream_lib.Split
  parts: Callable[[], list[Part]]

  @property
  def path(self) -> str:
    """Path of the file."""
    return os.path.join(self.directory, f"seen-{self._digest[:32]}.bits")

  @property
  def _digest(self) -> str:
    return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()

  @property
  def num_chunks(self) -> int:
    """The number of train chunks, each of which has a bit."""
    return self.split.num_train // self.split.chunk_size

  def open(self, stop: threading.Event | None = None) -> consumed_lib.Consumed:
    """Opens the bitmap, after building it if it is missing or damaged.

    Args:
      stop: Event that stops the build, which then raises InterruptedError.
    """
    found = self._find()
    if found is not None:
      return found
    with stored.building(self.path):
      found = self._find()
      if found is None:
        consumed_lib.write_bits(self.path, self._bits(stop), self.num_chunks, self._digest)
        found = self._find()
    if found is None:
      raise errors.OrderError(
          f"{self.path} does not read back as it was written: its disk is damaged, or another"
          " program changes the file. Choose a different olmo_order_cache_dir."
      )
    return found

  def _find(self) -> consumed_lib.Consumed | None:
    if not os.path.exists(self.path):
      return None
    try:
      return consumed_lib.Consumed(
          self.path, fingerprint=self._digest, num_instances=self.num_chunks
      )
    except errors.CorpusError:
      return None

  def _bits(self, stop: threading.Event | None) -> np.ndarray:
    bits = np.zeros(-(-self.num_chunks // 8), np.uint8)
    parts, size = self.parts(), self.split.chunk_size
    total = sum(part.num_windows for part in parts)
    # A small bitmap is built too fast to need a progress bar.
    with progress.progress_bar(
        "Marking windows the run has seen", total, enabled=total > _BLOCK, unit="windows"
    ) as advance:
      for part in parts:
        shared = None
        if part.index.fingerprint != self.index.fingerprint:
          shared = SharedFiles(part.index, self.index)
        for windows in part.windows():
          if stop is not None and stop.is_set():
            raise InterruptedError("The bitmap of seen samples is no longer needed.")
          count = len(windows)
          if shared is not None:
            windows = shared.overlapping(windows)
          ranks = self.split.train_ranks(windows * size)
          ranks = np.unique(ranks[ranks >= 0] // size)
          np.bitwise_or.at(bits, ranks >> 3, (1 << (ranks & 7)).astype(np.uint8))
          advance(count)
    return bits
