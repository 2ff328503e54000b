"""Stages of a run, which change its mixture, order, seed or corpus from a position on.

    stage            0: web and code by weight     1: twice the code      2: another index
    positions        0 … 3999                      4000 … 7999            8000 …
    within stage     0 … 3999                      0 … 3999               0 …

Positions count the samples of the whole run, and each stage is a separate stream that begins at its
first position. Epochs are numbered over the run: those of a stage follow those of the stages before
it, and an epoch that a new stage cuts short keeps its number.

Mixtures with the same corpus, order and seed share the streams of their labels: each label
continues where earlier stages left it, which a closed form computes. With `leave_out_seen`, the
first epoch of a stage (for a mixture, of each label) leaves out what the run has seen in any
earlier stage, using a bitmap (`seen`).
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
    "documents": schema.Maybe(str),
    "shared": schema.Maybe(dict),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that decide the rows of a stage.

  Attributes:
    order: Name of the order.
    seed: Seed of the order.
    fingerprint: Fingerprint of the corpus.
    index_path: Path of the index; ignored in comparisons.
    mixture: `(label or pattern, value)` pairs, sorted by name; empty for the corpus as it is.
    unit: Unit of the values.
    leave_out_seen: Whether the first epoch leaves out what the run has seen.
    documents: Checksum of the documents that rows are made of; empty for windows.
  """

  order: str
  seed: int
  fingerprint: str
  index_path: str = dataclasses.field(default="", compare=False, repr=False)
  mixture: tuple[tuple[str, float], ...] = ()
  unit: str = ""
  leave_out_seen: bool = False
  documents: str = ""

  @property
  def shares_labels(self) -> tuple[str, str, int]:
    """A key that is equal for two mixtures if the labels of one continue in the other."""
    return self.fingerprint, self.order, self.seed

  @property
  def drops_tails(self) -> bool:
    """Whether no batch of the stage spans two epochs."""
    return not self.mixture and permutations.order_class(self.order).drops_tails

  def differences(self, other: Settings) -> list[str]:
    """Returns a text for each difference, with the names of the config keys."""
    values = [
        {
            "olmo_index_path": f"{settings.index_path} ({settings.fingerprint})",
            "olmo_order": settings.order,
            "data_shuffle_seed": settings.seed,
            "olmo_mixture": dict(settings.mixture),
            "olmo_mixture_unit": settings.unit,
            "leave_out_seen": settings.leave_out_seen,
            "the document index": settings.documents,
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
    """Returns the settings in a few words; includes the index only if it differs from `before`."""
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
    position: First position of the stage in the run.
    request: Text of the request, such as `step 1000`; the same request is never converted twice.
      Empty for the stage that a run begins with.
    settings: Settings that decide its rows.
    shared: `(fingerprint, digest)` pairs: for each earlier index that decides which rows the stage
      leaves out, a digest of the files that it shares with the stage's index. Full paths decide
      this, and they are no part of a fingerprint.
  """

  position: int
  request: str
  settings: Settings
  shared: tuple[tuple[str, str], ...] = ()

  @property
  def name(self) -> str:
    """A description of the stage for messages."""
    return f"the stage from {self.request} on" if self.request else "the first stage"

  def to_json(self) -> dict[str, Any]:
    """Returns the stage as a JSON-able dict."""
    values = dataclasses.asdict(self.settings)
    if not self.settings.documents:
      del values["documents"]
    return {
        "position": self.position,
        "request": self.request,
        **values,
        "mixture": dict(self.settings.mixture) or None,
        **({"shared": dict(self.shared)} if self.shared else {}),
    }

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> Stage:
    """Returns the stage from a dict that `to_json` made and that matches `SCHEMA`."""
    mixture = values.get("mixture") or {}
    if not all(type(value) in (int, float) and 0 < value < 2**64 for value in mixture.values()):
      raise schema.damaged(f"the mixture of a stage is {schema.show(mixture)}")
    if values["order"] not in permutations.order_names():
      raise schema.damaged(f"a stage has the order {schema.show(values['order'])}")
    shared = values.get("shared") or {}
    if not all(isinstance(digest, str) for digest in shared.values()):
      raise schema.damaged(f"the shared files of a stage are {schema.show(shared)}")
    names = ("order", "seed", "fingerprint", "index_path", "unit", "leave_out_seen")
    return cls(
        position=values["position"],
        request=values["request"],
        settings=Settings(
            mixture=mixture_pairs(mixture),
            documents=values.get("documents") or "",
            **{name: values[name] for name in names},
        ),
        shared=tuple(shared.items()),
    )


def mixture_pairs(mixture: dict[str, float]) -> tuple[tuple[str, float], ...]:
  """Returns a mixture in the form of `Settings.mixture`."""
  return tuple(sorted((str(name), float(value)) for name, value in mixture.items()))
