"""The repetition filter: which windows repeat one n-gram too often.

A window that says the same few tokens dozens of times in a row teaches a model to do the same, so
OLMo's pretraining keeps such windows in the batch and takes them out of the loss. The rule, for
one period p:

    tokens        7 1 2 1 2 1 2 1 2 5        L = 10, p = 2
    equal[i]          0 1 1 1 1 1 1 0        tokens[i] == tokens[i - p], for i in [p, L)
                        └─────────┘          the longest run: 6 places, [3, 9)

A run [a, b) is the repetition (start = a - p, end = b, period = p, times = (end - start) // p),
here (1, 9, 2, 4). A window is rejected where for some period a run has (count - 1) * p places or
more, that is, where an n-gram of p tokens comes count times in a row. Fewer than three times is
no repetition, so counts below 3 act as 3.

`clean_rows` gives that verdict for a whole batch without looking at most of it: any run of R
places covers one of the places R apart, so these are tried first, and only where one is equal is
there more to see. With numba (extra `[fast]`) the search is compiled, in the background, while
NumPy serves.
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

_BLOCK_TOKENS = (
    1 << 19
)  # what NumPy takes at once: large enough to hide its call costs, small enough for the cache
# How many tokens are filtered before numba is worth a second of another core.
_COMPILE_AFTER = 1 << 20
# OLMo's own filter, as the kernel takes it: shortest and longest period, and equal places per
# period.
SEARCH = (1, 13, 31)

# For a byte of eight places, the first in its highest bit: how many places at its beginning and at
# its end are equal.
_EQUAL_FIRST = np.array([8 - (255 ^ b).bit_length() for b in range(256)], np.int64)
_EQUAL_LAST = np.array([(~b & (b + 1)).bit_length() - 1 for b in range(256)], np.int64)


class RepetitionTuple(NamedTuple):
  """`tokens[start:end]` repeats its first `period` tokens, `times` times in full."""

  start: int
  end: int
  period: int
  times: int


def find_periodic_sequences(
    arr: np.ndarray, max_period: int, min_period: int = 1, mask_value: int = -1
) -> Iterator[RepetitionTuple]:
  """Yields every repetition of three times or more, by period and then by place.

  Args:
    arr: One window of token ids, of any integer dtype.
    max_period: The longest n-gram looked for; no longer than a third of the window.
    min_period: The shortest.
    mask_value: An id that stands for no token and must not occur.
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
      if times >= 3:
        yield RepetitionTuple(start, end, period, times)


def is_clean_instance(
    input_ids: np.ndarray,
    *,
    repetition_max_period: int = 13,
    repetition_min_period: int = 1,
    repetition_max_count: int = 32,
    mask_value: int = -1,
) -> bool:
  """Whether no n-gram of the given lengths comes `repetition_max_count` times in a row."""
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
  """The filter's verdict on each row of `tokens` (n, L): True to keep it."""
  tokens = np.asarray(tokens)
  if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    raise CorpusError(
        "The repetition filter takes rows of token ids: expected an integer array of shape (rows,"
        f" tokens), found {tokens.dtype} of shape {tokens.shape}."
    )
  _check_periods(min_period)
  length = tokens.shape[1]
  # Only equality matters, so neither sign nor byte order does: one search for each item size.
  rows = np.require(tokens, requirements=["C", "A"]).view(f"u{tokens.dtype.itemsize}")
  search = _compiled(tokens.dtype.itemsize).get(tokens.size) or _search_with_numpy
  return search(rows, *search_bounds(length, max_period, min_period, max_count))


def search_bounds(
    length: int, max_period: int = 13, min_period: int = 1, max_count: int = 32
) -> tuple[int, int, int]:
  """The shortest and longest period, and the equal places per period, of a search of rows."""
  # Nothing longer than the row is ever found; the bounds keep every product within 64 bits.
  repeats = min(max(max_count, 3) - 1, length + 1)
  return min(min_period, length + 1), min(max_period, length // 3), repeats


def compile_filter(dtype: Any = np.uint32) -> bool:
  """Waits until the compiled search for `dtype` is ready; False where NumPy must do without it."""
  return _compiled(np.dtype(dtype).itemsize).wait()


class NgramFilterTransform(grain.transforms.Map):
  """Adds `instance_mask` to a record: False where its tokens repeat too often."""

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
          f"Token {masked[0]} of the window is {mask_value}, the mask_value, which stands for no"
          f" token; it occurs {masked.size} times. Pass a mask_value outside the vocabulary."
      )
  return window


def _check_periods(min_period: int) -> None:
  if min_period < 1:
    raise ConfigError(f"The repetition filter's min_period must be 1 or more, found {min_period}.")


# NumPy's search.


@dataclasses.dataclass(frozen=True)
class _Samples:
  """The places of a row that are tried first: for each period, one in every possible run."""

  periods: tuple[int, ...]
  bounds: tuple[int, ...]  # the samples of periods[k] are bounds[k] to bounds[k + 1]
  period: np.ndarray  # by sample
  place: np.ndarray  # by sample


@functools.lru_cache(maxsize=16)
def _samples(length: int, min_period: int, max_period: int, repeats: int) -> _Samples:
  places = {}
  for period in range(min_period, max_period + 1):
    # A run lies in [period, length), so its last place is at period + run - 1 at the earliest.
    at = np.arange(period + repeats * period - 1, length, repeats * period)
    if at.size:
      places[period] = at
  sizes = [at.size for at in places.values()]
  return _Samples(
      periods=tuple(places),
      bounds=(0, *np.cumsum(sizes).tolist()),
      period=np.repeat(np.array(list(places), np.int64), sizes),
      place=np.concatenate([np.empty(0, np.int64), *places.values()]),
  )


def _search_with_numpy(
    rows: np.ndarray, min_period: int, max_period: int, repeats: int
) -> np.ndarray:
  n, length = rows.shape
  keep = np.ones(n, np.bool_)
  samples = _samples(length, min_period, max_period, repeats)
  if not samples.periods:
    return keep
  size = max(1, _BLOCK_TOKENS // length)
  for begin in range(0, n, size):
    block = slice(begin, begin + size)
    _search_block(rows[block], samples, repeats, keep[block])
  return keep


def _search_block(rows: np.ndarray, samples: _Samples, repeats: int, keep: np.ndarray) -> None:
  """Clears `keep` for the rows of one block that repeat too often."""
  suspect = _suspects(rows, samples, repeats)
  if not suspect.any():
    return
  # One byte per place, in whole words, with a word of zeros before, between and after the rows.
  width = -(-rows.shape[1] // 8) * 8 + 8
  scratch = np.zeros(8 + len(rows) * width, np.uint8)
  for k, period in enumerate(samples.periods):
    which = np.flatnonzero(suspect[:, k] & keep)
    if 2 * which.size > len(rows):
      which = np.arange(len(rows))  # cheaper than picking most of them
    if which.size:
      keep[which[_rows_with_run(rows, which, period, repeats * period, scratch, width)]] = False


def _suspects(rows: np.ndarray, samples: _Samples, repeats: int) -> np.ndarray:
  """Which (row, period) may hold a run, judged by a few places of each."""
  n, length = rows.shape
  bounds = samples.bounds
  hits = np.empty((n, bounds[-1]), np.bool_)
  for k, p in enumerate(samples.periods):
    np.equal(
        rows[:, p + repeats * p - 1 :: repeats * p],
        rows[:, repeats * p - 1 : length - p : repeats * p],
        out=hits[:, bounds[k] : bounds[k + 1]],
    )
  row, sample = np.divmod(np.flatnonzero(hits), bounds[-1])
  suspect = np.zeros((n, len(samples.periods)), np.bool_)

  # Where much is equal, more samples will not tell.
  crowded = np.bincount(row, minlength=n) > bounds[-1] // 6 + 8
  if crowded.any():
    suspect[crowded] = np.logical_or.reduceat(hits[crowded], bounds[:-1], axis=1)
    lone = ~crowded[row]
    row, sample = row[lone], sample[lone]

  # A run of R places around place s also covers, for any 0 < k < R, the place s - k or s + R - k.
  flat = rows.reshape(-1)
  for share in (2, 3, 5):
    if not row.size:
      return suspect
    period, place = samples.period[sample], samples.place[sample]
    run = repeats * period
    back = run // share + (run < share)
    at = row * length + place - back
    equal = flat[at] == flat[at - period]
    after = np.flatnonzero(~equal & (place - back + run < length))
    at = at[after] + run[after]
    equal[after] = flat[at] == flat[at - period[after]]
    row, sample = row[equal], sample[equal]
  suspect[row, np.searchsorted(bounds, sample, side="right") - 1] = True
  return suspect


def _rows_with_run(
    rows: np.ndarray, which: np.ndarray, period: int, run: int, scratch: np.ndarray, width: int
) -> np.ndarray:
  """Which of the rows `which` have a run of `run` equal places, as indices into `which`."""
  length = rows.shape[1] - period
  flat = scratch[: 8 + which.size * width]
  equal = flat[8:].reshape(which.size, width).view(np.bool_)
  if which.size == len(rows):
    np.equal(rows[:, period:], rows[:, :length], out=equal[:, :length])
  else:
    for k, r in enumerate(which.tolist()):
      np.equal(rows[r, period:], rows[r, :length], out=equal[k, :length])
  equal[:, length:] = False

  if run < 15:  # may hold no whole byte of eight places
    start, end = _runs(flat.view(np.bool_), run)
    return np.unique((start - 8) // width)
  places = np.packbits(flat)
  start, end = _runs(places == 255, (run - 7) // 8)
  total = (end - start) * 8 + _EQUAL_LAST[places[start - 1]] + _EQUAL_FIRST[places[end]]
  return np.unique((start[total >= run] - 1) // (width // 8))


def _runs(flags: np.ndarray, least: int) -> tuple[np.ndarray, np.ndarray]:
  """Starts and ends of the runs of `least` or more; `flags` begins and ends with False."""
  some = flags
  covered = 1
  while covered < least:  # some[i]: flags[i : i + covered] are all set
    step = min(covered, least - covered)
    some = some[:-step] & some[step:]
    covered += step
  if not some.any():
    return np.empty(0, np.int64), np.empty(0, np.int64)
  edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
  start, end = edges[0::2], edges[1::2]
  long = end - start >= least
  return start[long], end[long]


# The compiled search.


@functools.cache
def _compiled(itemsize: int) -> compiled.Background[_Search]:
  def build() -> _Search:
    from maxtext_olmo.rows import kernel

    return kernel.build_search(itemsize)

  return compiled.Background(build, after=_COMPILE_AFTER, what="The repetition filter")
