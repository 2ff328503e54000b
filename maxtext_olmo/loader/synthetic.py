"""`dataset_type=synthetic`: random tokens without files, from the same iterator as real data.

Use it to measure a trainer by itself, or to try out a mesh. Instance i is a pure function of the
seed and i, so a resumed run has the same tokens on any number of hosts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from maxtext_olmo import config as config_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source

_TRAIN_INSTANCES = 1 << 30
_EVAL_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class SyntheticRecords:
  """Records of uniformly random tokens, generated on access by record number."""

  length: int
  vocab_size: int
  seed: int

  def __getitem__(self, number: int) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(key=[self.seed, number]))
    return {"inputs": rng.integers(self.vocab_size, size=self.length, dtype=np.uint32)}


@dataclasses.dataclass(frozen=True)
class SyntheticRows(row_source.RowSourceDefaults):
  """Rows of one record each: row i is the whole of record i."""

  row_length: int
  count: int
  fingerprint: str

  def num_rows(self, epoch: int) -> int:
    """Returns the number of records."""
    del epoch
    return self.count

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    """Returns one part for each record."""
    del epoch
    lengths = np.full(len(rows), self.row_length)
    return parts_lib.Parts.one_per_row(rows, np.zeros_like(rows), lengths)


def make_synthetic_train_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns an endless iterator over batches of random tokens."""
  options = config_lib.Options.read(config)
  made = _stream(options, _TRAIN_INSTANCES, "train", None)
  return wiring.train_iterator(options, global_mesh, *made, content=_CONTENT)


def make_synthetic_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns an iterator over a few batches of random tokens, the same each time."""
  options = config_lib.Options.read(config)
  made = _stream(options, _EVAL_BATCHES * options.global_batch_size_to_eval_on, "eval", 1)
  return wiring.eval_iterator(options, global_mesh, *made, content=_CONTENT)


DATASET_TYPE = registry.DatasetType(make_synthetic_train_iterator, make_synthetic_eval_iterator)

_CONTENT = content_lib.Content(ngram_filter=False)


def _stream(
    options: config_lib.Options, instances: int, part: str, num_epochs: int | None
) -> tuple[SyntheticRows, reader_lib.RecordReader, stream_lib.Stream]:
  vocab_size = options.vocab_size or 256
  seed = options.data_shuffle_seed + (1 << 32 if part == "eval" else 0)
  length = options.max_target_length
  fingerprint = f"synthetic {part}, vocabulary of {vocab_size}"
  records = SyntheticRecords(length, vocab_size, seed)
  order = permutations.SequentialOrder(num_instances=instances, seed=seed)
  split = stream_lib.Split(num_windows=instances, chunk_size=1)
  stream = stream_lib.Stream(fingerprint, length, order, split, num_epochs=num_epochs)
  source = SyntheticRows(length, instances, fingerprint)
  return source, reader_lib.RecordReader(records, np.uint32), stream
