"""Train and held-out: which instances training may see.

The held-out set is chosen over windows (of `max_target_sequence_length` tokens if the index has
one, otherwise one instance each) by a keyed permutation. Its key, and the number of windows it was
made for, are stored in the index, so files appended later do not move it. Training ranks count the
other instances in corpus order:

    8 windows, held out {2, 5}:   train rank  0 1 2 3 4 5   →  instance  0 1 3 4 6 7
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import feistel


@dataclasses.dataclass(frozen=True)
class Split:
  """The train and held-out instances of a corpus; memory grows with the held-out set alone.

  Attributes:
    num_windows: All windows of the corpus.
    chunk_size: Instances per window.
    num_held_out: Windows that training never sees.
    key: Key of the permutation that chooses them.
    keyed_windows: How many windows, from the first, the permutation chooses from.
  """

  num_windows: int
  chunk_size: int
  num_held_out: int = 0
  key: str = ""
  keyed_windows: int = 0

  @classmethod
  def of_index(cls, index: index_lib.OlmoNpyIndex, held_out_instances: int) -> Split:
    """Holds out that many instances of an index, rounded up to whole windows."""
    windows = -(-held_out_instances // index.chunk_size)
    if held_out_instances < 0 or windows >= index.num_windows or windows > index.split_windows:
      raise errors.ConfigError(
          f"olmo_eval_instances={held_out_instances} cannot be held out of"
          f" {index.total_instances} instances; at least one has to be left for training"
          f" (the split was made over {index.split_windows} windows of {index.chunk_size})."
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
    """Instances that training sees once per epoch."""
    return (self.num_windows - self.num_held_out) * self.chunk_size

  @property
  def num_eval(self) -> int:
    """Held-out instances."""
    return self.num_held_out * self.chunk_size

  @functools.cached_property
  def _held_out(self) -> np.ndarray:
    """Held-out windows in evaluation's order, which is random over the corpus."""
    choose = feistel.Bijection(max(self.keyed_windows, 1), "split", self.key)
    return choose(np.arange(self.num_held_out))

  @functools.cached_property
  def _train_before(self) -> np.ndarray:
    """For each held-out window, ascending, how many train windows lie before it."""
    return np.sort(self._held_out) - np.arange(self.num_held_out)

  def train_ids(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the instance ids of train ranks in [0, num_train)."""
    if self.num_held_out == 0:
      return ranks
    window, rest = np.divmod(ranks, self.chunk_size)
    window = window + np.searchsorted(self._train_before, window, side="right")
    return window * self.chunk_size + rest

  def train_windows_before(self, windows: np.ndarray) -> np.ndarray:
    """Returns how many train windows lie before each of some windows."""
    return windows - np.searchsorted(np.sort(self._held_out), windows)

  def eval_ids(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the instance ids of held-out ranks in [0, num_eval), in evaluation's order."""
    window, rest = np.divmod(ranks, self.chunk_size)
    return self._held_out[window] * self.chunk_size + rest

  def identity(self) -> str:
    """Returns what determines the split, for a checkpoint to compare."""
    if self.num_held_out == 0:
      return "none"
    return f"{self.num_held_out} of {self.keyed_windows} windows, key {self.key}"
