"""Finds text in a corpus as token ranges, by scanning the raw bytes of token files.

Inside a document, the surrounding text changes how a text is tokenized at its edges. So the text is
encoded with and without a leading space, one or two tokens at each end are ignored, the middle is
searched as bytes, and each hit is decoded and compared as text:

    text            "harbour seal in it"
    tokens          har bour  seal  in  it
    searched            bour  seal  in                any occurrence at a token boundary
    decoded         "… a har bour  seal  in  it, …"   contains the text: a hit

A text of few tokens is searched whole, so occurrences that are tokenized differently at the edges
are missed. Search for a longer text to find them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from maxtext_olmo import cores
from maxtext_olmo import errors
from maxtext_olmo import progress as progress_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import run as run_lib

_MARGIN = 4  # Tokens on each side of a hit that are decoded with it.


@dataclasses.dataclass(frozen=True, order=True)
class TokenRange:
  """A range of tokens in a file. `file` is the number of the file in the index."""

  file: int
  first: int
  count: int


@dataclasses.dataclass(frozen=True)
class _Query:
  """Tokens to look for; the text has `open` more tokens before them, and as many after them."""

  tokens: tuple[int, ...]
  open: int


@dataclasses.dataclass(frozen=True)
class FindWork(run_lib.Work):
  """Finds a text in a piece, and where it crosses into the next piece.

  Attributes:
    text: The text to look for.
    queries: Tokens to look for, and the number of tokens of the text before and after them.
    tokenizer: The tokenizer of the corpus.
  """

  name: ClassVar[str] = "find"
  version: ClassVar[int] = 2

  text: str
  queries: tuple[tuple[tuple[int, ...], int], ...]
  tokenizer: Any = dataclasses.field(kw_only=True, repr=False, compare=False)

  @classmethod
  def of_text(cls, text: str, tokenizer: Any, dtype: np.dtype, storage: Any = None) -> FindWork:
    """Returns the search for a text in tokens of a dtype."""
    largest = np.iinfo(dtype).max
    queries = tuple(
        (query.tokens, query.open)
        for query in _queries(text, tokenizer)
        if max(query.tokens) <= largest
    )
    return cls(text, queries, tokenizer=tokenizer, storage=storage)

  @property
  def settings(self) -> dict[str, Any]:
    """The fields that decide what a result is."""
    return {"text": self.text, "queries": self.queries}

  def __call__(self, item: pieces_lib.Piece) -> dict[str, Any]:
    """Returns the first token and the number of tokens of each occurrence."""
    hits = sorted(set(self.hits(item)))
    return {
        "first": np.array([hit.first for hit in hits], np.int64),
        "count": np.array([hit.count for hit in hits], np.int64),
    }

  def hits(
      self, piece: pieces_lib.Piece, advance: Callable[[int], None] = lambda amount: None
  ) -> Iterator[TokenRange]:
    """Yields each occurrence that begins in a piece; a few may be repeated."""
    for place, query in self._candidates(piece, advance):
      hit = _verified(self.text, self.tokenizer, self.files, piece.source, place, query)
      if hit is not None:
        yield hit

  def _candidates(
      self, piece: pieces_lib.Piece, advance: Callable[[int], None]
  ) -> Iterator[tuple[int, _Query]]:
    """Yields the token at which each occurrence of a query begins; a few may be repeated."""
    queries = [_Query(tuple(tokens), around) for tokens, around in self.queries]
    if not queries:
      advance(piece.weight)
      return
    source, overlap = piece.source, max(len(query.tokens) for query in queries) - 1
    width = source.token_dtype.itemsize
    reading.expect(self.files, source)
    last = source.data_offset + source.n_tokens * width
    end = min(piece.end + overlap * width, last)
    tail, place, left = np.zeros(0, source.token_dtype), piece.first, piece.weight
    for chunk in reading.read_range(self.files, source.path, piece.start, end):
      tokens = chunk.view(source.token_dtype)
      # An occurrence that crosses into this chunk is in these few tokens; the rest is not copied.
      border, first = np.concatenate([tail, tokens[:overlap]]), place - len(tail)
      known = border if len(tokens) < overlap else tokens
      tail = known[max(0, len(known) - overlap) :].copy()
      advance(min(left, len(chunk)))
      left -= min(left, len(chunk))
      for query in queries:
        for at in _occurrences(border, query.tokens).tolist():
          yield first + at, query
        for at in _occurrences(tokens, query.tokens).tolist():
          yield place + at, query
      place += len(tokens)


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
    files: The token files of the corpus.
    only: Numbers of the files to scan; all by default.
    most: Stop after about this many occurrences; a few more may be returned. None finds all.
    progress: Whether to show a progress bar, or a function that is called from several threads with
      the number of bytes just scanned. If the function raises an exception, the search ends.
  """
  work = FindWork.of_text(text, tokenizer, index.token_dtype, files.storage)
  pieces = _pieces(index, files, only)
  hits: set[TokenRange] = set()  # Shared by all threads; adding to a set is atomic.
  with contextlib.ExitStack() as stack:
    if callable(progress):
      advance = progress
    else:
      total = sum(piece.weight for piece in pieces)
      bar = progress_lib.progress_bar("Searching", total, enabled=progress, unit="bytes")
      advance = stack.enter_context(bar)

    def enough() -> bool:
      return most is not None and len(hits) >= most

    def search(i: int) -> None:
      for hit in () if enough() else work.hits(pieces[i], advance):
        hits.add(hit)
        if enough():
          return

    results, problems = scan.map_files(
        search, len(pieces), workers=cores.available_cores(), block=1
    )
  scan.all_or_error(results, problems, "The corpus cannot be searched")
  return sorted(hits)


def find_in_pieces(
    text: str,
    tokenizer: Any,
    index: index_lib.OlmoNpyIndex,
    files: token_files.TokenFiles,
    options: options_lib.WorkOptions | None = None,
    *,
    only: Sequence[int] | None = None,
    progress: bool = False,
    piece_bytes: int = pieces_lib.PIECE_BYTES,
) -> run_lib.Outcome:
  """Looks for a text in all pieces, or in a part of them, on one machine or on many.

  Args:
    text: The text to look for.
    tokenizer: The tokenizer of the corpus.
    index: The corpus.
    files: The token files of the corpus.
    options: How the work is done.
    only: Numbers of the files to scan; all by default.
    progress: Whether to show a progress bar.
    piece_bytes: Size of a piece in bytes.
  """
  return run_lib.run_work(
      FindWork.of_text(text, tokenizer, index.token_dtype, files.storage),
      _pieces(index, files, only, piece_bytes),
      options,
      fingerprint=index.fingerprint,
      description="Searching",
      progress=progress,
  )


def hits_of(outcome: run_lib.Outcome) -> list[TokenRange]:
  """Returns what `find_text` returns, from the results of all pieces.

  Raises:
    CorpusError: Pieces failed or are missing.
  """
  outcome.check("The corpus cannot be searched")
  hits: set[TokenRange] = set()
  for piece, result in outcome:
    places = zip(result["first"].tolist(), result["count"].tolist())
    hits.update(TokenRange(piece.file, first, count) for first, count in places)
  return sorted(hits)


def _pieces(
    index: index_lib.OlmoNpyIndex,
    files: token_files.TokenFiles,
    only: Sequence[int] | None,
    piece_bytes: int = pieces_lib.PIECE_BYTES,
) -> list[pieces_lib.Piece]:
  """Returns the pieces of some files, at the paths that the files have on this machine."""
  numbers = range(len(index.files)) if only is None else only
  sources = pieces_lib.source_files(index)
  found = []
  for number in numbers:
    source, path = sources[number], files.paths[number]
    if path != source.path:
      source = dataclasses.replace(source, path=path, etag=None)
    found += pieces_lib.cut(source, piece_bytes)
  return found


def _queries(text: str, tokenizer: Any) -> list[_Query]:
  if not text:
    raise errors.ConfigError("--find needs a text that is not empty.")
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    return [_Query(tuple(tokenizer.encode([text])[0].tolist()), 0)]  # Each byte is a token.
  found: dict[tuple[int, ...], _Query] = {}
  for ids in tokenizer.encode([text, " " + text]):
    ends = 2 if len(ids) >= 6 else 1 if len(ids) >= 4 else 0
    tokens = tuple(ids[ends : len(ids) - ends].tolist())
    # The leading space may be a token of its own, which is not part of the text.
    while len(tokens) > 1 and text in tokenizer.decode(np.array(tokens[1:])):
      tokens = tokens[1:]
    if tokens:
      found.setdefault(tokens, _Query(tokens, ends))
  return list(found.values())


def _occurrences(tokens: np.ndarray, wanted: tuple[int, ...]) -> np.ndarray:
  """Returns where `wanted` begins in `tokens`."""
  starts = len(tokens) - len(wanted) + 1
  if starts < 1:
    return np.zeros(0, np.int64)
  # High ids are rare tokens, so find the highest first and compare the others only there.
  first, *others = sorted(range(len(wanted)), key=lambda i: -wanted[i])
  at = np.flatnonzero(tokens[first : first + starts] == wanted[first])
  for i in others:
    at = at[tokens[at + i] == wanted[i]]
  return at


def _verified(
    text: str,
    tokenizer: Any,
    storage: Any,
    source: pieces_lib.SourceFile,
    place: int,
    query: _Query,
) -> TokenRange | None:
  """Returns the shortest token range that contains a hit and the text around it.

  Returns None if the text is not there, or is there without the tokens of the hit.
  """
  around = query.open + (0 if isinstance(tokenizer, tokenizer_lib.ByteTokenizer) else _MARGIN)
  first = max(0, place - around)
  end = min(source.n_tokens, place + len(query.tokens) + around)
  span = pieces_lib.Piece(source, first, end - first)
  data = storage.read(source.path, span.start, span.weight)
  tokens = np.frombuffer(data, source.token_dtype)

  def contains(low: int, high: int) -> bool:
    return text in tokenizer.decode(tokens[low:high])

  high = len(tokens)
  if not contains(0, high):
    return None
  # The text may occur several times around the hit, so the range must contain the query's tokens.
  start, stop = place - first, place - first + len(query.tokens)
  ranges = []
  for low in range(start, -1, -1):
    if contains(low, high):
      while high > stop and contains(low, high - 1):
        high -= 1
      ranges.append((low, high))
  low, high = min(ranges, key=lambda bounds: bounds[1] - bounds[0])
  if contains(start + 1, high) or contains(low, stop - 1):
    return None  # The text is next to the query's tokens, and other tokens lead to it.
  return TokenRange(source.id, first + low, high - low)


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
  """Returns the token that contains a byte of a file, as a range."""
  token = (byte - int(files.data_offsets[number])) // files.dtype.itemsize
  if not 0 <= token < index.files[number].n_tokens:
    start, end = files.byte_range(number, 0, index.files[number].n_tokens)
    raise errors.ConfigError(
        f"--byte={byte} is not part of a token of {files.paths[number]}, whose tokens are in bytes"
        f" {start} to {end - 1}."
    )
  return TokenRange(number, token, 1)
