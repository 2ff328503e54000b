"""`dataset_type=synthetic`: random tokens that need no files, through the same stream, schedule and iterator.

For measuring a trainer without data, and for trying a mesh. Instance i is a pure function of the seed and i, so the laws
hold here too: a resumed run goes on with the same tokens on any number of hosts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from maxtext_olmo import config as config_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import resume
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import split as split_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import steps

_TRAIN_INSTANCES = 1 << 30
_EVAL_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class SyntheticSource:
  """Windows of uniform random tokens."""

  length: int
  vocab_size: int
  seed: int

  @property
  def dtype(self) -> np.dtype:
    """Of the tokens."""
    return np.dtype(np.uint32)

  def read(self, instance_ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The windows of some instances, one row each."""
    rows = np.empty((len(instance_ids), self.length), self.dtype) if out is None else out
    for row, instance in zip(rows, instance_ids):
      rng = np.random.Generator(np.random.Philox(key=[self.seed, int(instance)]))
      row[:] = rng.integers(self.vocab_size, size=self.length, dtype=self.dtype)
    return rows

  def where(self, instance_id: int, column: int = 0) -> str:
    """A name for a token, for error messages."""
    return f"synthetic instance {instance_id}, token {column}"


def make_synthetic_train_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.OlmoIterator:
  """Random tokens without end."""
  options = config_lib.Options.read(config)
  schedule = options.schedule()
  source, stream = _stream(options, _TRAIN_INSTANCES, "train", None)
  layouts = wiring.train_layouts(options, global_mesh, schedule)
  wiring.check_agreement(options, stream)
  start = resume.find_start(options, stream, schedule, _CONTENT)
  return iterator_lib.OlmoIterator(
      source,
      stream,
      start.schedule,
      layouts,
      content=_CONTENT,
      prefetch=wiring.prefetch(options),
      first_step=start.step,
  )


def make_synthetic_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.OlmoIterator:
  """A few batches of random tokens, the same each time."""
  options = config_lib.Options.read(config)
  size = options.global_batch_size_to_eval_on
  source, stream = _stream(options, _EVAL_BATCHES * size, "eval", 1)
  layouts = wiring.eval_layouts(options, global_mesh)
  wiring.check_agreement(options, stream)
  return iterator_lib.OlmoIterator(
      source,
      stream,
      schedule_lib.BatchSchedule.constant(size),
      layouts,
      content=_CONTENT,
      prefetch=wiring.prefetch(options),
      restart_on_iter=True,
      pad_after_end=options.generate_padding_batch_eval,
  )


DATASET_TYPE = registry.DatasetType(make_synthetic_train_iterator, make_synthetic_eval_iterator)

_CONTENT = steps.Content(ngram_filter=False)


def _stream(
    options: config_lib.Options, instances: int, part: str, num_epochs: int | None
) -> tuple[SyntheticSource, stream_lib.Stream]:
  vocab_size = options.vocab_size or 256
  seed = options.data_shuffle_seed + (1 << 32 if part == "eval" else 0)
  source = SyntheticSource(options.max_target_length, vocab_size, seed)
  stream = stream_lib.Stream(
      fingerprint=f"synthetic {part}, vocabulary of {vocab_size}",
      sequence_length=options.max_target_length,
      order=permutations.SequentialOrder(num_instances=instances, seed=seed),
      split=split_lib.Split(num_windows=instances, chunk_size=1),
      num_epochs=num_epochs,
  )
  return source, stream
