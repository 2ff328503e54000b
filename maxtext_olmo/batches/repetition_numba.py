"""The repetition filter's search, compiled by numba (extra `[fast]`).

For one period p, a row is rejected where R = repeats * p places in a row equal the place p before
them. The search looks at the last place of a would-be run first. Where that differs, no run covers
it, and the next would-be run begins behind it, so that one look passes R places:

    [. . . . . . i]      i differs: the next would-be run is [i + 1, i + R]
    [. . j = = = i]      j differs: the next is [j + 1, j + R], and (j, i] is known to be equal

No place is walked over twice, and walking back takes 32 places at a time. Where hits are many,
whole groups of 32 places are tried instead, R - 31 apart: any run covers one of them.

Only `repetition` imports this module, in a thread of its own, since importing numba takes a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir

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


def build(itemsize: int) -> Callable[[np.ndarray, int, int, int], np.ndarray]:
  """Compiles the search for unsigned tokens of `itemsize` bytes, or loads it from numba's cache."""
  tokens = types.Array(numba.from_dtype(np.dtype(f"u{itemsize}")), 2, "C", readonly=True)
  keep = types.Array(types.boolean, 1, "C")
  signature = types.void(tokens, types.intp, types.intp, types.intp, keep)
  try:
    compiled = numba.njit(signature, nogil=True, cache=True)(_search)
  except Exception:  # nowhere to write to, a full disk, a damaged file: compiling needs none of it
    compiled = numba.njit(signature, nogil=True)(_search)

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
