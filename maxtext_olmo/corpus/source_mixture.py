"""OLMo-core's source mixtures: how many tokens a mixture reads from each file of its sources.

A mixture requests a number of tokens, and sets a ratio for each source. It reads the same share of
each file of a source, always from the start of the file. If a source has too few tokens, its files
are repeated:

    source   ratio   files            needs   has    takes
    web      0.75    a (60), b (40)   75      100    0.75 of each file: a 45, b 30
    code     0.25    c (10)           25      10     all of c twice, then 0.5 of it: c 10, c 10, c 5

Rows have a fixed length, so the tokens of each occurrence of a file are rounded down to whole rows.
The rows must fill whole batches. Missing rows are divided equally among the files that have tokens
left, and the last few go to the files with the largest remainders (Hamilton's method).

The arithmetic is the same as in OLMo-core, in doubles and in the same order of operations, because
a difference in the last bit can move a row from one file to another.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError


@dataclasses.dataclass(frozen=True)
class MixtureSource:
  """A source of a mixture.

  Attributes:
    name: Name of the source, which becomes the label of its files.
    target_ratio: Share of the requested tokens that come from this source.
    paths: Token files of the source.
    max_repetition_ratio: Maximum number of times that the source is read. If the mixture needs
      more, it is refused.
    max_source_fraction: Maximum share of the source that is used. If the mixture needs more, it is
      refused.
  """

  name: str
  target_ratio: float
  paths: tuple[str, ...]
  max_repetition_ratio: float = 1.0
  max_source_fraction: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Occurrence:
  """One use of a file in a mixture: the source, the file's index in it, and the tokens to read."""

  source: int
  file: int
  tokens: int


@dataclasses.dataclass(frozen=True)
class MixtureSize:
  """The size of a mixture.

  Attributes:
    requested_tokens: Number of tokens to read in all.
    global_batch_size: Number of tokens in a global batch.
    sequence_length: Number of tokens in a row.
  """

  requested_tokens: int
  global_batch_size: int
  sequence_length: int


def allot_tokens(
    sources: Sequence[MixtureSource], file_tokens: Sequence[Sequence[int]], size: MixtureSize
) -> list[Occurrence]:
  """Returns how many tokens to read from each file, in stream order.

  A file may occur several times.

  >>> sources = [MixtureSource("web", 0.75, ("a", "b")), MixtureSource("code", 0.25, ("c",), 3.0)]
  >>> for occurrence in allot_tokens(sources, [[60, 40], [10]], MixtureSize(100, 20, 5)):
  ...   print(sources[occurrence.source].paths[occurrence.file], occurrence.tokens)
  a 45
  b 30
  c 10
  c 10
  c 5

  Args:
    sources: Sources of the mixture.
    file_tokens: For each source, the number of tokens of each of its files.
    size: Size of the mixture.

  Raises:
    ConfigError: The mixture is not possible: its ratios do not sum to 1, or a source has too few
      tokens.
  """
  _check(sources, size)
  kept: list[Occurrence] = []
  limits: list[int] = []
  for number, (source, tokens) in enumerate(zip(sources, file_tokens)):
    for share in _shares(source, sum(tokens), size.requested_tokens):
      for file, count in enumerate(tokens):
        kept.append(Occurrence(number, file, min(count, math.ceil(count * share))))
        limits.append(count)
  rows = _whole_rows([occurrence.tokens for occurrence in kept], limits, size)
  return [
      dataclasses.replace(occurrence, tokens=count * size.sequence_length)
      for occurrence, count in zip(kept, rows)
  ]


def _check(sources: Sequence[MixtureSource], size: MixtureSize) -> None:
  problems = [
      f"{name} must be positive, got {value}"
      for name, value in dataclasses.asdict(size).items()
      if value < 1
  ]
  if size.global_batch_size < size.sequence_length:
    problems.append(
        f"a global batch of {size.global_batch_size} tokens holds no row of"
        f" {size.sequence_length}"
    )
  for source in sources:
    if not source.paths:
      problems.append(f"source {source.name!r} has no files")
    if not 0 <= source.target_ratio <= 1:
      problems.append(
          f"source {source.name!r}: target_ratio {source.target_ratio} is not in [0, 1]"
      )
    if source.max_repetition_ratio < 1:
      problems.append(
          f"source {source.name!r}: max_repetition_ratio {source.max_repetition_ratio} is below 1"
      )
    if not 0 < source.max_source_fraction <= 1:
      problems.append(
          f"source {source.name!r}: max_source_fraction {source.max_source_fraction} is not in"
          " (0, 1]"
      )
  total = np.sum([source.target_ratio for source in sources]) if sources else 0.0
  if not np.allclose(total, 1.0):
    problems.append(f"the target ratios must sum to 1, but they sum to {total}")
  if problems:
    raise ConfigError(f"The source mixture is not possible: {'; '.join(problems)}.")


def _shares(source: MixtureSource, population: int, requested: int) -> list[float]:
  """Returns, for each pass over the files of a source, the share of each file to read."""
  needed = int(requested * source.target_ratio)
  most = int((population * source.max_source_fraction) * source.max_repetition_ratio)
  if most < needed:
    raise ConfigError(
        f"Source {source.name!r} has too few tokens: its ratio of {source.target_ratio} needs"
        f" {needed:,} tokens, but its files have {population:,}, and at most {most:,} may be read"
        f" (max_source_fraction {source.max_source_fraction}, max_repetition_ratio"
        f" {source.max_repetition_ratio}). Request fewer tokens, or raise its limits."
    )
  rest = needed / population if population else 0.0
  if rest <= 1:
    return [rest]
  shares = []
  while rest > 0:
    shares.append(min(1.0, rest))
    rest -= 1.0  # A tiny remainder from rounding still adds a pass, as in OLMo-core.
  return shares


def _whole_rows(kept: Sequence[int], limits: Sequence[int], size: MixtureSize) -> list[int]:
  """Returns the number of rows of each occurrence; they fill whole batches, if possible.

  Args:
    kept: Number of tokens to read from each occurrence.
    limits: Number of tokens in the file of each occurrence.
    size: Size of the mixture.
  """
  length = size.sequence_length
  steps = math.ceil(size.requested_tokens / size.global_batch_size)
  wanted = steps * (size.global_batch_size // length)
  most = [limit // length for limit in limits]
  rows = [min(tokens // length, limit) for tokens, limit in zip(kept, most)]
  remainders = [
      (tokens % length) / length if count < limit else 0.0
      for tokens, count, limit in zip(kept, rows, most)
  ]
  missing = wanted - sum(rows)
  growing = [place for place, count in enumerate(rows) if count < most[place]]
  if missing > 0 and growing:
    for place in growing:
      rows[place] += min(missing // len(growing), most[place] - rows[place])
    missing = wanted - sum(rows)
    growing = [place for place in growing if rows[place] < most[place]]
  if missing > 0:
    # Among occurrences with equal remainders, the last one gets a row first.
    growing.sort(key=lambda place: (remainders[place], place), reverse=True)
    for place in growing[:missing]:
      rows[place] += 1
  return rows


def build_mixture_index(
    sources: Sequence[MixtureSource],
    size: MixtureSize,
    *,
    tokenizer: str,
    dtype: str = "uint32",
    base: str | os.PathLike[str] | None = None,
    max_target_sequence_length: int | None = None,
    storage: Storage | None = None,
    **settings: Any,
) -> index_lib.OlmoNpyIndex:
  """Scans the files of a mixture and builds its index.

  Each entry of the index is the head of a file: its first tokens. An entry without tokens has no
  instances, but stays in the index, because the fingerprints of OLMo-core before 3.0 include it.

  Args:
    sources: Sources of the mixture.
    size: Size of the mixture.
    tokenizer: Name of the tokenizer, which becomes part of the fingerprint.
    dtype: Dtype of the files.
    base: Directory that stored paths are relative to.
    max_target_sequence_length: Longest sequence length that a later stage may use.
    storage: Storage that holds the files; `open_storage()` by default.
    settings: Further arguments of `build_index`: `workers`, `progress`, `checksums`.
  """
  files = [(path, source.name) for source in sources for path in source.paths]
  if not files:
    raise ConfigError("The source mixture is not possible: it has no sources.")
  whole = index_builder.build_index(
      files,
      size.sequence_length,
      tokenizer=tokenizer,
      dtype=dtype,
      base=base,
      max_target_sequence_length=max_target_sequence_length,
      storage=storage,
      **settings,
  )
  entries = iter(whole.files)
  by_source = [[next(entries) for _ in source.paths] for source in sources]
  tokens = [[entry.n_tokens for entry in some] for some in by_source]
  heads = [
      dataclasses.replace(by_source[use.source][use.file], head_tokens=use.tokens)
      for use in allot_tokens(sources, tokens, size)
  ]
  index = index_lib.make_index(
      heads,
      size.sequence_length,
      dtype=whole.dtype,
      tokenizer=tokenizer,
      base=whole.base,
      max_target_sequence_length=max_target_sequence_length,
  )
  if not index.total_instances:
    raise CorpusError(
        f"The source mixture has no instances: no file contributes {index.window} tokens. Request"
        " more tokens, or choose a shorter sequence length."
    )
  return index
