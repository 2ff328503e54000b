"""Stages of a run, which change its mixture, order, seed or corpus from a position on.

    stage            0: web and code by weight     1: twice the code      2: another index
    positions        0 … 3999                      4000 … 7999            8000 …
    within stage     0 … 3999                      0 … 3999               0 …

Positions count the samples of the whole run, and each stage is a separate stream that begins at its
first position. Each stage counts its epochs from 0, and may end in the middle of an epoch.

Mixtures with the same corpus, order and seed share the streams of their labels: each label
continues where earlier stages left it. That place is computed by a formula, without reading the
earlier stages.

With `leave_out_seen`, the first epoch of a stage leaves out the samples that the run has seen in
any earlier stage, which a bitmap records (`seen`). In a mixture, the first epoch of each label
leaves them out.
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
    mixture: `(label or pattern, value)` pairs, sorted by name; empty without a mixture.
    unit: Unit of the values.
    leave_out_seen: Whether the first epoch leaves out samples that the run has seen.
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
    """True if no batch of the stage may span two epochs."""
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
      what += ", without samples already seen"
    return what if self.fingerprint == before.fingerprint else f"index {self.index_path}, {what}"


@dataclasses.dataclass(frozen=True)
class Stage:
  """A stage, as recorded in the history of a run.

  Attributes:
    position: First position of the stage in the run.
    request: Text of the request, such as `step 1000`. On resume, a request that is in the run's
      history is not converted to a position again. Empty for the stage that a run begins with.
    settings: Settings that decide its rows.
    shared: `(fingerprint, digest)` pairs, one for each earlier index that affects which rows the
      stage leaves out. The digest identifies the files that the earlier index shares with the
      stage's index. Files are matched by full path, which a fingerprint does not include.
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
      raise schema.damaged(
          f"the mixture of a stage is {schema.show(mixture)}, expected positive numbers"
      )
    if values["order"] not in permutations.order_names():
      raise schema.damaged(f"a stage has the unknown order {schema.show(values['order'])}")
    shared = values.get("shared") or {}
    if not all(isinstance(digest, str) for digest in shared.values()):
      raise schema.damaged(
          f"the shared files of a stage are {schema.show(shared)}, expected a digest for each"
      )
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
