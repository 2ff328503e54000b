"""Evaluates the embedded trainer's model: on tasks of lm-evaluation-harness, and on corpora.

config → checkpoint → parameters on the mesh → `JaxLM` → the harness's results
"""

from __future__ import annotations

import contextlib
import difflib
import logging as python_logging
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from absl import logging
from ml_collections import ConfigDict

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.loader import resume
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.trainers.tiny import checkpoints as checkpoints_lib
from maxtext_olmo.trainers.tiny import model

if TYPE_CHECKING:
  from maxtext_olmo.evaluation.model import JaxLM

# Bootstrap samples for standard errors that have no formula.
_BOOTSTRAP_DRAWS = 1000
_FIELDS = ("inputs", "inputs_position", "inputs_segmentation")


def make_apply(config: ConfigDict) -> scoring.Apply:
  """Returns the function that applies the model of a config to batches of requests."""
  model_config = model.ModelConfig.from_config(config)

  def apply(params: model.Params, batch: batch_lib.LLMIndexedBatch) -> jax.Array:
    return model.apply(params, {name: getattr(batch, name) for name in _FIELDS}, model_config)

  return apply


def make_lm(config: ConfigDict, params: Any, mesh: jax.sharding.Mesh, **options: Any) -> JaxLM:
  """Returns the model in the form that the harness evaluates.

  Args:
    options: Options of `JaxLM`, which override those from the config.
  """
  from maxtext_olmo.evaluation.model import JaxLM

  values: dict[str, Any] = {
      "tokenizer": config.eval_tokenizer,
      "batch_size": config.eval_batch_size or config.global_batch_size_to_load,
      "max_length": config.max_target_length,
      "data_sharding": layout_lib.partition_spec(mesh, config.data_sharding),
      "name": str(model.ModelConfig.from_config(config)),
      **options,
  }
  return JaxLM(make_apply(config), params, mesh=mesh, **values)


def load_params(
    config: ConfigDict, mesh: jax.sharding.Mesh, step: int | None = None
) -> tuple[int, Any]:
  """Returns the step of a checkpoint, by default the latest, and its parameters."""
  directory = config.checkpoint_dir
  if not directory:
    raise errors.ConfigError(
        "No checkpoint was given. Set checkpoint_dir, as in training: --config.checkpoint_dir=DIR."
    )
  if not os.path.isdir(directory) and "://" not in directory:
    raise errors.ConfigError(
        f"checkpoint_dir={directory} is not a directory. Train a model first, or check the path."
    )
  checkpoints = checkpoints_lib.Checkpoints(directory, read_only=True)
  if step is None:
    # Raises an error if it is unknown whether the latest checkpoint is complete, because an older
    # one is not what was asked for.
    step = collectives.from_process_0(
        lambda: resume.latest_committed_step(checkpoints.directory), "looking for checkpoints"
    )
  if step is None or not checkpoints.has(step):
    which = "no checkpoint" if step is None else f"no checkpoint {step}"
    latest = "" if checkpoints.latest is None else f"; the latest is {checkpoints.latest}"
    raise errors.ConfigError(f"{checkpoints.directory} has {which}{latest}.")
  learner = model.Learner(config, mesh)
  state, _ = checkpoints.restore(step, learner.abstract_state)
  checkpoints.close()
  return step, state["params"]


class Tasks:
  """Tasks of the harness, found by name once and run any number of times.

  Args:
    names: Names of tasks, groups or tags, or paths of task files (YAML); `*` matches any part of a
      name.
    directory: Directory of your own task files.
  """

  def __init__(self, names: Sequence[str], directory: str = ""):
    with _harness():
      from lm_eval import tasks as harness_tasks

      self._make_manager = harness_tasks.TaskManager
      self._manager, self.names = self._find(list(names), directory)

  def run(
      self,
      lm: JaxLM,
      *,
      limit: int | float | None = None,
      num_fewshot: int | None = None,
      log_samples: bool = False,
  ) -> dict[str, Any]:
    """Returns the harness's results on each process; all processes call it together.

    Args:
      limit: The number of documents of each task, or a fraction of them if below 1.
      num_fewshot: The number of examples before each question; None uses the task's setting.
    """
    with _harness():
      import lm_eval

      try:
        results = lm_eval.simple_evaluate(
            lm,
            tasks=list(self.names),
            task_manager=self._manager,
            limit=limit,
            num_fewshot=num_fewshot,
            batch_size=lm.batch_size,
            bootstrap_iters=_BOOTSTRAP_DRAWS,
            log_samples=log_samples,
        )
      except Exception as error:
        if isinstance(error, errors.MaxtextOlmoError) or _is_of_the_model(error):
          raise
        # Data or a package is missing, or a task file is invalid: the harness passes on whatever
        # its libraries raise.
        said = " ".join(str(error).split()) or "no details"
        raise errors.ConfigError(
            f"The tasks {', '.join(self.names)} cannot run here: {type(error).__name__}:"
            f" {said[:400]}. Check their task files, and that their data is available and not"
            " empty."
        ) from error
    # These values are the same on every process.
    results["config"]["compiled_lengths"] = list(lm.compiled_lengths)
    results["config"]["padding_share"] = lm.padding_share
    return results

  def _find(self, names: list[str], directory: str) -> tuple[Any, list[str]]:
    if not names:
      raise errors.ConfigError("No task was given; name at least one.")
    if directory and not os.path.isdir(directory):
      raise errors.ConfigError(f"The task directory {directory} does not exist.")
    own = self._make_manager(include_path=directory or None, include_defaults=False)
    manager = own
    if any(not _match(name, own) for name in names):
      # Loading the harness's own tasks takes seconds, because there are thousands of them.
      manager = self._make_manager(include_path=directory or None)
    found: list[str] = []
    for name in names:
      matches = _match(name, manager)
      if not matches:
        raise errors.ConfigError(_unknown_task(name, manager.all_tasks, directory))
      found += [match for match in matches if match not in found]
    return manager, found


def metrics(results: dict[str, Any]) -> dict[str, float]:
  """Returns the metrics by name, such as `arc_easy/acc`, without standard errors."""
  found = {}
  for task, values in results["results"].items():
    for name, value in values.items():
      metric, _, filter_name = name.partition(",")
      if isinstance(value, (int, float)) and filter_name and not metric.endswith("_stderr"):
        suffix = "" if filter_name == "none" else f"/{filter_name}"
        found[f"{task}/{metric}{suffix}"] = float(value)
  return found


def during_training(
    config: ConfigDict, mesh: jax.sharding.Mesh
) -> Callable[[Any], dict[str, float]] | None:
  """Returns a function that evaluates parameters on `eval_tasks`; None if there are no tasks."""
  if not config.eval_tasks:
    return None
  tasks = Tasks(config.eval_tasks.split(","), config.eval_task_dir)
  lm: JaxLM | None = None

  def evaluate(params: Any) -> dict[str, float]:
    nonlocal lm
    if lm is None:
      # One model for the whole run, so that each shape is compiled once.
      lm = make_lm(config, params, mesh, progress=False)
    lm.params = params
    results = tasks.run(lm, limit=config.eval_limit or None)
    return {f"eval/{name}": value for name, value in metrics(results).items()}

  return evaluate


@contextlib.contextmanager
def _harness() -> Iterator[None]:
  """Silences the harness, and keeps it from forking, which is unsafe while JAX has threads."""
  os.environ.setdefault("TQDM_DISABLE", "1")
  os.environ.setdefault("DISABLE_MULTIPROC", "1")
  os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
  try:
    from lm_eval import evaluator
  except ImportError as error:
    raise errors.ConfigError(
        "Evaluation on tasks needs lm-evaluation-harness: pip install lm-eval tokenizers."
    ) from error
  logger = python_logging.getLogger("lm_eval")
  level = logger.level
  if not logging.level_debug():
    logger.setLevel(python_logging.ERROR)
  theirs = evaluator.get_git_commit_hash
  evaluator.get_git_commit_hash = _git_hash
  try:
    yield
  finally:
    evaluator.get_git_commit_hash = theirs
    logger.setLevel(level)


def _is_of_the_model(error: BaseException) -> bool:
  """Returns whether an error was raised while the harness was calling the model."""
  from maxtext_olmo.evaluation import model as model_lib

  frames = traceback.extract_tb(error.__traceback__)
  return any(frame.filename == model_lib.__file__ for frame in frames)


def _git_hash() -> str | None:
  """Returns the git hash that the harness records, without git's error messages."""
  try:
    done = subprocess.run(
        ["git", "describe", "--always"], capture_output=True, text=True, check=False
    )
  except OSError:
    return None
  return done.stdout.strip() or None


def _match(name: str, manager: Any) -> list[str]:
  if name in manager.task_index or (name.endswith((".yaml", ".yml")) and os.path.isfile(name)):
    return [name]
  return list(manager.match_tasks([name])) if "*" in name else []


def _unknown_task(name: str, known: Sequence[str], directory: str) -> str:
  if name.endswith((".yaml", ".yml")):
    return f"The task file {name} does not exist."
  near = difflib.get_close_matches(name, known, n=3)
  hint = f" Did you mean {' or '.join(near)}?" if near else ""
  where = f", nor of {directory}" if directory else ""
  return (
      f"{name!r} is not a task of lm-evaluation-harness{where}.{hint} Give your own task files as"
      " paths, or by name together with their directory."
  )
