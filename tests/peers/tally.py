"""Counts what was compared with the real OLMo-core, and how much of it differs, for each kind."""

import collections
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

# `PEER_SEED` repeats a run; without it, each run draws other cases.
SEED = int(os.environ.get("PEER_SEED", random.SystemRandom().randrange(10**9)))
HEAD = ("kind", "cases", "rows", "differing rows", "other values", "differing")

_counts: dict[str, collections.Counter[str]] = {}


def num_cases(default: int) -> int:
  """Returns the number of cases of a kind, which `PEER_CASES` sets for all kinds."""
  return int(os.environ.get("PEER_CASES", default))


def case(kind: str) -> None:
  """Counts a case."""
  _of(kind)["cases"] += 1


def compare_rows(kind: str, *pairs: tuple[Sequence[Any], Sequence[Any]]) -> None:
  """Counts rows, and raises AssertionError if one differs.

  Args:
    kind: Kind of the case.
    *pairs: Ours and theirs of each array of a batch, with the same number of rows.
  """
  differs = np.zeros(len(pairs[0][0]), np.bool_)
  for ours, theirs in pairs:
    if len(ours) != len(differs) or len(theirs) != len(differs):
      raise AssertionError(f"{kind}: {len(ours)} rows, but OLMo-core has {len(theirs)}.")
    differs |= [not np.array_equal(one, other) for one, other in zip(ours, theirs)]
  counts = _of(kind)
  counts["rows"] += len(differs)
  counts["differing rows"] += int(differs.sum())
  if differs.any():
    row = int(np.argmax(differs))
    shown = "; ".join(f"{ours[row]} and {theirs[row]}" for ours, theirs in pairs)
    raise AssertionError(f"{kind}: row {row} of a batch differs: {shown}")


def compare(kind: str, ours: Any, theirs: Any) -> None:
  """Counts another value, such as a fingerprint, and raises AssertionError if it differs."""
  counts = _of(kind)
  counts["other values"] += 1
  if ours != theirs:
    counts["differing"] += 1
    raise AssertionError(f"{kind}: {ours}, but OLMo-core has {theirs}.")


def total(column: str) -> int:
  """Returns the sum of a column."""
  return sum(counts[column] for counts in _counts.values())


def rows() -> list[tuple[str, ...]]:
  """Returns the rows of a table with `HEAD`, the sum last."""
  found = [(kind, *(f"{counts[name]:,}" for name in HEAD[1:])) for kind, counts in _counts.items()]
  return [*found, ("all", *(f"{total(name):,}" for name in HEAD[1:]))]


def _of(kind: str) -> collections.Counter[str]:
  return _counts.setdefault(kind, collections.Counter())
