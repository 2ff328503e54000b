"""The corpus that `maxtext-olmo bench throughput` measures on, and the proof that it is in the page cache.

Token ids are drawn as words are used: few of them often, most of them rarely. Documents end after 600 tokens or so, and one
window in a thousand says the same few tokens over and over, as in a crawl, so that the filter has something to find.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo import progress
from maxtext_olmo.corpus import index_builder as index_lib

VOCAB_SIZE = 100_278
EOS_ID = 100_257
LENGTHS = (2048, 8192)
_LONGEST = max(LENGTHS)
_DOCUMENT = 600
_SAMPLE = 8
_RESIDENT = 0.999
_CHANCES = 3


@dataclasses.dataclass(frozen=True)
class BenchCorpus:
  """Token files and their indices, by sequence length."""

  directory: str
  files: tuple[str, ...]
  indices: dict[int, str]

  @property
  def bytes(self) -> int:
    return sum(os.path.getsize(path) for path in self.files)

  def spec(self, length: int) -> dict[str, Any]:
    """What a loader is told about the corpus."""
    return {
        "files": list(self.files),
        "index": self.indices[length],
        "directory": self.directory,
        "vocab_size": VOCAB_SIZE,
        "eos_id": EOS_ID,
        "length": length,
    }

  def beginnings(self, length: int) -> set[tuple[int, ...]]:
    """The first tokens of all windows: what a loader delivers must begin with one of them."""
    found = []
    for path in self.files:
      tokens = np.memmap(path, np.uint32, mode="r")
      found.append(tokens[: len(tokens) // length * length].reshape(-1, length)[:, :_SAMPLE])
    return set(map(tuple, np.concatenate(found).tolist()))


def make(directory: pathlib.Path, *, megabytes: int, files: int) -> BenchCorpus:
  """Writes the corpus, or takes the one that is there with the same sizes."""
  window = _LONGEST * 4
  windows = max(1, megabytes * 1_000_000 // (files * window))
  wanted = {"files": files, "windows": windows, "version": 2}
  stamp = directory / "bench.json"
  paths = [directory / "data" / f"part-{i:04d}.npy" for i in range(files)]
  indices = {length: str(directory / f"index-{length}.json") for length in LENGTHS}
  corpus = BenchCorpus(str(directory), tuple(map(str, paths)), indices)
  if stamp.exists() and json.loads(stamp.read_text()) == wanted:
    return corpus
  if directory.exists() and any(directory.iterdir()):
    raise errors.ConfigError(
        f"{directory} holds something else than the corpus of this measurement, which has {files}"
        f" files of {windows} windows; choose another --directory, or delete it."
    )
  (directory / "data").mkdir(parents=True, exist_ok=True)
  ids = _inverse_frequencies()
  with progress.progress_bar("tokens", files, enabled=True) as advance:
    for i, path in enumerate(paths):
      _write(path, i * windows, windows, ids, np.random.default_rng([7, i]))
      advance(1)
  for length, index_path in indices.items():
    entries = [(str(p), "web") for p in paths]
    base = str(directory / "data")
    index = index_lib.build_index(entries, length, tokenizer="dolma2", dtype="uint32", base=base)
    index.save(index_path)
  stamp.write_text(json.dumps(wanted))
  return corpus


def _inverse_frequencies() -> np.ndarray:
  """2^16 token ids, each as often as Zipf's law has it: a uniform number picks a token."""
  weights = 1 / (10 + np.arange(EOS_ID))
  edges = np.cumsum(weights) / weights.sum()
  return np.searchsorted(edges, (np.arange(1 << 16) + 0.5) / (1 << 16)).astype(np.uint32)


def _write(
    path: pathlib.Path, first: int, windows: int, ids: np.ndarray, rng: np.random.Generator
) -> None:
  tokens = ids[rng.integers(0, 1 << 16, (windows, _LONGEST), np.uint16)]
  ends = np.cumsum(rng.geometric(1 / _DOCUMENT, 2 * tokens.size // _DOCUMENT + 1))
  tokens.reshape(-1)[ends[ends < tokens.size]] = EOS_ID
  for row in np.flatnonzero((first + np.arange(windows)) % 1000 == 500):
    start, period = rng.integers(0, _LONGEST - 2048), rng.integers(1, 14)
    tokens[row, start : start + 2048] = np.resize(tokens[row, start : start + period], 2048)
  tokens.tofile(path)


def warm(paths: Iterable[str | os.PathLike[str]]) -> None:
  """Reads files into the page cache, and makes sure that they have stayed there."""
  paths = list(paths)
  for _ in range(_CHANCES):  # A kernel may take pages back at any time, even while others are read.
    for path in paths:
      with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
          pass
    if resident_share(paths) >= _RESIDENT:
      return
  check_resident(paths)


def check_resident(paths: Sequence[str | os.PathLike[str]]) -> None:
  """Raises where files are not in the page cache, because then the disk would be measured."""
  share = resident_share(paths)
  if share < _RESIDENT:
    raise errors.CorpusError(
        f"Only {100 * share:.1f} % of the {len(paths)} files in {os.path.dirname(paths[0])} are in the"
        " page cache, so a measurement would be one of the disk. Free some memory, or pass a"
        " smaller --megabytes."
    )


def resident_share(paths: Sequence[str | os.PathLike[str]]) -> float:
  """The share of the files' pages that are in the page cache."""
  libc = ctypes.CDLL(None, use_errno=True)
  resident = pages = 0
  for path in paths:
    size = os.path.getsize(path)
    if not size:
      continue
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as map_:
      count = -(-size // mmap.PAGESIZE)
      found = np.zeros(count, np.uint8)
      view = np.frombuffer(map_, np.uint8)
      address = view.ctypes.data
      failed = libc.mincore(
          ctypes.c_void_p(address), ctypes.c_size_t(size), found.ctypes.data_as(ctypes.c_void_p)
      )
      del view
      if failed:
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
      resident += int((found & 1).sum())
      pages += count
  return resident / pages if pages else 1.0


def drop(paths: Sequence[str | os.PathLike[str]]) -> float:
  """Asks the kernel to forget files, and returns the share of their pages that it kept."""
  for path in paths:
    with open(path, "rb") as file:
      os.fsync(file.fileno())  # Pages that are not on the disk yet cannot be forgotten.
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
  return resident_share(paths)
