"""Replaces the functions of MaxText through which its trainers get data.

MaxText has no registry of data pipelines, so its functions are replaced where it looks them up:

  create_data_iterator                     ours for olmo_grain, its own for every other dataset type
  _initialize_pydantic                     its config class gets our keys
  save_checkpoint, for_save                a checkpoint of olmo_grain gets the data state
  load_state_if_possible                   and a restored run continues after it
  create_dataloader                        under batch ramp-up our iterator has each step's rows
  create_checkpoint_manager                a run takes the lease of its checkpoint directory first
  MetricLogger                             metrics have the position and the epoch of each step

Each is checked before anything is replaced: another version of MaxText, or another signature of one
of these, is refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from maxtext_olmo import errors

VERSIONS = ("0.2.5",)
# What `maxtext-olmo maxtext` can start: MaxText's module, and the folder of its configs where short
# names are looked up.
ENTRY_POINTS = {
    "train": ("maxtext.trainers.pre_train.train", ""),
    "sft": ("maxtext.trainers.post_train.sft.train_sft", "post_train"),
    "dataloader": ("maxtext.utils.standalone_dataloader", ""),
}
_DATASET_TYPE = "olmo_grain"
_CREATE = ("maxtext.input_pipeline.input_pipeline_interface", "create_data_iterator")
# Modules that take create_data_iterator by name when they are imported.
_BY_NAME = ("maxtext.trainers.post_train.hooks",)

_originals: dict[tuple[str, str], Callable] = {}
# By directory; held until the process exits. An elastic restart in the same process keeps its own.
_leases: dict[str, Any] = {}


def is_installed() -> bool:
  """Whether MaxText's functions are replaced now."""
  return bool(_originals)


def install() -> None:
  """Makes MaxText's `dataset_type=olmo_grain` use this package; a second call changes nothing."""
  if is_installed():
    return
  check_version()
  found = {place: _find(*place) for place in _REPLACEMENTS}
  replacements = {
      place: functools.wraps(original)(functools.partial(_REPLACEMENTS[place][0], original))
      for place, original in found.items()
  }
  _originals.update(found)
  for (module, name), replacement in replacements.items():
    setattr(importlib.import_module(module), name, replacement)
  _rebind_by_name(replacements[_CREATE])


def uninstall() -> None:
  """Gives MaxText its own functions back; without an installation it does nothing."""
  for (module, name), original in _originals.items():
    setattr(importlib.import_module(module), name, original)
  if _originals:
    _rebind_by_name(_originals[_CREATE])
  _originals.clear()


def run(entry_point: str, args: Sequence[str]) -> None:
  """Installs, and runs one of MaxText's entry points with its arguments; may end the process."""
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
  # MaxText infers a default config from the path of the program, which is its module's.
  try:
    app.run(module.main, argv=[str(module.__file__), *_with_config_path(args, folder)])
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
    return 2
  return 0


def _end_all_processes(error: Exception) -> None:
  """Ends the other processes too, which would wait for this one; returns if there is none."""
  import jax

  from maxtext_olmo.trainers import failure

  if jax.distributed.is_initialized():
    traceback.print_exc()
  code = 2 if isinstance(error, errors.MaxtextOlmoError) else 1
  failure.end(f"{type(error).__name__}: {error}", code)


def check_version() -> None:
  """ConfigError where MaxText is not there, or in a version that is not known here."""
  try:
    version = importlib.metadata.version("maxtext")
  except importlib.metadata.PackageNotFoundError as error:
    raise errors.ConfigError(
        f"MaxText is not installed in {sys.prefix}; this package works inside"
        f" maxtext=={VERSIONS[-1]} (Python 3.12): docs/guides/maxtext.md has the commands."
    ) from error
  if version not in VERSIONS:
    raise errors.ConfigError(
        f"MaxText {version} is installed; this package works inside {', '.join(VERSIONS)} and"
        f" changes nothing in others: pip install maxtext=={VERSIONS[-1]}."
    )


def _find(module: str, name: str) -> Callable:
  """A function of MaxText, if it has the shape that its replacement relies on."""
  function = getattr(importlib.import_module(module), name, None)
  if not callable(function):
    raise errors.ConfigError(
        f"This MaxText has no function {module}.{name}, which the data pipeline has to replace. It"
        f" may have been edited: reinstall maxtext=={VERSIONS[-1]}."
    )
  expected = _REPLACEMENTS[module, name][1]
  found = tuple(inspect.signature(function).parameters)
  if not set(expected) <= set(found):
    raise errors.ConfigError(
        f"MaxText's {module}.{name} takes {list(found)}; expected at least {list(expected)}. It may"
        f" have been edited: reinstall maxtext=={VERSIONS[-1]}."
    )
  return function


def _rebind_by_name(function: Callable) -> None:
  for name in _BY_NAME:
    module = sys.modules.get(name)
    if module is not None:
      module.create_data_iterator = function  # type: ignore[attr-defined]


def _is_ours(config: Any) -> bool:
  kind = getattr(config, "dataset_type", None)
  return str(getattr(kind, "value", kind)) == _DATASET_TYPE


def _is_our_iterator(iterator: Any) -> bool:
  from maxtext_olmo.loader import iterator as iterator_lib

  return isinstance(iterator, iterator_lib.BatchIterator)


def _create_data_iterator(original: Callable, config: Any, mesh: Any) -> tuple[Any, Any]:
  if not _is_ours(config):
    return original(config, mesh)
  from maxtext.input_pipeline import multihost_dataloading

  from maxtext_olmo.loader import registry
  from maxtext_olmo.trainers import failure
  from maxtext_olmo.trainers.maxtext import config as config_lib

  failure.watch()
  if getattr(config, "use_sft", False):
    _take_lease(config)  # Tunix makes a checkpoint manager of its own.
  made = registry.create_data_iterator(config_lib.data_config(config), mesh)
  for iterator in made:
    if iterator is not None:
      # MaxText closes the iterators it knows of before an elastic restart.
      multihost_dataloading._GLOBAL_MULTIHOST_ITERATORS.add(iterator)
  return made


def _initialize_pydantic(
    original: Callable, argv: Any = None, config_class: Any = None, **kwargs: Any
) -> Any:
  from maxtext.configs import types

  from maxtext_olmo.trainers.maxtext import config as config_lib

  extended = config_lib.extended_config_class(config_class or types.MaxTextConfig)
  return original(argv, config_class=extended, **kwargs)


def _save_checkpoint(original: Callable, *args: Any, **kwargs: Any) -> Any:
  from maxtext_olmo.trainers.maxtext import checkpoints as checkpoints_lib

  call = inspect.signature(original).bind(*args, **kwargs)
  if _is_our_iterator(call.arguments.get("data_iterator")):
    lease = _leases.get(str(getattr(call.arguments["config"], "checkpoint_dir", "")))
    if lease is not None:
      lease.check()
    call.arguments["config"] = checkpoints_lib.AsGrain(call.arguments["config"])
  return original(*call.args, **call.kwargs)


def _for_save(original: Callable, step: int, data_iterator: Any, *rest: Any, **kwargs: Any) -> Any:
  from maxtext_olmo.trainers.maxtext import checkpoints as checkpoints_lib

  if _is_our_iterator(data_iterator):
    return checkpoints_lib.DataState(data_iterator)
  return original(step, data_iterator, *rest, **kwargs)


def _load_state_if_possible(original: Callable, *args: Any, **kwargs: Any) -> Any:
  call = inspect.signature(original).bind(*args, **kwargs)
  call.apply_defaults()
  given = call.arguments
  if not _is_our_iterator(given["data_iterator"]):
    return original(*args, **kwargs)
  from maxtext.common import checkpointing

  from maxtext_olmo.trainers.maxtext import checkpoints as checkpoints_lib

  manager = given["checkpoint_manager"]
  label = None
  if manager is not None:
    label = given["step"] if given["step"] >= 0 else checkpointing.latest_step(manager)
  result = original(*call.args, **call.kwargs)
  checkpoints_lib.place_after_restore(
      given["data_iterator"],
      directory=getattr(manager, "directory", None),
      label=label,
      full_state_path=given["load_full_state_from_path"],
      restored=result[0],
      config=given["maxtext_config"],
  )
  return result


def _create_dataloader(
    original: Callable,
    config: Any,
    mesh: Any,
    data_iterator: Any,
    goodput_recorder: Any,
    rampup_manager: Any,
) -> Any:
  if not _is_ours(config):
    return original(config, mesh, data_iterator, goodput_recorder, rampup_manager)
  from maxtext.common import data_loader

  from maxtext_olmo.trainers.maxtext import monitor

  loader = data_loader.DataLoader(config, mesh, data_iterator, goodput_recorder)
  return monitor.watch(loader, data_iterator)


def _create_checkpoint_manager(
    original: Callable, config: Any, mesh: Any, init_state_fn: Any
) -> Any:
  if _is_ours(config):
    _take_lease(config)
  return original(config, mesh, init_state_fn)


def _take_lease(config: Any) -> None:
  """Takes the lease of the checkpoint directory, unless this process holds it or there is none."""
  directory = str(config.checkpoint_dir or "") if config.enable_checkpointing else ""
  if directory and directory not in _leases:
    from maxtext_olmo.trainers import lease  # Late, because it imports JAX.

    _leases[directory] = lease.Lease(directory)


def _metric_logger(original: Callable, config: Any, *args: Any, **kwargs: Any) -> Any:
  logger = original(config, *args, **kwargs)
  if not _is_ours(config):
    return logger
  from maxtext_olmo.trainers.maxtext import monitor

  return monitor.add_to_metrics(logger)


# Where each function is looked up, what replaces it (with the original as its first argument), and
# the parameters that the replacement relies on.
_REPLACEMENTS: dict[tuple[str, str], tuple[Callable, tuple[str, ...]]] = {
    _CREATE: (_create_data_iterator, ("config", "mesh")),
    ("maxtext.configs.pyconfig", "_initialize_pydantic"): (
        _initialize_pydantic,
        ("argv", "config_class", "kwargs"),
    ),
    ("maxtext.common.checkpointing", "save_checkpoint"): (
        _save_checkpoint,
        ("checkpoint_manager", "step", "state", "config", "data_iterator", "force"),
    ),
    ("maxtext.common.checkpointing", "load_state_if_possible"): (
        _load_state_if_possible,
        (
            "checkpoint_manager",
            "data_iterator",
            "load_full_state_from_path",
            "step",
            "maxtext_config",
        ),
    ),
    ("maxtext.common.grain_utility", "for_save"): (
        _for_save,
        ("step", "data_iterator", "expansion_factor_real_data"),
    ),
    ("maxtext.utils.train_utils", "create_dataloader"): (
        _create_dataloader,
        ("config", "mesh", "data_iterator", "goodput_recorder", "rampup_manager"),
    ),
    ("maxtext.utils.train_utils", "create_checkpoint_manager"): (
        _create_checkpoint_manager,
        ("config", "mesh", "init_state_fn"),
    ),
    ("maxtext.common.metric_logger", "MetricLogger"): (_metric_logger, ("config",)),
}


def _with_config_path(args: Sequence[str], folder: str) -> list[str]:
  """Returns the arguments, with the name of MaxText's config (`base.yml`) turned into its path."""
  from maxtext.utils import globals as maxtext_globals

  args = list(args)
  if args and args[0].endswith((".yml", ".yaml")) and not os.path.exists(args[0]):
    for directory in ("", folder):
      path = os.path.join(maxtext_globals.MAXTEXT_CONFIGS_DIR, directory, args[0])
      if os.path.exists(path):
        args[0] = path
        break
  return args
