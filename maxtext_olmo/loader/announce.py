"""Logs where a run starts or resumes in its data, so that runs can be compared by eye."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.order import staged_stream

_SHOWN_ROWS = 4


def announce(name: str, iterator: Any) -> None:
  """Logs the step, position and first rows of an iterator that is about to read.

  Args:
    name: Name of the dataset type.
    iterator: A `BatchIterator`.
  """
  stream, position = iterator.stream, iterator.position
  number_at = getattr(stream, "number_at", None)
  stage = 0 if number_at is None else number_at(position)
  in_force = stream if number_at is None else stream.stream(stage)
  where, rows = "the end of the data", list[int]()
  # At the end of the data, the remaining rows may be too few for a batch.
  with contextlib.suppress(errors.OrderError):
    rows = iterator.row_numbers(iterator.step)[:_SHOWN_ROWS].tolist()
    where = place(stream, position)
  logging.info(
      "%s: step %d at position %d (%s), first instances %s, %s",
      name,
      iterator.step,
      position,
      where,
      rows,
      ", ".join(f"{k} {_short(v)}" for k, v in in_force.identity().items()),
  )
  for skip in iterator.history.present.skips:
    if skip.end > position:
      what = "without loss" if skip.mode == "mask" else "skipped"
      logging.info("%s: positions %d to %d are %s.", name, skip.first, skip.end - 1, what)
  stages = getattr(stream, "stages", ())
  for number, one in enumerate(stages):
    if number >= stage:
      logging.info(
          "%s: stage %d %s position %d: %s.",
          name,
          number,
          "has been in force since" if number == stage else "begins at",
          one.position,
          one.settings.describe(stages[max(0, number - 1)].settings),
      )


def place(stream: Any, position: int) -> str:
  """Returns the stage of a position, its epoch, and its place in the epoch, as text."""
  found = staged_stream.place_of(stream, position)
  stage = "" if found.stage is None else f"stage {found.stage}, "
  place = "" if found.length is None else f", place {found.place} of {found.length}"
  return f"{stage}epoch {found.epoch}{place}"


def _short(value: Any) -> str:
  """Returns a value as text, with long hashes shortened."""
  return re.sub(r"([0-9a-f]{10})[0-9a-f]{20,}", r"\1…", str(value))
