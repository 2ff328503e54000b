"""Stages of a run: from some position on, another mixture, order, seed or corpus.

    stage            0: web and code by weight     1: twice the code      2: another index
    positions        0 … 3999                      4000 … 7999            8000 …
    its own          0 … 3999                      0 … 3999               0 …

Positions count the samples of the whole run, and each stage is a stream of its own that begins at
its first position. Epochs are numbered over the run: those of a stage follow those of the stages
before it, and an epoch that a new stage cuts off keeps its number.

Mixtures of one corpus, order and seed share the streams of their labels: each label continues where
the stages before left it, which is a sum of closed forms. With `leave_out_seen`, the first epoch of
a stage (for a mixture, of each label) leaves out what the run has seen in any stage before it, by a
bitmap (`seen`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from maxtext_olmo import schema
from maxtext_olmo.order import permutations

SCHEMA: dict[str, Any] = {
    "position": schema.Count(),
    "request": str,
    "order": str,
    "seed": int,
    "fingerprint": str,
    "index_path": str,
    "mixture": schema.Maybe(dict),
    "unit": str,
    "leave_out_seen": bool,
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What decides the rows of a stage.

  Attributes:
    order: The name of the order.
    seed: The seed of the order.
    fingerprint: Of the corpus.
    index_path: Where its index was; no part of what is compared.
    mixture: `(label or pattern, value)` pairs, by name; empty for the corpus as it is.
    unit: The unit of the values.
    leave_out_seen: Whether the first epoch leaves out what the run has seen.
  """

  order: str
  seed: int
  fingerprint: str
  index_path: str = dataclasses.field(default="", compare=False, repr=False)
  mixture: tuple[tuple[str, float], ...] = ()
  unit: str = ""
  leave_out_seen: bool = False

  @property
  def shares_labels(self) -> tuple[str, str, int]:
    """What two mixtures have in common if the labels of one continue in the other."""
    return self.fingerprint, self.order, self.seed

  def differences(self, other: Settings) -> list[str]:
    """Returns what differs, in words, by the names of the config's keys."""
    values = [
        {
            "olmo_index_path": f"{settings.index_path} ({settings.fingerprint})",
            "olmo_order": settings.order,
            "data_shuffle_seed": settings.seed,
            "olmo_mixture": dict(settings.mixture),
            "olmo_mixture_unit": settings.unit,
            "leave_out_seen": settings.leave_out_seen,
        }
        for settings in (self, other)
    ]
    if self.fingerprint == other.fingerprint:
      del values[0]["olmo_index_path"]
    return [
        f"{name}: {value!r} then, {values[1][name]!r} now"
        for name, value in values[0].items()
        if value != values[1][name]
    ]

  def describe(self, before: Settings) -> str:
    """Returns the settings in a few words; the index only if it is another one than before."""
    what = f"{self.order} order, seed {self.seed}"
    if self.mixture:
      shares = ", ".join(f"{name}={value:g}" for name, value in self.mixture)
      what = f"mixture by {self.unit} ({shares}), {what}"
    if self.leave_out_seen:
      what += ", without what was seen"
    return what if self.fingerprint == before.fingerprint else f"index {self.index_path}, {what}"


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage, as the history of a run keeps it.

  Attributes:
    position: Its first position in the run.
    request: What was asked for, such as `step 1000`; the same request is never converted twice.
      Empty for the stage that a run begins with.
    settings: What decides its rows.
  """

  position: int
  request: str
  settings: Settings

  @property
  def name(self) -> str:
    """The stage in words, for messages."""
    return f"the stage from {self.request} on" if self.request else "the first stage"

  def to_json(self) -> dict[str, Any]:
    """Returns the stage as a JSON-able dict."""
    values = dataclasses.asdict(self.settings)
    return {
        "position": self.position,
        "request": self.request,
        **values,
        "mixture": dict(self.settings.mixture) or None,
    }

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> Stage:
    """Returns the stage of a dict that `to_json` made and `SCHEMA` describes."""
    mixture = values.get("mixture") or {}
    if not all(type(value) in (int, float) and 0 < value < 2**64 for value in mixture.values()):
      raise schema.damaged(f"the mixture of a stage is {schema.show(mixture)}")
    if values["order"] not in permutations.order_names():
      raise schema.damaged(f"a stage has the order {schema.show(values['order'])}")
    names = ("order", "seed", "fingerprint", "index_path", "unit", "leave_out_seen")
    return cls(
        position=values["position"],
        request=values["request"],
        settings=Settings(mixture=mixture_pairs(mixture), **{name: values[name] for name in names}),
    )


def mixture_pairs(mixture: dict[str, float]) -> tuple[tuple[str, float], ...]:
  """Returns a mixture as settings keep it."""
  return tuple(sorted((str(name), float(value)) for name, value in mixture.items()))
