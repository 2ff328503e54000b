"""The small corpora that cases spoil, and the truth that batches are compared with."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import maxtext_olmo
from maxtext_olmo.cli import main as main_lib
from tests import corpora
from tests.hostile import cases
from tests.loader import cases as loader_cases

TOKENS_PER_FILE = (333, 150, 7, 514)
BOUNDARIES = ((0, 20, "id-0", "a.jsonl", 1), (20, 90, "id-1", "a.jsonl", 2), (90, 150, "id-1"))
BOUNDARY_FILE = "data/part-001.csv.gz"

WINDOWS: dict[str, Any] = {
    "dataset_type": "olmo_grain",
    "max_target_length": 8,
    "global_batch_size_to_load": 8,
    "vocab_size": 100,
    "data_shuffle_seed": 11,
    "olmo_num_epochs": 1,
    "olmo_apply_ngram_filter": False,
}
STORED: dict[str, Any] = {**WINDOWS, "olmo_order": "olmo_core"}
DOCUMENTS: dict[str, Any] = {
    **WINDOWS,
    "dataset_type": "olmo_documents",
    "max_target_length": 32,
    "olmo_eos_id": 0,
    "olmo_packing_bins": 8,
}
# The corpus has no token 1, so padding is told from tokens.
PACKED: dict[str, Any] = {
    **WINDOWS,
    "dataset_type": "olmo_packed",
    "max_target_length": 32,
    "olmo_eos_id": 0,
    "olmo_pad_id": 1,
}
PADDED: dict[str, Any] = {**PACKED, "dataset_type": "olmo_padded"}
SYNTHETIC: dict[str, Any] = {
    "dataset_type": "synthetic",
    "max_target_length": 8,
    "global_batch_size_to_load": 8,
    "vocab_size": 100,
    "data_shuffle_seed": 11,
}
# Options with which nothing is read ahead.
ON_REQUEST = {"olmo_prefetch_batches": 0, "olmo_device_prefetch": 0}

Batch = dict[str, np.ndarray]


def write(folder: pathlib.Path) -> str:
  """Writes the corpus, always the same, with boundaries of one file; returns the index's path."""
  path, _ = corpora.write_corpus(folder, tokens_per_file=TOKENS_PER_FILE)
  write_boundaries(folder / BOUNDARY_FILE, BOUNDARIES)
  return path


def write_boundaries(path: pathlib.Path, rows: Sequence[Sequence[Any]]) -> None:
  """Writes a boundary file."""
  lines = "".join(",".join(map(str, row)) + "\n" for row in rows)
  path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def write_masks(folder: pathlib.Path) -> None:
  """Writes loss masks of all tokens, as `masks/*.npy`; `reversed/*.npy` are of other sizes."""
  for name, counts in (("masks", TOKENS_PER_FILE), ("reversed", TOKENS_PER_FILE[::-1])):
    (folder / name).mkdir()
    for number, count in enumerate(counts):
      (folder / name / f"part-{number:03d}.npy").write_bytes(b"\1" * count)


def cut_in_place(path: pathlib.Path) -> None:
  """Cuts a file that is in use."""
  with open(path, "r+b") as file:
    file.truncate(100)


@contextlib.contextmanager
def opened(index: str, base: dict[str, Any] = WINDOWS, **values: Any) -> Iterator[Any]:
  """Opens the train iterator of a config, and closes it."""
  values = {**base, **values}
  if values["dataset_type"] != "synthetic":
    values.setdefault("olmo_index_path", index)
  with opened_config(loader_cases.data_config(**values)) as iterator:
    yield iterator


@contextlib.contextmanager
def opened_config(config: Any) -> Iterator[Any]:
  """Opens the train iterator of any config object, and closes it."""
  made = maxtext_olmo.create_data_iterator(config, mesh())
  try:
    yield made[0]
  finally:
    for iterator in made:
      if iterator is not None:
        iterator.close()


@functools.cache
def mesh() -> Any:
  """Returns the mesh of all cases: one device, with two axes to shard over."""
  return loader_cases.device_mesh({"data": 1, "fsdp": 1})


def take_all(iterator: Any, most: int = 1000) -> list[Batch]:
  """Returns all batches of a finite stream, or the first ones."""
  taken: list[Batch] = []
  for batch in iterator:
    taken.append({name: np.asarray(array) for name, array in batch.items()})
    if len(taken) == most:
      break
  return taken


def read(index: str, base: dict[str, Any] = WINDOWS, **values: Any) -> list[Batch]:
  """Returns the batches of one epoch."""
  with opened(index, base, **values) as iterator:
    return take_all(iterator)


_TRUTH: dict[str, list[Batch]] = {}


def truth(base: dict[str, Any] = WINDOWS) -> list[Batch]:
  """Returns the batches of one epoch of the corpus as it was written."""
  key = repr(sorted(base.items()))
  if key not in _TRUTH:
    with tempfile.TemporaryDirectory(prefix="hostile_truth_") as name:
      folder = pathlib.Path(name)
      _TRUTH[key] = read(write(folder), with_order_cache(folder, base))
      expect_files(_TRUTH[key], folder, base)
  return _TRUTH[key]


def with_order_cache(folder: pathlib.Path, base: dict[str, Any]) -> dict[str, Any]:
  """Returns a config that keeps stored orders in a folder, if it has any."""
  if base.get("olmo_order") != "olmo_core":
    return base
  return {**base, "olmo_order_cache_dir": str(folder / "orders")}


def expect(found: Sequence[Batch], expected: Sequence[Batch]) -> None:
  """Raises WrongDataError unless the batches are the expected ones."""
  if len(found) != len(expected):
    raise cases.WrongDataError(f"{len(found)} batches instead of {len(expected)}")
  for step, (one, other) in enumerate(zip(found, expected)):
    for name, values in other.items():
      if name not in one or not np.array_equal(one[name], values):
        raise cases.WrongDataError(f"{name} of batch {step} differs")


def expect_true(index: str, base: dict[str, Any] = WINDOWS) -> None:
  """Reads an epoch, which must be that of the corpus as it was written."""
  expect(read(index, base), truth(base))


def expect_files(
    batches: Sequence[Batch], folder: pathlib.Path, base: dict[str, Any] = WINDOWS
) -> None:
  """Raises WrongDataError unless each segment is a range of a token file as it lies on the disk.

  Rows as in OLMo-core may be one segment, so what each EOS ends there must be such a range.
  """
  contents = [path.read_bytes() for path in sorted((folder / "data").glob("*.npy"))]
  for batch in batches:
    for row, segments in zip(batch["inputs"], batch["inputs_segmentation"]):
      pieces = [row[segments == number] for number in set(segments.tolist()) - {0}]
      if "olmo_pad_id" in base:
        pieces = _documents(row[segments > 0], base["olmo_eos_id"], base["olmo_pad_id"])
      for piece in pieces:
        data = piece.astype("<u2").tobytes()
        if not any(data in content for content in contents):
          raise cases.WrongDataError(f"a row has tokens that no file holds: {row.tolist()}")


def _documents(row: np.ndarray, eos_id: int, pad_id: int) -> list[np.ndarray]:
  """Returns what each EOS ends, and what follows the last one without its padding."""
  tokens = np.flatnonzero(row != pad_id)
  row = row[: tokens[-1] + 1] if len(tokens) else row[:0]
  return np.split(row, np.flatnonzero(row == eos_id) + 1)


def run_cli(*argv: Any) -> str:
  """Runs a command; RefusedError with its message unless it ends well; returns its output."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      code = main_lib.main([os.fspath(word) for word in argv])
    except SystemExit as exit_:  # argparse leaves so.
      code = int(exit_.code or 0)
  if code and not (err.getvalue() + out.getvalue()).strip():
    raise AssertionError(f"exit code {code} without a message")
  if code:
    raise cases.RefusedError((err.getvalue() or out.getvalue()).strip())
  return out.getvalue()
