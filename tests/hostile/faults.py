"""Faults of reads and writes, injected by a preloaded library, and full disks.

Under each fault an operation must give what it gives without, or raise an error of this package,
and leave no temporary file behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

import maxtext_olmo
from maxtext_olmo.evaluation import cache as cache_lib
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import resume
from maxtext_olmo.order import consumed
from maxtext_olmo.order import timeline
from maxtext_olmo.trainers import lease as lease_lib
from maxtext_olmo.trainers.tiny import checkpoints as checkpoints_lib
from maxtext_olmo.trainers.tiny import report as report_lib
from tests.hostile import cases
from tests.hostile import fixture

VARIABLE = "HOSTILE_FAULTS_LIBRARY"
_SOURCE = pathlib.Path(__file__).with_name("faults.c")
READ, WRITE, SYNC, OPEN, CREATE = 1, 2, 4, 8, 16
_SHORT, _END = -1, -2
_DISK_BYTES = 512 << 10

Arm = Callable[[], None]
# Called with a folder for inputs, one for outputs, and a function that lets the faults begin.
Operation = Callable[[pathlib.Path, pathlib.Path, Arm], None]


def build(directory: pathlib.Path) -> pathlib.Path | None:
  """Compiles the library; returns its path, or None where there is no compiler."""
  compiler = shutil.which("gcc") or shutil.which("cc")
  if compiler is None:
    return None
  library = directory / "faults.so"
  subprocess.run(
      [compiler, "-shared", "-fPIC", "-O1", str(_SOURCE), "-o", str(library), "-ldl"], check=True
  )
  return library


# What is done while files fail. Each compares its result with the truth.


def _read(folder: pathlib.Path, out: pathlib.Path, arm: Arm, **options: Any) -> None:
  """Reads an epoch; `OUT/` in an option stands for the folder of outputs."""
  outputs = {name: value for name, value in options.items() if str(value).startswith("OUT/")}
  base = {name: value for name, value in options.items() if name not in outputs}
  index, expected = fixture.write(folder), fixture.truth(base)
  arm()
  paths = {name: str(out / value[4:]) for name, value in outputs.items()}
  fixture.expect(fixture.read(index, base, **paths), expected)


def _copy_index(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  _read(folder, out, arm, **fixture.WINDOWS, checkpoint_dir="OUT/checkpoints")
  if not any(path.stat().st_size for path in out.rglob("*.json")):
    raise cases.WrongDataError("no copy of the index was kept")


def _build_index(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  expected = maxtext_olmo.load_index(fixture.write(folder)).fingerprint
  files = [(str(path), "x") for path in sorted((folder / "data").glob("*.npy"))]
  arm()
  index = maxtext_olmo.build_index(files, 8, tokenizer="test", dtype="uint16", checksums="xxh3")
  index.save(out / "index.json")
  if maxtext_olmo.load_index(out / "index.json").fingerprint != expected:
    raise cases.WrongDataError("the index has another fingerprint")


def _find_documents(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  index = fixture.write(folder)
  arm()
  fixture.run_cli("index", "documents", index, "--eos-id", "0", "--output", out / "documents")
  maxtext_olmo.load_documents(out / "documents", maxtext_olmo.load_index(index), 0).verify()


def _write_bitmap(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  index = maxtext_olmo.load_index(path := fixture.write(folder))
  seen = np.arange(index.total_instances) % 2 == 0
  consumed.write_consumed(folder / "bitmap", seen, index.fingerprint)
  expected = fixture.read(path, olmo_consumed_path=str(folder / "bitmap"))
  arm()
  consumed.write_consumed(out / "bitmap", seen, index.fingerprint)
  fixture.expect(fixture.read(path, olmo_consumed_path=str(out / "bitmap")), expected)


def _save_state(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  with fixture.opened(fixture.write(folder)) as iterator:
    fixture.take_all(iterator, 2)
    arm()
    saved = maxtext_olmo.IteratorSave(iterator)
    resume.IteratorCheckpointHandler().save(epath.Path(out), saved)
    if resume.find_state(epath.Path(out)) != json.loads(json.dumps(iterator.get_state())):
      raise cases.WrongDataError("the state that was saved is another one")


def _add_to_cache(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  kept = cache_lib.RequestCache(out / "cache.jsonl")
  arm()
  try:
    for number in range(3):
      kept.add(str(number), ["x" * 2000, number])
  finally:
    with contextlib.suppress(OSError):
      kept.close()
  again = cache_lib.RequestCache(out / "cache.jsonl")
  found = again.lookup(["0", "1", "2"])
  again.close()
  if any(result != ["x" * 2000, int(key)] for key, result in found.items()):
    raise cases.WrongDataError("the cache has results that were never computed")


def _read_cache(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  kept = cache_lib.RequestCache(folder / "cache.jsonl")
  kept.add("0", ["x", 0])
  kept.close()
  arm()
  again = cache_lib.RequestCache(folder / "cache.jsonl")
  found = again.lookup(["0"])
  again.close()
  if found not in ({}, {"0": ["x", 0]}):  # What cannot be read is computed again.
    raise cases.WrongDataError("the cache has results that were never computed")


def _read_state(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  with fixture.opened(fixture.write(folder)) as iterator:
    fixture.take_all(iterator, 2)
    resume.IteratorCheckpointHandler().save(epath.Path(out), maxtext_olmo.IteratorSave(iterator))
    expected = iterator.get_state()
    arm()
    if resume.find_state(epath.Path(out)) != json.loads(json.dumps(expected)):
      raise cases.WrongDataError("the state that was read is another one")


def _keep_history(folder: pathlib.Path, out: pathlib.Path, arm: Arm, *, reads: bool) -> None:
  """Writes the history of a run, or reads it; either is complete, or there is none."""
  with fixture.opened(fixture.write(folder)) as iterator:
    fixture.take_all(iterator, 2)
    state = json.loads(json.dumps(iterator.get_state()))
  history = timeline.Timeline.from_json(state["history"])
  if not reads:
    arm()
  history_file.record(out, history, 0)
  if reads:
    arm()
  found = history_file.state_at(out, 2)
  if found is not None and found["position"] != state["position"]:
    raise cases.WrongDataError(f"the history has another position: {found}")
  if reads and found is None:
    raise cases.WrongDataError("the history is lost, without a word")


def _save_model(folder: pathlib.Path, out: pathlib.Path, arm: Arm, *, asynchronous: bool) -> None:
  """Saves a second checkpoint; the first one stays whole, whatever happens to the second."""
  states = [{"step": n, "params": {"w": np.full(64, n, np.float32)}} for n in range(2)]
  abstract = {"step": 0, "params": {"w": jax.ShapeDtypeStruct((64,), np.float32)}}
  options = {"asynchronous": asynchronous}
  with checkpoints_lib.Checkpoints(out / "run", **options) as saved:
    saved.save(0, states[0], {"n": 0})
  try:
    with checkpoints_lib.Checkpoints(out / "run", **options) as saved:
      arm()
      saved.save(1, states[1], {"n": 1})
  finally:
    disarm()
    committed = resume.committed_steps(out / "run")
    again = checkpoints_lib.Checkpoints(out / "run", read_only=True)
    for step in {0, *committed}:
      state, data = again.restore(step, abstract)
      if data != {"n": step} or not np.array_equal(
          state["params"]["w"], states[step]["params"]["w"]
      ):
        raise cases.WrongDataError(f"checkpoint {step} is another one")
  if committed != [0, 1]:
    raise cases.WrongDataError(f"the checkpoints {committed} are there, without an error")


def _restore_model(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  abstract = {"step": 0, "params": {"w": jax.ShapeDtypeStruct((64,), np.float32)}}
  with checkpoints_lib.Checkpoints(out / "run") as saved:
    saved.save(0, {"step": 0, "params": {"w": np.ones(64, np.float32)}}, {"n": 0})
  again = checkpoints_lib.Checkpoints(out / "run", read_only=True)
  arm()
  state, data = again.restore(0, abstract)
  if data != {"n": 0} or not np.array_equal(state["params"]["w"], np.ones(64)):
    raise cases.WrongDataError("the checkpoint is another one")


def _report(folder: pathlib.Path, out: pathlib.Path, arm: Arm, *, opened: bool) -> None:
  """Writes metrics to a file that is open when the faults begin, or is opened after that."""
  metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0}
  if not opened:
    arm()
  report = report_lib.Report(str(out / "metrics.jsonl"), 0, 100, enabled=True)
  if opened:
    arm()
  with contextlib.closing(report):
    for step in range(3):
      report.step(step, metrics, tokens=8, last=False)
  lines = (out / "metrics.jsonl").read_text().splitlines()
  if [json.loads(line)["step"] for line in lines] != [0, 1, 2]:
    raise cases.WrongDataError(f"the metrics of 3 steps are {lines}")


def _hold_lease(folder: pathlib.Path, out: pathlib.Path, arm: Arm, *, held: bool) -> None:
  """Takes the lease of a directory, or checks one that is held."""
  if not held:
    arm()
  with lease_lib.Lease(out / "run") as lease:
    if held:
      arm()
    lease.check()
    disarm()
    try:
      lease_lib.Lease(out / "run").release()
    except maxtext_olmo.ConfigError:
      return
  raise cases.WrongDataError("two runs have the lease of one directory")


def _make_corpus(folder: pathlib.Path, out: pathlib.Path, arm: Arm) -> None:
  (folder / "text.txt").write_text("a few words\n" * 50)
  arm()
  try:
    fixture.run_cli("corpus", "make", "--output", out / "corpus", folder / "text.txt")
  except cases.RefusedError:
    if (out / "corpus").exists():
      raise cases.WrongDataError("a corpus that was not made is there") from None
    raise
  made = next((out / "corpus").rglob("*.npy"))
  if bytes(np.fromfile(made, "<u2")[:11].astype(np.uint8)) != b"a few words":
    raise cases.WrongDataError("the corpus holds another text")


_read_documents = functools.partial(_read, **fixture.DOCUMENTS, olmo_documents_path="OUT/documents")
_store_order = functools.partial(_read, **fixture.STORED, olmo_order_cache_dir="OUT/orders")
_READERS: dict[str, Operation] = {
    "windows": functools.partial(_read, **fixture.WINDOWS),
    "few-files": functools.partial(_read, **fixture.WINDOWS, olmo_max_open_files=1),
    "documents": _read_documents,
    "bitmap": _write_bitmap,
    "index": _build_index,
    "order": _store_order,
    "index-copy": _copy_index,
    "cache": _read_cache,
    "state": _read_state,
    "history": functools.partial(_keep_history, reads=True),
    "checkpoint": _restore_model,
    "lease": functools.partial(_hold_lease, held=True),
}
_WRITERS: dict[str, Operation] = {
    "index": _build_index,
    "documents": _read_documents,
    "document-index": _find_documents,
    "order": _store_order,
    "bitmap": _write_bitmap,
    "state": _save_state,
    "index-copy": _copy_index,
    "cache": _add_to_cache,
    "corpus": _make_corpus,
    "history": functools.partial(_keep_history, reads=False),
    "checkpoint": functools.partial(_save_model, asynchronous=False),
    "checkpoint-async": functools.partial(_save_model, asynchronous=True),
    "metrics": functools.partial(_report, opened=False),
    "metrics-open": functools.partial(_report, opened=True),
    "lease": functools.partial(_hold_lease, held=False),
}
_LOST = {
    "cache": "a cache that cannot be written is lost, with a word",
    "history": "a history that cannot be written is lost, with a warning: states have it too",
}
# What fails, how, and every which time.
_READ_FAULTS = {
    "short": (READ, _SHORT, 1),
    "interrupted": (READ, errno.EINTR, 2),
    "io-error": (READ, errno.EIO, 1),
    "io-error-third": (READ, errno.EIO, 3),
    "stale": (READ, errno.ESTALE, 2),
    "end": (READ, _END, 2),
    "no-memory": (READ, errno.ENOMEM, 2),
    "denied": (OPEN, errno.EACCES, 1),
    "denied-second": (OPEN, errno.EACCES, 2),
    "open-stale": (OPEN, errno.ESTALE, 2),
}
_WRITE_FAULTS = {
    "short": (WRITE, _SHORT, 1),
    "interrupted": (WRITE, errno.EINTR, 2),
    "no-space": (WRITE, errno.ENOSPC, 1),
    "no-space-second": (WRITE, errno.ENOSPC, 2),
    "quota": (WRITE, errno.EDQUOT, 1),
    "io-error": (WRITE, errno.EIO, 1),
    "sync-io-error": (SYNC, errno.EIO, 1),
    "sync-no-space": (SYNC, errno.ENOSPC, 1),
    "sync-quota": (SYNC, errno.EDQUOT, 1),
    "read-only": (CREATE, errno.EROFS, 1),
    "read-only-second": (CREATE, errno.EROFS, 2),
    "denied": (CREATE, errno.EACCES, 1),
    "denied-second": (CREATE, errno.EACCES, 2),
    "create-quota": (CREATE, errno.EDQUOT, 1),
    "create-quota-third": (CREATE, errno.EDQUOT, 3),
}


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  for fault, how in _READ_FAULTS.items():
    for name, operation in _READERS.items():
      attempt = functools.partial(_strike, operation=operation, how=how)
      yield cases.Case(f"reads/{fault}-{name}", attempt, "what was read is the truth")
  for fault, how in _WRITE_FAULTS.items():
    for name, operation in _WRITERS.items():
      attempt = functools.partial(_strike, operation=operation, how=how)
      yield cases.Case(f"writes/{fault}-{name}", attempt, "what was written is whole")
  for name, operation in _WRITERS.items():
    attempt = functools.partial(_fill_disk, operation=operation)
    yield cases.Case(f"disks/full-{name}", attempt, _LOST.get(name, ""))


def _strike(folder: pathlib.Path, operation: Operation, how: tuple[int, int, int]) -> None:
  """Lets every n-th call fail: reads below the whole folder, writes below that of outputs."""
  library = _library()
  if library is None:
    raise cases.SkippedError("faults need a C compiler")
  (out := folder / "out").mkdir()
  which, what, every = how
  below = f"{folder if which in (READ, OPEN) else out}/*".encode()
  try:
    operation(folder, out, lambda: library.hostile_arm(which, what, every, below))
    if not library.hostile_fired():
      raise cases.SkippedError("some operations make no call of the kind that is to fail")
  finally:
    disarm()
    # A directory that cannot be opened cannot be removed either.
    _check_left_over(out, (".unfinished_",) if which == OPEN else _HIDDEN)


def _library() -> ctypes.CDLL | None:
  path = os.environ.get(VARIABLE)
  return None if path is None else ctypes.CDLL(path)


def disarm() -> None:
  """Ends the faults, if there are any."""
  if (library := _library()) is not None:
    library.hostile_arm(0, 0, 1, b"")


_HIDDEN = (".unfinished_", ".documents_")


def _check_left_over(out: pathlib.Path, hidden: tuple[str, ...] = _HIDDEN) -> None:
  left = [path.name for path in out.rglob("*") if path.name.endswith((".tmp", "-tmp"))]
  left += [path.name for path in out.iterdir() if path.name.startswith(hidden)]
  if left:
    raise cases.WrongDataError(f"temporary files are left: {left}")


def _fill_disk(folder: pathlib.Path, operation: Operation) -> None:
  (out := folder / "disk").mkdir()
  command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(out)]
  if subprocess.run(command, capture_output=True, check=False).returncode:
    raise cases.SkippedError("full disks need root, to mount a small tmpfs")

  def fill() -> None:
    with contextlib.suppress(OSError), open(out / "filler", "wb", buffering=0) as file:
      while True:
        file.write(bytes(4096))

  try:
    try:
      operation(folder, out, fill)
    finally:
      _check_left_over(out)
  finally:
    subprocess.run(["umount", "--lazy", str(out)], check=True)
