"""Collective operations, in which all processes of a run succeed, fail and decide together.

A process that raises while the others wait in a collective leaves them waiting until a heartbeat
times out. Anything that can fail on one process alone, such as opening a file on a mount that is
missing there, therefore runs first, and its outcome is exchanged: all processes continue or none.

The same holds for batches, since each host sees only its own. Before any host uses a batch, all
hosts exchange their status as a few integers and reach the same decision:

    process 0      process 1
    (2, 128)       (2, 128)        continue
    (2, 128)       (1, 128)        pad to (2, 128), or an error on both that names both shapes
    (2, 128)       out of data     an error on both that names process 1
    out of data    out of data     the end of the data on both

The exchange is an all-gather on the devices, so it waits for the steps dispatched before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext_olmo import errors

T = TypeVar("T")


def run_on_all_processes(act: Callable[[], T], doing: str) -> T:
  """Calls a function on every process; if it fails on one, all raise.

  Args:
    act: Function to call. It must not communicate with other processes.
    doing: What the function does, such as "opening the corpus". If it fails on one process, the
      processes on which it succeeded raise an error that includes this text.
  """
  result: T | None = None
  error: Exception | None = None
  try:
    result = act()
  except Exception as caught:  # The others must learn of any error before it is raised here.
    error = caught
  if jax.process_count() > 1:
    texts = gather(errors.describe(error) if error else "")
    failed = [process for process, text in enumerate(texts) if text]
    if failed and error is None:
      who = f"Process {failed[0]} of {len(texts)}"
      text = texts[failed[0]]
      raise errors.from_peer(text, f"{who} failed while {doing}, so all processes stop: {text}")
  if error is not None:
    raise error
  return result  # type: ignore[return-value]


def from_process_0(decide: Callable[[], T], doing: str) -> T:
  """Calls a function on process 0 and returns its result on every process; if it fails, all raise.

  Args:
    decide: Function to call on process 0 alone. Its result must be a JSON value.
    doing: What the function does, such as "looking for checkpoints". If it fails, the other
      processes raise an error that includes this text.
  """
  outcome: dict[str, Any] = {}
  error: Exception | None = None
  if jax.process_index() == 0:
    try:
      outcome = {"value": decide()}
    except Exception as caught:  # The others must learn of any error before it is raised here.
      error = caught
      outcome = {"error": errors.describe(caught)}
  if jax.process_count() > 1:
    data = np.frombuffer(json.dumps(outcome).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    outcome = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
  if error is not None:
    raise error
  if "error" in outcome:
    text = outcome["error"]
    raise errors.from_peer(text, f"Process 0 failed while {doing}, so all processes stop: {text}")
  return outcome["value"]


def check_equal(values: Mapping[str, Any]) -> None:
  """Raises ConfigError on every process unless all processes pass the same values."""
  if jax.process_count() == 1:
    return
  own = json.dumps(values, sort_keys=True)
  # Digests first: the texts of thousands of processes would take megabytes.
  digests = _gather(np.frombuffer(hashlib.sha256(own.encode()).digest(), np.int32))
  if (digests == digests[0]).all():
    return
  texts = gather(own)
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


_READY, _OUT, _FAILED = 0, 1, 2
_MESSAGE_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class LocalBatch:
  """One host's batch for a step: named arrays, or the exception raised while loading them."""

  names: tuple[str, ...] = ()
  arrays: tuple[np.ndarray, ...] = ()
  structure: Any = None
  trouble: Exception | None = None  # StopIteration if the host's data has ended.

  @property
  def status(self) -> int:
    if self.trouble is None:
      return _READY
    return _OUT if isinstance(self.trouble, StopIteration) else _FAILED

  @property
  def kind(self) -> str:
    """The name, dtype and rank of each array, and the structure of the batch, as text."""
    leaves = [f"{n}: {a.dtype}, {a.ndim} axes" for n, a in zip(self.names, self.arrays)]
    return f"{'; '.join(leaves)} in {self.structure}"

  @property
  def sizes(self) -> np.ndarray:
    return np.array([size for array in self.arrays for size in array.shape], np.int32)


def anyone_has_data(local: LocalBatch) -> bool:
  """Returns whether any host still has data. A host that failed counts as one with data."""
  return bool((_gather(np.array([local.status], np.int32)) != _OUT).any())


def common_shapes(local: LocalBatch, *, pad: bool, when: str) -> list[tuple[int, ...]]:
  """Returns the common shape of each array, or raises on all hosts if any host has no batch.

  Args:
    local: This host's batch.
    pad: If shapes differ, whether to return the largest size of each axis instead of raising.
    when: Name of the step, for errors.
  """
  notes = _gather(
      np.array(
          [local.status, _digest(local.kind.encode()), _digest(local.sizes.tobytes())], np.int32
      )
  )
  _check_all_have_one(local, notes[:, 0], when)
  others = notes[:, 1] != notes[0, 1]
  if others.any():
    raise errors.CorpusError(
        f"At {when}, {_processes(others)} of {len(notes)} delivered a batch of a different"
        f" structure than process 0; process {jax.process_index()} has {local.kind}. Names, dtypes"
        " and ranks must be the same on every process."
    )
  others = notes[:, 2] != notes[0, 2]
  if not others.any():
    return [array.shape for array in local.arrays]
  every = _split(_gather(local.sizes), local.arrays)
  if not pad:
    name, shapes = next((n, s) for n, s in zip(local.names, every) if (s != s[0]).any())
    odd = int(np.argmax((shapes != shapes[0]).any(axis=1)))
    raise errors.CorpusError(
        f"At {when}, {_processes(others)} of {len(notes)} delivered different shapes than process"
        f" 0: {name} is {tuple(shapes[0].tolist())} on process 0 and {tuple(shapes[odd].tolist())}"
        f" on process {odd}. Set pad_shapes=True, or make the shapes equal."
    )
  return [tuple(shapes.max(axis=0).tolist()) for shapes in every]


def _check_all_have_one(local: LocalBatch, status: np.ndarray, when: str) -> None:
  failed, out = status == _FAILED, status == _OUT
  if failed.any():
    trouble = local.trouble if local.status == _FAILED else None
    text = "" if trouble is None else errors.describe(trouble)
    encoded = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    messages = _gather(np.frombuffer(encoded, np.uint8))
    if trouble is not None:
      raise trouble
    first = bytes(messages[int(np.argmax(failed))]).rstrip(b"\0").decode(errors="replace")
    raise errors.from_peer(
        first,
        f"{_processes(failed)} of {len(status)} could not load the batch of {when}: {first}",
        errors.CorpusError,
    )
  if out.all():
    raise StopIteration
  if out.any():
    raise errors.OrderError(
        f"{_processes(out)} of {len(status)} ran out of data at {when}, while {_processes(~out)}"
        " still had some. Every process must deliver the same number of batches: repeat the data,"
        " or drop or pad its tail globally."
    )


def _split(sizes: np.ndarray, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Splits the gathered sizes into one array per leaf, of shape (processes, ndim)."""
  ends = np.cumsum([array.ndim for array in arrays])
  return np.split(sizes, ends[:-1], axis=1)


def _processes(are: np.ndarray) -> str:
  numbers = [str(process) for process in np.flatnonzero(are)]
  return f"process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _gather(values: np.ndarray) -> np.ndarray:
  return np.asarray(multihost_utils.process_allgather(values))


def _digest(data: bytes) -> int:
  return int(np.array(zlib.crc32(data), np.uint32).view(np.int32))
