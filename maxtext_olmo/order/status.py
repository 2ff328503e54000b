"""Where a run stands, as `describe()` of an iterator returns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, repr=False)
class RunStatus:
  """Where a run stands; as text, one line per fact.

  >>> RunStatus(step=200, position=1600, tokens=409600, epoch=1, identity={"seed": 7})
  200 steps done: 1,600 samples, 409,600 tokens
  next: step 200, position 1,600, epoch 1
  stream: seed 7

  Attributes:
    step: Steps done, which is also the number of the next step.
    position: Samples consumed, over all hosts.
    tokens: Tokens of these samples, padding included.
    epoch: The epoch of the next sample; None after the last one, or if epochs are not counted.
    identity: What decides which row is at which position: corpus, order, seed, split.
  """

  step: int
  position: int
  tokens: int
  epoch: int | None
  identity: Mapping[str, Any]

  def __str__(self) -> str:
    epoch = "" if self.epoch is None else f", epoch {self.epoch}"
    return "\n".join(
        (
            f"{self.step:,} steps done: {self.position:,} samples, {self.tokens:,} tokens",
            f"next: step {self.step:,}, position {self.position:,}{epoch}",
            "stream: " + ", ".join(f"{name} {value}" for name, value in self.identity.items()),
        )
    )

  __repr__ = __str__  # So that a notebook shows the text.
