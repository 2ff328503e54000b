"""The stream: which instance each position of a run holds.

A stream joins an order (position → rank) and a split (rank → instance id), and knows where it ends.
Its identity is what a checkpoint must agree with: two streams of equal identity hold the same
instance at every position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import index_changes
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import remainder
from maxtext_olmo.order import split as split_lib

Extent = tuple[int, int, str]  # first epoch, files, fingerprint


@dataclasses.dataclass(frozen=True)
class Stream:
  """Position → instance id.

  Attributes:
    fingerprint: Of the corpus.
    sequence_length: Tokens per instance.
    order: Over the ranks of this stream's part of the split.
    split: Which instances are whose.
    held_out: Whether this is the held-out part.
    num_epochs: Epochs until the stream ends; None for a stream without end.
    history: Where the corpus was extended during the run: `(first epoch, files, fingerprint)` of
      each extent that it has had, the present one last. Empty if it was never extended.
  """

  fingerprint: str
  sequence_length: int
  order: permutations.Order
  split: split_lib.Split
  held_out: bool = False
  num_epochs: int | None = None
  history: tuple[Extent, ...] = ()

  @property
  def endless(self) -> bool:
    """Whether there is no end."""
    return self.num_epochs is None

  @property
  def num_positions(self) -> int | None:
    """The number of samples until the end, or None."""
    return None if self.num_epochs is None else self.order.epochs.start(self.num_epochs)

  def with_history(self, index: index_lib.OlmoNpyIndex, history: Sequence[Extent]) -> Stream:
    """Returns the stream over a corpus that grew during the run; the held-out part stays fixed."""
    lengths = []
    for first_epoch, num_files, _ in history or [(0, len(index.files), index.fingerprint)]:
      windows = index_changes.windows_of_prefix(index, num_files) - self.split.num_held_out
      lengths.append((first_epoch, windows * self.split.chunk_size))
    epochs = epochs_lib.Epochs(tuple(lengths))
    if epochs == self.order.epochs:
      return dataclasses.replace(self, history=tuple(history))
    return dataclasses.replace(self, order=self.order.with_epochs(epochs), history=tuple(history))

  @property
  def drops_tails(self) -> bool:
    """Whether a batch that would cross the end of an epoch starts at the next one."""
    return self.order.drops_tails

  @property
  def epochs(self) -> epochs_lib.Epochs:
    """The lengths of epochs."""
    return self.order.epochs

  def has(self, position: int) -> bool:
    """Returns whether there is an instance at a position."""
    return self.num_positions is None or position < self.num_positions

  def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the epochs and the instance ids at some positions."""
    epochs, places = self.order.locate(positions)
    if not epochs.size or epochs.min() != epochs.max():
      return epochs, self.instance_ids(positions)
    return epochs, self._instances(self.order.ids(int(epochs[0]), places))

  def prepare(self, position: int) -> None:
    """Prepares the order of a position's epoch, before workers are made that read from there."""
    self.order.prepare(position)

  def close(self) -> None:
    """Does nothing: a stream of instances runs nothing in the background."""

  def instance_ids(self, positions: np.ndarray) -> np.ndarray:
    """Returns the instance ids (int64) at some positions."""
    return self._instances(self.order.at(positions))

  def _instances(self, ranks: np.ndarray) -> np.ndarray:
    return self.split.eval_ids(ranks) if self.held_out else self.split.train_ids(ranks)

  def identity(self) -> dict[str, Any]:
    """Returns what determines the instance at each position, apart from the windows' length."""
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
) -> Stream:
  """Makes a stream of the training part of a corpus.

  Args:
    index: The corpus.
    order: Its name.
    seed: Of the order.
    held_out_instances: That training never sees.
    num_epochs: Until the end; None for a stream without one.
    cache_dir: Where stored orders are kept.
    consumed_path: A bitmap of what the first epoch leaves out.
  """
  split = split_lib.Split.of_index(index, held_out_instances)
  made = permutations.make_order(
      order,
      num_instances=split.num_train,
      seed=seed,
      chunk_size=split.chunk_size,
      cache_dir=cache_dir,
  )
  if consumed_path:
    bitmap = consumed_lib.Consumed(
        consumed_path, fingerprint=index.fingerprint, num_instances=index.total_instances
    )
    made = remainder.RemainderOrder(bitmap, made)
  return Stream(
      fingerprint=index.fingerprint,
      sequence_length=index.sequence_length,
      order=made,
      split=split,
      num_epochs=num_epochs,
  )


def eval_stream(index: index_lib.OlmoNpyIndex, *, held_out_instances: int | None = None) -> Stream:
  """Makes one pass over the held-out part of a corpus, or over all of it if that is None."""
  held_out = held_out_instances is not None
  split = split_lib.Split.of_index(index, held_out_instances or 0)
  return Stream(
      fingerprint=index.fingerprint,
      sequence_length=index.sequence_length,
      order=permutations.SequentialOrder(
          num_instances=split.num_eval if held_out else split.num_train,
          seed=0,
          chunk_size=split.chunk_size,
      ),
      split=split,
      held_out=held_out,
      num_epochs=1,
  )
