"""Runs a model over rows of tokens and gives every process the log-probabilities of scored tokens.

The devices return one result per token, and the results are summed in float64: in float32, the sum
over a long text would be wrong in the fourth digit. Every process knows from the plan (`packing`)
which token belongs to which request.

A test run shows whether a model keeps the requests of a row apart. Three batches of the same shape
are made from one of the batches to score:

    shared     A A A B B B C C      as planned
    changed    X X X B B B Z Z      the neighbours change: B must score exactly the same
    alone      A A A . . . . .      one per row: all must score the same, up to rounding
               B B B . . . . .
               C C . . . . . .

The first comparison detects models that attend across segments. It can be exact in any precision,
because the order of additions does not change. The second comparison detects models that count
positions from the beginning of the row, not of the segment.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.devices import global_batch
from maxtext_olmo.evaluation import packing as packing_lib
from maxtext_olmo.evaluation import pipeline as pipeline_lib
from maxtext_olmo.evaluation import requests as requests_lib
from maxtext_olmo.rows import batch as batch_lib

RUNS = 3

# Tolerances for the log-probability of a token. For the first comparison: the same additions in the
# same order should give the same result, but some kernels do not guarantee this.
_SAME = 1e-5
# For the second comparison: rounding errors in float32.
_ROUNDING = 1e-4
# The same in half precision. Single tokens may change by more, so this is a limit for the root mean
# square over all tokens.
_HALF_ROUNDING = 0.05
_HALF = re.compile(r"\b(b?f16|f8\w*)\[")

# A function that runs a step and returns an array for each request: the log-probabilities of all
# its tokens.
Run = Callable[[packing_lib.Step, Sequence[requests_lib.Row]], list[np.ndarray]]


def computes_in_half_precision(program: object, platform: str) -> bool:
  """Returns whether a traced program rounds anywhere to less than float32.

  By default, devices other than CPUs do so even when they multiply float32 matrices.

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
  """Returns why this model cannot score several requests in one row; empty if it can.

  Args:
    run: Runs the model on a step.
    steps: The planned steps; some of them have several requests in a row.
    rows: The rows to score, one per request. The steps contain indices of this list.
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
    return "returns NaN, so nothing can be compared"
  if not off.max() <= _SAME:
    return f"mixes the requests of a row: the others change a token's score by {off.max():.2g}"

  # The last requests of a row come first here, because they are the farthest from its beginning.
  several = sorted((members for members in step.rows if len(members) > 1), key=len, reverse=True)
  some = [number for members in several for number in reversed(members)][:batch_size]
  alone = run(packing_lib.Step(step.length, tuple((number,) for number in some)), rows)
  off = np.concatenate([_difference(shared[number], a) for number, a in zip(some, alone)])
  found, limit = off.max(), _ROUNDING
  if half_precision:
    found, limit = np.sqrt(np.mean(off**2)), _HALF_ROUNDING
  if not found <= limit:
    return (
        "does not use inputs_position: after other requests, the score of a token changes by"
        f" {found:.2g}"
    )
  return ""


def _by_itself(
    step: packing_lib.Step, rows: Sequence[requests_lib.Row]
) -> tuple[packing_lib.Step, list[requests_lib.Row]]:
  """Returns a step and only the rows that it needs, with new indices and every token scored."""
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
  # Equal infinities have no difference, but subtracting them gives NaN.
  with np.errstate(invalid="ignore"):
    return np.where(a == b, 0.0, np.abs(a - b))


PACKINGS = ("auto", True, False)

Params = Any
Apply = Callable[[Params, batch_lib.LLMIndexedBatch], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
  """The score of one row."""

  request: int
  logprob: float  # Sum over all scored tokens.
  is_greedy: bool  # Whether each scored token is the most likely one at its place.


class Scorer:
  """Scores rows with a model on a mesh; all processes call it together, with the same rows.

  Args:
    apply: Maps parameters and a batch to logits (rows, tokens, vocabulary).
    mesh: The mesh that holds the batches.
    batch_size: Rows per batch, over all processes.
    padding_multiple: All lengths are rounded up to a multiple of this.
    max_length: The maximum number of input tokens; no batch is longer, including padding.
    data_sharding: Sharding of a batch; by default its rows are split over all mesh axes.
    packing: Whether several rows may become segments of one row. `auto` packs if packing does not
      change the model's scores, which is tested in each call of `scores`.
  """

  def __init__(
      self,
      apply: Apply,
      mesh: Mesh,
      *,
      batch_size: int,
      padding_multiple: int,
      max_length: int | None = None,
      data_sharding: PartitionSpec | None = None,
      packing: bool | str = "auto",
  ):
    if packing not in PACKINGS:
      raise errors.ConfigError(
          f"packing={packing!r} is unknown; choose from {', '.join(map(repr, PACKINGS))}."
      )
    self.mesh = mesh
    self.batch_size = batch_size
    self.padding_multiple = padding_multiple
    self.max_length = max_length
    self.data_sharding = data_sharding
    self.packing = packing if packing == "auto" else bool(packing)
    self.lengths: set[int] = set()  # The row lengths for which the model has been compiled.
    self.tokens_run = 0  # Including padding.
    self.tokens_scored = 0  # Only the tokens of the rows.
    self._apply = apply
    self._host, self._host_count = pipeline_lib.host_share(mesh, data_sharding)
    self._step = jax.jit(self._score, out_shardings=NamedSharding(mesh, PartitionSpec()))
    # If a batch does not divide over the devices, this fails now, not only after tokenization.
    self.place(batch_lib.LLMIndexedBatch.get_sample(self._local_rows(), padding_multiple))

  def vocab_size(self, params: Params) -> int:
    """Returns the size of the model's vocabulary."""
    return jax.eval_shape(self._apply, params, self._abstract_batch()).shape[-1]

  def scores(self, params: Params, rows: Sequence[requests_lib.Row]) -> Iterator[list[Score]]:
    """Yields the scores of the rows, one list per batch, in no particular order."""
    pending = None
    for step in self._plan(params, rows):
      # The devices run a step while the results of the previous one are summed here.
      results = self.run(params, self.my_part(step, rows))
      self.tokens_scored += sum(rows[number].length for members in step.rows for number in members)
      if pending is not None:
        yield _read(*pending, rows)
      pending = results, step
    if pending is not None:
      yield _read(*pending, rows)

  def run(self, params: Params, local: batch_lib.LLMIndexedBatch) -> dict[str, jax.Array]:
    """Starts a step on the devices. Each process passes its own rows, and gets all results."""
    batch = self.place(local)
    self.lengths.add(batch.inputs.shape[1])
    self.tokens_run += batch.inputs.size
    return self._step(params, batch)

  def padded_length(self, length: int) -> int:
    """Returns the padded length of a growing batch; it doubles, so few lengths are compiled."""
    longest = packing_lib.power_of_two(length, self.padding_multiple)
    return longest if self.max_length is None else max(length, min(longest, self.max_length))

  def place(self, local: batch_lib.LLMIndexedBatch) -> batch_lib.LLMIndexedBatch:
    """Returns the global arrays of a batch; each process provides its own rows."""
    return global_batch.get_next_batch_sharded(
        iter([local]), self.mesh, data_sharding=self.data_sharding
    )

  def my_part(
      self, step: packing_lib.Step, rows: Sequence[requests_lib.Row]
  ) -> batch_lib.LLMIndexedBatch:
    """Returns this process's rows of a step."""
    count = self._local_rows()
    return packing_lib.step_batch(step, rows, self._host * count, count)

  def _local_rows(self) -> int:
    if self.batch_size < 1:
      raise errors.ConfigError(f"batch_size={self.batch_size} must be positive.")
    if self.batch_size % self._host_count:
      raise errors.ConfigError(
          f"batch_size={self.batch_size} does not divide over {self._host_count} hosts; choose a"
          f" multiple of {self._host_count}."
      )
    return self.batch_size // self._host_count

  def _plan(self, params: Params, rows: Sequence[requests_lib.Row]) -> list[packing_lib.Step]:
    is_tried = self.packing == "auto"
    plan = functools.partial(
        packing_lib.plan_steps,
        [row.length for row in rows],
        self.batch_size,
        self.padding_multiple,
        max_length=self.max_length,
    )
    steps = plan(
        pack=self.packing is not False,
        known=self.lengths,
        overhead=RUNS if is_tried else 0,
    )
    # The test runs each time, because its result depends on the weights: a model may learn to
    # attend across segments.
    if is_tried and any(step.is_packed for step in steps):
      reason = self._why_not_shared(params, steps, rows)
      if reason:
        logging.warning("Each request is scored in a separate row, because the model %s.", reason)
        return plan(pack=False, known=self.lengths)
    return steps

  def _why_not_shared(
      self,
      params: Params,
      steps: Sequence[packing_lib.Step],
      rows: Sequence[requests_lib.Row],
  ) -> str:
    def run(step: packing_lib.Step, rows: Sequence[requests_lib.Row]) -> list[np.ndarray]:
      results = self.run(params, self.my_part(step, rows))
      found = np.asarray(results["logprobs"], np.float64).reshape(-1)
      numbers, starts = packing_lib.row_starts(step, rows)
      return [found[start : start + rows[n].length] for n, start in zip(numbers, starts)]

    reason = why_not_shared(
        run,
        steps,
        rows,
        batch_size=self.batch_size,
        vocab_size=self.vocab_size(params),
        half_precision=computes_in_half_precision(
            jax.make_jaxpr(self._apply)(params, self._abstract_batch()),
            self.mesh.devices.flat[0].platform,
        ),
    )
    # The results are the same on all processes. If they ever differed, the processes would wait for
    # each other forever, so process 0 decides.
    return collectives.from_process_0(lambda: reason, "deciding whether rows can share a sequence")

  def _abstract_batch(self) -> batch_lib.LLMIndexedBatch:
    batch = batch_lib.LLMIndexedBatch.get_dtype_struct(self.batch_size, self.padding_multiple)
    borders: Any = jax.ShapeDtypeStruct(batch.inputs.shape, np.bool_)
    return dataclasses.replace(batch, _document_borders=borders)

  def _score(self, params: Params, batch: batch_lib.LLMIndexedBatch) -> dict[str, jax.Array]:
    logits = self._apply(params, batch).astype(jnp.float32)
    counts = batch.targets_segmentation != 0
    chosen = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    logprobs = jnp.where(counts, chosen - jax.nn.logsumexp(logits, axis=-1), 0.0)
    hits = (jnp.argmax(logits, axis=-1) == batch.targets) | ~counts
    return {"logprobs": logprobs, "hits": hits}


def _read(
    results: dict[str, jax.Array],
    step: packing_lib.Step,
    rows: Sequence[requests_lib.Row],
) -> list[Score]:
  numbers, starts = packing_lib.row_starts(step, rows)
  # Tokens that are not scored, including padding, add nothing to the sum of the row before them.
  sums = np.add.reduceat(np.asarray(results["logprobs"], np.float64).reshape(-1), starts)
  greedy = np.logical_and.reduceat(np.asarray(results["hits"]).reshape(-1), starts)
  return [
      Score(rows[number].request, float(total), bool(is_greedy))
      for number, total, is_greedy in zip(numbers, sums, greedy)
  ]
