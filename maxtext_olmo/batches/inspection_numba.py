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

Only `repetition` and `inspection` import this module, in threads of their own, since importing numba takes a while. All of it
is in one file, because numba's cache notices a change in the file of a compiled function, not in those of what it calls.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from maxtext_olmo.batches import crew
from maxtext_olmo.corpus import compiled_reads

# Any: what numba's compiler makes of these is not what a type checker sees.
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic

_LANES = 32
_MANY_HITS = 4  # in one row, for one period
# Taken by a thread at a time: few enough to share a batch evenly, enough for the words of a job to stay in one core's cache.
_BYTES_AT_ONCE = 1 << 15
# So often is looked for a helper's last row, or for the next job, without going to sleep: some 100 µs.
_LOOKS = 4000
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


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
  """Where a word of a post lies."""
  data = context.make_array(signature.args[0])(context, builder, args[0]).data
  return builder.gep(data, [args[1]])


@intrinsic
def _get(_typing: Any, post: Any, word: Any) -> Any:
  """A word of `post`, before everything that is read later."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.load_atomic(_word(context, builder, signature, args), "seq_cst", 8)

  return types.int64(post, types.intp), generate


@intrinsic
def _set(_typing: Any, post: Any, word: Any, value: Any) -> Any:
  """Sets a word of `post`, after everything that was written before."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    builder.store_atomic(args[2], _word(context, builder, signature, args), "seq_cst", 8)
    return context.get_dummy_value()

  return types.void(post, types.intp, types.int64), generate


@intrinsic
def _add(_typing: Any, post: Any, word: Any, value: Any) -> Any:
  """Adds to a word of `post` at one blow, and gives what it was before."""

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    word = _word(context, builder, signature, args)
    return builder.atomic_rmw("add", word, args[2], "seq_cst")

  return types.int64(post, types.intp, types.int64), generate


@intrinsic
def _breathe(_typing: Any) -> Any:
  """Tells the core that it waits, where there is an instruction for that, so that another thread of it goes on faster."""

  def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
    if platform.machine() == "x86_64":
      kind = ir.FunctionType(ir.VoidType(), [])
      builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
    return context.get_dummy_value()

  return types.void(), generate


@intrinsic
def _array_at(typingctx: Any, address: Any, like: Any) -> Any:
  """The memory at an address as a pointer to what the type `like` stands for."""
  del typingctx
  pointer = types.CPointer(like.dtype)

  def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

  return pointer(address, like), generate


_search_compiled: Any = numba.njit(nogil=True)(_search)
_pread: Any = compiled_reads.pread()
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
  n, at_once = rows.shape[0], post[crew.ROWS_AT_ONCE]
  periods = post[crew.MIN_PERIOD], post[crew.MAX_PERIOD], post[crew.REPEATS]
  first = _add(post, crew.NEXT, at_once)
  while first < n:
    for i in range(first, min(n, first + at_once)):
      if not _read_row_compiled(descriptors, offsets, rows, i, *periods, highest, clean):
        _set(post, crew.FAILED, i)
    first = _add(post, crew.NEXT, at_once)


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
  post[crew.DESCRIPTORS] = descriptors.ctypes.data
  post[crew.OFFSETS] = offsets.ctypes.data
  post[crew.ROWS] = rows.ctypes.data
  post[crew.COUNT] = n
  post[crew.LENGTH] = rows.shape[1]
  post[crew.MIN_PERIOD] = min_period
  post[crew.MAX_PERIOD] = max_period
  post[crew.REPEATS] = repeats
  post[crew.HIGHEST] = highest.ctypes.data
  post[crew.CLEAN] = clean.ctypes.data
  post[crew.ROWS_AT_ONCE] = max(1, _BYTES_AT_ONCE // max(1, rows.shape[1] * rows.itemsize))
  post[crew.FAILED] = -1
  _set(post, crew.NEXT, 0)
  for _ in range(_get(post, crew.ASLEEP)):
    _sem_post(post.ctypes)
  _take_part(post, descriptors, offsets, rows, highest, clean)
  _set(post, crew.NEXT, crew.CLOSED)
  looks = 0
  while _get(post, crew.BUSY) != 0:
    looks += 1
    _breathe()
    if looks > _LOOKS:  # It reads from a disk, or has lost its core to somebody else.
      _usleep(_NAP_MICROSECONDS)
  return post[crew.FAILED]


def _help(post: Any, like: Any) -> None:
  """What a helping thread does, until it is told to stop; `like` says of which type the tokens are."""
  looks = 0
  while True:
    if _get(post, crew.NEXT) >= crew.CLOSED:
      looks += 1
      if (
          looks <= _LOOKS
      ):  # Where batch follows batch, the next job is here before a thread would be awake again.
        _breathe()
        continue
      looks = 0
      _add(post, crew.ASLEEP, 1)
      if _get(post, crew.NEXT) >= crew.CLOSED and _get(post, crew.STOPPED) == 0:
        _sem_wait(post.ctypes)
      _add(post, crew.ASLEEP, -1)
      if _get(post, crew.STOPPED) != 0:
        return
    _add(post, crew.BUSY, 1)
    if _get(post, crew.NEXT) < crew.CLOSED:
      n = post[crew.COUNT]
      _take_part(
          post,
          numba.carray(_array_at(post[crew.DESCRIPTORS], types.int32), n),
          numba.carray(_array_at(post[crew.OFFSETS], types.int64), n),
          numba.carray(_array_at(post[crew.ROWS], like), (n, post[crew.LENGTH])),
          numba.carray(_array_at(post[crew.HIGHEST], types.uint64), n),
          numba.carray(_array_at(post[crew.CLEAN], types.boolean), n),
      )
    _add(post, crew.BUSY, -1)


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


class Reads(NamedTuple):
  """Reading and looking, and what threads do that help with it: `help_read(post, none of the tokens)`."""

  read: Callable[..., int]
  help_read: Callable[[np.ndarray, np.ndarray], None]


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
