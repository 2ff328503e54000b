"""The processes of a run act as one at its start: they fail together, decide together, and compare what they were told.

A process that raises while the others wait in a collective leaves them waiting until a heartbeat runs out. So whatever may fail
on one process alone, such as a mount that is missing there, is done first and told to all, and all go on or none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext_olmo import errors

T = TypeVar("T")


def together(act: Callable[[], T], doing: str) -> T:
  """Does something on every process; where it fails on one, all raise.

  Args:
    act: What to do; it must not communicate.
    doing: What that is, for the processes on which it went well.
  """
  result: T | None = None
  error: Exception | None = None
  try:
    result = act()
  except Exception as caught:  # Whatever it is, the others must hear of it before it is raised.
    error = caught
  if jax.process_count() > 1:
    texts = gather(f"{type(error).__name__}: {error}" if error else "")
    failed = [process for process, text in enumerate(texts) if text]
    if failed and error is None:
      raise errors.MaxtextOlmoError(
          f"Process {failed[0]} of {len(texts)} failed while {doing}, so all stop. It says:"
          f" {texts[failed[0]]}"
      )
  if error is not None:
    raise error
  return result  # type: ignore[return-value]


def from_process_0(decide: Callable[[], Any]) -> Any:
  """What process 0 decides, a JSON value, on every process; its failure is raised on all."""
  outcome: dict[str, Any] = {}
  error: Exception | None = None
  if jax.process_index() == 0:
    try:
      outcome = {"value": decide()}
    except Exception as caught:  # As above.
      error = caught
      outcome = {"error": f"{type(caught).__name__}: {caught}"}
  if jax.process_count() > 1:
    data = np.frombuffer(json.dumps(outcome).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    outcome = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
  if error is not None:
    raise error
  if "error" in outcome:
    raise errors.ResumeError(
        f"Process 0 could not decide where the run goes on: {outcome['error']}"
    )
  return outcome["value"]


def check_equal(values: Mapping[str, Any]) -> None:
  """Raises on every process where they do not all have the same values, before any data flows."""
  if jax.process_count() == 1:
    return
  texts = gather(json.dumps(values, sort_keys=True))
  first = json.loads(texts[0])
  for process, text in enumerate(texts):
    if text != texts[0]:
      other = json.loads(text)
      differing = {
          k: (first.get(k), other.get(k)) for k in {*first, *other} if first.get(k) != other.get(k)
      }
      raise errors.ConfigError(
          f"Processes 0 and {process} would read different streams: {differing} (process 0 first). Give all processes"
          " the same index and config."
      )


def gather(text: str) -> list[str]:
  """The texts of all processes, in their order."""
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = np.asarray(multihost_utils.process_allgather(np.int32(data.size))).reshape(-1)
  padded = np.zeros(max(1, int(sizes.max())), np.uint8)
  padded[: data.size] = data
  rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
  return [row[:size].tobytes().decode() for row, size in zip(rows, sizes)]
