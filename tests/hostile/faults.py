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

import numpy as np
from etils import epath

import maxtext_olmo
from maxtext_olmo.evaluation import cache as cache_lib
from maxtext_olmo.loader import resume
from maxtext_olmo.order import consumed
from tests.hostile import cases
from tests.hostile import fixture

VARIABLE = "HOSTILE_FAULTS_LIBRARY"
_SOURCE = pathlib.Path(__file__).with_name("faults.c")
_READ, _WRITE, _SYNC = 1, 2, 4
_SHORT, _END = -1, -2
_DISK_BYTES = 64 << 10

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
    raise cases.WrongDataError("the cache has results that nobody computed")


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
}
_READ_FAULTS = {
    "short": (_SHORT, 1),
    "interrupted": (errno.EINTR, 2),
    "io-error": (errno.EIO, 1),
    "io-error-third": (errno.EIO, 3),
    "stale": (errno.ESTALE, 2),
    "end": (_END, 2),
    "no-memory": (errno.ENOMEM, 2),
}
_WRITE_FAULTS = {
    "short": (_WRITE, _SHORT, 1),
    "interrupted": (_WRITE, errno.EINTR, 2),
    "no-space": (_WRITE, errno.ENOSPC, 1),
    "no-space-second": (_WRITE, errno.ENOSPC, 2),
    "quota": (_WRITE, errno.EDQUOT, 1),
    "io-error": (_WRITE, errno.EIO, 1),
    "sync-io-error": (_SYNC, errno.EIO, 1),
    "sync-no-space": (_SYNC, errno.ENOSPC, 1),
}


def all_cases() -> Iterator[cases.Case]:
  """Yields the cases of this module."""
  for fault, (what, every) in _READ_FAULTS.items():
    for name, operation in _READERS.items():
      attempt = functools.partial(_strike, operation=operation, how=(_READ, what, every))
      yield cases.Case(f"reads/{fault}-{name}", attempt, "what was read is the truth")
  for fault, how in _WRITE_FAULTS.items():
    for name, operation in _WRITERS.items():
      attempt = functools.partial(_strike, operation=operation, how=how)
      yield cases.Case(f"writes/{fault}-{name}", attempt, "what was written is whole")
  for name, operation in _WRITERS.items():
    lost = "a cache that cannot be written is lost, with a word" if name == "cache" else ""
    yield cases.Case(f"disks/full-{name}", functools.partial(_fill_disk, operation=operation), lost)


def _strike(folder: pathlib.Path, operation: Operation, how: tuple[int, int, int]) -> None:
  """Lets every n-th call fail: reads below the whole folder, writes below that of outputs."""
  path = os.environ.get(VARIABLE)
  if path is None:
    raise cases.SkippedError("faults need a C compiler")
  library = ctypes.CDLL(path)
  (out := folder / "out").mkdir()
  which, what, every = how
  below = str(folder if which == _READ else out).encode()
  try:
    operation(folder, out, lambda: library.hostile_arm(which, what, every, below))
    if not library.hostile_fired():
      raise cases.SkippedError("some operations make no call of the kind that is to fail")
  finally:
    library.hostile_arm(0, 0, 1, b"")
    _check_left_over(out)


def _check_left_over(out: pathlib.Path) -> None:
  hidden = (".unfinished_", ".documents_")
  left = [path.name for path in out.rglob("*") if path.name.endswith(".tmp")]
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
