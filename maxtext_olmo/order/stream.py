"""Streams, which assign an instance to each position of a run.

A stream combines an order (position → rank) and a split (rank → instance id), and knows where it
ends. A checkpoint records its identity: two streams with the same identity have the same instance
at every position.

A split says which instances training may see. A keyed permutation of windows chooses the held-out
set. A window has `max_target_sequence_length` tokens if the index sets that, and is otherwise one
instance. The permutation's key and number of windows are stored in the index, so files appended
later do not change the held-out set. Training ranks count the other instances in corpus order:

    8 windows, held out {2, 5}:   train rank  0 1 2 3 4 5   →  instance  0 1 3 4 6 7
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import feistel
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stored


@dataclasses.dataclass(frozen=True)
class Split:
  """The train and held-out instances of a corpus; its memory grows only with the held-out set.

  Attributes:
    num_windows: Number of windows in the corpus.
    chunk_size: Number of instances per window.
    num_held_out: Number of windows that training never sees.
    key: Key of the permutation that chooses the held-out windows.
    keyed_windows: Number of windows, from the start of the corpus, that the permutation covers.
    listed: The held-out windows, if the split of another corpus determines them.
  """

  num_windows: int
  chunk_size: int
  num_held_out: int = 0
  key: str = ""
  keyed_windows: int = 0
  listed: tuple[int, ...] | None = None

  @classmethod
  def of_index(cls, index: index_lib.OlmoNpyIndex, held_out_instances: int) -> Split:
    """Makes a split that holds out instances of an index, rounded up to whole windows."""
    windows = -(-held_out_instances // index.chunk_size)
    if held_out_instances < 0 or windows >= index.num_windows or windows > index.split_windows:
      raise errors.ConfigError(
          f"olmo_eval_instances={held_out_instances} cannot be held out of"
          f" {index.total_instances} instances; at least one must remain for training (the split"
          f" was made over {index.split_windows} windows of {index.chunk_size} instances)."
      )
    return cls(
        num_windows=index.num_windows,
        chunk_size=index.chunk_size,
        num_held_out=windows,
        key=index.split_key,
        keyed_windows=index.split_windows,
    )

  @property
  def num_train(self) -> int:
    """Number of instances that training sees once per epoch."""
    return (self.num_windows - self.num_held_out) * self.chunk_size

  @property
  def num_eval(self) -> int:
    """Number of held-out instances."""
    return self.num_held_out * self.chunk_size

  @functools.cached_property
  def _held_out(self) -> np.ndarray:
    """The held-out windows in evaluation order: random, or as in `listed` if that is set."""
    if self.listed is not None:
      return np.array(self.listed, np.int64)
    choose = feistel.Bijection(max(self.keyed_windows, 1), "split", self.key)
    return choose(np.arange(self.num_held_out))

  @functools.cached_property
  def _ranked(self) -> tuple[np.ndarray, np.ndarray]:
    """The held-out windows in ascending order, and the rank of each in evaluation order."""
    ranks = np.argsort(self._held_out)
    return self._held_out[ranks], ranks

  @functools.cached_property
  def _train_before(self) -> np.ndarray:
    """The number of train windows before each held-out window, ascending."""
    return self._ranked[0] - np.arange(self.num_held_out)

  def train_ids(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the instance ids of train ranks in [0, num_train)."""
    if self.num_held_out == 0:
      return ranks
    window, rest = np.divmod(ranks, self.chunk_size)
    window = window + np.searchsorted(self._train_before, window, side="right")
    return window * self.chunk_size + rest

  def train_ranks(self, ids: np.ndarray) -> np.ndarray:
    """Returns the train ranks of instances, -1 for held-out ones; the inverse of `train_ids`."""
    if self.num_held_out == 0:
      return np.asarray(ids, np.int64)
    window, rest = np.divmod(ids, self.chunk_size)
    before, held = self._find_held_out(window)
    return np.where(held, -1, (window - before) * self.chunk_size + rest)

  def eval_ranks(self, ids: np.ndarray) -> np.ndarray:
    """Returns the held-out ranks of instances, -1 for others; the inverse of `eval_ids`."""
    window, rest = np.divmod(ids, self.chunk_size)
    if self.num_held_out == 0:
      return np.full(np.shape(ids), -1, np.int64)
    before, held = self._find_held_out(window)
    rank = self._ranked[1][np.minimum(before, self.num_held_out - 1)]
    return np.where(held, rank * self.chunk_size + rest, -1)

  @property
  def held_out_windows(self) -> np.ndarray:
    """The held-out windows, in evaluation order."""
    return self._held_out

  def train_windows_before(self, windows: np.ndarray) -> np.ndarray:
    """Returns the number of train windows before each window."""
    return windows - self._find_held_out(windows)[0]

  def _find_held_out(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of held-out windows before each window, and whether it is held out."""
    ascending, _ = self._ranked
    before = np.searchsorted(ascending, windows)
    if not len(ascending):
      return before, np.zeros(np.shape(windows), np.bool_)
    return before, ascending[np.minimum(before, len(ascending) - 1)] == windows

  def eval_ids(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the instance ids of held-out ranks in [0, num_eval), in evaluation order."""
    window, rest = np.divmod(ranks, self.chunk_size)
    return self._held_out[window] * self.chunk_size + rest

  def identity(self) -> str:
    """Returns a text that identifies the split; a resume compares it with the checkpoint's."""
    if self.num_held_out == 0:
      return "none"
    if self.listed is not None:
      return f"{self.num_held_out} windows, because of the windows with key {self.key}"
    return f"{self.num_held_out} of {self.keyed_windows} windows, key {self.key}"


Extent = tuple[int, int, str]  # First epoch, number of files, fingerprint.


@dataclasses.dataclass(frozen=True)
class Stream:
  """Maps positions to instance ids.

  Attributes:
    fingerprint: Fingerprint of the corpus.
    sequence_length: Number of tokens per instance.
    order: Order of the train ranks, or of the held-out ranks if `held_out` is set.
    split: Split of the corpus into training and held-out instances.
    held_out: Whether this stream reads the held-out part.
    num_epochs: Number of epochs until the stream ends; None for an endless stream.
    history: Extents of the corpus, each `(first epoch, files, fingerprint)`, with the current
      extent last. Empty if the corpus was never extended during the run.
  """

  fingerprint: str
  sequence_length: int
  order: permutations.Order
  split: Split
  held_out: bool = False
  num_epochs: int | None = None
  history: tuple[Extent, ...] = ()

  @property
  def endless(self) -> bool:
    """True if the stream has no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of samples until the end; None if there is no end."""
    return None if self.num_epochs is None else self.order.epochs.start(self.num_epochs)

  def with_history(self, index: index_lib.OlmoNpyIndex, history: Sequence[Extent]) -> Stream:
    """Returns the stream over a corpus that grew during the run; the held-out part is unchanged."""
    if not history:  # Then the order keeps its own epoch lengths, such as those of a mixture.
      return dataclasses.replace(self, history=())
    lengths = []
    for first_epoch, num_files, _ in history:
      windows = index_lib.windows_of_prefix(index, num_files) - self.split.num_held_out
      lengths.append((first_epoch, windows * self.split.chunk_size))
    epochs = epochs_lib.Epochs(tuple(lengths))
    if epochs == self.order.epochs:
      return dataclasses.replace(self, history=tuple(history))
    return dataclasses.replace(self, order=self.order.with_epochs(epochs), history=tuple(history))

  @property
  def drops_tails(self) -> bool:
    """True if a batch that would cross the end of an epoch starts at the next epoch instead."""
    return self.order.drops_tails

  @property
  def batch_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs whose ends no batch crosses; None if batches may span epochs."""
    return self.order.epochs if self.order.drops_tails else None

  @property
  def epochs(self) -> epochs_lib.Epochs:
    """The lengths of epochs."""
    return self.order.epochs

  def has(self, position: int) -> bool:
    """Returns whether there is an instance at a position."""
    return self.num_positions is None or position < self.num_positions

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epoch and the instance id at each position."""
    epochs, places = self.order.locate(positions)
    return epochs, self._instances(self.order.in_epochs(epochs, places))

  def prepare(self, position: int) -> None:
    """Prepares the order for the epoch of a position, before workers start to read there."""
    self.order.prepare(position)

  def close(self) -> None:
    """Closes the files of the order; the stream remains usable."""
    self.order.close()

  def instance_ids(self, positions: np.ndarray) -> np.ndarray:
    """Returns the instance id (int64) at each position."""
    return self._instances(self.order.at(positions))

  def positions(self, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Returns the position of each instance in an epoch; -1 if the epoch does not have it.

    An instance is missing if it is held out, was consumed before the run, or has a label that the
    mixture does not use. If a mixture repeats an instance within the epoch, this is its first
    position; `visits` returns all.
    """
    places = self.order.places(epoch, self._ranks(rows))
    return np.where(places < 0, -1, places + self.epochs.start(epoch))

  def visits(self, epoch: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all positions of the given instances in an epoch.

    Returns:
      Two arrays with one element per visit: the index into `rows` of the visited instance, and the
      position of the visit.
    """
    which, places = self.order.visits(epoch, self._ranks(rows))
    return which, places + self.epochs.start(epoch)

  def _ranks(self, ids: np.ndarray) -> np.ndarray:
    ids = np.asarray(ids, np.int64)
    return self.split.eval_ranks(ids) if self.held_out else self.split.train_ranks(ids)

  def _instances(self, ranks: np.ndarray) -> np.ndarray:
    return self.split.eval_ids(ranks) if self.held_out else self.split.train_ids(ranks)

  def identity(self) -> dict[str, Any]:
    """Returns the values that determine the instance at each position, except the window length."""
    return {
        "fingerprint": self.fingerprint,
        "order": self.order.name,
        "seed": self.order.seed,
        "split": self.split.identity(),
    }


def train_stream(
    index: index_lib.OlmoNpyIndex,
    *,
    order: str,
    seed: int,
    held_out_instances: int = 0,
    num_epochs: int | None = None,
    cache_dir: str | None = None,
    consumed_path: str = "",
    split: Split | None = None,
    seen: consumed_lib.Consumed | None = None,
) -> Stream:
  """Makes a stream of the training part of a corpus.

  Args:
    index: Index of the corpus.
    order: Name of the order.
    seed: Seed of the order.
    held_out_instances: Number of instances to hold out, if no `split` is given.
    num_epochs: Number of epochs until the end; None for an endless stream.
    cache_dir: Directory of stored orders, and of a local copy of the bitmap.
    consumed_path: Path of the bitmap of instances that the first epoch leaves out.
    split: Split of the corpus; by default, one that holds out `held_out_instances` instances.
    seen: Bitmap of the train chunks that the first epoch leaves out.
  """
  split = split or Split.of_index(index, held_out_instances)
  made = permutations.make_order(
      order,
      num_instances=split.num_train,
      seed=seed,
      chunk_size=split.chunk_size,
      cache_dir=cache_dir,
  )
  if consumed_path:
    if split.chunk_size != 1:
      raise errors.ConfigError(
          "A bitmap of consumed instances (olmo_consumed_path) needs an index with one instance per"
          f" window; this index has {split.chunk_size}. Use an index built without"
          " --max-target-sequence-length."
      )
    bitmap = consumed_lib.Consumed(
        consumed_path,
        fingerprint=index.fingerprint,
        num_instances=index.total_instances,
        cache_dir=cache_dir or stored.default_cache_dir(),
    )
    made = consumed_lib.RemainderOrder(bitmap, made)
  elif seen is not None:
    shuffles = order != permutations.SequentialOrder.name
    made = consumed_lib.RemainderOrder(seen, made, shuffles=shuffles)
  return Stream(index.fingerprint, index.sequence_length, made, split, num_epochs=num_epochs)


def eval_stream(index: index_lib.OlmoNpyIndex, *, held_out_instances: int | None = None) -> Stream:
  """Makes a stream of one epoch for evaluation.

  Args:
    index: Index of the corpus.
    held_out_instances: Number of held-out instances; the stream reads only these. None reads the
      whole corpus.
  """
  held_out = held_out_instances is not None
  split = Split.of_index(index, held_out_instances or 0)
  order = permutations.SequentialOrder(
      num_instances=split.num_eval if held_out else split.num_train,
      seed=0,
      chunk_size=split.chunk_size,
  )
  return Stream(
      index.fingerprint, index.sequence_length, order, split, held_out=held_out, num_epochs=1
  )
