"""The configuration of the data path: `Options` reads and checks the keys of `config_table`.

A config is any object with the keys as attributes: an `ml_collections.ConfigDict`, MaxText's
config, a `types.SimpleNamespace`. `Options.read` fills in defaults, checks every value, and reports
all problems in one error before any data is read:

    options = Options.read(config)
    options.olmo_order                    # each key is an attribute
    options.schedule().start(11)          # and some values are derived from several keys

Setting an `olmo_*` key that the chosen dataset type does not read is an error.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from ml_collections import ConfigDict

from maxtext_olmo import config_checks
from maxtext_olmo import config_key
from maxtext_olmo import config_stages
from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.config_key import DATASET_TYPES as DATASET_TYPES
from maxtext_olmo.config_key import GRAIN
from maxtext_olmo.config_key import PADDED
from maxtext_olmo.config_key import read_values
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips


def defaults() -> dict[str, Any]:
  """Returns every key with its default."""
  return {key.name: key.default for key in config_table.KEYS}


def get_config() -> ConfigDict:
  """Returns a config with every data key at its default, for a trainer of your own.

  The config is locked, so that a misspelt key is an error. The embedded trainer has further keys;
  its configs begin with `get_trainer_config`.

  >>> import maxtext_olmo
  >>> config = maxtext_olmo.get_config()
  >>> config.max_target_length
  2048
  >>> config.max_target_len = 4096
  Traceback (most recent call last):
    ...
  AttributeError: ...
  """
  return config_key.make_config(config_table.KEYS)


def read_value(config: Any, name: str) -> Any:
  """Returns the value of one key in a config, or its default."""
  values, problems = read_values(config, [key for key in config_table.KEYS if key.name == name])
  if problems:
    raise _config_error(problems.values())
  return values[name]


def check_all_read(config: Any, dataset_type: str, reads: Collection[str]) -> None:
  """Raises ConfigError if a config sets an `olmo_*` key that its dataset type does not read.

  Args:
    config: The config.
    dataset_type: The name of its dataset type.
    reads: The `olmo_*` keys that this type reads.
  """
  unread = _unread_keys(config, dataset_type, reads)
  if unread:
    raise _config_error(unread.values())


class Options(types.SimpleNamespace):
  """The checked values of all keys, as attributes of the same names; immutable."""

  @classmethod
  def read(cls, config: Any) -> Options:
    """Reads the keys of a config, with defaults for those that are missing or None.

    Also makes the olmo_storage_* keys the defaults of this process, so that index files and other
    small files are read with the same options as the tokens.

    Raises:
      ConfigError: The config is invalid. The message lists every problem.
    """
    values, problems = read_values(config, config_table.KEYS)
    name = values["dataset_type"]
    if name in DATASET_TYPES:  # For other types, the registry checks the keys that they declare.
      unread = _unread_keys(
          config, name, [key.name for key in config_table.KEYS if name in key.read_by]
      )
      values.update({key: defaults()[key] for key in unread})
      problems.update(unread)
    for key in config_table.KEYS:
      if values[key.name] is None:
        values[key.name] = key.default_by_type.get(name)
    load = values["global_batch_size_to_load"]
    load_eval = values["global_batch_size_to_load_eval"] or load
    values["global_batch_size_to_load_eval"] = load_eval
    values["global_batch_size_to_train_on"] = values["global_batch_size_to_train_on"] or load
    values["global_batch_size_to_eval_on"] = values["global_batch_size_to_eval_on"] or load_eval
    options = cls(**values)
    found = [*problems.values(), *config_checks.problems(options, defaults())]
    if name in (GRAIN, config_key.DOCUMENTS):
      found += config_stages.problems(options)
    if found:
      raise _config_error(found)
    stores.use_by_default(options.store_options)
    return options

  def __setattr__(self, name: str, value: Any) -> NoReturn:
    raise AttributeError(f"Options cannot be changed; replace({name}=...) returns a changed copy.")

  def replace(self, **changes: Any) -> Options:
    """Returns a copy with some values changed; the new values are not checked."""
    return Options(**{**vars(self), **changes})

  def run_options(self) -> dict[str, str]:
    """Returns, as text, the values of all keys that must be the same in all processes of a run."""
    return {
        key.name: repr(getattr(self, key.name)) for key in config_table.KEYS if not key.per_host
    }

  def schedule(self) -> schedule_lib.BatchSchedule:
    """Returns the batch schedule of training, which maps steps to positions."""
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

  @property
  def has_batch_schedule(self) -> bool:
    """Whether the batch size changes during the run."""
    return bool(self.olmo_batch_schedule or self.olmo_batch_rampup_factors)

  @property
  def skips(self) -> skips.Requests:
    """The ranges of steps or samples to skip, as the config requests them."""
    return skips.Requests(self.olmo_skip, self.olmo_skip_unit, self.olmo_skip_mode)

  @property
  def order_name(self) -> str:
    """The effective order: olmo_order, or sequential if shuffling is disabled."""
    return self.olmo_order if self.enable_data_shuffling else permutations.SequentialOrder.name

  @property
  def path_remap(self) -> dict[str, str]:
    """A dict from the path prefix to replace in token files to its replacement; may be empty."""
    if not self.olmo_path_remap_from:
      return {}
    return {self.olmo_path_remap_from: self.olmo_path_remap_to}

  @property
  def store_options(self) -> stores.StoreOptions:
    """The options for connecting to object stores."""
    return stores.StoreOptions(
        endpoint=self.olmo_storage_endpoint,
        region=self.olmo_storage_region,
        anonymous=self.olmo_storage_anonymous,
    )

  @property
  def random_access_documents(self) -> bool:
    """Whether each row of documents can be computed from its position alone.

    If not, rows are only available as a stream: each row depends on the rows before it.
    """
    one_per_row = self.olmo_packing == "none" and self.olmo_long_documents != "split"
    return bool(self.olmo_shard == "batch" and (self.olmo_packing == "planned" or one_per_row))

  @property
  def documents_rule(self) -> str:
    """The rule that finds the documents and their names: one of `documents.RULES`."""
    return str(self.olmo_boundaries) if self.dataset_type == PADDED else "auto"

  @property
  def resumes_whole_batches(self) -> bool:
    """Whether a restored position is rounded down to a multiple of the batch size."""
    return bool(self.olmo_order_resume == "olmo_core")


def _unread_keys(config: Any, dataset_type: str, reads: Collection[str]) -> dict[str, str]:
  """Returns a dict from each key that is set but would have no effect to an error message."""
  return {
      key.name: (
          f"{key.name}={config_key.show(getattr(config, key.name))} would have no effect, because"
          f" dataset_type={dataset_type!r} does not read it. Remove it, or choose a dataset type"
          f" that reads it: {', '.join(key.read_by)}."
      )
      for key in config_table.KEYS
      if key.name.startswith("olmo_") and key.name not in reads and key.is_set(config)
  }


def _config_error(problems: Iterable[str]) -> errors.ConfigError:
  return errors.ConfigError(
      "The configuration is invalid:\n" + "\n".join(f"  - {problem}" for problem in problems)
  )
