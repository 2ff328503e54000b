"""Spoiled states of iterators, and spoiled checkpoints."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import maxtext_olmo
from maxtext_olmo.trainers.tiny import checkpoints as checkpoints_lib
from tests.hostile import cases
from tests.hostile import damage
from tests.hostile import fixture

_DONE = 3  # Steps before a state is saved.


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  yield from _state_cases()
  yield from _checkpoint_cases()
  yield from _model_cases()


# States that are given to `set_state`.

_ENTRY = "step position sequence_length schedule identity content extents"
_SCHEDULE = "stages by_position anchor epochs stages.0 stages.0.1 anchor.0 anchor.1"
_STAGE = "position request order seed fingerprint index_path mixture unit leave_out_seen"
_FIELDS = {
    "stream": (
        *("format", "kind", "step", "position", "history", "history.0"),
        *(f"history.0.{name}" for name in _ENTRY.split()),
        *(f"history.0.schedule.{name}" for name in _SCHEDULE.split()),
        *(f"history.0.identity.{name}" for name in ("fingerprint", "order", "seed")),
        *(f"history.0.content.{name}" for name in ("ngram_filter", "document_eos_id", "exclude")),
    ),
    "staged": tuple(
        f"history.0.stages{name}"
        for name in ("", ".0", ".1", *(f".{i}.{field}" for i in (0, 1) for field in _STAGE.split()))
    ),
    # Format 1 has nothing that its step and position could be compared with.
    "format-1": ("format", "identity", "content", "sequence_length", "history"),
    "packed": (
        *("format", "kind", "step", "position", "identity", "epoch_start", "iterator"),
        *(f"identity.{name}" for name in ("documents", "seed", "packing", "row_length", "bins")),
        *("iterator.step", "iterator.rows", "iterator.rows.next_row", "iterator.rows.counter"),
        *("iterator.rows.parent", "iterator.rows.parent.next_index_in_buffer"),
        "iterator.rows.parent.parent.next_index",
    ),
}
_CONTENT = "content may change, with a warning; the rows stay"
_SCHEDULED = "what was scheduled before: the position alone decides"
_STATE_ACCEPTS: dict[str, dict[str, str]] = {
    "stream": {
        "history.0.content*": _CONTENT,
        "history.0.schedule.*": _SCHEDULED,
        "history.0.step=*": _SCHEDULED,
        "history.0.position=*": _SCHEDULED,
    },
    "format-1": {"content=*": _CONTENT, "history=[rn]*": "a corpus that never grew has none"},
    "staged": {
        "history.0.stages.[01].index_path=*": "where an index was; its fingerprint is compared",
        "history.0.stages.0.request=*": "the first stage was not asked for",
        "history.0.stages.[01].mixture=[ro]*": "a stage without a mixture has none",
        "history.0.stages.0.unit=*": "of a mixture that there is none of",
    },
    "packed": {},
}
_PACKED = {
    **fixture.DOCUMENTS, "olmo_packing": "first_fit", "olmo_packing_bins": 4, "olmo_num_epochs": 0
}  # fmt: skip
_STAGED = {
    **fixture.WINDOWS, "olmo_stages": ({"from_step": 2, "data_shuffle_seed": 5},)
}  # fmt: skip
_BASES = {
    "stream": fixture.WINDOWS, "staged": _STAGED, "format-1": fixture.WINDOWS, "packed": _PACKED
}  # fmt: skip
_WHOLES: dict[str, Any] = {
    "none": None, "number": 7, "text": "{}", "bytes": b"{}", "list": [], "empty": {}, "set": {1},
    "object": object(), "type": dict, "array": np.zeros(3), "step-only": {"step": 3},
}  # fmt: skip


@functools.cache
def _saved(group: str) -> tuple[dict[str, Any], list[fixture.Batch]]:
  """Returns the state after some steps, and the batches that come next."""
  folder = pathlib.Path(tempfile.mkdtemp())
  with fixture.opened(fixture.write(folder), _BASES[group]) as iterator:
    fixture.take_all(iterator, _DONE)
    state = iterator.get_state()
    expected = fixture.take_all(iterator, 3)
  shutil.rmtree(folder)
  if group != "format-1":
    return state, expected
  kept = ("sequence_length", "identity", "content")
  return {
      "format": 1, "step": state["step"], "position": state["position"], "history": [],
      **{name: state["history"][0][name] for name in kept},
  }, expected  # fmt: skip


def _restore(folder: pathlib.Path, spoil: Callable[[Any], Any], group: str) -> None:
  """Restores a spoiled state; the next batches must be those after the steps done."""
  state, expected = _saved(group)
  base = _BASES[group]
  with fixture.opened(fixture.write(folder), base) as iterator:
    iterator.set_state(spoil(state))
    where = (iterator.step, iterator.position)
    found = fixture.take_all(iterator, 3)
  if where != (_DONE, _DONE * base["global_batch_size_to_load"]):
    raise cases.WrongDataError(f"resumed at step and position {where}")
  fixture.expect(found, expected)


def _state_cases() -> Iterator[cases.Case]:
  for group, fields in _FIELDS.items():
    attempt = functools.partial(_restore, group=group)
    yield from damage.field_cases(f"states/{group}", attempt, fields, _STATE_ACCEPTS[group])
    for name, whole in _WHOLES.items():
      spoil = functools.partial(lambda state, whole: whole, whole=whole)
      yield cases.Case(f"states/{group}-is-{name}", functools.partial(attempt, spoil=spoil))


# Checkpoints: a run that saved after step 3, and resumes with batches of another size.

_STATE, _MARKER, _ITEM = "2/data/olmo_state.json", "2/_CHECKPOINT_METADATA", "2/data"
_TEXTS = ("[1]", "{}", '{"step": 4}', "7", '"x"', "null", damage.DEEP, '{"format": 2}',
          '{"format": 2, "kind": "stream"}', '{"identity": {}}')  # fmt: skip
_NEIGHBOURS = ("²", "٣", "-1", "1e3", "0x7", "9", "9.tmp", " 4", "4 ", "9" * 30, "tmp")


def _write_checkpoints(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
  index, directory = fixture.write(folder), folder / "checkpoints"
  options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
  with fixture.opened(index) as iterator, ocp.CheckpointManager(
      directory, options=options
  ) as manager:
    for label in range(_DONE):
      fixture.take_all(iterator, 1)
      if label:
        manager.save(label, args=ocp.args.Composite(data=maxtext_olmo.IteratorSave(iterator)))
  return index, directory


def _resume(
    folder: pathlib.Path, spoil: Callable[[pathlib.Path], object], path: str, by_step: bool = False
) -> None:
  """Resumes from spoiled checkpoints; the position must be that of the latest, or of its step."""
  index, directory = _write_checkpoints(folder)
  spoil(directory / path)
  options = {**fixture.WINDOWS, "global_batch_size_to_load": 6, "checkpoint_dir": str(directory)}
  with fixture.opened(index, options) as iterator:
    where = (iterator.step, iterator.position)
    found = fixture.take_all(iterator)
  if by_step and where == (_DONE, _DONE * 6):
    return
  if where != (_DONE, _DONE * 8):
    raise cases.WrongDataError(f"resumed at step and position {where}, not {(_DONE, _DONE * 8)}")
  taken = np.concatenate([batch["inputs"] for batch in found])
  expected = np.concatenate([batch["inputs"] for batch in fixture.truth()[_DONE:]])
  trained = expected[expected.any(axis=1)]
  if not np.array_equal(taken[: len(trained)], trained):
    raise cases.WrongDataError("the rows are not those after the checkpoint")


def _checkpoint_cases() -> Iterator[cases.Case]:
  past = {"flip-*": "what a flip changes in the record of the past leaves the position as it is"}
  state = functools.partial(_resume, path=_STATE)
  yield from damage.file_cases("checkpoints/state", state, past)
  marker = functools.partial(_resume, path=_MARKER)
  marked = {"*": "another file of Orbax says that it was committed"}
  kinds: tuple[str, ...] = ("empty", "cut-to-half", "deep", "noise", "missing", "fifo", "loop")
  yield from damage.file_cases("checkpoints/marker", marker, marked, kinds)
  without = {"missing": "a checkpoint without a data item resumes by its step"}
  item = functools.partial(_resume, path=_ITEM, by_step=True)
  kinds = ("missing", "directory", "fifo", "loop", "dangling", "socket")
  yield from damage.file_cases("checkpoints/item", item, without, kinds)
  for number, text in enumerate(_TEXTS):
    write = functools.partial(pathlib.Path.write_text, data=text)
    yield cases.Case(f"checkpoints/text-{number}", functools.partial(state, spoil=write))
  ignored = {"*": "what is not a committed checkpoint does not count"}
  for name in _NEIGHBOURS:
    beside = functools.partial(_resume, path=name)
    kinds = ("directory", "sparse", "loop")
    yield from damage.file_cases(f"checkpoints/next-to-{name[:5]}", beside, ignored, kinds)
  kinds = ("sparse", "fifo", "loop", "dangling", "socket")
  yield from damage.file_cases("checkpoints/all", functools.partial(_resume, path=""), {}, kinds)


def _model_cases() -> Iterator[cases.Case]:
  tree = {"params": {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}}

  def attempt(folder: pathlib.Path, spoil: Callable[[pathlib.Path], None], number: int) -> None:
    with checkpoints_lib.Checkpoints(folder, asynchronous=False) as kept:
      for step in (1, 2):
        kept.save(step, jax.tree.map(jax.numpy.asarray, tree), {"step": step})
    paths = sorted(path for path in (folder / "2/state").rglob("*") if path.is_file())
    spoil(paths[number % len(paths)])
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    with checkpoints_lib.Checkpoints(folder, asynchronous=False) as kept:
      restored, data = kept.restore(2, abstract)
    if not np.array_equal(restored["params"]["w"], tree["params"]["w"]):
      raise cases.WrongDataError("the restored model is not the saved one")
    assert json.dumps(data) == '{"step": 2}'

  needless = {"*": "not every file of Orbax is needed to restore"}
  for number in range(8):
    kinds = ("missing", "empty", "cut-to-half", "noise", "directory")
    one = functools.partial(attempt, number=number)
    yield from damage.file_cases(f"checkpoints/model-{number}", one, needless, kinds)
