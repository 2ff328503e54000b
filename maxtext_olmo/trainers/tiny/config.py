"""Every config key of the trainer: the data keys, the model, the optimiser, the mesh, the reports.

`get_config()` gives them all with their defaults; a config file changes some and the command line
others. The config is locked, so that a misspelt key is an error that names its nearest neighbour.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections import config_flags

from maxtext_olmo import errors
from maxtext_olmo.loader import options
from maxtext_olmo.loader.options import Key

DTYPES = ("float32", "bfloat16")

KEYS: tuple[Key, ...] = (
    Key("steps", 100, "Train until so many steps are done, those before a resume included."),
    Key("emb_dim", 64, "Width of the residual stream."),
    Key("num_layers", 2, "Transformer layers."),
    Key("num_heads", 2, "Attention heads."),
    Key("head_dim", 32, "Width of a head; even, since RoPE turns pairs."),
    Key("mlp_dim", 256, "Hidden width of the SwiGLU."),
    Key("logits_via_embedding", True, "Tie the output projection to the embedding."),
    Key("rope_max_timescale", 10_000, "Base of RoPE's wavelengths."),
    Key("dtype", "float32", "Layers compute in float32 or bfloat16; weights stay float32."),
    Key("remat", False, "Compute each layer again in the backward pass, to save memory."),
    Key("init_seed", 0, "Seed of the initial weights."),
    Key("learning_rate", 1e-3, "Peak learning rate."),
    Key("warmup_steps", 10, "Steps of linear warm-up from 0; the cosine decay to `steps` follows."),
    Key("learning_rate_final_fraction", 0.1, "The last learning rate, as a fraction of the peak."),
    Key("adam_b1", 0.9, "Decay of AdamW's first moment."),
    Key("adam_b2", 0.95, "Decay of AdamW's second moment."),
    Key("adam_eps", 1e-8, "AdamW's epsilon."),
    Key("weight_decay", 0.1, "On matrices; the embedding and the norms have none."),
    Key("grad_clip", 1.0, "Largest global gradient norm; 0: no clipping."),
    Key("mesh_axes", ("data", "fsdp"), "Names of the mesh's axes; `fsdp` shards large weights."),
    Key("mesh_shape", (-1, 1), "Devices along each axis; one may be -1: all that are left."),
    Key("checkpoint_period", 100, "Save after every so many steps, and at the end."),
    Key("max_checkpoints", 3, "Checkpoints kept; 0: all."),
    Key("async_checkpointing", True, "Write checkpoints while training continues."),
    Key("log_interval", 10, "Steps between two lines of metrics."),
    Key("eval_steps", 0, "Batches per evaluation; 0: all of them."),
    Key(
        "eval_tasks",
        "",
        "Harness tasks to evaluate on every eval_interval steps: names or YAML files, by comma.",
    ),
    Key("eval_task_dir", "", "Directory of your own task files."),
    Key(
        "eval_tokenizer",
        "bytes",
        "Of the tasks: `bytes`, a tokenizer.json or its directory, or a name on the Hub.",
    ),
    Key("eval_batch_size", 0, "Rows of the tasks' batches. 0: as for training."),
    Key("eval_limit", 0, "Documents of each task. 0: all of them."),
    Key("metrics_file", "", "Write every step's metrics here, as JSON lines, at full precision."),
    Key("coordinator_address", "", "host:port of process 0. Empty: $JAX_COORDINATOR_ADDRESS."),
    Key("num_processes", 0, "Processes of the run. 0: $JAX_NUM_PROCESSES."),
    Key("process_id", -1, "Which of them this is. -1: $JAX_PROCESS_ID."),
)  # fmt: skip

_POSITIVE = (
    "vocab_size",
    "steps",
    "emb_dim",
    "num_layers",
    "num_heads",
    "head_dim",
    "mlp_dim",
    "rope_max_timescale",
    "learning_rate",
    "adam_eps",
    "checkpoint_period",
    "log_interval",
)
_NOT_NEGATIVE = (
    "warmup_steps",
    "weight_decay",
    "grad_clip",
    "max_checkpoints",
    "eval_steps",
    "eval_batch_size",
    "eval_limit",
    "num_processes",
)


def get_config() -> ConfigDict:
  """Every key with its default; locked, so that only keys that exist can be set."""
  config = ConfigDict(options.defaults())
  config.update({key.name: key.default for key in KEYS})
  return config.lock()


def read_config(argv: Sequence[str]) -> ConfigDict:
  """The config of a command line: `--config=FILE` (else the defaults) and `--config.KEY=VALUE`.

  Args:
    argv: as `sys.argv`, the program's name first.
  """
  values = flags.FlagValues()
  args = list(argv)
  try:
    if any(arg.split("=")[0].lstrip("-") == "config" for arg in args[1:]):
      config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=args)
    else:
      config_flags.DEFINE_config_dict("config", get_config(), flag_values=values, sys_argv=args)
    rest = values(args)
    config: Any = values["config"].value
    missing = sorted(
        set(get_config()) - set(config)
    )  # a file that could not be loaded shows only now
    if missing:
      raise errors.ConfigError(
          f"The config lacks {len(missing)} keys ({', '.join(missing[:3])}, …). Begin it with"
          " `config = maxtext_olmo.get_config()`, which has them all, and change what should"
          " differ."
      )
  except AttributeError as error:
    raise errors.ConfigError(_unknown_key(error)) from error
  except OSError as error:
    raise errors.ConfigError(f"The config file cannot be loaded: {_last_line(error)}") from error
  except errors.ConfigError:
    raise
  except (flags.Error, TypeError, ValueError) as error:
    raise errors.ConfigError(f"The command line cannot be read: {error}") from error
  if len(rest) > 1:
    raise errors.ConfigError(
        f"{rest[1]!r} is no flag; keys are set with --config.KEY=VALUE, files given with --config."
    )
  return config


def describe() -> str:
  """Every key with its default and what it means, as text."""
  keys = sorted((*options.KEYS, *KEYS))
  return "\n".join(f"  {key.name} = {key.default!r}\n      {key.help}" for key in keys)


def validate(config: ConfigDict) -> None:
  """Raises one ConfigError with all that is wrong, in the data keys too; reads no data."""
  problems = _data_problems(config)

  def check(holds: bool, problem: str) -> None:
    if not holds:
      problems.append(problem)

  for name in _POSITIVE:
    check(config[name] > 0, f"{name}={config[name]} must be positive.")
  for name in _NOT_NEGATIVE:
    check(config[name] >= 0, f"{name}={config[name]} must not be negative.")
  for name in ("adam_b1", "adam_b2"):
    check(0 <= config[name] < 1, f"{name}={config[name]} must be from 0 to below 1.")
  final = config.learning_rate_final_fraction
  check(0 <= final <= 1, f"learning_rate_final_fraction={final} must be from 0 to 1.")
  check(config.head_dim % 2 == 0, f"head_dim={config.head_dim} must be even.")
  check(config.dtype in DTYPES, f"dtype={config.dtype!r} must be one of {', '.join(DTYPES)}.")
  check(
      not config.eval_tasks or config.eval_interval > 0,
      f"eval_tasks={config.eval_tasks!r} needs eval_interval, the steps from one evaluation to the"
      " next.",
  )
  _check_mesh(config, check)
  _check_processes(config, check)
  if problems:
    raise errors.ConfigError(
        "The configuration cannot work:\n" + "\n".join(f"  - {problem}" for problem in problems)
    )


def for_data(config: ConfigDict) -> ConfigDict:
  """The config as the data path shall see it: evaluation on tasks alone needs no held-out data."""
  has_data = config.olmo_eval_index_path or config.olmo_eval_instances
  if not config.eval_tasks or has_data or config.dataset_type != "olmo_grain":
    return config
  changed = config.copy_and_resolve_references()
  changed.eval_interval = -1
  return changed


def _data_problems(config: ConfigDict) -> list[str]:
  try:
    options.Options.read(for_data(config))
  except errors.ConfigError as error:
    # One report for both: below the headline, the problems are a list.
    return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
  return []


def _check_mesh(config: ConfigDict, check: Any) -> None:
  axes, shape = tuple(config.mesh_axes), tuple(config.mesh_shape)
  check(
      len(axes) == len(shape) > 0,
      f"mesh_axes={axes} and mesh_shape={shape} must name and size the same axes.",
  )
  check(len(set(axes)) == len(axes), f"mesh_axes={axes} names an axis twice.")
  check(
      all(size == -1 or size > 0 for size in shape) and shape.count(-1) <= 1,
      f"mesh_shape={shape} must be positive sizes, of which one may be -1.",
  )


def _check_processes(config: ConfigDict, check: Any) -> None:
  count, this = config.num_processes, config.process_id
  if count or this >= 0:
    check(
        0 <= this < count,
        f"process_id={this} must be from 0 to below num_processes={count}; set both, or neither.",
    )
    address = config.coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    check(
        count <= 1 or bool(address),
        f"num_processes={count} needs coordinator_address, the host:port of process 0.",
    )


def _unknown_key(error: AttributeError) -> str:
  found = re.match(r"""["']\W*(?:Key \W*)?(\w+)""", str(error))
  if not found:
    return f"The config cannot be read: {error}"
  name, known = found[1], list(get_config())
  near = difflib.get_close_matches(name, known, n=1)
  hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}."
  return f"The config has no key {name!r}; {hint}"


def _last_line(error: OSError) -> str:
  return str(error).splitlines()[-1].strip()
