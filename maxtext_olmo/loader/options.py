"""What the data pipeline reads from a config: every key, its default, and what may be wrong with it.

`KEYS`, from `keys`, is the one table of them. `Options.read` takes the values from any object with such attributes (an `ml_collections.ConfigDict`, MaxText's config), and all problems are reported together, before
anything is read from disk.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import document_options
from maxtext_olmo.loader.keys import KEYS
from maxtext_olmo.loader.keys import OF_A_HOST
from maxtext_olmo.loader.keys import Key
from maxtext_olmo.loader.keys import defaults
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib

__all__ = ["KEYS", "Key", "Options", "defaults"]


_UNITS = ("steps", "tokens")


def _whole(value: Any) -> int:
  if value != int(value):
    raise ValueError(f"{value!r} is not a whole number.")
  return int(value)


# Keys that hold (boundary, value) pairs, with what the values are.
_PAIRS: dict[str, Callable[[Any], Any]] = {
    "olmo_batch_schedule": _whole,
    "olmo_batch_rampup_factors": float,
}


@dataclasses.dataclass(frozen=True)
class Options:
  """The values of the data keys, checked; the fields are named as the keys, which document them."""

  dataset_type: str
  max_target_length: int
  global_batch_size_to_load: int
  global_batch_size_to_train_on: int
  global_batch_size_to_load_eval: int
  global_batch_size_to_eval_on: int
  vocab_size: int
  data_shuffle_seed: int
  enable_data_shuffling: bool
  data_sharding: Any
  grain_worker_count: int
  grain_per_worker_buffer_size: int
  generate_padding_batch_train: bool
  generate_padding_batch_eval: bool
  eval_interval: int
  enable_checkpointing: bool
  checkpoint_dir: str
  initial_step: int
  olmo_index_path: str
  olmo_path_remap_from: str
  olmo_path_remap_to: str
  olmo_order: str
  olmo_consumed_path: str
  olmo_num_epochs: int
  olmo_order_cache_dir: str
  olmo_order_resume: str
  olmo_allow_corpus_change: str
  olmo_batch_schedule: tuple[tuple[int, int], ...]
  olmo_batch_rampup_factors: tuple[tuple[int, float], ...]
  olmo_batch_schedule_unit: str
  olmo_initial_position: int
  olmo_mixture: dict[str, float]
  olmo_mixture_unit: str
  olmo_apply_ngram_filter: bool
  olmo_document_mask: bool
  olmo_eos_id: int
  olmo_packing: str
  olmo_packing_bins: int
  olmo_long_documents: str
  olmo_shift: str
  olmo_shard: str
  olmo_documents_path: str
  olmo_eval_index_path: str
  olmo_eval_instances: int
  olmo_prefetch_batches: int
  olmo_device_prefetch: int
  olmo_max_open_files: int
  olmo_batch_extras: tuple[str, ...]

  @classmethod
  def read(cls, config: Any) -> Options:
    """Takes the keys from a config, with defaults for those it lacks, and reports all problems together."""
    values = {}
    problems = []
    for key in KEYS:
      value = _get(config, key)
      if key.name in _PAIRS:
        try:
          value = tuple((_whole(first), _PAIRS[key.name](second)) for first, second in value)
        except (TypeError, ValueError):
          what = "rows" if key.name == "olmo_batch_schedule" else "factor"
          problems.append(f"{key.name}={value!r} is not a list of (boundary, {what}) pairs.")
          value = ()
      elif key.name == "olmo_mixture":
        try:
          value = {str(name): float(share) for name, share in value.items()}
        except (AttributeError, TypeError, ValueError):
          problems.append(f"olmo_mixture={value!r} is not a dict of numbers by label.")
          value = {}
      elif key.name != "data_sharding" and not _same_kind(value, key.default):
        problems.append(f"{key.name}={value!r} should be {_KINDS[type(key.default)]}.")
        value = key.default
      elif isinstance(value, float) and isinstance(key.default, int):
        value = int(value)
      values[key.name] = value
    load = values["global_batch_size_to_load"]
    values["global_batch_size_to_train_on"] = values["global_batch_size_to_train_on"] or load
    load_eval = values["global_batch_size_to_load_eval"] or load
    values["global_batch_size_to_load_eval"] = load_eval
    values["global_batch_size_to_eval_on"] = values["global_batch_size_to_eval_on"] or load_eval
    options = cls(**values)
    problems += options._problems()
    if problems:
      raise errors.ConfigError(
          "The configuration cannot work:\n" + "\n".join(f"  - {p}" for p in problems)
      )
    return options

  def _problems(self) -> list[str]:
    found = []

    def check(holds: bool, problem: str) -> None:
      if not holds:
        found.append(problem)

    for name in ("max_target_length", "global_batch_size_to_load"):
      check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive.")
    for name in (
        "global_batch_size_to_train_on",
        "global_batch_size_to_load_eval",
        "global_batch_size_to_eval_on",
        "vocab_size",
        "olmo_num_epochs",
        "olmo_eval_instances",
        "olmo_prefetch_batches",
        "olmo_device_prefetch",
        "olmo_max_open_files",
        "grain_per_worker_buffer_size",
    ):
      check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative.")
    for name in ("initial_step", "olmo_initial_position"):
      check(getattr(self, name) >= -1, f"{name}={getattr(self, name)} must be -1, 0 or more.")
    for train, load in (
        ("global_batch_size_to_train_on", "global_batch_size_to_load"),
        ("global_batch_size_to_eval_on", "global_batch_size_to_load_eval"),
    ):
      check(
          getattr(self, train) <= getattr(self, load),
          f"{train}={getattr(self, train)} exceeds {load}={getattr(self, load)}.",
      )
    check(
        self.vocab_size <= 2**31,
        f"vocab_size={self.vocab_size} exceeds 2**31; batches are arrays of int32.",
    )
    check(
        self.dataset_type != "synthetic" or not self.olmo_index_path,
        f"olmo_index_path={self.olmo_index_path!r} is set, but dataset_type=synthetic reads no"
        " files; set dataset_type=olmo_grain.",
    )
    if self.dataset_type in ("olmo_grain", "olmo_documents"):
      self._check_olmo(check)
    if self.dataset_type == "olmo_documents":
      found += document_options.problems(self)
    return found

  def _check_olmo(self, check) -> None:
    check(
        bool(self.olmo_index_path),
        "olmo_index_path is empty; build one with `maxtext-olmo index build`.",
    )
    for name in ("olmo_index_path", "olmo_eval_index_path", "olmo_consumed_path"):
      path = getattr(self, name)
      check(not path or os.path.exists(path), f"{name}={path!r} does not exist.")
    check(
        self.order_name in permutations.order_names(),
        f"olmo_order={self.olmo_order!r} is unknown; known are {', '.join(permutations.order_names())}.",
    )
    check(
        self.olmo_order_resume == "exact"
        or (self.olmo_order_resume, self.order_name) == ("olmo_core", "olmo_core"),
        f"olmo_order_resume={self.olmo_order_resume!r} must be 'exact', or 'olmo_core' where"
        " olmo_order is that too.",
    )
    check(
        self.olmo_allow_corpus_change in corpus_change.CHOICES,
        f"olmo_allow_corpus_change={self.olmo_allow_corpus_change!r} must be one of"
        f" {', '.join(corpus_change.CHOICES)}.",
    )
    check(
        not (self.olmo_eval_instances and self._order_is_foreign),
        f"olmo_eval_instances={self.olmo_eval_instances} cannot be held out of the"
        f" {self.order_name} order, which is exact over the whole corpus; evaluate on"
        " olmo_eval_index_path.",
    )
    check(
        not self.olmo_path_remap_to or bool(self.olmo_path_remap_from),
        "olmo_path_remap_to is set without olmo_path_remap_from.",
    )
    check(
        not self.olmo_document_mask or self.olmo_eos_id >= 0,
        "olmo_document_mask needs olmo_eos_id, the token that ends a document.",
    )
    check(
        not self.vocab_size or self.olmo_eos_id < self.vocab_size,
        f"olmo_eos_id={self.olmo_eos_id} is outside the vocabulary of {self.vocab_size}.",
    )
    check(
        not (self.olmo_eval_index_path and self.olmo_eval_instances),
        "olmo_eval_index_path and olmo_eval_instances are both set; evaluation takes one.",
    )
    check(
        not (self.olmo_consumed_path and self.olmo_mixture),
        "olmo_mixture and olmo_consumed_path are both set; a mixture draws from all of each label.",
    )
    check(
        not (self.olmo_consumed_path and self.olmo_eval_instances),
        "olmo_eval_instances cannot hold out what was trained on before (olmo_consumed_path); evaluate on"
        " olmo_eval_index_path.",
    )
    check(
        self.eval_interval <= 0 or bool(self.olmo_eval_index_path or self.olmo_eval_instances),
        f"eval_interval={self.eval_interval} needs olmo_eval_index_path or olmo_eval_instances.",
    )
    check(
        self.olmo_mixture_unit in mixture_lib.UNITS,
        f"olmo_mixture_unit={self.olmo_mixture_unit!r} is unknown; known are {', '.join(mixture_lib.UNITS)}.",
    )
    check(
        not self.olmo_mixture or self.olmo_allow_corpus_change == "no",
        f"olmo_mixture needs olmo_allow_corpus_change='no', not {self.olmo_allow_corpus_change!r}: the labels of another"
        " corpus have other sizes, and so another order.",
    )
    self._check_schedule(check)

  def _check_schedule(self, check) -> None:
    name = "olmo_batch_schedule" if self.olmo_batch_schedule else "olmo_batch_rampup_factors"
    check(
        not (self.olmo_batch_schedule and self.olmo_batch_rampup_factors),
        "olmo_batch_schedule and olmo_batch_rampup_factors are both set; a run takes one.",
    )
    check(
        self.olmo_batch_schedule_unit in _UNITS,
        f"olmo_batch_schedule_unit={self.olmo_batch_schedule_unit!r} must be one of"
        f" {', '.join(_UNITS)}.",
    )
    try:
      self.schedule()
    except errors.ConfigError as error:
      check(False, f"{name}: {error}")
    if self.has_batch_schedule:
      check(
          self.global_batch_size_to_train_on == self.global_batch_size_to_load,
          f"{name} needs global_batch_size_to_train_on equal to global_batch_size_to_load.",
      )

  def of_the_run(self) -> dict[str, str]:
    """The values that all processes of a run must share, as text."""
    names = [field.name for field in dataclasses.fields(self) if field.name not in OF_A_HOST]
    return {name: repr(getattr(self, name)) for name in names}

  @property
  def random_access_documents(self) -> bool:
    """Whether rows of documents are functions of their position, the same for all hosts."""
    cut = self.olmo_packing == "none" and self.olmo_long_documents != "split"
    return self.olmo_shard == "batch" and (self.olmo_packing == "planned" or cut)

  @property
  def order_name(self) -> str:
    """The order in force."""
    return self.olmo_order if self.enable_data_shuffling else permutations.SequentialOrder.name

  @property
  def _order_is_foreign(self) -> bool:
    known = self.order_name in permutations.order_names()
    return known and permutations.order_class(self.order_name).foreign

  @property
  def has_batch_schedule(self) -> bool:
    """Whether the batch size changes during the run."""
    return bool(self.olmo_batch_schedule or self.olmo_batch_rampup_factors)

  @property
  def resumes_whole_batches(self) -> bool:
    """Whether a restored position goes back to a whole number of batches."""
    return self.olmo_order_resume == "olmo_core"

  @property
  def path_remap(self) -> dict[str, str]:
    """Rewrites of the token files' paths."""
    if not self.olmo_path_remap_from:
      return {}
    return {self.olmo_path_remap_from: self.olmo_path_remap_to}

  def schedule(self) -> schedule_lib.BatchSchedule:
    """Step ↔ position for training."""
    rows = max(1, self.global_batch_size_to_train_on)
    length = max(1, self.max_target_length) if self.olmo_batch_schedule_unit == "tokens" else None
    if self.olmo_batch_rampup_factors:
      return schedule_lib.BatchSchedule.from_factors(
          rows, self.olmo_batch_rampup_factors, sequence_length=length
      )
    if not self.olmo_batch_schedule:
      return schedule_lib.BatchSchedule.constant(rows)
    if length is None:
      return schedule_lib.BatchSchedule(self.olmo_batch_schedule)
    return schedule_lib.BatchSchedule.from_tokens(self.olmo_batch_schedule, sequence_length=length)


_KINDS = {int: "a whole number", bool: "true or false", str: "text", tuple: "a list"}


def _get(config: Any, key: Key) -> Any:
  value = getattr(config, key.name, None)
  return key.default if value is None else value


def _same_kind(value: Any, default: Any) -> bool:
  if isinstance(default, bool) or isinstance(value, bool):
    return isinstance(value, bool) and isinstance(default, bool)
  if isinstance(default, int):
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
  if isinstance(default, str):
    return isinstance(value, (str, os.PathLike))
  return isinstance(value, Sequence)
