"""Adds this package's keys to MaxText's config, and translates MaxText's values for the loader.

MaxText refuses keys and values that its config class does not declare, so our keys are added to
that class. Some of MaxText's values affect the data and must be translated:

  batch ramp-up                    becomes a batch schedule, computed with MaxText's own
                                   `RampupBatchManager`
  expansion_factor_real_data < 1   loads fewer rows than `global_batch_size_to_train_on`, so the
                                   trainer also uses fewer
  Tunix's checkpoints              have the label N after N updates; MaxText's own, after N + 1
  dataset_type                     also accepts the types of this package, such as olmo_packed

MaxText logs its config, so credentials are removed from the URLs in all keys that we read.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import types
from typing import Annotated, Any, Literal, NamedTuple

from etils import epath

from maxtext_olmo import config_key
from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers.maxtext import shapes

# Keys of MaxText that this package reads, in addition to those of the data path.
_READ = (
    "attention",
    "enable_rampup_batch_size",
    "gradient_accumulation_steps",
    "load_full_state_path",
    "packing",
)
_RAMP_UP = shapes.Function(
    "maxtext.utils.rampup_batch", "RampupBatchManager", ("config", "step_num")
)


@functools.cache
def extended_config_class(base: type) -> type:
  """Returns MaxText's pydantic config class with our data keys and dataset types added."""
  import pydantic

  known = base.model_fields["dataset_type"]  # type: ignore[attr-defined]
  names = tuple(name for name in registry.dataset_types() if is_ours(name))
  fields: dict[str, Any] = {
      "dataset_type": (
          known.annotation | Literal[names],  # type: ignore[valid-type]
          pydantic.Field(known.default, description=known.description),
      )
  }
  for key in config_table.KEYS:
    if key.name in base.model_fields:  # type: ignore[attr-defined]
      continue
    declared: Any = key.kind.python_type
    if key.default is None:
      declared = declared | None
    default = list(key.default) if declared is list else key.default
    if declared is list:
      declared = Annotated[list, pydantic.BeforeValidator(_as_list)]
    fields[key.name] = (declared, pydantic.Field(default, description=key.help))

  class WithoutSecrets:
    """Removes credentials before any check, because pydantic's errors contain the input."""

    def __init__(self, **values: Any):
      ours = {key.name: values[key.name] for key in config_table.KEYS if key.name in values}
      super().__init__(**values | config_key.without_secrets(ours))

  bases: Any = (WithoutSecrets, base)  # The type of `create_model` accepts only models.
  return pydantic.create_model(base.__name__, __base__=bases, __module__=__name__, **fields)


def is_ours(dataset_type: Any) -> bool:
  """Returns whether a `dataset_type` of MaxText's config gets its batches from this package."""
  name = str(getattr(dataset_type, "value", dataset_type))
  # MaxText's own synthetic data stays as it is.
  return name in registry.dataset_types() and name != config_key.SYNTHETIC


def _as_list(value: Any) -> Any:
  """Converts a tuple in Python syntax to a list; MaxText's command line leaves it as text."""
  if isinstance(value, str):
    with contextlib.suppress(ValueError, SyntaxError):
      value = ast.literal_eval(value)
  return list(value) if isinstance(value, tuple) else value


def data_config(config: Any) -> Any:
  """Converts a config of MaxText to a config for `create_data_iterator`."""
  shapes.check_keys(config, (*(key.name for key in config_table.KEYS), *_READ))
  values: dict[str, Any] = {key.name: getattr(config, key.name) for key in config_table.KEYS}
  values["dataset_type"] = str(getattr(config.dataset_type, "value", config.dataset_type))
  _check_attention(config, values)
  for load, train in (
      ("global_batch_size_to_load", "global_batch_size_to_train_on"),
      ("global_batch_size_to_load_eval", "global_batch_size_to_eval_on"),
  ):
    # The trainer uses only the leading rows of a batch, and never more than are loaded.
    values[train] = min(values[train], values[load])
  if config.enable_rampup_batch_size:
    for name in ("olmo_batch_schedule", "olmo_batch_rampup_factors"):
      if values[name]:
        raise errors.ConfigError(f"enable_rampup_batch_size and {name} are both set; set only one.")
    values["olmo_batch_schedule"] = ramp_up_stages(config)
    values["olmo_batch_schedule_unit"] = "steps"
  if values["initial_step"] == -1 and _latest_label(config) is not None:
    # Start at 0 for now; `checkpoints.place` moves the data once MaxText has restored the model.
    values.update(initial_step=0, olmo_initial_position=-1)
  return types.SimpleNamespace(**values)


def _check_attention(config: Any, values: dict[str, Any]) -> None:
  """Raises ConfigError if MaxText's attention would ignore document boundaries."""
  if not (values["olmo_document_mask"] or values["dataset_type"] == config_key.DOCUMENTS):
    return
  if config.attention == "cudnn_flash_jax":
    remedy = "attention=dot_product"
  elif config.attention == "cudnn_flash_te" and not config.packing:
    remedy = "packing=true and max_segments_per_seq"
  else:
    return
  raise errors.ConfigError(
      f"attention={config.attention} with packing={config.packing} lets tokens attend to other"
      f" documents of their row, but the config asks for document masks. Set {remedy}, or, with"
      " olmo_grain and olmo_packed, olmo_document_mask=false."
  )


def ramp_up_stages(config: Any) -> tuple[tuple[int, int], ...]:
  """Returns the (first step, rows) pairs of MaxText's batch ramp-up, from its own manager."""
  manager = _RAMP_UP.find()(config, -1)
  stages = [(0, manager.global_batch_size_current)]
  step = 0
  active = True
  while active:
    active = manager.update()
    step += 1
    # After the ramp-up the trainer takes whole batches, which are larger than the manager's last
    # size if gradients are accumulated.
    rows = manager.global_batch_size_current if active else config.global_batch_size_to_train_on
    if rows != stages[-1][1]:
      stages.append((step, rows))
  return tuple(stages)


class TunixCheckpoint(NamedTuple):
  """The latest checkpoint of Tunix's trainer, and the number of batches consumed before it."""

  label: int
  step: int


def tunix_checkpoint(config: Any) -> TunixCheckpoint | None:
  """Returns the checkpoint from which Tunix's trainer (SFT, DPO) resumes; None if there is none.

  Tunix restores the model itself and does not notify the data iterator.
  """
  label = _latest_label(config)
  if label is None or not _is_tunix(config, label):
    return None
  return TunixCheckpoint(label, label * max(1, config.gradient_accumulation_steps))


def _latest_label(config: Any) -> int | None:
  if not (config.enable_checkpointing and config.checkpoint_dir):
    return None
  return resume.latest_committed_step(config.checkpoint_dir)


def _is_tunix(config: Any, label: int) -> bool:
  return (epath.Path(config.checkpoint_dir) / str(label) / "model_params").exists()
