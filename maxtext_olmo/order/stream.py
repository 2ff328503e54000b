"""The stream: which instance each position of a run holds.

A stream joins an order (position → rank) and a split (rank → instance id), and knows where it ends. Its identity is what
a checkpoint must agree with: two streams of equal identity hold the same instance at every position.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import split as split_lib


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
  """

  fingerprint: str
  sequence_length: int
  order: permutations.Order
  split: split_lib.Split
  held_out: bool = False
  num_epochs: int | None = None

  @property
  def num_positions(self) -> int | None:
    """The number of samples until the end, or None."""
    return None if self.num_epochs is None else self.num_epochs * self.order.num_instances

  def instance_ids(self, positions: np.ndarray) -> np.ndarray:
    """The instance ids (int64) at some positions."""
    ranks = self.order.at(positions)
    return self.split.eval_ids(ranks) if self.held_out else self.split.train_ids(ranks)

  def identity(self) -> dict[str, Any]:
    """What decides which instance comes at which position, apart from the length of the windows."""
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
) -> Stream:
  """The training part of a corpus in some order."""
  split = split_lib.Split.of_index(index, held_out_instances)
  return Stream(
      fingerprint=index.fingerprint,
      sequence_length=index.sequence_length,
      order=permutations.make_order(
          order, num_instances=split.num_train, seed=seed, chunk_size=split.chunk_size
      ),
      split=split,
      num_epochs=num_epochs,
  )


def eval_stream(index: index_lib.OlmoNpyIndex, *, held_out_instances: int | None = None) -> Stream:
  """One pass over the held-out part of a corpus, or over all of it where None is held out."""
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
