"""Whether a model keeps the requests of a row apart, found out by running it.

Three batches of the same shape, made from one of the batches to score:

    shared     A A A B B B C C      as planned
    changed    X X X B B B Z Z      others have other tokens: the rest must score exactly the same
    alone      A A A . . . . .      a row each: all must score the same, up to rounding
               B B B . . . . .
               C C . . . . . .

The first comparison finds models that attend across segments, in any precision: no sum changes its
order. The second finds those that count positions from the beginning of the row.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from maxtext_olmo.evaluation import packing as packing_lib
from maxtext_olmo.evaluation import requests as requests_lib

RUNS = 3

# Of the log-probability of a token. The same sums are the same; some kernels do not promise that.
_SAME = 1e-5
# In float32.
_ROUNDING = 1e-4
# In half precision single tokens are off by more than that, but not the mean of their squares.
_HALF_ROUNDING = 0.05
_HALF = re.compile(r"\b(b?f16|f8\w*)\[")

# The log-probability of every token of some requests, all of which have all their tokens scored.
Run = Callable[[packing_lib.Step, Sequence[requests_lib.Row]], list[np.ndarray]]


def computes_in_half_precision(program: object, platform: str) -> bool:
  """Whether a traced program rounds to less than float32 somewhere.

  Other devices than CPUs do so even in products of float32 matrices, unless told otherwise.

  >>> import jax
  >>> computes_in_half_precision(jax.make_jaxpr(lambda x: x.astype("bfloat16"))(1.0), "cpu")
  True
  """
  return platform != "cpu" or bool(_HALF.search(str(program)))


def why_not_shared(
    run: Run,
    steps: Sequence[packing_lib.Step],
    rows: Sequence[requests_lib.Row],
    *,
    batch_size: int,
    vocab_size: int,
    half_precision: bool,
) -> str:
  """Why the rows of some steps cannot be shared; empty where they can.

  Args:
    run: Runs the model on a step.
    steps: What is planned, some of it with shared rows.
    rows: What the numbers of the steps stand for.
  """
  planned = min((step for step in steps if step.is_packed), key=lambda step: step.length)
  step, rows = _by_itself(planned, rows)
  shared = run(step, rows)

  kept = {number for members in step.rows for number in members[1::2]}
  others = [
      row if number in kept else dataclasses.replace(row, tokens=(row.tokens + 1) % vocab_size)
      for number, row in enumerate(rows)
  ]
  changed = run(step, others)
  off = np.concatenate([_difference(shared[number], changed[number]) for number in sorted(kept)])
  if np.isnan(off).any():
    return "gives NaN, so that nothing can be compared"
  if not off.max() <= _SAME:
    return f"looks at other requests of a row: they change the score of a token by {off.max():.2g}"

  # The last of a row are the farthest from its beginning.
  several = sorted((members for members in step.rows if len(members) > 1), key=len, reverse=True)
  some = [number for members in several for number in reversed(members)][:batch_size]
  alone = run(packing_lib.Step(step.length, tuple((number,) for number in some)), rows)
  off = np.concatenate([_difference(shared[number], a) for number, a in zip(some, alone)])
  found, limit = off.max(), _ROUNDING
  if half_precision:
    found, limit = np.sqrt(np.mean(off**2)), _HALF_ROUNDING
  if not found <= limit:
    return (
        "does not count positions by inputs_position: behind other requests, the score of a token"
        f" changes by {found:.2g}"
    )
  return ""


def _by_itself(
    step: packing_lib.Step, rows: Sequence[requests_lib.Row]
) -> tuple[packing_lib.Step, list[requests_lib.Row]]:
  """The step and what is in it, numbered from 0, and scored from the first token on."""
  numbers = [number for members in step.rows for number in members]
  new = {number: place for place, number in enumerate(numbers)}
  made = [
      dataclasses.replace(
          rows[number], tokens=np.asarray(rows[number].tokens, np.int64), scored=rows[number].length
      )
      for number in numbers
  ]
  members = tuple(tuple(new[number] for number in members) for members in step.rows)
  return packing_lib.Step(step.length, members), made


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  # Two infinities are equal, too.
  with np.errstate(invalid="ignore"):
    return np.where(a == b, 0.0, np.abs(a - b))
