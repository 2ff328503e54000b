"""Every config key with 20 hostile values or more: the iterator is opened, and a batch is taken.

`_RULES` says for each key which of the values may be accepted. The first batch must then be that of
the config without the key; for keys in `_OTHER_ROWS`, it must be made of ranges of the token files.
"""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maxtext_olmo import config as config_lib
from maxtext_olmo import config_table
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.rows import packing
from tests.hostile import cases
from tests.hostile import damage
from tests.hostile import fixture

_BASES = {
    "olmo_grain": fixture.WINDOWS,
    "olmo_documents": fixture.DOCUMENTS,
    "olmo_packed": fixture.PACKED,
    "olmo_padded": fixture.PADDED,
    "synthetic": fixture.SYNTHETIC,
}
# What else a config needs for a key to have an effect.
_NEEDS: dict[str, dict[str, Any]] = {
    "olmo_ngram_min_period": {"olmo_apply_ngram_filter": True},
    "olmo_ngram_max_period": {"olmo_apply_ngram_filter": True},
    "olmo_ngram_max_count": {"olmo_apply_ngram_filter": True},
    "olmo_packing_cache_dir": {"olmo_packing_ties": "cache"},
}
_ENOUGH = 20
# More worker processes would take the machine down if they were started for real.
_MOST_WORKERS = 4


class _Evil:
  """A value whose every conversion fails."""

  def __repr__(self) -> str:
    return "_Evil()"

  def __int__(self) -> int:
    raise ValueError("no number")

  __index__ = __float__ = __fspath__ = __int__


_OF_ANY_TYPE: dict[str, Any] = {
    "none": None, "true": True, "text": "x", "empty-text": "", "nul": "a\0b", "bytes": b"x",
    "list": [], "dict": {"x": 1}, "set": {1}, "evil": _Evil(), "class": dict, "array": np.arange(3),
    "nested": [[[[[[1]]]]]], "negative": -2, "zero": 0, "one": 1, "fraction": 1.5, "nan": math.nan,
    "infinite": math.inf, "huge": 2**70,
}  # fmt: skip
_NUMBERS: dict[str, Any] = {
    "digits": "3", "three": 3, "minus-one": -1, "whole-float": 2.0, "numpy-int": np.int64(2),
    "numpy-big": np.uint64(2**64 - 1), "int32": 2**31, "int63": 2**63, "complex": 1j,
}  # fmt: skip
_TEXTS: dict[str, Any] = {"superscript": "²", "long": "x" * 100_000, "surrogate": "\ud800"}
# Paths are relative to the folder of the case.
_PATHS: dict[str, Any] = {
    name: pathlib.Path(name)
    for name in ("missing", "directory", "fifo", "loop", "device-zero", "file", "file/x", "x" * 300)
}
_PATHS |= {"surrogate": "/\udcff\ud800", "proc": "/proc/nowhere", "long": "/" + "x/" * 5000}
_BOOLEANS: dict[str, Any] = {"false": False, "text-true": "true", "numpy-true": np.bool_(True)}
_PAIRS: dict[str, Any] = {
    "infinite-size": ((0, math.inf),), "nan-size": ((0, math.nan),), "zero-size": ((0, 0),),
    "negative-size": ((0, -8),), "huge-size": ((0, 2**70),), "huge-boundary": ((0, 8), (2**70, 16)),
    "not-from-0": ((5, 8),), "unsorted": ((0, 8), (4, 8), (2, 8)), "twice": ((0, 8), (0, 8)),
    "triple": ((0, 8, 9),), "single": ((0,),), "flat": (0, 8), "texts": (("0", "8"),),
    "ones": ((0, 1), (2, 1)),
}  # fmt: skip
_MIXTURES: dict[str, Any] = {
    "unknown-label": {"nowhere": 1.0}, "zero": {"label-0": 0.0}, "negative": {"label-0": -1.0},
    "nan": {"label-0": math.nan}, "infinite": {"label-0": math.inf}, "huge": {"label-0": 1e300},
    "tiny": {"label-0": 1e-300}, "text": {"label-0": "1"}, "number": {0: 1.0}, "bad": {"[": 1.0},
    "empty": {"": 1.0}, "pairs": [("label-0", 1.0)], "valid": {"label-0": 1.0, "*": 1.0},
}  # fmt: skip
_STAGES: dict[str, Any] = {
    "valid": ({"from_step": 2, "olmo_mixture": {"*": 1.0}},),
    "valid-seed": ({"from_tokens": 10**6, "data_shuffle_seed": 7, "leave_out_seen": True},),
    "no-beginning": ({"olmo_mixture": {"*": 1.0}},), "only-beginning": ({"from_step": 2},),
    "zero": ({"from_step": 0, "data_shuffle_seed": 1},), "texts": ("from_step", "2"),
    "huge": ({"from_step": 2**70, "data_shuffle_seed": 1},), "numbers": (1, 2), "none": (None,),
    "nan": ({"from_step": math.nan, "data_shuffle_seed": 1},), "dict": {"from_step": 2},
    "unknown-key": ({"from_step": 2, "olmo_skip": 1},), "empty": ({},), "number-key": ({0: 1},),
    "unsorted": ({"from_step": 5, "data_shuffle_seed": 1}, {"from_step": 3, "olmo_mixture": {}}),
    "unknown-order": ({"from_step": 2, "olmo_order": "nowhere"},),
    "bad-mixture": ({"from_step": 2, "olmo_mixture": {"nowhere": 1.0}},),
    "bad-index": ({"from_step": 2, "olmo_index_path": "/nowhere"},),
    "directory": ({"from_step": 2, "olmo_index_path": "/"},),
    "nul": ({"from_step": 2, "olmo_index_path": "a\0b"},),
}  # fmt: skip
_AXES: dict[str, Any] = {
    "unknown-axis": (("nowhere",),), "axis-twice": (("data", "data"),), "number": ((0,),),
    "twice": (("data",), ("data",)), "three": (("data",), None, ("fsdp",)), "none-axis": ((None,),),
    "deep": ((("data",),),), "valid": (("data",), None), "valid-text": ("data",),
}  # fmt: skip
_MASKS: dict[str, Any] = {
    "valid": (pathlib.Path("masks/*.npy"),), "too-few": (pathlib.Path("masks/part-000.npy"),),
    "too-many": (pathlib.Path("masks/*.npy"), pathlib.Path("file")), "texts": ("x", "y", "z", "x"),
    "no-match": (pathlib.Path("nowhere/*.npy"),), "wrong-order": (pathlib.Path("reversed/*.npy"),),
    "directories": (pathlib.Path("directory"),) * 4, "fifos": (pathlib.Path("fifo"),) * 4,
    "wrong-size": (pathlib.Path("file"),) * 4, "loops": (pathlib.Path("loop"),) * 4,
    "devices": (pathlib.Path("device-zero"),) * 4, "stars": ("*" * 1000,), "nul": ("a\0*",),
    "empty": ("",), "empties": ("",) * 4, "root": ("/*",), "not-text": (1, 2, 3, 4),
    "one-text": "masks/*.npy", "url": ("s4://bucket/*.npy",), "bracket": ("masks/[*.npy",),
}  # fmt: skip
_OF_KEY = {
    "olmo_batch_schedule": _PAIRS, "olmo_batch_rampup_factors": _PAIRS, "olmo_mixture": _MIXTURES,
    "olmo_stages": _STAGES,
    "data_sharding": _AXES, "olmo_path_remap_from": _PATHS, "olmo_path_remap_to": _PATHS,
    "olmo_order": config_table.ORDERS, "olmo_packing": config_table.PACKINGS,
    "olmo_skip": _PAIRS, "olmo_exclude": _PATHS, "olmo_label_masks": _MASKS,
    "olmo_packing_ties": config_table.PACKING_TIES, "olmo_boundaries": document_spans.SOURCES,
    "olmo_long_documents": packing.LONG_DOCUMENTS, "olmo_packed_segments": ("rescan", "documents"),
}  # fmt: skip

Accepts = Callable[[Any], bool]


def _number(low: float = -math.inf, high: float = math.inf) -> Accepts:
  """Accepts whole numbers within bounds."""

  def accepts(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
      return False
    return math.isfinite(value) and value == int(value) and low <= value <= high

  return accepts


def _real(low: float, high: float) -> Accepts:
  """Accepts numbers within bounds."""

  def accepts(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
      return False
    return low <= value <= high

  return accepts


def _boolean(value: Any) -> bool:
  return isinstance(value, (bool, np.bool_))


def _text(*choices: str) -> Accepts:
  return lambda value: isinstance(value, str) and value in choices


def _one_of(*choices: Any) -> Accepts:
  """Accepts these very objects, and whatever is empty."""
  return lambda value: any(value is c for c in choices) or (
      isinstance(value, (str, list, tuple, dict)) and not value
  )


def _path(*names: str) -> Accepts:
  return lambda value: value == "" or str(value) in names if _is_text(value) else False


def _is_text(value: Any) -> bool:
  return isinstance(value, (str, pathlib.Path))


_RULES: dict[str, Accepts] = {
    "dataset_type": _text(*config_lib.DATASET_TYPES),
    "max_target_length": _number(1, 4096),
    "global_batch_size_to_load": _number(1, 64),
    "global_batch_size_to_train_on": _number(0, 8),
    "global_batch_size_to_load_eval": _number(0),
    "global_batch_size_to_eval_on": _number(0, 8),
    "vocab_size": _number(0, 2**31),
    "data_shuffle_seed": _number(),
    "enable_data_shuffling": _boolean,
    "data_sharding": _one_of(_AXES["valid"], _AXES["valid-text"]),
    "grain_worker_count": _number(high=_MOST_WORKERS),
    "grain_per_worker_buffer_size": _number(0),
    "generate_padding_batch_train": _boolean,
    "generate_padding_batch_eval": _boolean,
    "eval_interval": _number(),
    "enable_checkpointing": _boolean,
    "checkpoint_dir": _path("x", "missing", "directory"),
    "initial_step": _number(-1, 2**62),
    "olmo_index_path": _path(),
    "olmo_path_remap_from": _path(),
    "olmo_path_remap_to": _path(),
    "olmo_max_open_files": _number(0),
    "olmo_storage_endpoint": lambda value: _is_text(value) and str(value) in ("", "."),
    "olmo_storage_region": _is_text,
    "olmo_storage_anonymous": _boolean,
    "olmo_allow_corpus_change": _text(*config_table.CORPUS_CHANGES),
    "olmo_eval_index_path": _is_text,  # Not opened unless there are evaluations.
    "olmo_eval_instances": _number(0, 100),
    "olmo_spool_dir": _is_text,  # Not opened unless token files are remote.
    "olmo_spool_gib": _real(0.0625, 2**20),
    "olmo_order": _text(*config_table.ORDERS),
    "olmo_order_cache_dir": _is_text,  # Not opened unless the order is stored.
    "olmo_order_resume": _text("exact", "olmo_core"),
    "olmo_num_epochs": _number(0),
    "olmo_initial_position": _number(-1, 2**62),
    "olmo_consumed_path": _path(),
    "olmo_mixture": _one_of(_MIXTURES["valid"], _MIXTURES["tiny"]),  # A share is relative.
    "olmo_mixture_unit": _text("epochs", "tokens", "weights"),
    "olmo_stages": _one_of(_STAGES["valid"], _STAGES["valid-seed"]),
    "olmo_allow_mixture_change": _boolean,
    "olmo_batch_schedule": _one_of(_PAIRS["ones"]),
    "olmo_batch_rampup_factors": _one_of(_PAIRS["ones"], _PAIRS["not-from-0"]),
    "olmo_batch_schedule_unit": _text("steps", "tokens"),
    "olmo_apply_ngram_filter": _boolean,
    "olmo_ngram_min_period": _number(1, 13),
    "olmo_ngram_max_period": _number(1, 2**20),
    "olmo_ngram_max_count": _number(1, 2**20),
    "olmo_document_mask": _boolean,
    "olmo_label_masks": _one_of(_MASKS["valid"]),
    "olmo_label_masks_seed": _number(-1, -1),  # Any other has no effect without masks.
    "olmo_skip": _one_of(*(_PAIRS[name] for name in ("not-from-0", "unsorted", "twice"))),
    "olmo_skip_unit": _text("steps", "samples"),
    "olmo_skip_mode": _text("drop", "mask"),
    "olmo_exclude": _path(),
    "olmo_eos_id": _number(-1, 99),
    "olmo_bos_id": _number(-1, 99),
    "olmo_pad_id": _number(0, 99),
    "olmo_boundaries": _text("eos"),  # Most files of this corpus have no .csv.gz file.
    "olmo_documents_path": _path("missing"),
    "olmo_packing": _text(*config_table.PACKINGS),
    "olmo_packing_bins": _number(0),
    "olmo_source_group_size": _number(1, 2**20),
    "olmo_packing_ties": _text(*config_table.PACKING_TIES[:-1]),  # Not 'cache' without a directory.
    "olmo_packing_cache_dir": lambda value: False,  # None of these has cache files.
    "olmo_packed_segments": _text("rescan", "documents"),
    "olmo_long_documents": _text(*packing.LONG_DOCUMENTS),
    "olmo_shift": _text("left", "right"),
    "olmo_shard": _text("batch", "slice"),
    "olmo_batch_extras": _one_of(),
    "olmo_prefetch_batches": _number(0),
    "olmo_device_prefetch": _number(0),
}
_OTHER_ROWS = (
    "max_target_length", "global_batch_size_to_load", "global_batch_size_to_train_on", "vocab_size",
    "data_shuffle_seed", "enable_data_shuffling", "initial_step", "olmo_eval_instances",
    "olmo_order", "olmo_num_epochs", "olmo_initial_position", "olmo_mixture", "olmo_batch_schedule",
    "olmo_batch_rampup_factors", "olmo_eos_id", "olmo_apply_ngram_filter", "olmo_packing",
    "olmo_packing_bins", "olmo_long_documents", "olmo_shard", "olmo_skip", "olmo_stages",
    "olmo_ngram_min_period", "olmo_ngram_max_period", "olmo_ngram_max_count", "olmo_bos_id",
    "olmo_pad_id", "olmo_source_group_size", "olmo_packing_ties", "olmo_document_mask",
)  # fmt: skip


def _values(key: Any) -> dict[str, Any]:
  """Returns the values that are tried for a key."""
  own = _OF_KEY.get(key.name)
  if isinstance(own, tuple):
    own = {f"choice-{name}": name for name in own}
  elif own is not None:
    pass
  elif key.name.endswith(("_path", "_dir")):
    own = _PATHS
  else:
    own = {int: _NUMBERS, float: _NUMBERS, str: _TEXTS}.get(type(key.default), _BOOLEANS)
  return {**_OF_ANY_TYPE, **own}


def all_cases() -> Iterator[cases.Case]:
  """Yields each value of each key, for each dataset type that reads the key."""
  for dataset_type in _BASES:
    for key in config_table.KEYS:
      if dataset_type not in key.read_by:
        continue
      values = list(_values(key).items())
      if dataset_type in ("olmo_packed", "olmo_padded") and "olmo_grain" in key.read_by:
        values = values[-_ENOUGH:]  # The others take the same path as those of olmo_grain.
      for name, value in values:
        accepted = value is None or _RULES[key.name](value)
        yield cases.Case(
            f"config/{dataset_type}/{key.name}={name[:20]}",
            functools.partial(_open, dataset_type=dataset_type, key=key.name, value=value),
            accept=f"a value of {key.name}" if accepted else "",
            # Workers take long to start, and far positions of documents long to count.
            seconds=120,
        )


class _Config:
  """A config of plain attributes; a ConfigDict would refuse some of the values itself."""

  def __init__(self, values: dict[str, Any]):
    vars(self).update({**config_lib.defaults(), **values})


def _open(folder: pathlib.Path, dataset_type: str, key: str, value: Any) -> None:
  index = fixture.write(folder)
  for name in ("directory", "fifo", "loop", "device-zero"):
    damage.put_in_place(folder / name, name)
  (folder / "file").write_text("x")
  if key == "olmo_label_masks":
    fixture.write_masks(folder)
    value = tuple(_within(folder, item) for item in value) if type(value) is tuple else value
  value = _within(folder, value)
  base = {**_BASES[dataset_type], **_NEEDS.get(key, {})}
  if dataset_type != "synthetic":
    base["olmo_index_path"] = index
  if key == "olmo_order" and dataset_type in ("olmo_grain", "olmo_packed", "olmo_padded"):
    base["olmo_order_cache_dir"] = str(folder / "orders")
  if key == "grain_worker_count" and _number(_MOST_WORKERS + 1)(value):
    config_lib.Options.read(_Config({**base, key: value}))
    raise cases.WrongDataError(f"{value} worker processes would be started")
  found = _first_batch({**base, key: value})
  if value is None or key not in _OTHER_ROWS:
    if key != "olmo_index_path":
      base.pop(key, None)
    fixture.expect(found, _first_batch(base))
  elif dataset_type != "synthetic":
    fixture.expect_files(found, folder, {**base, key: value})


def _within(folder: pathlib.Path, value: Any) -> Any:
  return str(folder / value) if isinstance(value, pathlib.Path) else value


def _first_batch(values: dict[str, Any]) -> list[fixture.Batch]:
  with fixture.opened_config(_Config(values)) as iterator:
    return fixture.take_all(iterator, 1)
