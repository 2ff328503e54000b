"""Outputs of the real OLMo-core for small corpora, and the corpora, which are made by a formula.

`testdata/olmo_core/corpora.json` describes token files, and the other files there hold what
OLMo-core 3.0.0 made of them. All random numbers come from SplitMix64, so the files do not depend on
the version of any library; each is compared with its recorded SHA-256.
"""

import functools
import gzip
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

_FOLDER = pathlib.Path(__file__).parent / "testdata" / "olmo_core"
_STREAMS = 16  # Each file has keys for this many streams of random numbers.
_LENGTHS, _TOKENS, _MASK = range(3)


@functools.cache
def load(name: str) -> Any:
  """Returns the content of a golden file, such as `mixture`; large ones are compressed."""
  path = _FOLDER / f"{name}.json"
  if path.exists():
    return json.loads(path.read_text())
  return json.loads(gzip.decompress(path.with_suffix(".json.gz").read_bytes()))


def config(name: str) -> Any:
  """Returns sections of the config.json of an official stage, such as `olmo3_7b_pretrain`."""
  return json.loads((_FOLDER / "configs" / f"{name}.json").read_text())


def mix_file(name: str) -> pathlib.Path:
  """Returns the path of an excerpt of a mix manifest of AI2."""
  return _FOLDER / "mixes" / f"{name}.txt"


def corpus(name: str) -> dict[str, Any]:
  """Returns the description of a corpus: its dtype, its special tokens and its files."""
  return load("corpora")["corpora"][name]


def write_corpora(folder: str | pathlib.Path, *names: str) -> None:
  """Writes corpora to `folder/<corpus>/<file>`, and checks that they are those of the goldens."""
  for name in names:
    description, made = corpus(name), load("corpora")["made"][name]
    directory = pathlib.Path(folder) / name
    directory.mkdir(parents=True, exist_ok=True)
    for file in description["files"]:
      tokens, mask = _make_file(description, file)
      arrays = {file["name"]: tokens}
      if mask is not None:
        arrays[file["mask_name"]] = mask
      for file_name, array in arrays.items():
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        if digest != made[file_name]["sha256"]:
          raise AssertionError(f"{name}/{file_name} is not the file that OLMo-core read.")
        array.tofile(directory / file_name)


def split_mix(key: int, numbers: np.ndarray) -> np.ndarray:
  """Returns the outputs of SplitMix64 with a key, as uint64."""
  with np.errstate(over="ignore"):
    z = np.uint64(key) + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _random(seed: int, stream: int, numbers: np.ndarray, below: Any) -> np.ndarray:
  values = split_mix(seed * _STREAMS + stream, numbers) % np.asarray(below).astype(np.uint64)
  return values.astype(np.int64)


def _document_lengths(spec: list[Any], count: int, seed: int) -> np.ndarray:
  kind, *values = spec
  numbers = np.arange(count)
  if kind == "uniform":
    low, high = values
    return low + _random(seed, _LENGTHS, numbers, high - low + 1)
  if kind == "log2":
    low, high = values
    power = 2 ** (low + _random(seed, _LENGTHS, 2 * numbers, high - low + 1))
    return power + _random(seed, _LENGTHS, 2 * numbers + 1, power)
  if kind == "distinct":
    lengths = values[0] + np.arange(values[1])
    return lengths[np.argsort(split_mix(seed * _STREAMS, lengths), kind="stable")]
  return np.array(values, np.int64)


def _make_file(
    corpus: dict[str, Any], file: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray | None]:
  seed = file["seed"]
  lengths = _document_lengths(file["lengths"], file.get("documents", 0), seed)
  ends = np.cumsum(lengths)
  starts = ends - lengths
  places = np.arange(int(lengths.sum()) + file.get("tail", 0))
  ordinary = corpus["vocab_size"] - corpus["low_free"] - corpus["high_free"]
  tokens = corpus["low_free"] + _random(seed, _TOKENS, places, ordinary)
  for document, place, period, count in file.get("repeats", ()):
    first = starts[document] + place
    tokens[first : first + period * count] = np.tile(tokens[first : first + period], count)
  if corpus["bos_token_id"] is not None:
    tokens[starts[lengths > 1]] = corpus["bos_token_id"]
  tokens[ends - 1] = corpus["eos_token_id"]
  mask = None
  if file.get("mask") == "prompt":
    mask = np.ones(len(places), np.bool_)
    prompts = _random(seed, _MASK, np.arange(len(lengths)), (lengths + 1) // 2)
    for start, prompt in zip(starts, prompts):
      mask[start : start + prompt] = False
  elif file.get("mask") == "turns":
    mask = (places + _random(seed, _MASK, np.arange(1), 7)) % 7 >= 3
  return tokens.astype(np.dtype(corpus["dtype"]).newbyteorder("<")), mask


def row_hash(rows: np.ndarray) -> str:
  """Returns the SHA-256 of values as little-endian int64, as in the goldens."""
  return hashlib.sha256(np.ascontiguousarray(rows, "<i8").tobytes()).hexdigest()
