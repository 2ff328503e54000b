"""Runs a model over rows of tokens and hands every process the log-probabilities of what is scored.

Results leave the devices token by token and are added up in float64: in float32, the sum over a long
text would be off in the fourth digit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.batches import collate
from maxtext_olmo.devices import multihost
from maxtext_olmo.pipelines import lmeval
from maxtext_olmo.pipelines import lmeval_lengths
from maxtext_olmo.pipelines import lmeval_requests

Params = Any
Apply = Callable[[Params, collate.LLMIndexedBatch], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
  """What the model says to one row."""

  request: int
  logprob: float  # of all scored tokens together
  is_greedy: bool  # whether each of them is the likeliest at its place


class Scorer:
  """A model on a mesh; all processes call it together, with the same rows.

  Args:
    apply: Parameters and a batch → logits (rows, tokens, vocabulary).
    mesh: Where the batches go.
    batch_size: Rows of a batch, over all processes.
    padding_multiple: What all lengths are a multiple of.
    max_length: How many tokens go into the model at most; no batch is longer, padding included.
    data_sharding: How a batch lies on the mesh; by default its rows are split over all axes.
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
  ):
    self.mesh = mesh
    self.batch_size = batch_size
    self.padding_multiple = padding_multiple
    self.max_length = max_length
    self.data_sharding = data_sharding
    self.lengths: set[int] = set()  # each is a shape that was compiled
    self.tokens_run = 0  # padding included
    self._apply = apply
    self._host, self._host_count = lmeval.host_share(mesh, data_sharding)
    self._step = jax.jit(self._score, out_shardings=NamedSharding(mesh, PartitionSpec()))
    # A batch that does not divide over the devices shows now, not after tokenizing everything.
    self.place(collate.LLMIndexedBatch.get_sample(self._local_rows(), padding_multiple))

  def vocab_size(self, params: Params) -> int:
    """How many tokens the model knows."""
    batch = collate.LLMIndexedBatch.get_dtype_struct(self.batch_size, self.padding_multiple)
    borders: Any = jax.ShapeDtypeStruct(batch.inputs.shape, np.bool_)
    batch = dataclasses.replace(batch, _document_borders=borders)
    return jax.eval_shape(self._apply, params, batch).shape[-1]

  def scores(self, params: Params, rows: Sequence[lmeval_requests.Row]) -> Iterator[list[Score]]:
    """Batch by batch, the scores of the rows, in no particular order."""
    local = lmeval.local_batches(
        rows,
        self.batch_size,
        host=self._host,
        host_count=self._host_count,
        padding_multiple=self.padding_multiple,
        known_lengths=self.lengths,
        max_length=self.max_length,
    )
    pending = None
    for step in range(len(local)):
      # The devices run a step while the results of the one before are added up here.
      results = self.run(params, local[step])
      if pending is not None:
        yield _read(pending)
      pending = results
    if pending is not None:
      yield _read(pending)

  def run(self, params: Params, local: collate.LLMIndexedBatch) -> dict[str, jax.Array]:
    """Starts a step on this process's rows of a batch; its results are the same on every process."""
    batch = self.place(local)
    self.lengths.add(batch.inputs.shape[1])
    self.tokens_run += batch.inputs.size
    return self._step(params, batch)

  def padded_length(self, length: int) -> int:
    """What a batch that grows is padded to: few lengths, whatever it grows to."""
    longest = lmeval_lengths.power_of_two(length, self.padding_multiple)
    return longest if self.max_length is None else max(length, min(longest, self.max_length))

  def place(self, local: collate.LLMIndexedBatch) -> collate.LLMIndexedBatch:
    """This process's rows of a batch as its part of global arrays."""
    return multihost.get_next_batch_sharded(
        iter([local]), self.mesh, data_sharding=self.data_sharding
    )

  def my_rows(self, batch: collate.LLMIndexedBatch) -> collate.LLMIndexedBatch:
    """The rows of a whole batch that this process holds."""
    first = self._host * self._local_rows()
    return batch[first : first + self._local_rows()]

  def _local_rows(self) -> int:
    if self.batch_size < 1 or self.batch_size % self._host_count:
      raise errors.ConfigError(
          f"batch_size={self.batch_size} does not divide over {self._host_count} hosts; choose a"
          f" multiple of {self._host_count}."
      )
    return self.batch_size // self._host_count

  def _score(self, params: Params, batch: collate.LLMIndexedBatch) -> dict[str, jax.Array]:
    logits = self._apply(params, batch).astype(jnp.float32)
    counts = batch.targets_segmentation != 0
    chosen = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    logprobs = jnp.where(counts, chosen - jax.nn.logsumexp(logits, axis=-1), 0.0)
    hits = (jnp.argmax(logits, axis=-1) == batch.targets) | ~counts
    return {
        "request": jnp.asarray(batch.document_idx) - 1,
        "logprobs": logprobs,
        "is_greedy": hits.all(axis=1),
    }


def _read(results: dict[str, jax.Array]) -> list[Score]:
  found = {name: np.asarray(array) for name, array in results.items()}
  sums = found["logprobs"].sum(axis=1, dtype=np.float64)
  return [
      Score(int(request), float(total), bool(greedy))
      for request, total, greedy in zip(found["request"], sums, found["is_greedy"])
      if request >= 0
  ]
