"""Which loaders are measured, and at which of their settings."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A loader, and the ways in which it is measured.

  Attributes:
    name: As tables have it.
    group: `limit`, `ours` or `peer`.
    loader: What the measured process opens.
    kind: The interpreter that it needs.
    base: What its spec says beside corpus, batch and length.
    settings: Titles and specs of the settings that are tried, the one expected to be best first.
    filters: With the repetition filter, without it, or both.
    documents: With the document mask, without it, or both.
    threads: How many cores it may use for the work.
    everywhere: Whether it is measured at every size, or at the main one alone.
  """

  name: str
  group: str
  loader: str
  kind: str = "own"
  base: dict[str, Any] = dataclasses.field(default_factory=dict)
  settings: tuple[tuple[str, dict[str, Any]], ...] = (("", {}),)
  filters: tuple[bool, ...] = (False,)
  documents: tuple[bool, ...] = (False,)
  threads: int = 1
  everywhere: bool = True

  @property
  def device(self) -> bool:
    """Whether it delivers arrays on devices."""
    return self.base.get("way") == "device"

  def spec(self, setting: dict[str, Any], *, filter: bool, documents: bool) -> dict[str, Any]:
    """What the measured process is told beside corpus, batch and length."""
    defaults = {
        "loader": self.loader,
        "workers": 0,
        "threads": 0,
        "read_threads": 0,
        "way": "inline",
        "arrays": 1,
    }
    return {**defaults, **self.base, **setting, "filter": filter, "documents": documents}


def _workers(*counts: int) -> tuple[tuple[str, dict[str, Any]], ...]:
  titles = {0: "in process", 1: "1 worker", 2: "2 workers"}
  return tuple((titles[count], {"workers": count}) for count in counts)


LIMIT = Candidate("copy limit, 1 array", "limit", "limit")
INLINE = Candidate("this library, inline", "ours", "ours", filters=(True, False), threads=2)
# By the thread that asks alone.
ALONE = dataclasses.replace(
    INLINE,
    name="this library, inline, one thread",
    base={"read_threads": 1},
    threads=1,
    everywhere=False,
)
PREFETCH = Candidate(
    "this library, threads ahead",
    "ours",
    "ours",
    base={"way": "prefetch"},
    filters=(True, False),
    threads=2,
)
DEVICE = Candidate(
    "this library, on devices",
    "ours",
    "ours",
    base={"way": "device"},
    filters=(True, False),
    documents=(False, True),
    threads=2,
)
FORMED = Candidate(
    "its rows, MaxText's way of forming",
    "peer",
    "formed",
    base={"way": "device"},
    filters=(True, False),
    threads=2,
    everywhere=False,
)
MAXTEXT = Candidate(
    "MaxText olmo_grain",
    "peer",
    "maxtext",
    kind="maxtext",
    settings=_workers(2, 0, 1),
    filters=(True, False),
    threads=2,
)
MAXTEXT_DEVICE = dataclasses.replace(
    MAXTEXT, name="MaxText olmo_grain, on devices", base={"way": "device"}, everywhere=False
)
OLMO_CORE = Candidate(
    "OLMo-core",
    "peer",
    "olmo_core",
    kind="peers",
    settings=(*_workers(2, 1), ("4 threads", {"threads": 4}), ("in process", {"threads": 0})),
    filters=(True, False),
    threads=2,
)
# Not a loader as it comes: what a careful user may write, and the hardest to beat, since it does nothing but copy.
BY_HAND = Candidate(
    "torch DataLoader, batches by hand",
    "peer",
    "torch_batches",
    kind="peers",
    settings=_workers(0, 2, 1),
    threads=2,
    everywhere=False,
)
CANDIDATES: tuple[Candidate, ...] = (
    LIMIT,
    Candidate("copy limit, 2 arrays", "limit", "limit", base={"arrays": 2}, everywhere=False),
    Candidate("copy limit, 6 arrays", "limit", "limit", base={"arrays": 6}, everywhere=False),
    INLINE,
    ALONE,
    PREFETCH,
    dataclasses.replace(
        PREFETCH,
        name="this library, 1 worker",
        base={"way": "prefetch", "workers": 1},
        everywhere=False,
    ),
    dataclasses.replace(
        PREFETCH,
        name="this library, 2 workers",
        base={"way": "prefetch", "workers": 2},
        everywhere=False,
    ),
    DEVICE,
    FORMED,
    MAXTEXT,
    MAXTEXT_DEVICE,
    OLMO_CORE,
    Candidate(
        "Grain Dataset over memmap",
        "peer",
        "grain",
        settings=(
            *_workers(2, 1),
            ("16 threads", {"threads": 16}),
            ("2 threads", {"threads": 2}),
            ("in process", {"threads": 0}),
        ),
        threads=2,
    ),
    Candidate(
        "Grain DataLoader over memmap",
        "peer",
        "grain_loader",
        settings=_workers(2, 0, 1),
        threads=2,
        everywhere=False,
    ),
    Candidate(
        "torch DataLoader over memmap",
        "peer",
        "torch",
        kind="peers",
        settings=_workers(0, 2, 1),
        threads=2,
    ),
    BY_HAND,
    Candidate(
        "mosaicml-streaming",
        "peer",
        "streaming",
        kind="peers",
        settings=_workers(2, 0, 1),
        threads=2,
    ),
    Candidate("litdata", "peer", "litdata", kind="peers", settings=_workers(0, 2, 1), threads=2),
)
SIZES = ((16, 2048), (64, 2048), (256, 2048), (16, 8192), (64, 8192), (256, 8192))
MAIN = (64, 8192)
