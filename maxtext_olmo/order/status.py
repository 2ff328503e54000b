"""The status of a run, as returned by an iterator's `describe()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxtext_olmo import english


@dataclasses.dataclass(frozen=True, repr=False)
class RunStatus:
  """The progress of a run and the identity of its stream; prints as a short text.

  >>> RunStatus(step=200, position=1600, tokens=409600, epoch=1, identity={"seed": 7})
  200 steps done: 1,600 samples, 409,600 tokens
  next: step 200, position 1,600, epoch 1
  stream: seed 7

  Attributes:
    step: Number of steps done, which is also the number of the next step.
    position: Number of samples consumed or skipped, over all hosts.
    tokens: Number of tokens in the consumed samples, including padding but not skipped samples.
    epoch: Epoch of the next sample; None after the last sample, or if epochs are not counted.
    identity: Values that decide which row is at which position: corpus, order, seed, split.
    skipped: Number of samples before the position that olmo_skip left out.
  """

  step: int
  position: int
  tokens: int
  epoch: int | None
  identity: Mapping[str, Any]
  skipped: int = 0

  def __str__(self) -> str:
    epoch = "" if self.epoch is None else f", epoch {self.epoch}"
    taken = self.position - self.skipped
    skipped = f" ({english.count(self.skipped, 'sample')} skipped)" if self.skipped else ""
    return "\n".join(
        (
            f"{self.step:,} steps done: {taken:,} samples, {self.tokens:,} tokens{skipped}",
            f"next: step {self.step:,}, position {self.position:,}{epoch}",
            "stream: " + ", ".join(f"{name} {value}" for name, value in self.identity.items()),
        )
    )

  __repr__ = __str__  # So that a notebook shows the text.
