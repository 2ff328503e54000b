"""The corpora that loaders are measured on, in the page cache.

Token ids follow Zipf's law and document lengths are lognormal, both roughly as in web text. One
window in a thousand repeats a few tokens, so that the repetition filter finds something. Each token
file has a loss mask, which leaves out 3 of 10 tokens.
"""

import ctypes
import mmap
import pathlib

import numpy as np

import maxtext_olmo

VOCAB_SIZE, EOS_ID, PAD_ID = 100_278, 100_257, 100_277
LENGTH, BATCH = 8192, 64
_FILES = 20
MEAN_DOCUMENT, _SPREAD = 822, 1.2  # A median of 400 tokens.


def make(directory: pathlib.Path, megabytes: int, mean_document: int = MEAN_DOCUMENT) -> list[str]:
  """Writes token files, unless they are there, and their index; returns the files' paths."""
  if not (directory / "data").exists():
    (directory / "data").mkdir(parents=True)
    weights = np.cumsum(1 / (10 + np.arange(EOS_ID)))
    ids = np.searchsorted(weights / weights[-1], np.arange(0.5, 1 << 16) / (1 << 16))
    windows = max(BATCH, megabytes * 1_000_000 // (_FILES * LENGTH * 4))
    for i in range(_FILES):
      rng = np.random.default_rng([7, i])
      tokens = _tokens(windows, ids.astype(np.uint32), mean_document, rng)
      tokens.tofile(directory / "data" / f"part-{i:03d}.npy")
      mask = np.arange(tokens.size) % 1000 >= 300
      mask.tofile(directory / "data" / f"part-{i:03d}.mask")
  files = sorted(map(str, (directory / "data").glob("*.npy")))
  index = maxtext_olmo.build_index(
      [(path, "web") for path in files], LENGTH, tokenizer="bench", dtype="uint32", base="/"
  )
  index.save(str(directory / "index.json"))
  return files


def _tokens(
    windows: int, ids: np.ndarray, mean_document: int, rng: np.random.Generator
) -> np.ndarray:
  tokens = ids[rng.integers(0, 1 << 16, (windows, LENGTH), np.uint16)]
  for row in range(500, windows, 1000):
    tokens[row, :2048] = np.resize(tokens[row, : rng.integers(1, 14)], 2048)
  count = 100 + 2 * tokens.size // mean_document
  middle = np.log(mean_document) - _SPREAD**2 / 2
  lengths = np.maximum(2, rng.lognormal(middle, _SPREAD, count))
  ends = np.cumsum(lengths.astype(np.int64)) - 1
  tokens.reshape(-1)[ends[ends < tokens.size]] = EOS_ID
  return tokens


def warm(directory: pathlib.Path) -> None:
  """Reads the token files, and what other loaders made of them, into the page cache."""
  for path in filter(pathlib.Path.is_file, directory.rglob("*")):
    with open(path, "rb", buffering=0) as file:
      while file.read(1 << 24):
        pass


def cached_share(files: list[str]) -> float:
  """Returns the share of the files' pages that are in the page cache."""
  libc = ctypes.CDLL(None)
  found = []
  for path in files:
    tokens = np.memmap(path, np.uint8, mode="r")
    pages = np.zeros(-(-tokens.size // mmap.PAGESIZE), np.uint8)
    pointers = ctypes.c_void_p(tokens.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
    libc.mincore(pointers[0], ctypes.c_size_t(tokens.size), pointers[1])
    found.append(pages & 1)
  return float(np.concatenate(found).mean())
