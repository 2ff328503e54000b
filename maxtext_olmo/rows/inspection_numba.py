"""Reading rows and looking at each while it is in the cache, compiled by numba (extra `[fast]`).

The search of the repetition filter: for one period p, a row is rejected where R = repeats * p places in a row equal the place p before
them. The search looks at the last place of a would-be run first. Where that differs, no run covers
it, and the next would-be run begins behind it, so that one look passes R places:

    [. . . . . . i]      i differs: the next would-be run is [i + 1, i + R]
    [. . j = = = i]      j differs: the next is [j + 1, j + R], and (j, i] is known to be equal

No place is walked over twice, and walking back takes 32 places at a time. Where hits are many,
whole groups of 32 places are tried instead, R - 31 apart: any run covers one of them.

The rows of a batch may be shared with helping threads (`crew`), which wait in compiled code and hold no lock of Python's. A job is a
few words in memory that all of them see. Whoever is free takes the next rows, so a helper that wakes late costs nothing:

    who asks   writes the job, NEXT = 0, wakes them    takes rows   takes rows   NEXT = CLOSED, waits for BUSY = 0
    helper     sleeps                                  BUSY + 1     takes rows   finds no more, BUSY - 1, looks, sleeps

NEXT is the only word that says whether there is a job: a helper that comes too late finds it closed, and looks at no other.

Only `repetition` and `inspection` import this module, in threads of their own, since importing numba takes a while. All but
`atomic_words` is in one file, because numba's cache notices a change in the file of a compiled function, not in those of what it calls.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from llvmlite import ir

from maxtext_olmo.corpus import compiled_reads
from maxtext_olmo.rows import atomic_words
from maxtext_olmo.rows import crew

# Any: what numba's compiler makes of these is not what a type checker sees.
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic

_LANES = 32
_MANY_HITS = 4  # in one row, for one period
# The words of a post. What several threads write has a line of the cache for itself; the semaphore has the first.
_NEXT, _BUSY, _ASLEEP, _STOPPED = 8, 16, 24, 25
_DESCRIPTORS, _OFFSETS, _ROWS, _COUNT, _LENGTH, _HIGHEST, _CLEAN = range(32, 39)
_MIN_PERIOD, _MAX_PERIOD, _REPEATS, _ROWS_AT_ONCE, _HELPERS, _FAILED = range(40, 46)
_WORDS = 48
_LINE_BYTES = 64
# What _NEXT is where there is no job, and more than any batch has rows.
_CLOSED = 1 << 40
# Taken by a thread at a time: few enough to share a batch evenly, enough for the words of a job to stay in one core's cache.
_BYTES_AT_ONCE = 1 << 15
# So often is looked for a helper's last row, or for the next job, without going to sleep: some 100 µs. Each look takes longer where there
# is an instruction for waiting.
_LOOKS = 4000 if atomic_words.BREATHES else 40000
_NAP_MICROSECONDS = 50


@intrinsic
def _differ(_typing: Any, row: Any, i: Any, j: Any) -> Any:
  """row[i] != row[j], without the test for negative indices."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    left, right = (builder.load(builder.gep(data, [index])) for index in args[1:])
    return builder.icmp_unsigned("!=", left, right)

  return types.boolean(row, types.intp, types.intp), generate


@intrinsic
def _differences(_typing: Any, row: Any, i: Any, j: Any) -> Any:
  """A bit for each k < 32, set where row[i + k] != row[j + k], by vector instructions."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    element = signature.args[0].dtype
    vector = ir.VectorType(context.get_value_type(element), _LANES)

    def load(index: Any) -> Any:
      pointer = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
      return builder.load(pointer, align=element.bitwidth // 8)

    differ = builder.icmp_unsigned("!=", load(args[1]), load(args[2]))
    return builder.bitcast(differ, ir.IntType(_LANES))

  return types.uint32(row, types.intp, types.intp), generate


@intrinsic
def _leading_zeros(_typing: Any, bits: Any) -> Any:
  """The number of zeros above the highest set bit of `bits`, which is not 0."""

  def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))
    return builder.zext(zeros, ir.IntType(types.intp.bitwidth))

  return types.intp(types.uint32), generate


def _search(rows: Any, min_period: int, max_period: int, repeats: int, keep: Any) -> None:
  n, length = rows.shape
  for r in range(n):
    row = rows[r]
    keep[r] = True
    for period in range(min_period, max_period + 1):
      run = repeats * period
      last = period + run - 1  # the would-be run is [last - run + 1, last]
      known = period  # and of it, [last - run + 1, known) is known to be equal
      hits = 0
      while last < length:
        if hits < _MANY_HITS:
          if _differ(row, last, last - period):
            last += run
            while last < length and _differ(row, last, last - period):
              last += run
            if last >= length:
              break
            known = last - run + 1
          hits += run >= 2 * _LANES - 2
        else:
          start = last - run + 1
          group = start
          while group + _LANES <= length and _differences(row, group, group - period) != 0:
            group += run - _LANES + 1
          # The group before this one is not all equal, so no run covers it.
          begin = group - run + _LANES
          if begin > start:
            last += begin - start
            if last >= length:
              break
            known = max(known, begin)
        j = last
        while j >= known:
          if j - period >= _LANES - 1:
            differ = _differences(row, j - _LANES + 1, j - _LANES + 1 - period)
            if differ != 0:
              j -= _leading_zeros(differ)
              break
            j -= _LANES
          elif _differ(row, j, j - period):
            break
          else:
            j -= 1
        if j < known:
          keep[r] = False
          break
        known = last + 1
        last = j + run
      if not keep[r]:
        break


_search_compiled: Any = numba.njit(nogil=True)(_search)
_pread: Any = compiled_reads.pread()
_LIBC = ctypes.CDLL(None, use_errno=True)
_sem_post: Any = types.ExternalFunction("sem_post", types.intc(types.voidptr))
_sem_wait: Any = types.ExternalFunction("sem_wait", types.intc(types.voidptr))
_usleep: Any = types.ExternalFunction("usleep", types.intc(types.uint32))


@numba.njit(nogil=True)
def _highest(row: Any) -> Any:
  most = row.dtype.type(0)  # of the tokens' own type, so that a register takes many of them
  for i in range(row.shape[0]):
    most = max(most, row[i])
  return most


def _read_row(descriptors, offsets, rows, i, min_period, max_period, repeats, highest, clean):
  row = rows[i]
  width = rows.shape[1] * rows.itemsize
  if _pread(descriptors[i], row.ctypes, width, offsets[i]) != width:
    return False
  highest[i] = _highest(row)
  _search_compiled(rows[i : i + 1], min_period, max_period, repeats, clean[i : i + 1])
  return True


_read_row_compiled: Any = numba.njit(nogil=True)(_read_row)


@numba.njit(nogil=True)
def _take_part(post: Any, descriptors, offsets, rows, highest, clean) -> None:
  """Takes rows of the job until there are no more."""
  n, at_once = rows.shape[0], post[_ROWS_AT_ONCE]
  periods = post[_MIN_PERIOD], post[_MAX_PERIOD], post[_REPEATS]
  first = atomic_words.add(post, _NEXT, at_once)
  while first < n:
    for i in range(first, min(n, first + at_once)):
      if not _read_row_compiled(descriptors, offsets, rows, i, *periods, highest, clean):
        atomic_words.set(post, _FAILED, i)
    first = atomic_words.add(post, _NEXT, at_once)


def _read_and_look(
    descriptors: Any,
    offsets: Any,
    rows: Any,
    min_period: int,
    max_period: int,
    repeats: int,
    highest: Any,
    clean: Any,
    post: Any,
    helpers: int,
) -> int:
  n = rows.shape[0]
  if helpers == 0:
    for i in range(n):
      if not _read_row_compiled(
          descriptors, offsets, rows, i, min_period, max_period, repeats, highest, clean
      ):
        return i
    return -1
  post[_DESCRIPTORS] = descriptors.ctypes.data
  post[_OFFSETS] = offsets.ctypes.data
  post[_ROWS] = rows.ctypes.data
  post[_COUNT] = n
  post[_LENGTH] = rows.shape[1]
  post[_MIN_PERIOD] = min_period
  post[_MAX_PERIOD] = max_period
  post[_REPEATS] = repeats
  post[_HIGHEST] = highest.ctypes.data
  post[_CLEAN] = clean.ctypes.data
  post[_ROWS_AT_ONCE] = max(1, _BYTES_AT_ONCE // max(1, rows.shape[1] * rows.itemsize))
  post[_HELPERS] = helpers
  post[_FAILED] = -1
  atomic_words.set(post, _NEXT, 0)
  for _ in range(min(helpers, atomic_words.get(post, _ASLEEP))):
    _sem_post(post.ctypes)
  _take_part(post, descriptors, offsets, rows, highest, clean)
  atomic_words.set(post, _NEXT, _CLOSED)
  looks = naps = 0
  while atomic_words.get(post, _BUSY) != 0:
    looks += 1
    atomic_words.breathe()
    if looks > _LOOKS:  # It reads from a disk, or has lost its core to somebody else.
      _usleep(_NAP_MICROSECONDS)
      naps += 1
  return post[_FAILED] if post[_FAILED] >= 0 else -1 - naps


@numba.njit(nogil=True)
def _is_idle(post: Any) -> bool:
  """Whether there is no row to take, or nobody is wanted; for whoever is not counted as busy, it may just have changed."""
  taken = atomic_words.get(post, _NEXT)
  if taken >= _CLOSED or taken >= atomic_words.get(post, _COUNT):
    return True
  return atomic_words.get(post, _BUSY) >= atomic_words.get(post, _HELPERS)


def _help(post: Any, like: Any) -> None:
  """What a helping thread does, until it is told to stop; `like` says of which type the tokens are."""
  looks = 0
  while True:
    if _is_idle(post):
      looks += 1
      # Where batch follows batch, the next job is here before a thread would be awake again.
      if looks <= _LOOKS:
        atomic_words.breathe()
        continue
      looks = 0
      atomic_words.add(post, _ASLEEP, 1)
      if _is_idle(post) and atomic_words.get(post, _STOPPED) == 0:
        _sem_wait(post.ctypes)
      atomic_words.add(post, _ASLEEP, -1)
      if atomic_words.get(post, _STOPPED) != 0:
        return
    busy = atomic_words.add(post, _BUSY, 1)
    if atomic_words.get(post, _NEXT) < _CLOSED and busy < post[_HELPERS]:
      looks = 0
      n = post[_COUNT]
      _take_part(
          post,
          numba.carray(atomic_words.pointer(post[_DESCRIPTORS], types.int32), n),
          numba.carray(atomic_words.pointer(post[_OFFSETS], types.int64), n),
          numba.carray(atomic_words.pointer(post[_ROWS], like), (n, post[_LENGTH])),
          numba.carray(atomic_words.pointer(post[_HIGHEST], types.uint64), n),
          numba.carray(atomic_words.pointer(post[_CLEAN], types.boolean), n),
      )
    atomic_words.add(post, _BUSY, -1)


def build_search(itemsize: int) -> Callable[[np.ndarray, int, int, int], np.ndarray]:
  """Compiles the search for unsigned tokens of `itemsize` bytes, or loads it from numba's cache."""
  tokens = types.Array(numba.from_dtype(np.dtype(f"u{itemsize}")), 2, "C", readonly=True)
  keep = types.Array(types.boolean, 1, "C")
  signature = types.void(tokens, types.intp, types.intp, types.intp, keep)
  compiled = _compile(_search, signature)

  def search(rows: np.ndarray, min_period: int, max_period: int, repeats: int) -> np.ndarray:
    verdict = np.empty(len(rows), np.bool_)
    compiled(rows, min_period, max_period, repeats, verdict)
    return verdict

  # Where numba is switched off, or does not do what it did, this fails now rather than in a run.
  trial = np.zeros((2, 3 * _LANES), f"u{itemsize}")
  trial[1] = np.arange(trial.shape[1])
  if search(trial, 1, 2, 31).tolist() != [False, True]:
    raise RuntimeError("the compiled search gives wrong verdicts")
  return search


def make_post() -> np.ndarray:
  """Where jobs are written for helpers; there is none yet."""
  memory = np.zeros(_WORDS * 8 + _LINE_BYTES, np.uint8)
  start = -memory.ctypes.data % _LINE_BYTES
  post = memory[start : start + _WORDS * 8].view(np.int64)
  post[_NEXT] = _CLOSED
  if _LIBC.sem_init(ctypes.c_void_p(post.ctypes.data), 0, 0):
    raise OSError(ctypes.get_errno(), "sem_init failed")
  return post


def close_post(post: np.ndarray, helpers: int) -> None:
  """Lets so many helpers go, who look at the post."""
  post[_STOPPED] = 1
  for _ in range(helpers):
    _LIBC.sem_post(ctypes.c_void_p(post.ctypes.data))


class Reads(NamedTuple):
  """Reading and looking, and what threads do that help with it: `help_read(post, none of the tokens)`."""

  read: Callable[..., int]
  help_read: Callable[[np.ndarray, np.ndarray], None]
  make_post: Callable[[], np.ndarray] = make_post
  close_post: Callable[[np.ndarray, int], None] = close_post


def build_reads(itemsize: int) -> Reads | None:
  """Compiles reading and looking for unsigned tokens of `itemsize` bytes, or loads it from numba's cache."""
  if _pread is None:
    return None
  dtype = np.dtype(f"u{itemsize}")
  post, token = types.Array(types.int64, 1, "C"), numba.from_dtype(dtype)
  signature = types.intp(
      types.Array(types.int32, 1, "C"),
      types.Array(types.int64, 1, "C"),
      types.Array(token, 2, "C"),
      types.intp,
      types.intp,
      types.intp,
      types.Array(types.uint64, 1, "C"),
      types.Array(types.boolean, 1, "C"),
      post,
      types.intp,
  )
  compiled = _compile(_read_and_look, signature)
  _try(compiled, dtype)
  return Reads(compiled, _compile(_help, types.void(post, types.Array(token, 1, "C"))))


def _try(kernel: Callable[..., int], dtype: np.dtype) -> None:
  """Where numba is switched off, or does not do what it did, this fails now rather than in a run."""
  rows = np.zeros((2, 96), dtype)
  rows[1] = np.arange(96)
  found = np.ones_like(rows)
  highest, clean = np.zeros(2, np.uint64), np.zeros(2, np.bool_)
  file = os.memfd_create("maxtext_olmo")
  try:
    os.pwrite(file, rows.tobytes(), 0)
    descriptors, offsets = np.full(2, file, np.int32), np.arange(2) * rows[0].nbytes
    outcome = kernel(descriptors, offsets, found, 1, 2, 31, highest, clean, crew.NOBODY, 0)
  finally:
    os.close(file)
  verdict = [outcome, highest.tolist(), clean.tolist()]
  if verdict != [-1, [0, 95], [False, True]] or not np.array_equal(found, rows):
    raise RuntimeError("compiled reads give wrong results")


def _compile(function: Callable[..., Any], signature: Any) -> Any:
  try:
    return numba.njit(signature, nogil=True, cache=True)(function)
  except Exception:  # nowhere to write to, a full disk, a damaged file: compiling needs none of it
    return numba.njit(signature, nogil=True)(function)
