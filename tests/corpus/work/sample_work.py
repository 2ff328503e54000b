"""A work for tests: sums tokens, leaves a trace of each call, and can fail, kill or wait."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import time
import uuid
from collections import Counter
from typing import Any, ClassVar

import numpy as np

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import run
from maxtext_olmo.errors import CorpusError

PIECE_BYTES = 1 << 10


@dataclasses.dataclass(frozen=True)
class SumWork(run.Work):
  """Sums the tokens of a piece.

  Attributes:
    scale: Factor of the sum.
    trace: Directory in which each call leaves a file.
    failing: Keys of pieces that fail, as long as the file `trace/fixed` does not exist.
    killing: Keys of pieces that kill their worker, likewise.
    waiting: Keys of pieces that wait until the file `trace/open` exists.
  """

  name: ClassVar[str] = "sum"
  version: ClassVar[int] = 1

  scale: int = 1
  trace: str = ""
  failing: tuple[str, ...] = ()
  killing: tuple[str, ...] = ()
  waiting: tuple[str, ...] = ()

  def __call__(self, item: pieces_lib.Piece) -> dict[str, Any]:
    if self.trace:
      name = f"{item.key}@{os.getpid()}@{uuid.uuid4().hex}"
      pathlib.Path(self.trace, name).touch()
    fixed = os.path.exists(os.path.join(self.trace, "fixed"))
    if item.key in self.killing and not fixed:
      os.kill(os.getpid(), signal.SIGKILL)
    if item.key in self.failing and not fixed:
      raise CorpusError(f"{item.key} fails on purpose.")
    while item.key in self.waiting and not os.path.exists(os.path.join(self.trace, "open")):
      time.sleep(0.01)
    total, lengths = 0, []
    for tokens in reading.read_tokens(self.files, item):
      total += int(tokens.sum(dtype=np.int64))
      lengths.append(len(tokens))
    return {"sum": total * self.scale, "first": item.first, "lengths": np.array(lengths)}


@dataclasses.dataclass(frozen=True)
class TokenizeWork(run.Work):
  """Tokenizes a text, and measures which share of the CPU time its own thread takes."""

  name: ClassVar[str] = "share"
  version: ClassVar[int] = 1

  def __call__(self, item: pieces_lib.Piece) -> dict[str, Any]:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own, whole = time.thread_time(), time.process_time()
    made.encode_batch(["a " * 1000] * 200)
    return {"share": (time.thread_time() - own) / (time.process_time() - whole)}


def calls(trace: str) -> Counter[str]:
  """Returns how often each piece was called."""
  return Counter(name.split("@")[0] for name in os.listdir(trace) if "@" in name)


def processes(trace: str, key: str) -> list[int]:
  """Returns the processes that have begun with a piece."""
  names = [name.split("@") for name in os.listdir(trace) if "@" in name]
  return [int(pid) for found, pid, _ in names if found == key]


def wait_for(condition, what: str, seconds: float = 120) -> Any:
  """Waits until a condition is true, and returns its value; the limit only ends a hang."""
  end = time.monotonic() + seconds
  while not (found := condition()):
    if time.monotonic() > end:
      raise TimeoutError(f"{what} did not happen in {seconds} seconds")
    time.sleep(0.01)
  return found


def write_corpus(directory: str, sizes=(1000, 0, 3000, 7), dtype="uint16"):
  """Writes token files of random ids below 50, where 0 is the EOS; returns their index."""
  data = pathlib.Path(directory, "data")
  data.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(0)
  paths = []
  for number, size in enumerate(sizes):
    paths.append((str(data / f"part-{number:03}.npy"), "ab"[number % 2]))
    rng.integers(0, 50, size).astype(dtype).tofile(paths[-1][0])
  index = index_builder.build_index(paths, 8, tokenizer="t", dtype=dtype)
  index.save(os.path.join(directory, "index.json"))
  return index


def pieces(index) -> list[pieces_lib.Piece]:
  """Returns small pieces of a corpus."""
  return pieces_lib.pieces_of(index, piece_bytes=PIECE_BYTES)


def values(outcome: run.Outcome) -> list[tuple[str, int, list[int]]]:
  """Returns the results of an outcome in a form that can be compared."""
  return [(item.key, found["sum"], found["lengths"].tolist()) for item, found in outcome]
