"""Small real corpora for tests."""

import pathlib
from collections.abc import Sequence

import numpy as np

from maxtext_olmo.corpus import index_builder as index_lib


def write_tokens(
    path: pathlib.Path, count: int, *, seed: int, vocab_size: int = 100, dtype: str = "uint16"
) -> np.ndarray:
  """Writes a headerless token file of random ids, with EOS (id 0) about every twentieth, and
  returns them."""
  rng = np.random.Generator(np.random.PCG64(seed))
  tokens = rng.integers(2, vocab_size, size=count)
  tokens[rng.integers(0, 20, size=count) == 0] = 0
  path.parent.mkdir(parents=True, exist_ok=True)
  tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
  return tokens


def end_documents(path: pathlib.Path, length: int = 100) -> None:
  """Divides a headerless uint16 file into documents like a real one: each ends with EOS (id 0)."""
  tokens = np.fromfile(path, np.uint16)
  tokens[tokens == 0] = 1
  tokens[length - 1 :: length] = tokens[-1:] = 0
  tokens.tofile(path)


def write_corpus(
    directory: str | pathlib.Path,
    *,
    tokens_per_file: Sequence[int] = (333, 150, 7, 514),
    sequence_length: int = 8,
    dtype: str = "uint16",
    vocab_size: int = 100,
    max_target_sequence_length: int | None = None,
    seed: int = 1,
) -> tuple[str, np.ndarray]:
  """Writes token files and their index; returns the index's path and all instances, one row
  each."""
  directory = pathlib.Path(directory)
  window = max_target_sequence_length or sequence_length
  rows = []
  entries = []
  for i, count in enumerate(tokens_per_file):
    path = directory / "data" / f"part-{i:03d}.npy"
    tokens = write_tokens(path, count, seed=seed + i, vocab_size=vocab_size, dtype=dtype)
    rows.append(tokens[: count // window * window].reshape(-1, sequence_length))
    entries.append((str(path), f"label-{i % 2}"))
  index = index_lib.build_index(
      entries,
      sequence_length,
      tokenizer="test",
      dtype=dtype,
      base=str(directory / "data"),
      max_target_sequence_length=max_target_sequence_length,
  )
  path = directory / "index.json"
  index.save(str(path))
  return str(path), np.concatenate(rows)
