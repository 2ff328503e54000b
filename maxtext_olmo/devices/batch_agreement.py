"""The hosts compare notes on a batch before any of them uses it.

Processes that run one program must take every step together: one that raises while the others wait
in a collective leaves them there forever. So each sends its status in a few integers, and all draw
the same conclusion:

    process 0      process 1
    (2, 128)       (2, 128)        continue
    (2, 128)       (1, 128)        pad to (2, 128), or an error on both that names both shapes
    (2, 128)       out of data     an error on both that names process 1
    out of data    out of data     the end of the data on both

The exchange is an all-gather on the devices, so it waits for the steps sent to them before it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext_olmo import errors

_READY, _OUT, _FAILED = 0, 1, 2
_MESSAGE_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class LocalBatch:
  """The batch of one host for a step: its leaves and their names, or why there is none."""

  names: tuple[str, ...] = ()
  arrays: tuple[np.ndarray, ...] = ()
  structure: Any = None
  trouble: Exception | None = None  # StopIteration: its data has ended

  @property
  def status(self) -> int:
    if self.trouble is None:
      return _READY
    return _OUT if isinstance(self.trouble, StopIteration) else _FAILED

  @property
  def kind(self) -> str:
    """Everything but the sizes."""
    leaves = [f"{n}: {a.dtype}, {a.ndim} axes" for n, a in zip(self.names, self.arrays)]
    return f"{'; '.join(leaves)} in {self.structure}"

  @property
  def sizes(self) -> np.ndarray:
    return np.array([size for array in self.arrays for size in array.shape], np.int32)


def anyone_has_data(local: LocalBatch) -> bool:
  """Returns whether any host still has data; a host that failed counts as having some."""
  return bool((_gather(np.array([local.status], np.int32)) != _OUT).any())


def common_shapes(local: LocalBatch, *, pad: bool, when: str) -> list[tuple[int, ...]]:
  """Returns the common shape of each leaf if all hosts have a batch; otherwise raises on all.

  Args:
    pad: take the largest of unequal shapes, instead of raising.
    when: names the step in errors.
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
        f"At {when}, {_processes(others)} of {len(notes)} delivered a batch of another structure"
        f" than process 0; process {jax.process_index()} has {local.kind}. Names, dtypes and ranks"
        " must be the same on every process."
    )
  others = notes[:, 2] != notes[0, 2]
  if not others.any():
    return [array.shape for array in local.arrays]
  every = _split(_gather(local.sizes), local.arrays)
  if not pad:
    name, shapes = next((n, s) for n, s in zip(local.names, every) if (s != s[0]).any())
    odd = int(np.argmax((shapes != shapes[0]).any(axis=1)))
    raise errors.CorpusError(
        f"At {when}, {_processes(others)} of {len(notes)} delivered other shapes than process 0:"
        f" {name} is {tuple(shapes[0].tolist())} on process 0 and {tuple(shapes[odd].tolist())} on"
        f" process {odd}. Set pad_shapes=True, or make the shapes equal."
    )
  return [tuple(shapes.max(axis=0).tolist()) for shapes in every]


def _check_all_have_one(local: LocalBatch, status: np.ndarray, when: str) -> None:
  failed, out = status == _FAILED, status == _OUT
  if failed.any():
    text = f"{type(local.trouble).__name__}: {local.trouble}" if local.status == _FAILED else ""
    encoded = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    messages = _gather(np.frombuffer(encoded, np.uint8))
    if local.trouble is not None and local.status == _FAILED:
      raise local.trouble
    first = bytes(messages[int(np.argmax(failed))]).rstrip(b"\0").decode(errors="replace")
    raise errors.CorpusError(
        f"{_processes(failed)} of {len(status)} could not load the batch of {when}: {first}"
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
  """Returns the (processes, ndim) sizes of each leaf."""
  ends = np.cumsum([array.ndim for array in arrays])
  return np.split(sizes, ends[:-1], axis=1)


def _processes(are: np.ndarray) -> str:
  numbers = [str(process) for process in np.flatnonzero(are)]
  return f"process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _gather(values: np.ndarray) -> np.ndarray:
  return np.asarray(multihost_utils.process_allgather(values))


def _digest(data: bytes) -> int:
  return int(np.array(zlib.crc32(data), np.uint32).view(np.int32))
