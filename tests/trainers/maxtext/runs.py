"""Runs the real MaxText trainer, and records the batches that its train and eval steps receive.

MaxText takes long to import, so the test process imports it once, never initialises a JAX backend
itself, and forks a process for each process of a run: real processes, with a coordinator if there
are two, which can be killed at any time.

    rows = write_corpus(directory, instances=40)     # every row says which instance it is
    run = start(directory, "steps=12", ...)
    run.wait()
    run.steps()[3].ids                               # the instances of step 3, row by row
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
import unittest
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import history_file
from maxtext_olmo.order import stream as stream_lib
from tests.trainers import proof

LENGTH = 16
VOCABULARY = 512
_BASE = 256
_SHOWN = 6000  # characters of a log in an error
# The smallest model that is one: what is tested is the data.
MODEL = (
    "hardware=cpu",
    "model_name=default",
    "override_model_config=true",
    "base_emb_dim=16",
    "base_num_query_heads=1",
    "base_num_kv_heads=1",
    "head_dim=16",
    "base_mlp_dim=16",
    "base_num_decoder_layers=1",
    f"vocab_size={VOCABULARY}",
    f"max_target_length={LENGTH}",
    "attention=dot_product",
    "dtype=float32",
    "weight_dtype=float32",
    "enable_goodput_recording=false",
    "monitor_goodput=false",
    "enable_checkpoint_cloud_logger=false",
    "gcs_metrics=false",
    "packing=false",
    "async_checkpointing=false",
    "learning_rate=0.01",
)


def has_maxtext() -> bool:
  """Returns whether this environment has MaxText."""
  return importlib.util.find_spec("maxtext") is not None


needs_maxtext = unittest.skipUnless(
    has_maxtext(), "MaxText is not installed here; `make test-maxtext` runs this."
)


def write_corpus(directory: str | pathlib.Path, instances: int, *, files: int = 3) -> np.ndarray:
  """Writes token files and an `index.json` as MaxText's; a row begins with its id, in base 256."""
  directory = pathlib.Path(directory)
  rng = np.random.Generator(np.random.PCG64(7))
  rows = rng.integers(2, VOCABULARY, size=(instances, LENGTH)).astype("<u2")
  ids = np.arange(instances)
  for place in range(3):
    rows[:, place] = ids // _BASE**place % _BASE
  entries = []
  for i, part in enumerate(np.array_split(rows, files)):
    path = directory / "data" / f"part-{i}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    part.tofile(path)
    entries.append((path, part))
  _write_index(directory / "index.json", entries)
  return rows


def _write_index(path: pathlib.Path, files: Sequence[tuple[pathlib.Path, np.ndarray]]) -> None:
  """Returns an index as MaxText writes it, so that its loader and ours read the same file."""
  digest = hashlib.sha256()
  for text in ("1", str(LENGTH), "uint16", "test"):
    digest.update(text.encode() + b"\0")
  entries = []
  offset = 0
  for name, rows in files:
    digest.update(f"{name}\0{rows.size}\0".encode())
    entries.append(
        {
            "path": str(name),
            "label": "web",
            "n_tokens": rows.size,
            "n_instances": len(rows),
            "instance_offset": offset,
        }
    )
    offset += len(rows)
  path.write_text(
      json.dumps(
          {
              "format_version": "1",
              "sequence_length": LENGTH,
              "dtype": "uint16",
              "tokenizer": "test",
              "total_instances": offset,
              "total_tokens": offset * LENGTH,
              "fingerprint": f"sha256:{digest.hexdigest()}",
              "files": entries,
          }
      )
  )


def decode(rows: np.ndarray) -> list[int]:
  """Returns the instance of each row of tokens; -1 for padding, which is all zeros."""
  ids = sum(rows[:, place].astype(np.int64) * _BASE**place for place in range(3))
  return np.where(rows.any(axis=1), ids, -1).tolist()


@dataclasses.dataclass
class Step:
  """The batch that one train or eval step received."""

  ids: list[int]  # by row of the global batch
  digests: list[int]  # of all arrays of a row together
  loss: float


class Run:
  """One start of the trainer, on one or more processes."""

  def __init__(self, processes: list[Any], directory: pathlib.Path):
    self._processes = processes
    self._directory = directory

  def kill_at(self, step: int) -> None:
    """Kills all processes once a step was trained."""
    self.kill_when(lambda: max(self.steps(), default=-1) >= step)

  def kill_when(self, condition: Callable[[], bool]) -> None:
    """Kills all processes once a condition holds."""
    self.wait_until(condition)
    for process in self._processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for process in self._processes:
      process.join()

  def wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds, while the run continues."""
    while not condition():
      if not any(process.is_alive() for process in self._processes):
        raise AssertionError(f"The run ended too early:\n{self.log()[-_SHOWN:]}")
      time.sleep(0.02)

  def labels(self) -> list[int]:
    """Returns the checkpoints of the run."""
    names = [path.name for path in self._directory.glob("*/checkpoints/[0-9]*")]
    return sorted(int(name) for name in names if name.isdigit())  # Not those being written.

  def wait(self) -> "Run":
    """Waits until the run has ended successfully."""
    for process in self._processes:
      process.join(300)
    codes = [process.exitcode for process in self._processes]
    if any(codes):
      raise AssertionError(f"The trainer ended with {codes}:\n{self.log()[-_SHOWN:]}")
    return self

  def exit_codes(self) -> list[int]:
    """Waits for the processes and returns their exit codes."""
    for process in self._processes:
      process.join(300)
    return [process.exitcode for process in self._processes]

  def log(self) -> str:
    """Returns the output of the processes."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(self._tap.glob("*.log")))

  @property
  def _tap(self) -> pathlib.Path:
    return self._directory / "tap" / str(self._processes[0].pid)

  def steps(self, kind: str = "train") -> dict[int, Step]:
    """Returns the batch of each step, from all processes."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    losses = {}
    for path in self._tap.glob("*.jsonl"):
      for line in path.read_text().splitlines():
        try:
          record = json.loads(line)
        except ValueError:  # The last line of a process that was killed while it wrote.
          continue
        if record["kind"] == kind:
          rows = found.setdefault(record["step"], {})
          rows.update({row: (instance, digest) for row, instance, digest in record["rows"]})
          losses[record["step"]] = record["loss"]
    return {
        step: Step(
            [rows[row][0] for row in sorted(rows)],
            [rows[row][1] for row in sorted(rows)],
            losses[step],
        )
        for step, rows in sorted(found.items())
    }

  def evaluations(self) -> dict[int, Step]:
    """Returns each eval batch, numbered over the run."""
    return self.steps("eval")

  def loaded(self) -> dict[int, Step]:
    """Returns each batch that MaxText's data loader returned, numbered over the run."""
    return self.steps("loaded")


def command(
    directory: str | pathlib.Path, *args: str, processes: int = 1, config: str = "base.yml"
) -> list[str]:
  """Returns the command line of MaxText for a run on the corpus of a directory."""
  import maxtext.utils.globals as maxtext_globals

  path = os.path.join(maxtext_globals.MAXTEXT_CONFIGS_DIR, config)
  return [
      "train.py",
      path if not os.path.exists(config) else config,
      *MODEL,
      f"base_output_directory={directory}",
      f"skip_jax_distributed_system={str(processes == 1).lower()}",
      f"olmo_index_path={pathlib.Path(directory, 'index.json')}",
      "dataset_type=olmo_grain",
      "run_name=run",
      "checkpoint_period=4",
      "grain_worker_count=0",
      *args,
  ]


def start(
    directory: str | pathlib.Path,
    *args: str,
    processes: int = 1,
    devices: int = 1,
    install: bool = True,
    pause: float = 0.0,
    arrays: str | pathlib.Path = "",
    entry: str = "maxtext.trainers.pre_train.train",
    config: str = "base.yml",
    edit: Callable[[], None] | None = None,
) -> Run:
  """Starts the trainer on the corpus of a directory; `args` are MaxText's own.

  Args:
    directory: Directory of the corpus and of everything that the run writes.
    *args: Arguments of MaxText; the last value of a key counts.
    processes: JAX processes; two at a time is all that MaxText's fixed port allows.
    devices: CPU devices of each.
    install: Whether to put this package in; without it MaxText's own loader runs.
    pause: Seconds that each step takes longer, so that a kill hits the step it is meant for.
    arrays: Where all arrays of each train step are kept, if anywhere (`proof.save_batch`).
    entry: MaxText's module.
    config: One of MaxText's configs, or a path.
    edit: Called in each process before the trainer starts, to make MaxText another.
  """
  directory = pathlib.Path(directory)
  argv = command(directory, *args, processes=processes, config=config)
  context = multiprocessing.get_context("fork")
  started = []
  for process in range(processes):
    environment = {}
    if processes > 1:
      environment = {
          "JAX_COORDINATOR_ADDRESS": "127.0.0.1",
          "JOB_INDEX": "0",
          "JOB_COMPLETION_INDEX": str(process),
          "PROCESSES_IN_JOB": str(processes),
          "JAX_PROCESS_COUNT": str(processes),
      }
    leader = started[0].pid if started else None
    child = context.Process(
        target=_child,
        args=(
            str(directory),
            leader,
            process,
            environment,
            devices,
            install,
            pause,
            str(arrays),
            entry,
            argv,
            edit,
        ),
    )
    child.start()
    started.append(child)
  return Run(started, directory)


def set_up_module() -> None:
  """Imports MaxText, if installed, once for all runs of a test file."""
  if not has_maxtext():
    return
  os.environ["DECOUPLE_GCLOUD"] = "TRUE"
  os.environ["JAX_PLATFORMS"] = "cpu"
  # Most runs compile the same programs; the Makefile sets a cache that outlives the test file.
  os.environ.setdefault("MAXTEXT_TEST_CACHE", tempfile.mkdtemp(prefix="maxtext_test_cache_"))
  import maxtext.trainers.pre_train.train  # noqa: F401


def add_states(directory: str | pathlib.Path, run_name: str) -> None:
  """Gives a run's checkpoints the data states that earlier releases saved as the item `iter`."""
  for checkpoint in pathlib.Path(directory).glob(f"{run_name}/checkpoints/[0-9]*"):
    state = history_file.state_at(checkpoint.parent, int(checkpoint.name) + 1)
    (checkpoint / "iter").mkdir()
    (checkpoint / "iter" / "process_0.json").write_text(json.dumps(state))
    path = checkpoint / "_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    metadata["item_handlers"]["iter"] = (
        "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler"
        ".StatefulCheckpointableHandler"
    )
    path.write_text(json.dumps(metadata))


def in_child(function: Callable[..., Any], *args: Any) -> Any:
  """Returns the result of a function in a forked process, where it may use JAX."""
  context = multiprocessing.get_context("fork")
  receiver, sender = context.Pipe(duplex=False)
  child = context.Process(target=_call, args=(sender, function, args))
  child.start()
  sender.close()
  try:
    ok, value = receiver.recv()
  except EOFError as error:
    raise AssertionError(f"{function.__name__} ended without a result.") from error
  finally:
    child.join()
  if not ok:
    raise AssertionError(value)
  return value


def _call(sender: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
  try:
    sender.send((True, function(*args)))
  except BaseException:
    sender.send((False, traceback.format_exc()))
  finally:
    sender.close()
    os._exit(0)


def expected_ids(directory: str | pathlib.Path, count: int, **kwargs: Any) -> list[int]:
  """The instances at the first positions of the stream that a run on a directory's corpus has."""
  index = index_lib.load_index(str(pathlib.Path(directory, "index.json")))
  stream = stream_lib.train_stream(index, order="feistel", seed=kwargs.pop("seed", 0), **kwargs)
  return stream.instance_ids(np.arange(count)).tolist()


def _child(
    directory: str,
    leader: int | None,
    process: int,
    environment: dict[str, str],
    devices: int,
    install: bool,
    pause: float,
    arrays: str,
    entry: str,
    argv: Sequence[str],
    edit: Callable[[], None] | None,
) -> None:
  os.setsid()
  tap = pathlib.Path(directory, "tap", str(leader or os.getpid()))
  tap.mkdir(parents=True, exist_ok=True)
  log = os.open(tap / f"{process}.log", os.O_WRONLY | os.O_CREAT)
  os.dup2(log, 1)
  os.dup2(log, 2)
  code = 1
  try:
    os.environ.update(environment)
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    cache = os.environ.get("MAXTEXT_TEST_CACHE")
    if cache:
      jax.config.update("jax_compilation_cache_dir", cache)
      jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
      jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if install:
      from maxtext_olmo.trainers.maxtext import adapter

      adapter.install()
    if edit is not None:
      edit()
    _Tap(tap / f"{process}.jsonl", pause, arrays, process).install()
    importlib.import_module(entry).main(argv)
    code = 0
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else 1
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Tap:
  """Records the arguments of MaxText's compiled steps, and the loss that they return."""

  def __init__(self, path: pathlib.Path, pause: float, arrays: str, process: int):
    self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    self._pause = pause
    self._arrays = arrays
    self._process = process
    self._counts = {"eval": 0, "loaded": 0}

  def install(self) -> None:
    from maxtext.common import data_loader
    from maxtext.utils import train_utils

    original = train_utils.jit_train_and_eval_step

    def tapped(*args, **kwargs):
      train, evaluate = original(*args, **kwargs)
      return _Tapped(train, self, "train"), evaluate and _Tapped(evaluate, self, "eval")

    train_utils.jit_train_and_eval_step = tapped
    load = data_loader.DataLoader.load_next_batch

    def load_and_tell(loader, *args, **kwargs):
      batch = load(loader, *args, **kwargs)
      self.write("loaded", 0, batch, 0.0)
      return batch

    data_loader.DataLoader.load_next_batch = load_and_tell

  def write(self, kind: str, step: int, batch: dict[str, Any], loss: float) -> None:
    rows: dict[int, list[np.ndarray]] = {}
    names = sorted(batch)
    for name in names:
      for shard in batch[name].addressable_shards:
        first = shard.index[0].start or 0
        for i, row in enumerate(np.asarray(shard.data)):
          rows.setdefault(first + i, []).append(row)
    inputs = names.index("inputs")
    lines = [
        (row, decode(arrays[inputs][None])[0], zlib.crc32(np.concatenate(arrays).tobytes()))
        for row, arrays in sorted(rows.items())
    ]
    if kind in self._counts:
      step = self._counts[kind]
      self._counts[kind] += 1
    record = {"kind": kind, "step": step, "rows": lines, "loss": loss}
    os.write(self._file, (json.dumps(record) + "\n").encode())
    if kind == "train":
      if self._arrays:
        proof.save_batch(self._arrays, step, self._process, batch)
      time.sleep(self._pause)


class _Tapped:
  """A compiled step whose calls are recorded by the tap."""

  def __init__(self, step, tap: _Tap, kind: str):
    self._step = step
    self._tap = tap
    self._kind = kind

  def __getattr__(self, name: str) -> Any:
    return getattr(self._step, name)

  def __call__(self, state, batch, *args):
    number = int(np.asarray(state.optimizer.step.get_value()))
    copies = dict(batch)
    result = self._step(state, batch, *args)
    metrics = result[1] if self._kind == "train" else result
    scalars = metrics["scalar"]
    name = "learning/loss" if self._kind == "train" else "evaluation/total_loss"
    self._tap.write(self._kind, number, copies, float(np.asarray(scalars[name])))
    return result
