"""MaxText's config with this package's keys, and what the data pipeline needs to know of it.

MaxText refuses keys that its config class does not have, so the class that it builds its config
from gets ours too. A few of its values have a meaning to its trainer that a data pipeline cannot
see:

  batch ramp-up                  the batch schedule that MaxText's own `RampupBatchManager` counts
  expansion_factor_real_data < 1 fewer rows are loaded than `global_batch_size_to_train_on`
  Tunix's checkpoints            label N is saved after N updates, MaxText's own after N + 1
"""

from __future__ import annotations

import types
from typing import Any

from etils import epath

from maxtext_olmo import errors
from maxtext_olmo.loader import options
from maxtext_olmo.loader import resume


def extended_config_class(base: type) -> type:
  """Returns MaxText's pydantic config class with the keys of `options.KEYS` that it lacks."""
  import pydantic

  fields: dict[str, Any] = {}
  for key in options.KEYS:
    if key.name in base.model_fields:  # type: ignore[attr-defined]
      continue
    is_sequence = isinstance(key.default, tuple)
    kind = list if is_sequence else type(key.default)
    default = list(key.default) if is_sequence else key.default
    fields[key.name] = (kind, pydantic.Field(default, description=key.help))
  return pydantic.create_model(base.__name__, __base__=base, __module__=__name__, **fields)


def data_config(config: Any) -> Any:
  """What `create_data_iterator` takes, from MaxText's config."""
  values: dict[str, Any] = {key.name: getattr(config, key.name, None) for key in options.KEYS}
  values["dataset_type"] = str(getattr(config.dataset_type, "value", config.dataset_type))
  for load, train in (
      ("global_batch_size_to_load", "global_batch_size_to_train_on"),
      ("global_batch_size_to_load_eval", "global_batch_size_to_eval_on"),
  ):
    # The trainer slices the leading rows off what it gets, so it trains on all of a smaller batch.
    values[train] = min(values[train], values[load])
  if config.enable_rampup_batch_size:
    for name in ("olmo_batch_schedule", "olmo_batch_rampup_factors"):
      if values[name]:
        raise errors.ConfigError(
            f"enable_rampup_batch_size and {name} are both set; one decides the batch sizes."
        )
    values["olmo_batch_schedule"] = ramp_up_stages(config)
    values["olmo_batch_schedule_unit"] = "steps"
  if values["initial_step"] == -1:
    values["initial_step"] = _tunix_batches(config)
  return types.SimpleNamespace(**values)


def ramp_up_stages(config: Any) -> tuple[tuple[int, int], ...]:
  """(first step, rows) pairs of MaxText's batch ramp-up, counted by its own manager."""
  from maxtext.utils import rampup_batch

  manager = rampup_batch.RampupBatchManager(config, -1)
  stages = [(0, manager.global_batch_size_current)]
  step = 0
  active = True
  while active:
    active = manager.update()
    step += 1
    # After the ramp-up the trainer takes whole batches, which gradient accumulation makes larger
    # than the manager's last.
    rows = manager.global_batch_size_current if active else config.global_batch_size_to_train_on
    if rows != stages[-1][1]:
      stages.append((step, rows))
  return tuple(stages)


def _tunix_batches(config: Any) -> int:
  """Returns the batches that Tunix's trainer has taken, by its latest checkpoint, or -1."""
  if not (config.enable_checkpointing and config.checkpoint_dir):
    return -1
  label = resume.latest_committed_step(config.checkpoint_dir)
  if (
      label is None
      or not (epath.Path(config.checkpoint_dir) / str(label) / "model_params").exists()
  ):
    return -1
  if resume.saved_state(config.checkpoint_dir, label) is not None:
    return -1
  return label * max(1, config.gradient_accumulation_steps)
