"""Finds text in a corpus as token ranges, by scanning the raw bytes of token files.

Inside a document, the surrounding text changes how a text is tokenized at its edges. So the text is
encoded with and without a leading space, a token or two at both ends are ignored, the middle is
searched as bytes, and each hit is decoded and compared as text:

    text            "harbour seal in it"
    tokens          har bour  seal  in  it
    searched            bour  seal  in                any occurrence at a token boundary
    decoded         "… a har bour  seal  in  it, …"   has the text: the hit is the tokens around it

A text of few tokens is searched whole, which misses occurrences that are tokenized differently at
the edges; search for a longer text to find them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import cores
from maxtext_olmo import errors
from maxtext_olmo import progress as progress_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import tokenizer as tokenizer_lib

_MARGIN = 4  # Tokens on each side of a hit that are decoded with it.


@dataclasses.dataclass(frozen=True, order=True)
class TokenRange:
  """A range of tokens of a file, identified by its number in the index."""

  file: int
  first: int
  count: int


@dataclasses.dataclass(frozen=True)
class _Query:
  """Tokens to look for, and the number of the text's tokens before and after them."""

  tokens: tuple[int, ...]
  open: int


def find_text(
    text: str,
    tokenizer: Any,
    index: index_lib.OlmoNpyIndex,
    files: token_files.TokenFiles,
    *,
    only: Sequence[int] | None = None,
    most: int | None = None,
    progress: bool | Callable[[int], None] = False,
) -> list[TokenRange]:
  """Returns all occurrences of a text in a corpus, each as the shortest token range that holds it.

  Args:
    text: The text to look for.
    tokenizer: The tokenizer of the corpus.
    index: The corpus.
    files: Its token files.
    only: Numbers of the files to scan; all by default.
    most: Stop after about this many occurrences; a few more may be returned. None finds all.
    progress: Whether to show a progress bar, or a function that is called from several threads with
      the number of bytes just scanned. An exception that it raises ends the search.
  """
  largest = np.iinfo(index.token_dtype).max
  queries = [query for query in _queries(text, tokenizer) if max(query.tokens) <= largest]
  numbers = list(range(len(index.files)) if only is None else only)
  hits: set[TokenRange] = set()  # Shared by all threads; adding to a set is atomic.
  with contextlib.ExitStack() as stack:
    if callable(progress):
      advance = progress
    else:
      total = sum(index.files[n].n_tokens for n in numbers) * index.token_dtype.itemsize
      bar = progress_lib.progress_bar("Searching", total, enabled=progress, unit="bytes")
      advance = stack.enter_context(bar)

    def enough() -> bool:
      return most is not None and len(hits) >= most

    def search(i: int) -> None:
      number, n_tokens = numbers[i], index.files[numbers[i]].n_tokens
      for place, query in () if enough() else _scan(files, number, n_tokens, queries, advance):
        if enough():
          return
        hit = _verified(text, tokenizer, files, number, n_tokens, place, query)
        if hit is not None:
          hits.add(hit)

    results, problems = scan.map_files(
        search, len(numbers), workers=cores.available_cores(), block=1
    )
  scan.all_or_error(results, problems, "The corpus cannot be searched")
  return sorted(hits)


def _queries(text: str, tokenizer: Any) -> list[_Query]:
  if not text:
    raise errors.ConfigError("--find needs a text that is not empty.")
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    return [_Query(tuple(tokenizer.encode([text])[0].tolist()), 0)]  # Each byte is a token.
  found: dict[tuple[int, ...], _Query] = {}
  for ids in tokenizer.encode([text, " " + text]):
    ends = 2 if len(ids) >= 6 else 1 if len(ids) >= 4 else 0
    tokens = tuple(ids[ends : len(ids) - ends].tolist())
    if tokens:
      found.setdefault(tokens, _Query(tokens, ends))
  return list(found.values())


def _scan(
    files: token_files.TokenFiles,
    number: int,
    n_tokens: int,
    queries: Sequence[_Query],
    advance: Callable[[int], None],
) -> Iterator[tuple[int, _Query]]:
  """Yields the token at which each occurrence of a query begins; a few may be repeated.

  Pieces are read into one buffer and compared by NumPy, which releases the interpreter lock.
  """
  overlap = max((len(query.tokens) for query in queries), default=1) - 1
  buffer = np.empty(scan.CHUNK_BYTES + overlap * files.dtype.itemsize, np.uint8)
  piece = buffer.view(files.dtype)
  step = len(piece) - overlap
  source, place = np.array([number]), np.array([0])
  for first in range(0, n_tokens, step):
    count = min(len(piece), n_tokens - first)
    offset, end = files.byte_range(number, first, count)
    files.storage.fill(
        files.paths, source, np.array([offset]), np.array([end - offset]), buffer, place
    )
    advance(min(step, count) * files.dtype.itemsize)
    for query in queries:
      for at in _occurrences(piece[:count], query.tokens).tolist():
        yield first + at, query


def _occurrences(tokens: np.ndarray, wanted: tuple[int, ...]) -> np.ndarray:
  """Returns where `wanted` begins in `tokens`."""
  starts = len(tokens) - len(wanted) + 1
  if starts < 1:
    return np.zeros(0, np.int64)
  # High ids are rare tokens, so compare the two highest first: few places have both.
  rarest = sorted(range(len(wanted)), key=lambda i: -wanted[i])
  found = tokens[rarest[0] : rarest[0] + starts] == wanted[rarest[0]]
  for i in rarest[1:2]:
    found &= tokens[i : i + starts] == wanted[i]
  at = np.flatnonzero(found)
  for i in rarest[2:]:
    at = at[tokens[at + i] == wanted[i]]
  return at


def _verified(
    text: str,
    tokenizer: Any,
    files: token_files.TokenFiles,
    number: int,
    n_tokens: int,
    place: int,
    query: _Query,
) -> TokenRange | None:
  """Returns the shortest token range around a hit that contains the text; None if none does."""
  around = query.open + (0 if isinstance(tokenizer, tokenizer_lib.ByteTokenizer) else _MARGIN)
  first = max(0, place - around)
  end = min(n_tokens, place + len(query.tokens) + around)
  offset, end_byte = files.byte_range(number, first, end - first)
  tokens = np.frombuffer(
      files.storage.read(files.paths[number], offset, end_byte - offset), files.dtype
  )
  low, high = 0, len(tokens)
  if text not in tokenizer.decode(tokens):
    return None
  while low + 1 < high and text in tokenizer.decode(tokens[low + 1 : high]):
    low += 1
  while low < high - 1 and text in tokenizer.decode(tokens[low : high - 1]):
    high -= 1
  return TokenRange(number, first + low, high - low)


def file_number(files: token_files.TokenFiles, name: str) -> int:
  """Returns the number of the file whose path is `name`, or ends with it."""
  found = paths.find(files.paths, name)
  if len(found) != 1:
    what = "no file" if not found else f"{len(found)} files"
    raise errors.ConfigError(
        f"--file={name} matches {what} of the corpus. The corpus begins with {files.paths[0]}."
    )
  return found[0]


def range_of_byte(
    files: token_files.TokenFiles, index: index_lib.OlmoNpyIndex, number: int, byte: int
) -> TokenRange:
  """Returns the token that a byte of a file belongs to."""
  token = (byte - int(files.data_offsets[number])) // files.dtype.itemsize
  if not 0 <= token < index.files[number].n_tokens:
    start, end = files.byte_range(number, 0, index.files[number].n_tokens)
    raise errors.ConfigError(
        f"--byte={byte} is not part of a token of {files.paths[number]}, whose tokens are in bytes"
        f" {start} to {end - 1}."
    )
  return TokenRange(number, token, 1)
