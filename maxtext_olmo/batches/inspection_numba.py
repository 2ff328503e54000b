"""Reading rows and looking at each while it is in the cache, compiled by numba (extra `[fast]`).

The search of the repetition filter: for one period p, a row is rejected where R = repeats * p places in a row equal the place p before
them. The search looks at the last place of a would-be run first. Where that differs, no run covers
it, and the next would-be run begins behind it, so that one look passes R places:

    [. . . . . . i]      i differs: the next would-be run is [i + 1, i + R]
    [. . j = = = i]      j differs: the next is [j + 1, j + R], and (j, i] is known to be equal

No place is walked over twice, and walking back takes 32 places at a time. Where hits are many,
whole groups of 32 places are tried instead, R - 31 apart: any run covers one of them.

Only `repetition` and `inspection` import this module, in threads of their own, since importing numba takes a while. All of it
is in one file, because numba's cache notices a change in the file of a compiled function, not in those of what it calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir

from maxtext_olmo.corpus import compiled_reads

# Any: what numba's compiler makes of these is not what a type checker sees.
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic

_LANES = 32
_MANY_HITS = 4  # in one row, for one period


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


@numba.njit(nogil=True)
def _highest(row: Any) -> Any:
  most = row.dtype.type(0)  # of the tokens' own type, so that a register takes many of them
  for i in range(row.shape[0]):
    most = max(most, row[i])
  return most


def _read_and_look(
    descriptors: Any,
    offsets: Any,
    rows: Any,
    min_period: int,
    max_period: int,
    repeats: int,
    highest: Any,
    clean: Any,
) -> int:
  n, length = rows.shape
  width = length * rows.itemsize
  for i in range(n):
    row = rows[i]
    if _pread(descriptors[i], row.ctypes, width, offsets[i]) != width:
      return i
    highest[i] = _highest(row)
    _search_compiled(rows[i : i + 1], min_period, max_period, repeats, clean[i : i + 1])
  return -1


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


def build_reads(itemsize: int) -> Callable[..., int] | None:
  """Compiles reading and looking for unsigned tokens of `itemsize` bytes, or loads it from numba's cache."""
  if _pread is None:
    return None
  dtype = np.dtype(f"u{itemsize}")
  signature = types.intp(
      types.Array(types.int32, 1, "C"),
      types.Array(types.int64, 1, "C"),
      types.Array(numba.from_dtype(dtype), 2, "C"),
      types.intp,
      types.intp,
      types.intp,
      types.Array(types.uint64, 1, "C"),
      types.Array(types.boolean, 1, "C"),
  )
  compiled = _compile(_read_and_look, signature)
  _try(compiled, dtype)
  return compiled


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
    outcome = kernel(descriptors, offsets, found, 1, 2, 31, highest, clean)
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
