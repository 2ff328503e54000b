"""A corpus of generated text with rows of garbage in one file, and losses that show them."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np

from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib

LENGTH = 64
ROWS = 40  # of garbage
_LABELS = ("web", "web", "web", "code", "code", "wiki")
_ROWS_PER_FILE = 400

# Each kind of garbage that the loss jumps at and the repetition filter lets through.
GARBAGE = {
    "random_bytes": lambda rng: rng.integers(0, 256, LENGTH),
    "high_bytes": lambda rng: rng.integers(128, 256, LENGTH),
    "digits": lambda rng: rng.integers(48, 58, LENGTH),
    "shuffled_alphabet": lambda rng: np.resize(rng.permutation(np.arange(33, 127)), LENGTH),
    "ends_of_documents": lambda rng: np.where(rng.random(LENGTH) < 0.5, 256, rng.integers(97, 123)),
}


@dataclasses.dataclass(frozen=True)
class Planted:
  """A corpus with garbage: its index, the bad file, and the numbers of its bad rows."""

  index_path: str
  file: str
  rows: frozenset[int]


def write(directory: str, seed: int, garbage: str = "random_bytes") -> Planted:
  """Writes six files of text, one of which has rows of garbage at random places."""
  rng = np.random.Generator(np.random.PCG64(seed))
  root = pathlib.Path(directory)
  bad_file = int(rng.integers(len(_LABELS)))
  bad_rows = rng.choice(_ROWS_PER_FILE, ROWS, replace=False)
  entries = []
  for number, label in enumerate(_LABELS):
    rows = _text(rng, label).reshape(-1, LENGTH)
    if number == bad_file:
      for row in bad_rows.tolist():
        rows[row] = GARBAGE[garbage](rng)
    path = root / "data" / f"{label}-{number}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.astype("<u2").tofile(path)
    entries.append((str(path), label))
  base = str(root / "data")
  index = index_lib.build_index(entries, LENGTH, tokenizer="bytes", dtype="uint16", base=base)
  index_path = str(root / "index.json")
  index.save(index_path)
  eos_id = tokenizer_lib.ByteTokenizer.eos_id
  documents_lib.build_documents(index, f"{index_path}.documents", eos_id)
  numbers = frozenset((bad_file * _ROWS_PER_FILE + bad_rows).tolist())
  return Planted(index_path, entries[bad_file][0], numbers)


def _text(rng: np.random.Generator, label: str) -> np.ndarray:
  """Returns the tokens of a file: documents of words, the frequent ones short."""
  letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkqjxz", np.uint8)
  weights = 1 / np.arange(1, 27)
  words = [rng.choice(letters, 2 + i // 40, p=weights / weights.sum()) for i in range(200)]
  frequency = 1 / np.arange(1, 201)
  space = {"web": b" ", "code": b"_", "wiki": b" "}[label][0]
  tokens: list[int] = []
  while len(tokens) < LENGTH * _ROWS_PER_FILE:
    for word in rng.choice(200, int(rng.integers(5, 120)), p=frequency / frequency.sum()).tolist():
      tokens += [*words[word].tolist(), space]
    tokens.append(tokenizer_lib.ByteTokenizer.eos_id)
  return np.array(tokens[: LENGTH * _ROWS_PER_FILE])


def write_losses(path: pathlib.Path, bad: list[int], seed: int) -> None:
  """Writes the losses of a run, given the rows of garbage at each step."""
  rng = np.random.Generator(np.random.PCG64(seed))
  lines = []
  for step, count in enumerate(bad):
    loss = 2.5 + 2 * np.exp(-step / 40) + rng.normal(0, 0.05) + 0.6 * count
    lines.append(json.dumps({"step": step, "loss": float(loss), "grad_norm": 1.0}))
  path.write_text("\n".join(lines) + "\n")
