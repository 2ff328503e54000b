"""The history of a run as a file in its directory, for checkpoints that hold only a step.

    checkpoint_dir/olmo_history.jsonl      one line per change: a history entry, as JSON

A data state holds the run's position and history, so a checkpoint with a data state does not need
this file. With this file, a trainer that saves only a step (MaxText, a loop of your own) can also
resume exactly: step + history → position.

When process 0 starts to read batches, it appends a line if anything has changed. A line replaces
all earlier entries at or after its step, so a run that returns to an earlier step adds a line for
that step. A process that is killed while it writes may leave an incomplete last line. This line is
ignored, because no batch had been read with its settings. Any other damage raises ResumeError when
the file is needed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any

from absl import logging
from etils import epath

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.loader import run_files
from maxtext_olmo.loader import state_format
from maxtext_olmo.order import timeline

NAME = "olmo_history.jsonl"


def state_at(checkpoint_dir: str | os.PathLike[str], step: int) -> dict[str, Any] | None:
  """Returns the data state after `step` steps of the run in a directory, or None if unknown.

  It is the state that a checkpoint after these steps would hold. If the run restarted at `step` or
  later, the changes made then are left out, unless the history itself begins at `step`.

  Raises:
    ResumeError: The file cannot be read, or is damaged.
  """
  path = epath.Path(checkpoint_dir) / NAME
  history, _ = _read(path)
  if history is not None:
    history = history.until(step - 1) or history.until(step)
  if history is None:
    return None
  try:
    position = history.present.schedule.position(step)
  except errors.OrderError as error:
    raise _damaged(path, error) from error
  return {
      "format": state_format.FORMAT,
      "kind": state_format.KIND,
      "step": step,
      "position": position,
      "history": history.to_json(),
  }


def record(checkpoint_dir: str | os.PathLike[str], history: timeline.Timeline, step: int) -> None:
  """Calls `write`, and only logs a warning if it fails.

  The run may continue: checkpoints with a data state do not need the file.
  """
  try:
    write(checkpoint_dir, history, step)
  except (errors.WriteError, errors.ResumeError) as error:
    logging.warning(
        "The history of the run cannot be written (%s). Checkpoints with a data state resume as"
        " usual; a checkpoint without one resumes by its step alone.",
        error,
    )


def write(checkpoint_dir: str | os.PathLike[str], history: timeline.Timeline, step: int) -> None:
  """Updates the file to the history of a run that continues at `step`, by appending lines.

  Only process 0 may call this function.

  Raises:
    ResumeError: The file cannot be read, or is damaged.
    WriteError: The file cannot be written.
  """
  path = epath.Path(checkpoint_dir) / NAME
  now = history.present
  here = dataclasses.replace(now, step=step, position=now.schedule.position(step))
  before, whole = _read(path)
  wanted = _changed(before, (*history.entries, here))
  if wanted == before:
    return
  # Append as few lines as possible.
  ways = ((here,), history.entries, (*history.entries, here))
  lines = next(entries for entries in ways if _changed(before, entries) == wanted)
  text = "".join(json.dumps(entry.to_json()) + "\n" for entry in lines)
  with atomic.write_errors(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    _append(path, whole, text.encode())


def _read(path: epath.Path) -> tuple[timeline.Timeline | None, bytes]:
  """Returns the history in a file, and the bytes of all its complete lines."""
  try:
    if not path.exists():
      return None, b""
    content = run_files.read(path)
  except OSError as error:
    raise _damaged(path, error) from error
  whole = content[: content.rfind(b"\n") + 1]
  history = None
  for number, line in enumerate(whole.splitlines(), 1):
    try:
      history = _changed(history, timeline.Timeline.from_json([json.loads(line)]).entries)
    except (ValueError, RecursionError) as error:  # A ResumeError is a ValueError.
      raise _damaged(path, f"line {number}: {error}") from error
  return history, whole


def _changed(
    history: timeline.Timeline | None, entries: Iterable[timeline.Entry]
) -> timeline.Timeline | None:
  for entry in entries:
    history = timeline.Timeline((entry,)) if history is None else history.changed(entry)
  return history


def _append(path: epath.Path, whole: bytes, more: bytes) -> None:
  """Appends lines to a file, and replaces an incomplete last line."""
  if "://" in str(path):  # Object stores cannot append.
    path.write_bytes(whole + more)
    return
  descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
  with open(descriptor, "wb") as file:
    file.seek(len(whole))
    file.truncate()
    file.write(more)
    file.flush()
    os.fsync(file.fileno())


def _damaged(path: epath.Path, what: Any) -> errors.ResumeError:
  return errors.ResumeError(
      f"The history of the run in {path} is damaged: {what}. Restore it from a copy, or move it"
      " away and set initial_step and olmo_initial_position to where the run resumes."
  )
