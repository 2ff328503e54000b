"""The config of the tiny trainer: its keys for data, model, optimiser, mesh and reports.

`get_trainer_config()` returns all of them with their defaults; config files and the command line
change them. The config is locked: a misspelt key raises an error that suggests the nearest key. The
configs of this package (`configs/` in a checkout) are found by name from any directory.
"""

from __future__ import annotations

import difflib
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections import config_flags

from maxtext_olmo import config as data_keys
from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.config_key import Key
from maxtext_olmo.config_key import at_least
from maxtext_olmo.config_key import make_config
from maxtext_olmo.config_key import more_than
from maxtext_olmo.config_key import one_of
from maxtext_olmo.config_key import read_values

SHIPPED = pathlib.Path(data_keys.__file__).parent / "configs"
DTYPES = ("float32", "bfloat16")


def _is_decay(value: float) -> str:
  return "" if 0 <= value < 1 else "must be at least 0 and less than 1"


def _is_fraction(value: float) -> str:
  return "" if 0 <= value <= 1 else "must be from 0 to 1"


KEYS: tuple[Key, ...] = (
    Key("steps", 100, "Total steps of the run, including those before a resume.", at_least(1)),
    Key("emb_dim", 64, "Width of the residual stream.", at_least(1)),
    Key("num_layers", 2, "Transformer layers.", at_least(1)),
    Key("num_heads", 2, "Attention heads.", at_least(1)),
    Key("head_dim", 32, "Width of a head; even, because RoPE rotates pairs.", at_least(2)),
    Key("mlp_dim", 256, "Hidden width of the SwiGLU layer.", at_least(1)),
    Key("logits_via_embedding", True, "Whether to tie the output projection to the embedding."),
    Key("rope_max_timescale", 10_000, "Base of RoPE's wavelengths.", at_least(1)),
    Key("dtype", "float32", "Layers compute in float32 or bfloat16; weights are always float32.",
        one_of(*DTYPES)),
    Key("remat", False, "Whether to recompute each layer in the backward pass, to save memory."),
    Key("init_seed", 0, "Seed of the initial weights."),
    Key("learning_rate", 1e-3, "Peak learning rate.", more_than(0)),
    Key("warmup_steps", 10, "Steps of linear warm-up from 0, before cosine decay until `steps`.",
        at_least(0)),
    Key("learning_rate_final_fraction", 0.1, "Final learning rate, as a fraction of the peak.",
        _is_fraction),
    Key("adam_b1", 0.9, "Decay of AdamW's first moment.", _is_decay),
    Key("adam_b2", 0.95, "Decay of AdamW's second moment.", _is_decay),
    Key("adam_eps", 1e-8, "AdamW's epsilon.", more_than(0)),
    Key("weight_decay", 0.1, "Weight decay of matrices; the embedding and the norms have none.",
        at_least(0)),
    Key("grad_clip", 1.0, "Maximum global gradient norm. 0: no clipping.", at_least(0)),
    Key("mesh_axes", ("data", "fsdp"), "Names of the mesh axes; `fsdp` shards large weights."),
    Key("mesh_shape", (-1, 1), "Devices along each axis; one may be -1: all remaining devices."),
    Key("checkpoint_period", 100, "Steps between checkpoints; the last step is saved as well.",
        at_least(1)),
    Key("max_checkpoints", 3, "Checkpoints to keep. 0: all.", at_least(0)),
    Key("load_parameters_path", "",
        "Checkpoint whose weights a new run starts with, or a directory of checkpoints, of which"
        " the latest is used. The optimiser and the data start from the beginning. A resumed run"
        " ignores this key."),
    Key("async_checkpointing", True, "Whether to write checkpoints while training continues."),
    Key("log_interval", 10, "Steps between lines of metrics in the log.", at_least(1)),
    Key("eval_steps", 0, "Batches per evaluation. 0: all.", at_least(0)),
    Key("eval_tasks", "",
        "Harness tasks to evaluate on every eval_interval steps: names or YAML files, separated by"
        " commas."),
    Key("eval_task_dir", "", "Directory with your own task files."),
    Key("eval_tokenizer", "bytes",
        "Tokenizer of the tasks: `bytes`, a tokenizer.json or its directory, or `hf:NAME` on the"
        " Hub."),
    Key("eval_batch_size", 0, "Rows per batch on tasks. 0: as in training.", at_least(0)),
    Key("eval_limit", 0, "Documents to evaluate per task. 0: all.", at_least(0)),
    Key("metrics_file", "", "File for the metrics of every step, as JSON lines in full precision."),
    Key("coordinator_address", "",
        "host:port of process 0. Empty: $JAX_COORDINATOR_ADDRESS, or that of the cluster that JAX"
        " detects."),
    Key("num_processes", 0,
        "Number of processes. 0: $JAX_NUM_PROCESSES, or the tasks of the cluster.", at_least(0)),
    Key("process_id", -1,
        "Index of this process, from 0. -1: $JAX_PROCESS_ID, or that of the cluster's task."),
)  # fmt: skip


def get_trainer_config() -> ConfigDict:
  """Returns a config of the embedded trainer: every key, including data keys, at its default.

  Config files of `maxtext-olmo train` start from this config. It is locked, so a misspelt key is an
  error.

  >>> import maxtext_olmo
  >>> config = maxtext_olmo.get_trainer_config()
  >>> config.dataset_type, config.num_layers
  ('olmo_grain', 2)
  """
  return make_config((*config_table.KEYS, *KEYS))


get_config = get_trainer_config  # The name that config files for earlier releases use.


def read_config(argv: Sequence[str]) -> ConfigDict:
  """Returns the config that a command line sets, with defaults for all other keys.

  Args:
    argv: The arguments as in `sys.argv`: the program's name, `--config=FILE` if given, and
      `--config.KEY=VALUE` for any number of keys.
  """
  program, *args = argv
  named = [arg for arg in args if arg.split("=")[0].lstrip("-") == "config"]
  try:
    config = get_trainer_config()
    if named:
      config = _load_file(program, [_find_file(arg) for arg in named])
      args = [arg for arg in args if arg not in named]
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=[program, *args])
    rest = values([program, *args])
    config = values["config"].value
  except AttributeError as error:
    raise errors.ConfigError(_unknown_key(error)) from error
  except SyntaxError as error:
    raise errors.ConfigError(f"The config file is not Python: {error}.") from error
  except OSError as error:
    said = str(error).splitlines()[-1].strip()
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("[a-z]*.py")))
    raise errors.ConfigError(
        f"The config file cannot be loaded: {said}. Give the path of a Python file, or the name of"
        f" a config of this package: {shipped}."
    ) from error
  except errors.ConfigError:
    raise
  except (flags.Error, TypeError, ValueError) as error:
    raise errors.ConfigError(f"The command line cannot be read: {error}") from error
  if len(rest) > 1:
    raise errors.ConfigError(
        f"{rest[1]!r} is not a flag. Set keys with --config.KEY=VALUE, or a file with"
        " --config=FILE."
    )
  return config


def _load_file(program: str, named: Sequence[str]) -> ConfigDict:
  """Returns the config of a file, with defaults for keys that it lacks."""
  values = flags.FlagValues()
  args = [program, *named]
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=args)
  values(args)
  config: Any = values["config"].value
  defaults = get_trainer_config()
  unknown = sorted(set(config) - set(defaults))
  if unknown:
    raise errors.ConfigError(_unknown_key_text(unknown[0]))
  with config.unlocked():
    for name in set(defaults) - set(config):
      config[name] = defaults.get_ref(name)
  return config.lock()


def _find_file(argument: str) -> str:
  """Returns `--config=FILE`, with the full path if FILE names a config of this package.

  Raises:
    ConfigError: The file is not a regular file, so reading it might never end.
  """
  flag, given, file = argument.partition("=")
  path, colon, parameter = file.partition(":")
  if os.path.exists(path) and not os.path.isfile(path):
    raise errors.ConfigError(f"The config file {path} is not a regular file.")
  return f"{flag}{given}{shipped_config(path) or path}{colon}{parameter}"


def shipped_config(name: str) -> str | None:
  """Returns the path of a config that comes with this package; None if there is none of that name.

  Args:
    name: A file name, with or without `configs/` and `.py`. An existing file takes precedence.
  """
  folder, base = os.path.split(name)
  path = SHIPPED / f"{base.removesuffix('.py')}.py"
  return (
      str(path)
      if folder in ("", "configs") and not os.path.exists(name) and path.is_file()
      else None
  )


def describe() -> str:
  """Returns every key with its default and its help, as text."""
  keys = sorted((*config_table.KEYS, *KEYS), key=lambda key: key.name)
  return "\n".join(
      f"  {key.name} = {key.default_text.replace('`', '')}\n      {key.help}" for key in keys
  )


def validate(config: ConfigDict) -> None:
  """Raises one ConfigError with all problems, including those of the data keys; reads no data."""
  wrong_values = read_values(config, KEYS)[1].values()
  problems = [*_data_problems(config), *wrong_values, *_combinations(config)]
  if problems:
    raise errors.ConfigError(
        "The configuration is invalid:\n" + "\n".join(f"  - {problem}" for problem in problems)
    )


def for_data(config: ConfigDict, *, restores: bool = False) -> ConfigDict:
  """Returns the config for the data path.

  Args:
    config: The config of the run.
    restores: Whether the trainer restores the data state itself; then the data path does not look
      for a checkpoint.
  """
  changed = config.copy_and_resolve_references()
  has_data = config.olmo_eval_index_path or config.olmo_eval_instances
  if config.eval_tasks and not has_data and config.dataset_type == "olmo_grain":
    changed.eval_interval = -1  # Evaluation on tasks alone needs no held-out data.
  if restores:
    changed.update(initial_step=0, olmo_initial_position=-1)
  return changed


def _data_problems(config: ConfigDict) -> list[str]:
  try:
    data_keys.Options.read(for_data(config))
  except errors.ConfigError as error:
    # In the message, each line after the first is a problem.
    return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
  return []


def _combinations(config: ConfigDict) -> Iterator[str]:
  """Yields the problems that the checks of single keys cannot find."""
  if config.vocab_size <= 0:
    yield f"vocab_size={config.vocab_size} must be at least 1."
  if config.head_dim % 2:
    yield f"head_dim={config.head_dim} must be even."
  if config.eval_tasks and config.eval_interval <= 0:
    yield f"eval_tasks={config.eval_tasks!r} needs eval_interval, the steps between evaluations."
  axes, shape = tuple(config.mesh_axes), tuple(config.mesh_shape)
  if not len(axes) == len(shape) > 0:
    yield f"mesh_axes={axes} and mesh_shape={shape} must have the same length, at least 1."
  if len(set(axes)) < len(axes):
    yield f"mesh_axes={axes} names an axis twice."
  if any(size != -1 and size <= 0 for size in shape) or shape.count(-1) > 1:
    yield f"mesh_shape={shape} must have positive sizes, except that one may be -1."
  count, this = config.num_processes, config.process_id
  if count > 1 and this < 0:
    yield f"num_processes={count} needs process_id, the number of this process (from 0)."
  elif (count or this >= 0) and not 0 <= this < count:
    yield (
        f"process_id={this} must be at least 0 and less than num_processes={count}; set both or"
        " neither."
    )
  address = config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
  if count > 1 and not address:
    yield f"num_processes={count} needs coordinator_address, the host:port of process 0."


def _unknown_key(error: AttributeError) -> str:
  found = re.match(r"""["']\W*(?:Key \W*)?(\w+)""", str(error))
  if not found:
    return f"The config cannot be read: {error}"
  return _unknown_key_text(found[1])


def _unknown_key_text(name: str) -> str:
  known = list(get_trainer_config())
  if name in known:
    return (
        f"The config has no key {name!r}, because it was made by maxtext_olmo.get_config(), which"
        " has data keys only; begin the file with maxtext_olmo.get_trainer_config()."
    )
  near = difflib.get_close_matches(name, known, n=1)
  hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}."
  return f"The config has no key {name!r}; {hint}"
