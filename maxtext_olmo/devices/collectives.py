"""Start-up steps that all processes of a run take as one: they succeed, fail and decide together.

A process that raises while the others wait in a collective leaves them waiting until a heartbeat
times out. Anything that can fail on one process alone, such as opening a file on a mount that is
missing there, therefore runs first, and its outcome is exchanged: all processes continue or none.
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


def run_on_all_processes(act: Callable[[], T], doing: str) -> T:
  """Calls a function on every process; if it fails on one, all raise.

  Args:
    act: The function. It must not communicate with other processes.
    doing: What it does, for the error on the processes where it succeeded: "opening the corpus".
  """
  result: T | None = None
  error: Exception | None = None
  try:
    result = act()
  except Exception as caught:  # The others must learn of any error before it is raised here.
    error = caught
  if jax.process_count() > 1:
    texts = gather(f"{type(error).__name__}: {error}" if error else "")
    failed = [process for process, text in enumerate(texts) if text]
    if failed and error is None:
      raise errors.MaxtextOlmoError(
          f"Process {failed[0]} of {len(texts)} failed while {doing}, so all processes stop:"
          f" {texts[failed[0]]}"
      )
  if error is not None:
    raise error
  return result  # type: ignore[return-value]


def from_process_0(decide: Callable[[], Any], doing: str) -> Any:
  """Returns what a function returns on process 0, on every process; if it fails there, all raise.

  Args:
    decide: The function, called on process 0 alone. Its result must be a JSON value.
    doing: What it does, for the error on the other processes: "looking for checkpoints".
  """
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
    raise errors.MaxtextOlmoError(
        f"Process 0 failed while {doing}, so all processes stop: {outcome['error']}"
    )
  return outcome["value"]


def check_equal(values: Mapping[str, Any]) -> None:
  """Raises ConfigError on every process unless all processes pass the same values."""
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
          f"Processes 0 and {process} would read different streams: {differing} (process 0 first)."
          " Give all processes the same index and config."
      )


def gather(text: str) -> list[str]:
  """Returns the texts of all processes, in process order."""
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = np.asarray(multihost_utils.process_allgather(np.int32(data.size))).reshape(-1)
  padded = np.zeros(max(1, int(sizes.max())), np.uint8)
  padded[: data.size] = data
  rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
  return [row[:size].tobytes().decode() for row, size in zip(rows, sizes)]
