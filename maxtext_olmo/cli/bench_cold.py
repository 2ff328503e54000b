"""Batches from a disk that has to be asked: a dropped page cache, and a source that answers after 10 ms.

Each is measured beside the same windows read one after the other, which is what a loader does that does not read ahead.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus.storage import local as storage_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import steps

LATENCY_SECONDS = 0.01
_ROWS, _LENGTH = 64, 8192
# Until it is known how slow the source is, and the queue of reads has filled and been emptied once.
_SETTLING_BATCHES = 16
_MOST_KEPT = 0.05


class SlowStorage:
  """Local files whose every range comes after a wait, as from a distant disk; waits of several threads pass together."""

  def __init__(self, seconds: float, max_open_files: int = 512):
    self._seconds = seconds
    self._storage = storage_lib.LocalStorage(max_open_files)

  def __reduce__(self) -> tuple:
    return type(self), (self._seconds, self._storage.max_open_files)

  def size(self, path: str) -> int:
    return self._storage.size(path)

  def fill(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, out: np.ndarray
  ) -> None:
    for row in range(len(file_ids)):
      time.sleep(self._seconds)
      one = slice(row, row + 1)
      self._storage.fill(paths, file_ids[one], offsets[one], out[one])

  def hint(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, size: int
  ) -> None:
    """A distant disk takes no hints."""


@dataclasses.dataclass(frozen=True)
class Cold:
  """Bytes per second from a slow source.

  Attributes:
    what: Which source.
    ours: By this library, run by run.
    one_by_one: By reading the windows of the batches one after the other.
    note: What else a reader should know.
  """

  what: str
  ours: tuple[float, ...]
  one_by_one: tuple[float, ...]
  note: str

  @property
  def rate(self) -> float:
    return statistics.median(self.ours)

  @property
  def ratio(self) -> float:
    return self.rate / statistics.median(self.one_by_one)


def measure(
    corpus: bench_corpus.BenchCorpus, *, repeats: int, say: Callable[[str], None]
) -> list[Cold]:
  """Both sources; the two ways of reading take turns."""
  inspection.compile_reads(np.uint32)  # The steady state is measured, not the first seconds.
  index = index_lib.load_index(corpus.indices[_LENGTH])
  batches = min(80, index.total_instances // _ROWS // 2)
  found = []
  say("a source that answers after 10 ms")
  slow = source_lib.OlmoNpyDataSource(index, storage=SlowStorage(LATENCY_SECONDS))
  pairs = [(_steps(slow, batches), _plain(slow, 1)) for _ in range(repeats)]
  note = f"{LATENCY_SECONDS * 1e3:.0f} ms before each read, from the page cache"
  found.append(Cold("10 ms per read", *_columns(pairs), note))

  say("a dropped page cache")
  kept = 0.0
  pairs = []
  for _ in range(repeats):
    source = source_lib.OlmoNpyDataSource(index, max_open_files=512)
    kept = max(kept, bench_corpus.drop(corpus.files))
    ours = _steps(source, batches)
    kept = max(kept, bench_corpus.drop(corpus.files))
    pairs.append((ours, _plain(source, batches)))
  note = f"at most {100 * kept:.0f} % of the pages were still in memory"
  if kept > _MOST_KEPT:
    note += ": this file system keeps them, so the figure is not one of the disk"
  found.append(Cold("dropped page cache", *_columns(pairs), note))
  bench_corpus.warm(corpus.files)
  return found


def _columns(pairs: list[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
  return tuple(ours for ours, _ in pairs), tuple(plain for _, plain in pairs)


def _steps(source: source_lib.OlmoNpyDataSource, batches: int) -> float:
  """Bytes per second of the step dataset, once it knows how slow its source is."""
  dataset = steps.StepDataset(
      source,
      stream_lib.train_stream(source.index, order="feistel", seed=time.time_ns() % 1000),
      schedule_lib.BatchSchedule.constant(_ROWS),
      {_ROWS: np.arange(_ROWS)},
      content=steps.Content(vocab_size=bench_corpus.VOCAB_SIZE, ngram_filter=False),
  )
  size = 0
  began = 0.0
  for step in range(_SETTLING_BATCHES + batches):
    if step == _SETTLING_BATCHES:
      began = time.perf_counter()
    batch = dataset[step]
    size += batch["tokens"].nbytes if step >= _SETTLING_BATCHES else 0
  return size / (time.perf_counter() - began)


def _plain(source: source_lib.OlmoNpyDataSource, batches: int) -> float:
  """Bytes per second of one read after the other, of random windows."""
  rng = np.random.default_rng()
  ids = rng.choice(len(source), min(len(source), batches * _ROWS), replace=False)
  out = np.empty((1, _LENGTH), source.dtype)
  began = time.perf_counter()
  for i in ids:
    source.read(np.array([i]), out)
  return len(ids) * out.nbytes / (time.perf_counter() - began)


def to_json(cold: Cold) -> dict[str, Any]:
  """All of it."""
  return {**dataclasses.asdict(cold), "bytes_per_second": cold.rate, "ratio": cold.ratio}
