"""Migrates a run of MaxText's own `olmo_grain` loader, so that it continues with this package.

The run's config and its starts determine the data that it was trained on (`loader_history`). The
migration writes a bitmap of that data next to the index, and a config based on the old one. The new
run continues at the step after the model's last checkpoint: first the rest of the epoch, each
instance once, then whole epochs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import yaml
from etils import epath

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import storage
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import resume
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.trainers.maxtext import loader_history as history

# MaxText's defaults (from base.yml) of the keys that decide what its loader reads.
_DEFAULTS: dict[str, Any] = {
    "data_shuffle_seed": 0,
    "grain_worker_count": 1,
    "per_device_batch_size": 12.0,
    "gradient_accumulation_steps": 1,
    "expansion_factor_real_data": -1.0,
    "enable_rampup_batch_size": False,
    "max_target_length": 2048,
    "olmo_index_path": "",
    "dataset_type": "olmo_grain",
}


@dataclasses.dataclass(frozen=True)
class Migration:
  """The result of a migration.

  Attributes:
    label: The checkpoint from which training continues.
    parts: The steps that are in the model, one segment for each start.
    found: How often each instance was trained on in these steps.
    num_instances: Number of instances in the corpus.
    consumed_path: Path of the bitmap.
    config_path: Path of the new config.
  """

  label: int
  parts: tuple[history.Segment, ...]
  found: history.History
  num_instances: int
  consumed_path: str
  config_path: str

  @property
  def num_remaining(self) -> int:
    """The number of instances in the rest of the epoch."""
    return self.num_instances - int(self.found.consumed.sum())


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The part of a MaxText config that decides what MaxText's loader reads."""

  path: str
  index_path: str
  seed: int
  workers: int
  rows_per_device: float
  accumulation: int
  length: int

  @classmethod
  def read(cls, path: str, arguments: Sequence[str] = ()) -> RunConfig:
    """Reads a config file, its base configs and the `key=value` arguments of the run."""
    path = _find_config(path)
    values = {**_DEFAULTS, **_load_yaml(path), **_parse_arguments(arguments)}
    problems = []
    if values["dataset_type"] != "olmo_grain":
      problems.append(f"dataset_type is {values['dataset_type']!r}, not 'olmo_grain'.")
    if not values["olmo_index_path"]:
      problems.append("olmo_index_path is not set.")
    if values["enable_rampup_batch_size"]:
      problems.append(
          "with enable_rampup_batch_size, steps and batches of the loader differ in size."
      )
    if float(values["expansion_factor_real_data"]) > 0:
      problems.append("with expansion_factor_real_data, the loader reads more rows than are used.")
    if problems:
      raise errors.ConfigError(
          f"{path}: this run cannot be migrated:\n" + "\n".join(f"  - {p}" for p in problems)
      )
    return cls(
        path=os.path.abspath(path),
        index_path=str(values["olmo_index_path"]),
        seed=int(values["data_shuffle_seed"]),
        workers=max(0, int(values["grain_worker_count"])),
        rows_per_device=float(values["per_device_batch_size"]),
        accumulation=int(values["gradient_accumulation_steps"]),
        length=int(values["max_target_length"]),
    )

  def batch(self, devices: int) -> tuple[int, int]:
    """Returns the number of rows that a step loads, and the number that it trains on."""
    trained = int(devices * self.rows_per_device) * self.accumulation
    loaded = int(devices * max(1.0, self.rows_per_device)) * self.accumulation
    return loaded, trained


def migrate(
    run_config: str,
    checkpoint_dir: str,
    *,
    arguments: Sequence[str] = (),
    devices: int | None = None,
    hosts: int = 1,
    restarts: Sequence[str] = (),
    logs: Sequence[str] = (),
    label: int | None = None,
    consumed_path: str | None = None,
    config_path: str | None = None,
    progress: bool = False,
) -> Migration:
  """Finds the data that a run was trained on, and writes a bitmap and a config to continue it.

  Args:
    run_config: MaxText's YAML config of the run, or the name of one of MaxText's own configs.
    checkpoint_dir: Directory of the run's checkpoints.
    arguments: The `key=value` arguments with which the run was started.
    devices: Total number of devices of the run; not needed with `logs`.
    hosts: Number of hosts that loaded data at the first start.
    restarts: `LABEL` or `LABEL,hosts=H,devices=N,workers=W,data=LABEL` of each restart, in order.
    logs: Log files of the run, which replace the three arguments above.
    label: The checkpoint to continue from; None for the latest.
    consumed_path: Path of the bitmap; None for a name next to the index.
    config_path: Path of the new config; None for a name next to the old one.
    progress: Whether to show progress on stderr.
  """
  run = RunConfig.read(run_config, arguments)
  label = _find_label(checkpoint_dir, label)
  index = index_lib.load_index(run.index_path)
  if index.sequence_length != run.length:
    raise errors.ConfigError(
        f"The run has max_target_length={run.length} (from its arguments, {run_config} or MaxText's"
        f" default), but the index {run.index_path} has"
        f" windows of {index.sequence_length}. MaxText's loader does not start if they differ; give"
        " the index that the run used."
    )
  trained = None
  if logs:
    if restarts or devices is not None:
      raise errors.ConfigError("Give either --log, or --devices and --restart, but not both.")
    starts = _starts_from_logs(logs, run)
  else:
    starts, trained = _starts_from_arguments(run, devices, hosts, restarts)
  parts = tuple(history.segments(starts, label))
  found = history.count(
      index.total_instances, run.seed, parts, trained_rows=trained, progress=progress
  )
  consumed_path = os.path.abspath(consumed_path or f"{run.index_path}.consumed-{label}")
  # run.path may be inside MaxText's installation, if the run uses one of MaxText's own configs.
  root, extension = os.path.splitext(run_config)
  config_path = os.path.abspath(config_path or f"{root}-migrated{extension}")
  consumed_lib.write_consumed(consumed_path, found.consumed, index.fingerprint)
  _write_config(config_path, run, label, consumed_path)
  return Migration(label, parts, found, index.total_instances, consumed_path, config_path)


def _find_label(checkpoint_dir: str, label: int | None) -> int:
  committed = resume.committed_steps(checkpoint_dir)
  if label is None:
    label = resume.latest_committed_step(checkpoint_dir)
  if label is None or not committed:
    raise errors.ResumeError(
        f"{checkpoint_dir} has no committed checkpoint, so there is nothing to continue."
    )
  if not resume.is_committed(epath.Path(checkpoint_dir) / str(label)):
    raise errors.ResumeError(
        f"{checkpoint_dir} has no committed checkpoint {label}; its latest is {max(committed)}."
    )
  state = resume.saved_state(checkpoint_dir, label)
  trained_here = history_file.state_at(checkpoint_dir, label + 1)
  if state is not None or (trained_here and trained_here["history"][0]["step"] <= label):
    raise errors.ResumeError(
        f"Checkpoint {label} in {checkpoint_dir} was trained with this package: the run is already"
        " migrated. Continue it with its config."
    )
  return label


def _starts_from_logs(logs: Sequence[str], run: RunConfig) -> list[history.Start]:
  starts: list[history.Start] = []
  for path in logs:
    with open(path, encoding="utf-8", errors="replace") as file:
      starts += history.read_starts(file, workers=run.workers)
  if not starts:
    raise errors.ConfigError(
        "No line of MaxText's olmo_grain loader ('OLMo grain loader: ...') was found in"
        f" {', '.join(logs)}. Give the log of each start of the run, or --devices and --restart."
    )
  if run.rows_per_device < 1:
    raise errors.ConfigError(
        "With per_device_batch_size below 1, a log does not show how many rows were trained on; set"
        " --devices."
    )
  return starts


def _starts_from_arguments(
    run: RunConfig, devices: int | None, hosts: int, restarts: Sequence[str]
) -> tuple[list[history.Start], int | None]:
  if devices is None:
    raise errors.ConfigError(
        "The batch size of the run is per_device_batch_size times its devices: set --devices or"
        " --log."
    )
  current = {"hosts": hosts, "devices": devices, "workers": run.workers}
  starts = []
  trained = None
  for text in ("-1", *restarts):
    label, changes = _parse_restart(text)
    data_label = changes.pop("data", max(0, label))
    current.update(changes)
    loaded, used = run.batch(current["devices"])
    rows, rest = divmod(loaded, current["hosts"])
    if rest:
      raise errors.ConfigError(
          f"{loaded} rows cannot be divided among {current['hosts']} hosts, so MaxText's loader"
          " cannot have started. Check --devices and --hosts."
      )
    if used < loaded:
      if current["hosts"] > 1 or (restarts and trained not in (None, used)):
        raise errors.ConfigError(
            "With per_device_batch_size below 1 on several hosts, MaxText's own loader returns a"
            " batch of a shape that the trainer does not accept; such a run cannot be migrated."
        )
      trained = used
    starts.append(history.Start(label, data_label, current["hosts"], rows, current["workers"]))
  return starts, trained


def _parse_restart(text: str) -> tuple[int, dict[str, int]]:
  first, *pairs = text.split(",")
  try:
    changes = {name: int(value) for name, value in (pair.split("=") for pair in pairs)}
    label = int(first)
  except ValueError:
    changes, label = {"": 0}, 0
  if set(changes) - {"hosts", "devices", "workers", "data"}:
    raise errors.ConfigError(
        f"--restart {text!r} is not LABEL or LABEL,hosts=H,devices=N,workers=W,data=LABEL."
    )
  return label, changes


def _write_config(path: str, run: RunConfig, label: int, consumed_path: str) -> None:
  values = {
      "base_config": run.path,
      "dataset_type": "olmo_grain",
      "olmo_index_path": os.path.abspath(run.index_path),
      "olmo_consumed_path": consumed_path,
      # These two keys are an anchor: the rest of the epoch begins at this step.
      "initial_step": label + 1,
      "olmo_initial_position": 0,
  }
  atomic.write_atomically(path, yaml.safe_dump(values, sort_keys=False))


def _parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
  values = {}
  for argument in arguments:
    key, equals, value = argument.partition("=")
    if not equals or not key.isidentifier():
      raise errors.ConfigError(
          f"{argument!r} is not KEY=VALUE. Give the arguments of the run as they were given to"
          " MaxText, such as data_shuffle_seed=42."
      )
    try:
      values[key] = yaml.safe_load(value)
    except yaml.YAMLError:
      values[key] = value
  return values


def _config_places(name: str) -> list[str]:
  """Returns the paths at which MaxText's own config of this name may be."""
  maxtext = importlib.util.find_spec("maxtext")
  roots = maxtext.submodule_search_locations if maxtext is not None else None
  return [os.path.join(root, "configs", name) for root in roots or ()]


def _find_config(path: str) -> str:
  places = [path, *_config_places(path)]
  for place in places:
    if os.path.exists(place):
      return place
  raise errors.ConfigError(
      f"There is no config {path} here, nor among MaxText's own configs. Give the YAML file with"
      " which the run was started (base.yml if there was no other), followed by its key=value"
      " arguments."
  )


def _load_yaml(path: str) -> dict[str, Any]:
  """Returns the values of a MaxText config, merged over its base_config."""
  text = storage.open_storage().read(path)
  try:
    values = yaml.safe_load(text) or {}
  except (yaml.YAMLError, RecursionError) as error:
    raise errors.ConfigError(f"{path} is not YAML: {error}") from error
  if not isinstance(values, dict):
    raise errors.ConfigError(f"{path} is not a MaxText config: it has no keys.")
  base = values.pop("base_config", None)
  if not base:
    return values
  places = [os.path.join(os.path.dirname(path), base), *_config_places(base)]
  for place in places:
    if os.path.exists(place):
      return {**_load_yaml(place), **values}
  # MaxText's own base.yml holds only defaults, which are known here.
  if os.path.basename(base) == "base.yml":
    return values
  raise errors.ConfigError(f"{path} has base_config={base!r}, which was not found in {places}.")
