"""Readers, which read the parts of rows into one array, pad the rows, and check the tokens.

`FileReader` reads token files through a storage, in one call per batch. For local files, a compiled
kernel reads and checks each row while it is in the processor's cache. Otherwise the storage fills
the array first, and then the kernel or NumPy checks it, with the same results. `RecordReader` takes
tokens from any random-access source of records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo import errors
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import repetition

_COMPILE_AFTER_TOKENS = 1 << 22
_NO_FILES, _NO_OFFSETS = np.zeros(0, np.int32), np.zeros(0, np.int64)
_NO_SEARCH = (1, 0, 1)  # Shortest period, longest period and repeats of a search that does nothing.


class Findings(NamedTuple):
  """The results of checking some rows.

  Attributes:
    highest: The highest id, excluding padding; 0 if there are no tokens.
    clean: For each row, whether the repetition filter keeps it; True if the filter did not run.
  """

  highest: int
  clean: np.ndarray


@dataclasses.dataclass(frozen=True)
class Checks:
  """Settings for padding rows after they are read, and for checking their tokens.

  Attributes:
    pad_id: The id that fills a row after its parts.
    ngram_filter: Whether the repetition filter runs.
    filter_sees_padding: Whether the repetition filter treats padding as tokens.
    repetition: The repetitions that the filter rejects.
  """

  pad_id: int = 0
  ngram_filter: bool = False
  filter_sees_padding: bool = False
  repetition: repetition.RepetitionRule = repetition.OLMO_RULE


class Reader(Protocol):
  """Reads the tokens of parts."""

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens."""

  @property
  def wants_concurrency(self) -> int:
    """The number of reads that should be in flight from the first batch; 0 for one at a time."""

  def read(self, parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
    """Fills `out`, an array (rows, length), and checks it."""

  def filler(self, parts: parts_lib.Parts, out: np.ndarray) -> Callable[[slice], None]:
    """Returns a thread-safe function that reads a slice of the parts into `out`.

    The function neither pads nor checks the rows.
    """

  def check(self, parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
    """Pads and checks rows whose parts have been read."""

  def where(self, source: int, token: int) -> str:
    """Describes where a token is, for error messages."""

  def close(self) -> None:
    """Closes open files; the reader remains usable."""


class FileReader:
  """Reads parts of token files.

  Args:
    files: The files.

  Attributes:
    files: The files.
    mask_sizes: Sizes of the loss masks in object stores, by URL, once they are known.
  """

  def __init__(self, files: token_files.TokenFiles):
    self.files = files
    self.mask_sizes: dict[str, int] = {}

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens."""
    return self.files.dtype

  @property
  def wants_concurrency(self) -> int:
    """The number of reads that the storage wants in flight; 0 if one at a time is fastest."""
    return self.files.storage.wants_concurrency(self.files.paths)

  def read(self, parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
    """Fills `out` and checks it."""
    files = self.files
    kernel = _kernel(out.itemsize).ready  # None until the compilation that `check` starts is done.
    pinned = files.storage.pin(files.paths, parts.source) if kernel is not None else None
    if kernel is not None and pinned is not None:
      found = _execute(kernel, parts, pinned.descriptors, files.data_offsets, out, checks)
      if found is not None:
        return found
    # This also runs after a compiled read that was interrupted or failed: the storage completes the
    # read, or raises an error that says what is wrong.
    self.filler(parts, out)(slice(None))
    return self.check(parts, out, checks)

  def filler(self, parts: parts_lib.Parts, out: np.ndarray) -> Callable[[slice], None]:
    """Returns a function that reads a slice of the parts through the storage."""
    width, length = out.itemsize, out.shape[1]
    files, octets = self.files, out.reshape(-1).view(np.uint8)
    offsets, sizes = files.ranges(parts.source, parts.first, parts.count)
    places = (parts.row * length + parts.column) * width

    def fill(some: slice) -> None:
      files.storage.fill(
          files.paths, parts.source[some], offsets[some], sizes[some], octets, places[some]
      )

    return fill

  def check(self, parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
    """Pads and checks rows that have been read."""
    return check_rows(parts, out, checks)

  def where(self, source: int, token: int) -> str:
    """Returns the file and the byte of a token."""
    return self.files.where(source, token)

  def close(self) -> None:
    """Closes the files that the storage keeps open."""
    self.files.storage.close()


class RecordReader:
  """Reads parts of records: the `source` of a part is the index of a record.

  Args:
    records: Anything with `__getitem__`, such as a Grain data source. The tokens of record i are
      `records[i]["inputs"]`.
    dtype: The dtype of the batch's tokens.
  """

  wants_concurrency = 0

  def __init__(self, records: Any, dtype: np.dtype | type = np.int32):
    self._records = records
    self.dtype = np.dtype(dtype)

  def read(self, parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
    """Fills `out` and checks it."""
    self.filler(parts, out)(slice(None))
    return self.check(parts, out, checks)

  def filler(self, parts: parts_lib.Parts, out: np.ndarray) -> Callable[[slice], None]:
    """Returns a function that copies the tokens of a slice of the parts."""
    table = (parts.row, parts.column, parts.source, parts.first, parts.count)

    def fill(some: slice) -> None:
      lines = zip(*(column[some].tolist() for column in table))
      for row, column, source, first, count in lines:
        tokens = self._records[source]["inputs"]
        if len(tokens) < first + count:
          raise errors.CorpusError(
              f"Record {source} is too short: expected tokens {first} to {first + count}, but it"
              f" has {len(tokens)}. The records have changed since they were counted: restore"
              " them, or start a new run."
          )
        out[row, column : column + count] = _checked(tokens[first : first + count], out, source)

    return fill

  def check(self, parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
    """Pads and checks rows that have been read."""
    return check_rows(parts, out, checks)

  def where(self, source: int, token: int) -> str:
    """Returns the record of a token."""
    return f"record {source}, token {token}"

  def close(self) -> None:
    """Does nothing: the records belong to the caller."""


def _checked(tokens: Any, out: np.ndarray, record: int) -> np.ndarray:
  """Returns tokens of a record; raises CorpusError if one does not fit the dtype of the batch."""
  tokens = np.asarray(tokens)
  if tokens.size and not np.can_cast(tokens.dtype, out.dtype):
    low, high = int(tokens.min()), int(tokens.max())
    if not np.iinfo(out.dtype).min <= low <= high <= np.iinfo(out.dtype).max:
      raise errors.CorpusError(
          f"Record {record} has token ids from {low} to {high}, which do not fit {out.dtype}, the"
          " dtype of a batch."
      )
  return tokens


def check_rows(parts: parts_lib.Parts, out: np.ndarray, checks: Checks) -> Findings:
  """Pads rows whose parts have been read, and finds their highest id and the clean rows."""
  kernel = _kernel(out.itemsize).get(out.size)
  if kernel is not None:
    found = _execute(kernel, parts, _NO_FILES, _NO_OFFSETS, out, checks)
    if found is not None:
      return found
  return _check_with_numpy(parts.used, out, checks)


def as_unsigned(tokens: np.ndarray) -> np.ndarray:
  """Returns a view of the tokens as unsigned ids, so that a negative id exceeds any vocabulary."""
  return tokens if tokens.dtype.kind == "u" else tokens.view(f"u{tokens.itemsize}")


def compile_reads(dtype: Any = np.uint32) -> bool:
  """Waits until reading tokens of a dtype is compiled; returns False if it cannot be compiled."""
  return _kernel(np.dtype(dtype).itemsize).wait()


def _execute(
    kernel: Callable[..., tuple[int, int]],
    parts: parts_lib.Parts,
    descriptors: np.ndarray,
    data_offsets: np.ndarray,
    out: np.ndarray,
    checks: Checks,
) -> Findings | None:
  """Runs the kernel; returns None if a part could not be read in full."""
  clean = np.empty(len(out), np.bool_)
  search = checks.repetition.search if checks.ngram_filter else _NO_SEARCH
  unsigned = as_unsigned(out)
  failed, highest = kernel(
      parts.bounds,
      parts.source,
      parts.first,
      parts.count,
      descriptors,
      data_offsets,
      unsigned,
      unsigned.dtype.type(checks.pad_id),
      search,
      checks.filter_sees_padding,
      clean,
  )
  return None if failed >= 0 else Findings(highest, clean)


def _check_with_numpy(used: np.ndarray, out: np.ndarray, checks: Checks) -> Findings:
  """Pads and checks rows as the kernel does after reading."""
  rows, length = out.shape
  full = used == length
  out = as_unsigned(out)
  highest = int(out[full].max()) if full.any() else 0
  clean = np.ones(rows, np.bool_)
  for row in np.flatnonzero(~full).tolist():
    tokens = out[row, : used[row]]
    highest = max(highest, int(tokens.max()) if tokens.size else 0)
    out[row, used[row] :] = checks.pad_id
    if checks.ngram_filter and tokens.size and not checks.filter_sees_padding:
      clean[row] = checks.repetition.keeps(tokens[np.newaxis])[0]
  if checks.ngram_filter:
    whole = (used > 0) if checks.filter_sees_padding else full
    clean[whole] = checks.repetition.keeps(out[whole])
  return Findings(highest, clean)


@functools.cache
def _kernel(itemsize: int) -> compiled.Background[Callable[..., tuple[int, int]]]:
  def build() -> Callable[..., tuple[int, int]] | None:
    from maxtext_olmo.rows import kernel

    return kernel.build_execute(itemsize)

  return compiled.Background(build, after=_COMPILE_AFTER_TOKENS, what="Reading tokens")


def mask_reader(files: token_files.TokenFiles, paths: Sequence[str]) -> FileReader:
  """Returns a reader of loss masks: one mask file per token file, with one byte per token."""
  return FileReader(
      token_files.TokenFiles(
          tuple(paths), np.zeros(len(paths), np.int64), np.dtype(np.uint8), files.storage
      )
  )
