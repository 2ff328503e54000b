"""The repetition filter, which finds windows that repeat an n-gram too often.

A window that repeats the same few tokens dozens of times in a row teaches a model to repeat itself,
so OLMo's pretraining keeps such windows in the batch but masks them in the loss. The rule for one
period p is:

    tokens        7 1 2 1 2 1 2 1 2 5        L = 10, p = 2
    equal[i]          0 1 1 1 1 1 1 0        tokens[i] == tokens[i - p], for i in [p, L)
                        └─────────┘          the longest run: 6 places, [3, 9)

A run [a, b) is the repetition (start = a - p, end = b, period = p, times = (end - start) // p),
here (1, 9, 2, 4). A window is rejected if for some period a run has (count - 1) * p places or more,
that is, if an n-gram of p tokens occurs count times in a row. Fewer than three occurrences are not
a repetition, so counts below 3 act as 3.

`clean_rows` decides this for a whole batch without reading most of it. If the shortest rejected run
has R places, it tests every R-th place, because each rejected run includes one of them. It tests
other places only near a tested place that is equal. With numba (extra `[fast]`) the search is
compiled in the background, and NumPy is used until then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

# The compiled search or NumPy's: (rows, min_period, max_period, repeats) -> keep.
_Search = Callable[[np.ndarray, int, int, int], np.ndarray]

# Compiling occupies another core for a second, which pays off only after this many tokens.
_COMPILE_AFTER = 1 << 20
_FEWEST = 3  # Fewer occurrences are not a repetition.


@dataclasses.dataclass(frozen=True)
class RepetitionRule:
  """The repetitions that the filter rejects. The defaults are those of OLMo's pretraining.

  Attributes:
    min_period: Length of the shortest n-gram.
    max_period: Length of the longest n-gram.
    max_count: Number of consecutive occurrences at which a window is rejected.
  """

  min_period: int = 1
  max_period: int = 13
  max_count: int = 32

  def __str__(self) -> str:
    return f"{self.min_period} to {self.max_period} tokens, {self.max_count} times"

  @property
  def search(self) -> tuple[int, int, int]:
    """Arguments of the kernel: shortest and longest period, and run length in periods."""
    return self.min_period, self.max_period, max(self.max_count, _FEWEST) - 1

  def keeps(self, rows: np.ndarray) -> np.ndarray:
    """Returns whether the filter keeps each row of tokens (n, L)."""
    return clean_rows(rows, **dataclasses.asdict(self))


OLMO_RULE = RepetitionRule()


class RepetitionTuple(NamedTuple):
  """`tokens[start:end]` repeats its first `period` tokens, `times` times in full."""

  start: int
  end: int
  period: int
  times: int


def find_periodic_sequences(
    arr: np.ndarray, max_period: int, min_period: int = 1, mask_value: int = -1
) -> Iterator[RepetitionTuple]:
  """Yields every n-gram that occurs three times or more in a row, by period and then by place.

  >>> list(find_periodic_sequences(np.array([7, 1, 2, 1, 2, 1, 2, 1, 2, 5]), max_period=3))
  [RepetitionTuple(start=1, end=9, period=2, times=4)]

  Args:
    arr: One window of token ids, of any integer dtype.
    max_period: Length of the longest n-gram to look for, limited to a third of the window.
    min_period: Length of the shortest n-gram to look for.
    mask_value: Id that is not a token and must not occur in the window.
  """
  arr = _check_window(arr, mask_value)
  _check_periods(min_period)
  for period in range(min_period, min(max_period, arr.size // 3) + 1):
    equal = np.zeros(arr.size - period + 2, np.int8)
    equal[1:-1] = arr[period:] == arr[:-period]
    change = np.diff(equal)
    starts = np.flatnonzero(change == 1)
    ends = np.flatnonzero(change == -1) + period
    for start, end in zip(starts.tolist(), ends.tolist()):
      times = (end - start) // period
      if times >= _FEWEST:
        yield RepetitionTuple(start, end, period, times)


def is_clean_instance(
    input_ids: np.ndarray,
    *,
    repetition_max_period: int = 13,
    repetition_min_period: int = 1,
    repetition_max_count: int = 32,
    mask_value: int = -1,
) -> bool:
  """Returns whether no n-gram of these lengths occurs `repetition_max_count` times in a row.

  >>> is_clean_instance(np.array([1, 2] * 31)), is_clean_instance(np.array([1, 2] * 32))
  (True, False)
  """
  window = _check_window(input_ids, mask_value)
  keep = clean_rows(
      window[np.newaxis],
      max_period=repetition_max_period,
      min_period=repetition_min_period,
      max_count=repetition_max_count,
  )
  return bool(keep[0])


def clean_rows(
    tokens: np.ndarray, *, max_period: int = 13, min_period: int = 1, max_count: int = 32
) -> np.ndarray:
  """Returns whether the filter keeps each row of `tokens` (n, L)."""
  tokens = np.asarray(tokens)
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise CorpusError(
        "The repetition filter takes rows of token ids: expected an integer array of shape (rows,"
        f" tokens), found {tokens.dtype} of shape {tokens.shape}."
    )
  _check_periods(min_period)
  length = tokens.shape[1]
  # Only equality matters, not sign or byte order, so there is one search for each item size.
  rows = np.require(tokens, requirements=["C", "A"]).view(f"u{tokens.dtype.itemsize}")
  search = _compiled(tokens.dtype.itemsize).get(tokens.size) or _search_with_numpy
  return search(rows, *search_bounds(length, max_period, min_period, max_count))


def search_bounds(
    length: int, max_period: int = 13, min_period: int = 1, max_count: int = 32
) -> tuple[int, int, int]:
  """Returns the arguments of a search: shortest and longest period, and run length in periods."""
  # A run cannot be longer than the row, so the values are limited to keep products within 64 bits.
  repeats = min(max(max_count, _FEWEST) - 1, length + 1)
  return min(min_period, length + 1), min(max_period, length // 3), repeats


def compile_filter(dtype: Any = np.uint32) -> bool:
  """Waits until the search for `dtype` is compiled; returns False if it cannot be compiled."""
  return _compiled(np.dtype(dtype).itemsize).wait()


class NgramFilterTransform(grain.transforms.Map):
  """Adds `instance_mask` to a record: False if its tokens repeat too often.

  >>> NgramFilterTransform().map({"tokens": np.zeros(100, np.int32)})["instance_mask"]
  False
  """

  def __init__(
      self, *, max_period: int = 13, min_period: int = 1, max_count: int = 32, mask_value: int = -1
  ):
    _check_periods(min_period)
    self._settings = {
        "repetition_max_period": int(max_period),
        "repetition_min_period": int(min_period),
        "repetition_max_count": int(max_count),
        "mask_value": int(mask_value),
    }

  def map(self, element: dict[str, Any]) -> dict[str, Any]:
    return {**element, "instance_mask": is_clean_instance(element["tokens"], **self._settings)}

  def __repr__(self) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in self._settings.items())
    return f"NgramFilterTransform({settings})"


def _check_window(window: np.ndarray, mask_value: int) -> np.ndarray:
  window = np.asarray(window)
  if window.ndim != 1 or not np.issubdtype(window.dtype, np.integer):
    raise CorpusError(
        "The repetition filter takes one window of token ids: expected a 1-D integer array, found"
        f" {window.dtype} of shape {window.shape}."
    )
  # An id that the dtype cannot hold (-1 in unsigned tokens) cannot occur.
  bounds = np.iinfo(window.dtype)
  if bounds.min <= mask_value <= bounds.max:
    masked = np.flatnonzero(window == mask_value)
    if masked.size:
      raise CorpusError(
          f"Token {masked[0]} of the window is {mask_value}, the mask_value, which must not occur;"
          f" found it {masked.size} times. Pass a mask_value outside the vocabulary."
      )
  return window


def _check_periods(min_period: int) -> None:
  if min_period < 1:
    raise ConfigError(f"The repetition filter's min_period must be 1 or more, found {min_period}.")


def _search_with_numpy(
    rows: np.ndarray, min_period: int, max_period: int, repeats: int
) -> np.ndarray:
  """Returns the same results as the compiled search, and is also cheap if nothing repeats."""
  keep = np.ones(len(rows), np.bool_)
  length = rows.shape[1]
  for period in range(min_period, max_period + 1):
    run = repeats * period
    # Any run of that length covers one of these places.
    equal = rows[:, period + run - 1 :: run] == rows[:, run - 1 : length - period : run]
    row, place = np.nonzero(equal)
    place = place * run + period + run - 1
    for share in (2, 3, 5):
      # Such a run also covers the place `run // share` places earlier, or the place `run` places
      # after that one.
      back = place - run // share
      later = np.minimum(back + run, length - 1)
      covered = rows[row, back] == rows[row, back - period]
      covered |= (back + run < length) & (rows[row, later] == rows[row, later - period])
      row, place = row[covered], place[covered]
    for suspect in np.unique(row[keep[row]]).tolist():
      tokens = rows[suspect]
      differs = np.flatnonzero(tokens[period:] != tokens[:-period])
      between = np.diff(differs, prepend=-1, append=length - period) - 1
      keep[suspect] = between.max() < run
  return keep


@functools.cache
def _compiled(itemsize: int) -> compiled.Background[_Search]:
  def build() -> _Search:
    from maxtext_olmo.rows import kernel

    return kernel.build_search(itemsize)

  return compiled.Background(build, after=_COMPILE_AFTER, what="The repetition filter")
