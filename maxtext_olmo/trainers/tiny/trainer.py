"""A small but real trainer: a decoder-only language model, on one process or on several.

    python -m maxtext_olmo.trainers.tiny --config=configs/tiny.py --config.steps=200

It shows everything that a trainer needs to do to use this library: make the iterator from the
config and the mesh, save its state with the model, and restore it on a restart. Every batch is the
same as in an uninterrupted run, even if the number of processes changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import resume
from maxtext_olmo.trainers import RESTART_CODE
from maxtext_olmo.trainers import cluster
from maxtext_olmo.trainers import failure
from maxtext_olmo.trainers import preemption as preemption_lib
from maxtext_olmo.trainers.tiny import checkpoints as checkpoints_lib
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import evaluation
from maxtext_olmo.trainers.tiny import model
from maxtext_olmo.trainers.tiny import report as report_lib

# Error messages of a collective when another process has died.
_LOST_CONTACT = ("Connection closed by peer", "Connection reset by peer", "Connection refused")

OnBatch = Callable[[int, dict[str, jax.Array]], None]
OnStep = Callable[[int, dict[str, float]], None]


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a run."""

  steps_done: int  # In total, including steps before a resume.
  loss: float | None  # Loss of the last step; None if no step was left to do.
  eval_loss: float | None
  preempted: bool = False  # Whether SIGTERM ended the run before its last step.


def train(
    config: ConfigDict,
    *,
    on_batch: OnBatch | None = None,
    on_step: OnStep | None = None,
    preemption: preemption_lib.Preemption | None = None,
) -> Result:
  """Trains until `config.steps` steps are done, from the latest checkpoint if there is one.

  Args:
    config: A config from `maxtext_olmo.get_trainer_config`.
    on_batch: Called with the step and its global batch, before the step runs.
    on_step: Called with the step and its metrics, once they are available.
    preemption: Says after which step to save and stop; `connected` has been called. By default, the
      run does not stop early.
  """
  config_lib.validate(config)
  connect(config)
  cluster.check_processes()
  mesh = model.make_mesh(config)
  learner = model.Learner(config, mesh)
  _introduce(config, mesh, learner)
  with contextlib.ExitStack() as stack:
    checkpoints = checkpoints_lib.Checkpoints.from_config(config)
    if checkpoints is not None:
      stack.enter_context(checkpoints)
    restores = checkpoints is not None and checkpoints.latest is not None
    data_config = config_lib.for_data(config, restores=restores)
    batches, eval_batches = registry.create_data_iterator(data_config, mesh)
    stack.callback(batches.close)
    if eval_batches is not None:
      stack.callback(eval_batches.close)
    state, first_step = _start(config, mesh, learner, checkpoints, batches)
    run_tasks = evaluation.during_training(config, mesh)
    run = _Run(
        config,
        learner,
        checkpoints,
        batches,
        eval_batches,
        run_tasks,
        on_batch,
        on_step,
        preemption,
    )
    result = run.loop(state, first_step)
  if checkpoints is not None and result.loss is not None:
    logging.info("checkpoint %d is in %s", result.steps_done - 1, checkpoints.directory)
  if result.preempted:
    logging.info("stopped by SIGTERM; to continue with step %d, start again", result.steps_done)
  return result


def connect(config: ConfigDict) -> None:
  """Connects the processes of the run, as the config or the environment says; once per process.

  Raises:
    ConfigError: This is one of several tasks, and it could not connect to the others.
  """
  cluster.connect(config.coordinator_address, config.num_processes, config.process_id)


def main_from_argv(
    argv: Sequence[str], *, on_batch: OnBatch | None = None, on_step: OnStep | None = None
) -> int:
  """Trains with a command line, reports on stderr, and returns the exit code.

  The code is `RESTART_CODE` if SIGTERM ended the run, and it can be started again.

  Args:
    argv: The arguments as in `sys.argv`, the program's name first.
    on_batch: As in `train`.
    on_step: As in `train`.
  """
  if any(arg in ("-h", "--help", "--helpfull", "--helpshort") for arg in argv[1:]):
    sys.stdout.write(f"{__doc__}\nKeys, set with --config.KEY=VALUE:\n\n{config_lib.describe()}\n")
    return 0
  report_lib.show_on_stderr(0)
  try:
    config = config_lib.read_config(argv)
    config_lib.validate(config)
    with contextlib.ExitStack() as stack:
      preemption = None
      if config.enable_checkpointing and config.checkpoint_dir:
        preemption = stack.enter_context(preemption_lib.Preemption())
      connect(config)
      failure.watch()
      if preemption is not None:
        preemption.connected()
      report_lib.show_on_stderr(jax.process_index())
      result = train(config, on_batch=on_batch, on_step=on_step, preemption=preemption)
    return RESTART_CODE if result.preempted else 0
  except KeyboardInterrupt:
    return _exit_code("interrupted", 130)
  except errors.MaxtextOlmoError as error:
    code = 1 if errors.is_transient(error) else 2
    return _exit_code(f"{type(error).__name__}: {error}", code)
  except OSError as error:
    if error.filename is None:
      return _exit_code(traceback.format_exc(), 1)
    return _exit_code(f"{error.filename}: {error.strerror}", 2)
  except jax.errors.JaxRuntimeError as error:
    if jax.process_count() > 1 and any(sign in str(error) for sign in _LOST_CONTACT):
      return _exit_code(f"another process of this run has ended ({str(error).splitlines()[0]})", 1)
    return _exit_code(traceback.format_exc(), 1)
  except Exception:
    return _exit_code(traceback.format_exc(), 1)


def _exit_code(message: str, code: int) -> int:
  logging.error("%s", message)
  failure.end(message, code)
  return code


def _introduce(config: ConfigDict, mesh: jax.sharding.Mesh, learner: model.Learner) -> None:
  logging.info(
      "model: %s parameters, %d layers of width %d, %s",
      f"{learner.parameter_count:,}",
      config.num_layers,
      config.emb_dim,
      config.dtype,
  )
  logging.info(
      "mesh: %s over %s of %s; batches of %d x %d tokens",
      " x ".join(f"{name}={size}" for name, size in mesh.shape.items()),
      _count(mesh.size, "device"),
      _count(jax.process_count(), "process", "processes"),
      config.global_batch_size_to_load,
      config.max_target_length,
  )


def _count(number: int, one: str, many: str = "") -> str:
  return f"{number} {one if number == 1 else many or one + 's'}"


def _start(
    config: ConfigDict,
    mesh: jax.sharding.Mesh,
    learner: model.Learner,
    checkpoints: checkpoints_lib.Checkpoints | None,
    batches: Any,
) -> tuple[model.State, int]:
  """Returns the state to resume from and the next step, and moves the data to that step."""
  if checkpoints is None or checkpoints.latest is None:
    if checkpoints is None:
      logging.info("no checkpoint_dir, or enable_checkpointing=False: nothing will be saved")
    state = learner.init()
    if config.load_parameters_path:
      state["params"] = _load_parameters(config, mesh)
    return state, getattr(batches, "step", 0)
  state, data_state = checkpoints.restore(checkpoints.latest, learner.abstract_state)
  with resume.naming(f"Checkpoint {checkpoints.latest} in {checkpoints.directory}"):
    batches.set_state(data_state)
  logging.info(
      "restored checkpoint %d of %s; step %d comes next, at position %d of the data",
      checkpoints.latest,
      checkpoints.directory,
      checkpoints.latest + 1,
      batches.position,
  )
  return state, checkpoints.latest + 1


def _load_parameters(config: ConfigDict, mesh: jax.sharding.Mesh) -> model.Params:
  """Returns the weights of another run's checkpoint."""
  path = config.load_parameters_path.rstrip("/")
  directory, _, name = path.rpartition("/")
  step = int(name) if name.isdecimal() else None
  other = config.copy_and_resolve_references()
  other.checkpoint_dir = path if step is None else directory or "."
  try:
    step, params = evaluation.load_params(other, mesh, step)
  except (errors.ConfigError, errors.ResumeError) as error:
    raise type(error)(f"load_parameters_path={config.load_parameters_path}: {error}") from error
  logging.info("the weights are those of checkpoint %d in %s", step, other.checkpoint_dir)
  return params


@dataclasses.dataclass
class _Pending:
  """A step that the devices may still be running."""

  step: int
  metrics: dict[str, jax.Array]
  tokens: int
  extra: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Run:
  """The training loop; metrics are read one step late, so that the devices never wait for them."""

  config: ConfigDict
  learner: model.Learner
  checkpoints: checkpoints_lib.Checkpoints | None
  batches: Any
  eval_batches: Any
  run_tasks: Callable[[Any], dict[str, float]] | None
  on_batch: OnBatch | None
  on_step: OnStep | None
  preemption: preemption_lib.Preemption | None

  def loop(self, state: model.State, first_step: int) -> Result:
    config = self.config
    first_process = jax.process_index() == 0
    report = collectives.run_on_all_processes(
        lambda: report_lib.Report(
            config.metrics_file, first_step, config.log_interval, enabled=first_process
        ),
        "opening metrics_file",
    )
    pending: _Pending | None = None
    last_metrics: dict[str, float] = {}
    eval_loss: float | None = None
    step = first_step - 1
    stops = False
    if self.preemption is not None:
      self.preemption.begin(first_step)
    with contextlib.closing(report):
      for step in range(first_step, config.steps):
        where = getattr(self.batches, "place", {"position": self.batches.position})
        began = time.monotonic()
        try:
          batch = next(self.batches)
        except StopIteration:
          logging.info("the data has ended before step %d", step)
          step -= 1
          break
        report.add_wait(time.monotonic() - began)
        if self.on_batch is not None:
          self.on_batch(step, batch)
        tokens = batch["inputs"].size
        state, metrics = self.learner.train_step(state, batch)
        if step == first_step:
          jax.block_until_ready(metrics)
          logging.info("compiled and ran the first step in %.1f s", time.monotonic() - began)
          report.restart_clock()
          tokens = 0
        if pending is not None:
          last_metrics = self._finish(pending, report)
        pending = _Pending(step, metrics, tokens, dict(where))
        stops = self.preemption is not None and self.preemption.should_stop(step)
        if stops:  # Saves first: a scheduler may not wait for the end of an evaluation.
          self._save(step, state)
        if config.eval_interval > 0 and (step + 1) % config.eval_interval == 0:
          jax.block_until_ready(metrics)
          with report.paused():
            pending.extra.update(self._evaluate(state))
          eval_loss = pending.extra.get("eval_loss")
        if stops:
          break
        if self.checkpoints is not None:
          self.checkpoints.check()
          if self.checkpoints.is_due(step):
            self._save(step, state)
      if self.preemption is not None:
        self.preemption.finish()
      if pending is not None:
        last_metrics = self._finish(pending, report, last=True)
        self._save(step, state)
      else:
        logging.info(
            "nothing to do: %d steps are done, and steps=%d; to train further, raise steps",
            first_step,
            config.steps,
        )
    preempted = stops and step + 1 < config.steps
    return Result(step + 1, last_metrics.get("loss"), eval_loss, preempted)

  def _save(self, step: int, state: model.State) -> None:
    if self.checkpoints is not None:
      self.checkpoints.save(step, state, self.batches.get_state())

  def _finish(
      self, pending: _Pending, report: report_lib.Report, last: bool = False
  ) -> dict[str, float]:
    metrics = {name: value.item() for name, value in pending.metrics.items()} | pending.extra
    report.step(pending.step, metrics, tokens=pending.tokens, last=last)
    if self.on_step is not None:
      self.on_step(pending.step, metrics)
    return metrics

  def _evaluate(self, state: model.State) -> dict[str, float]:
    found = {}
    if self.eval_batches is not None:
      found["eval_loss"] = self._eval_loss(state)
    if self.run_tasks is not None:
      found |= self.run_tasks(state["params"])
    return found

  def _eval_loss(self, state: model.State) -> float:
    total, count = 0.0, 0.0
    for number, batch in enumerate(self.eval_batches):
      loss, tokens = self.learner.eval_step(state["params"], batch)
      total, count = total + float(loss), count + float(tokens)
      if number + 1 == self.config.eval_steps:
        break
    return total / max(count, 1.0)
