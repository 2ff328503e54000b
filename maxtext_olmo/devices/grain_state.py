"""The saved state of `MultiHostDataLoadIterator` and of the Grain LLM iterators built on it.

    {"format": 2, "kind": "grain", "step": 43, "position": 172, "identity": {"seed": 3, …},
     "epoch_start": 40, "iterator_length": 20, "iterator": {…}, "checksum": "…"}

`step` counts the steps done in all epochs, and `epoch_start` is its value when the current epoch
began. `iterator` is the state of the wrapped data iterator. If these states differ between
processes, `iterators` lists the states of all processes instead. So a saved state is the same on
all processes and fits in one file, but a state with `iterators` can be restored only by the same
number of processes.

A state of version 1 has no "format". Its `step` counts within the epoch, its identity is a string
or missing, and `iterator` belongs to the process that saved it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.devices import collectives

FORMAT = 2
KIND = "grain"

_BYTES = "__bytes__"
_SCHEMA = {
    "step": schema.Count(),
    "iterator_length": schema.Maybe(schema.Count()),
    "epoch_start": schema.Maybe(schema.Count()),
    "position": schema.Maybe(schema.Count()),
    "iterators": schema.Maybe([object]),
}


@dataclasses.dataclass(frozen=True)
class GrainState:
  """The state of an iterator.

  Attributes:
    step: Number of steps done in all epochs.
    epoch_start: Value of `step` when the current epoch began.
    iterator_length: Number of steps per epoch; None if an epoch ends when the data does.
    position: Number of samples taken; None if unknown.
    identity: Values that decide which sample is at which position; a string in version 1, None if
      unknown.
    iterator: State of this process's data iterator; None if the iterator has no state.
  """

  step: int
  epoch_start: int
  iterator_length: int | None
  position: int | None
  identity: Mapping[str, Any] | str | None
  iterator: Any = None

  def write(self, *, own_iterator: bool) -> dict[str, Any]:
    """Returns the state as a JSON-able dict, the same on all processes.

    Args:
      own_iterator: Whether `iterator` may differ between processes. If so, the states of all
        processes are gathered, and all processes must call this together.
    """
    state: dict[str, Any] = {
        "format": FORMAT,
        "kind": KIND,
        "step": self.step,
        "position": self.position,
        "identity": self.identity,
        "epoch_start": self.epoch_start,
        "iterator_length": self.iterator_length,
    }
    if self.iterator is None:
      return _with_checksum(state)
    mine = jsonable(self.iterator)
    if own_iterator and jax.process_count() > 1:
      gathered = [json.loads(text) for text in collectives.gather(json.dumps(mine))]
      return _with_checksum({**state, "iterators": gathered})
    return _with_checksum({**state, "iterator": mine})


def read(state: Any) -> GrainState:
  """Reads a state of either version; raises ResumeError if it is damaged or of a different kind."""
  if not isinstance(state, Mapping):
    raise errors.ResumeError(
        f"Expected a data state, which is a dict, found {type(state).__name__}:"
        f" {schema.show(state)}."
    )
  state = plain(state)
  version_1 = "format" not in state
  if not version_1 and (state["format"], state.get("kind")) != (FORMAT, KIND):
    raise errors.ResumeError(
        f"Expected a data state of format {FORMAT} and kind {KIND!r}, found format"
        f" {schema.show(state['format'])} and kind {schema.show(state.get('kind'))}: it was saved"
        " by another kind of iterator, or by a later release. Resume with the dataset type that"
        " saved it."
    )
  missing = {"step", "iterator_length"} - set(state)
  _check_checksum(state)
  if missing:
    raise errors.ResumeError(
        f"The state has no {' and no '.join(sorted(missing))}, only {sorted(map(str, state))}: it"
        " was not saved by this kind of iterator. Resume with the one that saved it."
    )
  identity = state.get("identity")
  schema.check(state, _SCHEMA)
  if not isinstance(identity, str):
    schema.check(identity, schema.Maybe(dict), "identity")
  epoch_start = state.get("epoch_start") or 0
  step = state["step"] + (epoch_start if version_1 else 0)
  if step < epoch_start:
    raise schema.damaged(f"its step, {step}, is before the start of its epoch, {epoch_start}")
  return GrainState(
      step=step,
      epoch_start=epoch_start,
      iterator_length=state["iterator_length"],
      position=state.get("position"),
      identity=identity,
      iterator=_iterator_of_this_process(state),
  )


def _with_checksum(state: dict[str, Any]) -> dict[str, Any]:
  return {**state, "checksum": _checksum(state)}


def _check_checksum(state: Mapping[str, Any]) -> None:
  """Raises ResumeError if a state was changed. States of earlier releases have no checksum."""
  if state.get("checksum") and state["checksum"] != _checksum(state):
    raise errors.ResumeError(
        f"The data state is damaged: its checksum is {_checksum(state)}, but it records"
        f" {str(state['checksum'])[:40]}. Restore another checkpoint."
    )


def _checksum(state: Mapping[str, Any]) -> str:
  """Returns a hash of everything in a state except its checksum."""
  values = {name: value for name, value in state.items() if name != "checksum"}
  try:
    # The values are encoded twice, because JSON turns integer keys into strings, which sort
    # differently.
    text = json.dumps(json.loads(json.dumps(jsonable(values))), sort_keys=True)
  except (TypeError, ValueError, RecursionError):  # Such a state was never saved as JSON.
    return ""
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_state(value: Any) -> bool:
  """Returns whether a value looks like a state of these iterators, in either version."""
  if not isinstance(value, Mapping):
    return False
  if "format" in value:
    return value.get("kind") == KIND
  return {"step", "iterator_length"} <= set(value)


def is_of_one_process(state: Mapping[str, Any]) -> bool:
  """Returns whether a version 1 state has an iterator but does not name its process."""
  return "format" not in state and "identity" not in state and "iterator" in state


def plain(state: Any) -> Any:
  """Converts a state to JSON types, since frameworks may restore integers as NumPy scalars."""
  try:
    return jsonable(state)
  except RecursionError as error:
    raise schema.damaged("it is nested too deeply") from error


def jsonable(value: Any) -> Any:
  """Returns a value with NumPy scalars and bytes replaced by JSON values."""
  if isinstance(value, Mapping):
    return {key: jsonable(part) for key, part in value.items()}
  if isinstance(value, (list, tuple)):
    parts = [jsonable(part) for part in value]
    return tuple(parts) if isinstance(value, tuple) else parts
  if isinstance(value, bytes):
    return {_BYTES: base64.b64encode(value).decode()}
  return value.item() if isinstance(value, np.generic) else value


def from_json(value: Any, tuples: bool = False) -> Any:
  """Reverses `jsonable`, as far as Grain's iterators need it.

  Grain's concat-then-split compares its `remainder_slices` as tuples, which JSON turns into lists.
  """
  if isinstance(value, Mapping):
    if set(value) == {_BYTES}:
      return base64.b64decode(value[_BYTES])
    return {
        key: from_json(part, tuples or key == "remainder_slices") for key, part in value.items()
    }
  if isinstance(value, (list, tuple)):
    parts = [from_json(part) for part in value]
    return tuple(parts) if tuples or isinstance(value, tuple) else parts
  return value.item() if isinstance(value, np.generic) else value


def _iterator_of_this_process(state: Mapping[str, Any]) -> Any:
  if state.get("iterators") is None:
    return _restored(state.get("iterator"))
  saved, now = len(state["iterators"]), jax.process_count()
  if saved != now:
    raise errors.ResumeError(
        f"The state was saved by {saved} processes, each with data of its own, and this run has"
        f" {now}. Resume with {saved} processes. To be able to change the number of processes, use"
        " shard='batch' (olmo_shard=batch in a config) from the start of a run."
    )
  return _restored(state["iterators"][jax.process_index()])


def _restored(iterator: Any) -> Any:
  try:
    return from_json(iterator)
  except (TypeError, ValueError) as error:
    raise schema.damaged(f"its data iterator's state has invalid bytes ({error})") from error
