"""Replaces the functions of MaxText through which its trainers get data.

MaxText has no registry of data pipelines, so six of its functions are replaced:

  create_data_iterator         returns our iterator for olmo_grain, MaxText's for other types, and
                               raises if this task is one of several that are not connected
  _initialize_pydantic         adds our keys to MaxText's config class
  setup_training_state         moves the data to the step that the model has reached
  create_dataloader            lets our iterator choose the rows of each step during batch ramp-up,
                               and checks at each step that the run still holds its lease
  create_checkpoint_manager    makes the same check, then takes the lease of the checkpoint
                               directory
  MetricLogger                 adds the position and the epoch of each step to the metrics

MaxText's checkpointing is unchanged; `checkpoints` finds the position of the data for a restored
step. `shapes` checks the parameters of all functions before any function is replaced. A trainer
that gets its data from elsewhere, or never reports the step that it restored, is stopped before its
first batch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo import trainers
from maxtext_olmo.trainers.maxtext import shapes

# For each entry point of `maxtext-olmo maxtext`: MaxText's module, and the config folder of MaxText
# in which short names are looked up.
ENTRY_POINTS = {
    "train": ("maxtext.trainers.pre_train.train", ""),
    "sft": ("maxtext.trainers.post_train.sft.train_sft", "post_train"),
    "dataloader": ("maxtext.utils.standalone_dataloader", ""),
}
_CONNECT_REMEDY = (
    "set hardware=gpu_multiprocess, with which JAX finds the other tasks; or hardware=gpu with the"
    " variables JAX_COORDINATOR_IP, JAX_COORDINATOR_PORT, NNODES and NODE_RANK. Do not set"
    " skip_jax_distributed_system. To train alone, set JAX_NUM_PROCESSES=1."
)
# MaxText's own functions, each with its replacement.
_installed: dict[shapes.Function, tuple[Callable, Callable]] = {}
# Leases by directory, held until the process exits; an elastic restart in the same process keeps
# them.
_leases: dict[str, Any] = {}
# Training data whose trainer has not yet reported the step that it restored.
_unplaced: weakref.WeakSet[Any] = weakref.WeakSet()


def is_installed() -> bool:
  """Returns whether MaxText's functions are currently replaced."""
  return bool(_installed)


def install() -> None:
  """Makes MaxText's `dataset_type=olmo_grain` use this package; a second call changes nothing.

  Raises:
    ConfigError: MaxText is not installed, or one of its functions lacks a parameter. In either
      case, nothing has been replaced.
  """
  if is_installed():
    return
  version = shapes.installed_version()
  found = {function: function.find() for function in _REPLACEMENTS}
  for function, original in found.items():
    replacement = functools.wraps(original)(functools.partial(_REPLACEMENTS[function], original))
    _installed[function] = original, replacement
    _rebind(function.name, original, replacement)
  if version not in shapes.TRIED:
    logging.warning(
        "MaxText %s has not been tested with this package (tested: %s). The run continues, because"
        " the functions to be replaced have the expected parameters.",
        version,
        ", ".join(shapes.TRIED),
    )


def uninstall() -> None:
  """Restores MaxText's own functions; does nothing if they are not replaced."""
  for function, (original, replacement) in _installed.items():
    _rebind(function.name, replacement, original)
  _installed.clear()


def run(entry_point: str, args: Sequence[str]) -> None:
  """Calls `install` and runs one of MaxText's entry points; may end the process."""
  install()
  from absl import app

  name, folder = ENTRY_POINTS[entry_point]
  try:
    module = importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name and error.name.split(".")[0] == "tunix":
      raise errors.ConfigError(
          f"MaxText's {name} needs Tunix, which is not installed: pip install google-tunix."
      ) from error
    raise
  from maxtext_olmo.trainers.maxtext import preemption

  preemption.watch()
  # MaxText infers a default config from the program's path, so pass the path of its module.
  try:
    app.run(module.main, argv=[str(module.__file__), *_with_config_path(args, folder)])
  except SystemExit as ended:  # `app.run` always exits.
    if preemption.is_preempted() and not ended.code:
      raise SystemExit(trainers.RESTART_CODE) from ended
    raise
  except Exception as error:
    _end_all_processes(error)
    raise


def main(argv: Sequence[str]) -> int:
  """`python -m maxtext_olmo.trainers.maxtext [train|sft|dataloader] CONFIG.yml key=value ...`."""
  args = list(argv[1:])
  entry_point = args.pop(0) if args and args[0] in ENTRY_POINTS else "train"
  try:
    run(entry_point, args)
  except errors.MaxtextOlmoError as error:
    sys.stderr.write(f"error: {error}\n")
    return _exit_code(error)
  return 0


def _end_all_processes(error: Exception) -> None:
  """Ends all processes of the run, because the others would wait for this one forever.

  Returns if there are no other processes.
  """
  import jax

  from maxtext_olmo.trainers import failure

  if jax.distributed.is_initialized():
    traceback.print_exc()
  failure.end(f"{type(error).__name__}: {error}", _exit_code(error))


def _exit_code(error: Exception) -> int:
  """Returns 2 if something must be fixed first, and 1 if a restart may succeed."""
  return 2 if isinstance(error, errors.MaxtextOlmoError) and not errors.is_transient(error) else 1


def _rebind(name: str, old: Callable, new: Callable) -> None:
  """Replaces a function in every module of MaxText that defines it or has imported it by name."""
  for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("maxtext.") and vars(module).get(name) is old:
      setattr(module, name, new)


def _bind(function: Callable, args: Any, kwargs: Any) -> inspect.BoundArguments:
  """Returns the arguments of a call by name, so that MaxText may add or reorder parameters."""
  call = inspect.signature(function).bind(*args, **kwargs)
  call.apply_defaults()
  return call


def _is_ours(config: Any) -> bool:
  from maxtext_olmo.trainers.maxtext import config as config_lib

  return config_lib.is_ours(getattr(config, "dataset_type", None))


def _check_not_alone(config: Any) -> None:
  """Raises ConfigError if this is one of several tasks, and MaxText has not connected them.

  With hardware=gpu and without JAX_COORDINATOR_IP, MaxText connects nothing and reports no error.
  """
  if not getattr(config, "enable_single_controller", False):  # Pathways has only one process.
    from maxtext_olmo.trainers import cluster

    cluster.check_not_alone(_CONNECT_REMEDY)


def _create_data_iterator(original: Callable, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
  given = _bind(original, args, kwargs).arguments
  config = given["config"]
  if not _is_ours(config):
    return original(*args, **kwargs)
  from maxtext.input_pipeline import multihost_dataloading

  from maxtext_olmo.loader import registry
  from maxtext_olmo.trainers import failure
  from maxtext_olmo.trainers.maxtext import checkpoints as checkpoints_lib
  from maxtext_olmo.trainers.maxtext import config as config_lib
  from maxtext_olmo.trainers.maxtext import monitor

  _check_not_alone(config)
  failure.watch()
  if getattr(config, "use_sft", False):
    _take_lease(config)  # Tunix does not call `create_checkpoint_manager`.
  train, evaluation = registry.create_data_iterator(config_lib.data_config(config), given["mesh"])
  monitor.fail_with(train, evaluation)
  # MaxText closes the iterators in this set before an elastic restart; version 0.2.4 has no set.
  known = getattr(multihost_dataloading, "_GLOBAL_MULTIHOST_ITERATORS", None)
  if known is not None:
    known.update(iterator for iterator in (train, evaluation) if iterator is not None)
  tunix = config_lib.tunix_checkpoint(config)
  if tunix is None:
    _unplaced.add(train)
  else:
    checkpoints_lib.place(
        train, config, label=tunix.label, step=tunix.step  # type: ignore[arg-type]
    )
  return train, evaluation


def _initialize_pydantic(original: Callable, *args: Any, **kwargs: Any) -> Any:
  from maxtext_olmo.trainers.maxtext import config as config_lib

  call = _bind(original, args, kwargs)
  extended = config_lib.extended_config_class(call.arguments["config_class"])
  call.arguments["config_class"] = extended
  return original(*call.args, **call.kwargs)


def _setup_training_state(original: Callable, *args: Any, **kwargs: Any) -> Any:
  given = _bind(original, args, kwargs).arguments
  iterator, config = given["data_iterator"], given["config"]
  from maxtext_olmo.loader import iterator as iterator_lib

  if not isinstance(iterator, iterator_lib.BatchIterator):
    if _is_ours(config) and hasattr(iterator, "__next__"):
      raise shapes.wrong_shape(
          "its trainer got olmo_grain batches from a function other than"
          " maxtext.input_pipeline.input_pipeline_interface.create_data_iterator"
      )
    return original(*args, **kwargs)
  from maxtext_olmo.trainers.maxtext import checkpoints as checkpoints_lib

  label = checkpoints_lib.latest_label(given["checkpoint_manager"])
  result = original(*args, **kwargs)
  step = checkpoints_lib.model_step(result[0] if isinstance(result, tuple) else result)
  if step is None:
    raise shapes.wrong_shape(
        "maxtext.utils.maxtext_utils.setup_training_state returned no train state with a step"
    )
  checkpoints_lib.place(iterator, config, label=label, step=step)
  _unplaced.discard(iterator)
  _warn_of_the_end(iterator, config)
  return result


def _warn_of_the_end(iterator: Any, config: Any) -> None:
  """Warns if the data ends before the run, because MaxText then saves no final checkpoint."""
  stream = iterator.stream
  if stream.endless or stream.num_positions is None or config.generate_padding_batch_train:
    return
  end = iterator.step + len(iterator.host_batches())
  if end < config.steps:
    logging.warning(
        "olmo_grain: the data ends after step %d, before steps=%d. MaxText does not save a"
        " checkpoint there; set steps=%d, so that it does.",
        end - 1,
        config.steps,
        end,
    )


def _create_dataloader(original: Callable, *args: Any, **kwargs: Any) -> Any:
  call = _bind(original, args, kwargs)
  config = call.arguments["config"]
  if not _is_ours(config):
    return original(*args, **kwargs)
  # Without a ramp-up manager, MaxText passes batches on unchanged. Our batches already have the
  # right rows for each step.
  call.arguments["rampup_manager"] = None
  loader = original(*call.args, **call.kwargs)
  load = loader.load_next_batch
  lease = _leases.get(_lease_directory(config))

  def load_next_batch(*args: Any, **kwargs: Any) -> Any:
    if _unplaced:
      raise shapes.wrong_shape(
          "its trainer asks for a batch without having called"
          " maxtext.utils.maxtext_utils.setup_training_state, so the step that it restored is not"
          " known"
      )
    if lease is not None:
      lease.require_held()
    return load(*args, **kwargs)

  from maxtext_olmo.trainers.maxtext import monitor

  loader.load_next_batch = load_next_batch
  return monitor.watch(loader, call.arguments["data_iterator"])


def _create_checkpoint_manager(original: Callable, *args: Any, **kwargs: Any) -> Any:
  config = _bind(original, args, kwargs).arguments["config"]
  if _is_ours(config):
    # Before the lease: a task that waits for it would not say that it is unconnected.
    _check_not_alone(config)
    _take_lease(config)
  return original(*args, **kwargs)


def _take_lease(config: Any) -> None:
  """Takes the lease of the checkpoint directory, if there is one and it is not yet held."""
  directory = _lease_directory(config)
  if directory and directory not in _leases:
    from maxtext_olmo.trainers import lease  # Imported only here, because it imports JAX.

    _leases[directory] = lease.Lease(directory)


def _metric_logger(original: Callable, *args: Any, **kwargs: Any) -> Any:
  logger = original(*args, **kwargs)
  if not _is_ours(_bind(original, args, kwargs).arguments["config"]):
    return logger
  from maxtext_olmo.trainers.maxtext import monitor

  return monitor.add_to_metrics(logger)


def _lease_directory(config: Any) -> str:
  return str(config.checkpoint_dir or "") if config.enable_checkpointing else ""


# The replacement of each function. A replacement takes the original as its first argument.
_REPLACEMENTS: dict[shapes.Function, Callable] = {
    shapes.Function(
        "maxtext.input_pipeline.input_pipeline_interface",
        "create_data_iterator",
        ("config", "mesh"),
    ): _create_data_iterator,
    shapes.Function(
        "maxtext.configs.pyconfig", "_initialize_pydantic", ("config_class",)
    ): _initialize_pydantic,
    shapes.Function(
        "maxtext.utils.maxtext_utils",
        "setup_training_state",
        ("data_iterator", "config", "checkpoint_manager"),
    ): _setup_training_state,
    shapes.Function(
        "maxtext.common.data_loader",
        "create_dataloader",
        ("config", "data_iterator", "rampup_manager"),
    ): _create_dataloader,
    shapes.Function(
        "maxtext.utils.train_utils", "create_checkpoint_manager", ("config",)
    ): _create_checkpoint_manager,
    shapes.Function("maxtext.common.metric_logger", "MetricLogger", ("config",)): _metric_logger,
}


def _with_config_path(args: Sequence[str], folder: str) -> list[str]:
  """Returns the arguments, with the name of a MaxText config (`base.yml`) replaced by its path."""
  from maxtext.utils import globals as maxtext_globals

  args = list(args)
  if args and args[0].endswith((".yml", ".yaml")) and not os.path.exists(args[0]):
    for directory in ("", folder):
      path = os.path.join(maxtext_globals.MAXTEXT_CONFIGS_DIR, directory, args[0])
      if os.path.exists(path):
        args[0] = path
        break
  return args
