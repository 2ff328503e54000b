"""What a batch costs as the corpus, the number of hosts and the position grow: it should cost the same.

All of it happens in this process, inline, and counts the processor time of one thread. The bytes that are read stay the same
few, in the page cache, whatever the index says, because the question is what the growth costs, not what a larger disk does:
many files are hard links to those of the bench's corpus, and a corpus too large for any disk is an index whose offsets are
taken modulo the size of the real files.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus.storage import local as storage_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import inspection
from maxtext_olmo.rows import steps

ROWS, LENGTH = 64, 8192
FILES = (10, 950, 12_000)
INSTANCES = (10**5, 10**6, 10**7, 10**8, 10**9)
HOSTS = (1, 4, 16, 64)
POSITIONS = (0.0, 0.25, 0.5, 0.75, 0.999)
_INDEX_FILES = 950
_LARGE = 724_000_000
_WARM_BATCHES = 40


class FoldedStorage:
  """Reads any offset of any file from a few real files, by remainder; for indices that no disk could hold."""

  def __init__(self, files: Sequence[str]):
    self._files = list(files)
    self._size = min(map(os.path.getsize, files))
    self._storage = storage_lib.LocalStorage(len(files) + 1)

  def size(self, path: str) -> int:
    """Of the file that is read instead."""
    return self._size

  def fill(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, out: np.ndarray
  ) -> None:
    self._storage.fill(self._files, *self._fold(file_ids, offsets), out)

  def hint(
      self, paths: Sequence[str], file_ids: np.ndarray, offsets: np.ndarray, size: int
  ) -> None:
    self._storage.hint(self._files, *self._fold(file_ids, offsets), size)

  def _fold(self, file_ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return file_ids % len(self._files), offsets % self._size


@dataclasses.dataclass(frozen=True)
class Growth:
  """What a batch costs at several sizes of something.

  Attributes:
    what: What grows.
    sizes: How far.
    microseconds: Processor time per batch, the median, for each.
    ranges: The least and the most, for each.
  """

  what: str
  sizes: tuple[float, ...]
  microseconds: tuple[float, ...]
  ranges: tuple[tuple[float, float], ...]

  @property
  def ratio(self) -> float:
    """The dearest against the first."""
    return max(self.microseconds) / self.microseconds[0]


def measure(
    corpus: bench_corpus.BenchCorpus, *, rounds: int, batches: int, say: Callable[[str], None]
) -> list[Growth]:
  """All four growths; the sizes of each take turns."""
  inspection.compile_reads(np.uint32)
  found = []
  with tempfile.TemporaryDirectory(dir=corpus.directory) as directory:
    kinds: dict[str, Iterator[tuple[float, steps.StepDataset]]] = {
        "files": _by_files(corpus, pathlib.Path(directory)),
        "instances": ((n, _dataset(_folded(corpus, n))) for n in INSTANCES),
        "hosts": ((n, _dataset(_folded(corpus, _LARGE), hosts=n)) for n in HOSTS),
        "position in the epoch": (
            (share, _dataset(_folded(corpus, _LARGE), first_step=int(share * _LARGE / ROWS)))
            for share in POSITIONS
        ),
    }
    for what, datasets in kinds.items():
      say(
          f"growth with the number of {what}"
          if what != "position in the epoch"
          else f"growth with the {what}"
      )
      found.append(_measure(what, dict(datasets), rounds, batches))
  return found


def _measure(
    what: str, datasets: dict[float, steps.StepDataset], rounds: int, batches: int
) -> Growth:
  costs: dict[float, list[float]] = {size: [] for size in datasets}
  taken = dict.fromkeys(datasets, 0)
  for number in range(rounds + 1):
    sizes = list(datasets) if number % 2 else list(reversed(datasets))
    for size in sizes:
      count = batches if number else _WARM_BATCHES
      began = time.thread_time()
      for step in range(taken[size], taken[size] + count):
        datasets[size][step]
      if number:  # The first round opens files.
        costs[size].append((time.thread_time() - began) / count * 1e6)
      taken[size] += count
  return Growth(
      what,
      tuple(datasets),
      tuple(statistics.median(costs[size]) for size in datasets),
      tuple((min(costs[size]), max(costs[size])) for size in datasets),
  )


def _dataset(
    source: source_lib.OlmoNpyDataSource, *, hosts: int = 1, first_step: int = 0
) -> steps.StepDataset:
  """The batches of the last of some hosts, with the same number of rows on each."""
  stream = stream_lib.train_stream(source.index, order="feistel", seed=1)
  schedule = schedule_lib.BatchSchedule.constant(ROWS * hosts)
  rows = {ROWS * hosts: np.arange(ROWS * (hosts - 1), ROWS * hosts)}
  content = steps.Content(vocab_size=bench_corpus.VOCAB_SIZE)
  return steps.StepDataset(
      source,
      stream,
      schedule,
      rows,
      first_step=first_step // hosts,
      content=content,
      read_threads=1,  # Whose processor time is what is counted.
  )


def _folded(corpus: bench_corpus.BenchCorpus, instances: int) -> source_lib.OlmoNpyDataSource:
  entries = []
  for i in range(_INDEX_FILES):
    windows = instances // _INDEX_FILES + (i < instances % _INDEX_FILES)
    tokens = windows * LENGTH
    entries.append(index_lib.OlmoNpyFileEntry(f"part-{i:05d}.npy", "web", tokens, 0, 0, tokens * 4))
  index = index_lib.make_index(
      entries, LENGTH, dtype="uint32", tokenizer="dolma2", base=corpus.directory
  )
  return source_lib.OlmoNpyDataSource(index, storage=FoldedStorage(corpus.files))


def _by_files(
    corpus: bench_corpus.BenchCorpus, directory: pathlib.Path
) -> Iterator[tuple[float, steps.StepDataset]]:
  for count in FILES:
    folder = directory / str(count)
    folder.mkdir()
    paths = [folder / f"part-{i:05d}.npy" for i in range(count)]
    for path, parts in zip(paths, _parts(corpus.files, count)):
      if len(parts) == 1:
        os.link(parts[0], path)
        continue
      with path.open("wb") as whole:
        for part in parts:
          whole.write(pathlib.Path(part).read_bytes())
    index = index_builder.build_index(
        [(str(path), "web") for path in paths],
        LENGTH,
        tokenizer="dolma2",
        dtype="uint32",
        base=str(folder),
    )
    yield count, _dataset(_opened(index))


def _parts(files: Sequence[str], count: int) -> list[Sequence[str]]:
  """What so many files are made of, so that all of the corpus is in them: less of it would be less to keep in caches."""
  if count >= len(files):
    return [[files[i % len(files)]] for i in range(count)]
  return [part.tolist() for part in np.array_split(np.array(files), count)]


def _opened(index: index_lib.OlmoNpyIndex) -> source_lib.OlmoNpyDataSource:
  """A source that has read from every file, as it has after some hundred batches, so that those are open which stay so."""
  source = source_lib.OlmoNpyDataSource(index)
  firsts = np.array([entry.instance_offset for entry in index.files])
  for some in np.array_split(firsts, -(-len(firsts) // ROWS)):
    source.read(some)
  return source


def to_json(growth: Growth) -> dict[str, Any]:
  """All of it."""
  return {**dataclasses.asdict(growth), "ratio": growth.ratio}
