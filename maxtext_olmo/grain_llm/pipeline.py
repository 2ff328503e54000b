"""The Grain LLM iterators: batches of packed or padded rows from any sources of documents.

    make_grain_llm_dataset          documents → rows, on this host           `RowDataset`
    make_grain_multihost_iterator   rows of all datasets → global batches    `LLMIterator`
    make_grain_llm_iterator         both in one

Random-access rows (padded rows, and rows packed by a plan) stay random access after mixing and
batching: a batch is a function of its step, and the state is one number. For rows that Grain packs
as they stream, worker processes read the documents but one process packs them, so the number of
workers does not change these rows either.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import jax
from absl import logging

from maxtext_olmo.devices import layout
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.grain_llm import batches as batches_lib
from maxtext_olmo.grain_llm import iterator as iterator_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import batch
from maxtext_olmo.rows import packing as packing_lib
from maxtext_olmo.rows import workers

LOGGER = logging.get_absl_logger()

SHARDS = ("slice", "batch")


def shard_grain_dataset(
    grain_dataset: grain.MapDataset, dataloading_host_index: int, dataloading_host_count: int
) -> grain.MapDataset:
  """Returns this host's contiguous share of a dataset; the first hosts may have one element more.

  >>> list(shard_grain_dataset(grain.MapDataset.range(5), 0, 2))
  [0, 1, 2]
  """
  bounds = row_dataset.shard_bounds(
      len(grain_dataset), dataloading_host_index, dataloading_host_count
  )
  return grain_dataset.slice(slice(*bounds))


def make_grain_llm_dataset(
    dataloading_host_index: int,
    dataloading_host_count: int,
    dataset: Any,
    global_batch_size: int,
    max_target_length: int,
    shuffle: bool,
    data_shuffle_seed: int,
    num_epochs: int | None = None,
    operations: Sequence[Any] | None = None,
    grain_packing: bool = False,
    grain_packing_bin_count: int | None = None,
    shift: bool = True,
    shift_target: bool = True,
    eod_token_id: int = 0,
    apply_padding: bool = True,
    *,
    packing: str | None = None,
    shard: str = "slice",
    long_documents: str = "error",
    packing_counts_path: str | None = None,
) -> row_dataset.RowDataset:
  """Makes a dataset of rows for a language model from a random-access dataset of documents.

  >>> rows = make_grain_llm_dataset(
  ...     0, 1, [{"inputs": [5, 6, 0]}, {"inputs": [7, 0]}], global_batch_size=2,
  ...     max_target_length=4, shuffle=False, data_shuffle_seed=0, num_epochs=1,
  ... )
  >>> [row["inputs"].tolist() for row in rows]
  [[5, 6, 0, 0], [7, 0, 0, 0]]

  Args:
    dataloading_host_index: Index of this host, such as `jax.process_index()`.
    dataloading_host_count: Number of hosts that load data, such as `jax.process_count()`.
    dataset: Anything with `__len__` and `__getitem__` whose elements (after `operations`) have
      token ids under `inputs`.
    global_batch_size: Number of rows in a batch, over all hosts.
    max_target_length: Number of tokens per row.
    shuffle: Whether documents come in a random order, which differs in each epoch.
    data_shuffle_seed: Seed of that order.
    num_epochs: Number of epochs; None repeats without end, and 0 is one pass. Batches may span the
      end of an epoch.
    operations: Grain transforms to apply to each element first.
    grain_packing: Whether to pack several documents into a row: first-fit, unless `packing` is set.
    grain_packing_bin_count: Number of rows that are filled at the same time. The default is 1024
      for `packing="planned"`. Otherwise it is the number of rows in this host's batch or, with
      `shard="batch"`, in the global batch.
    shift: Whether targets and inputs are offset from each other by one.
    shift_target: Whether to shift targets left; otherwise, inputs are shifted right, and an EOD
      is put before them.
    eod_token_id: Token that ends a document.
    apply_padding: Whether rows that are not packed are padded to `max_target_length`.
    packing: `first_fit`, `best_fit`, `concat_then_split`, or `planned` for random access.
    shard: `slice` gives each host its own share of the documents. With `batch`, all hosts share one
      stream, and each takes its rows of every batch, so the global batch does not depend on the
      number of hosts.
    long_documents: Handling of documents longer than a row: `error`, `truncate`, or `split` them
      into pieces.
    packing_counts_path: File in which a plan stores its row counts, so that a resumed run need not
      count again; None for no file.
  """
  if grain_packing and packing is None:
    packing = "first_fit"
  _check_choice("packing", packing, (None, *packing_lib.PACKINGS))
  _check_choice("shard", shard, SHARDS)
  packing_lib.check_long_documents(long_documents)
  if max_target_length < 1 or global_batch_size < 1:
    raise ConfigError(
        f"max_target_length={max_target_length} and global_batch_size={global_batch_size} must be"
        " positive."
    )
  if num_epochs is not None and num_epochs < 0:
    raise ConfigError(f"num_epochs={num_epochs} must not be negative; None repeats without end.")
  workers.parse_grain_flags()  # The caller may use `mp_prefetch`, which reads the flags.
  documents = dataset if isinstance(dataset, grain.MapDataset) else grain.MapDataset.source(dataset)
  if not len(documents):
    raise ConfigError("The dataset is empty: there is nothing to make rows of.")
  if grain_packing_bin_count is None:
    # A stream that all hosts share must not depend on the number of hosts.
    sharing = dataloading_host_count if shard == "slice" else 1
    rows = max(1, global_batch_size // sharing)
    grain_packing_bin_count = 1024 if packing == "planned" else rows
  LOGGER.info(
      "Rows of %d tokens from %d documents, packing %s, shard %s",
      max_target_length,
      len(documents),
      packing,
      shard,
  )
  return row_dataset.RowMaker(
      dataset=dataset,
      documents=documents,
      operations=tuple(operations or ()),
      host=dataloading_host_index if shard == "slice" else 0,
      hosts=dataloading_host_count if shard == "slice" else 1,
      order="feistel" if shuffle else "sequential",
      seed=data_shuffle_seed,
      num_epochs=1 if num_epochs == 0 else num_epochs,
      length=max_target_length,
      packing=packing,
      bins=grain_packing_bin_count,
      shift=None if not shift else "left" if shift_target else "right",
      eod_token_id=eod_token_id,
      pad=apply_padding,
      shard=shard,
      long_documents=long_documents,
      counts_path=packing_counts_path,
  ).make()


def make_grain_multihost_iterator(
    grain_datasets: Any,
    dataset_lengths: int | Sequence[int] | None,
    global_mesh: jax.sharding.Mesh,
    global_batch_size: int,
    dataloading_host_count: int,
    dataset_weights: Sequence[float] | None = None,
    worker_count: int = 1,
    worker_buffer_size: int = 1,
    drop_remainder: bool = True,
    batch_class: type = batch.LLMBatch,
    reset_after_epoch: bool = False,
    use_thread_prefetch: bool = False,
    batch_rampup_factors: Mapping[int, float] | None = None,
    *,
    when_exhausted: str = "stop",
    pad_shapes: bool = False,
    data_sharding: Any = None,
) -> iterator_lib.LLMIterator:
  """Makes an iterator over global batches of rows, mixed by weight if there are several datasets.

  >>> import numpy as np
  >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
  >>> rows = make_grain_llm_dataset(
  ...     0, 1, [{"inputs": [5, 6, 0]}, {"inputs": [7, 0]}], global_batch_size=2,
  ...     max_target_length=4, shuffle=False, data_shuffle_seed=0, num_epochs=1,
  ... )
  >>> iterator = make_grain_multihost_iterator([rows], [2], mesh, 2, 1, worker_count=0)
  >>> [batch.inputs.tolist() for batch in iterator]
  [[[5, 6, 0, 0], [7, 0, 0, 0]]]

  Args:
    grain_datasets: One dataset or a list of datasets: rows from `make_grain_llm_dataset`, or any
      Grain dataset whose elements are dicts of arrays.
    dataset_lengths: Number of rows in an epoch of each dataset, over all hosts. An epoch of the mix
      ends when every dataset has been seen once. For rows that are packed as they stream, give the
      number of documents: a pass over the iterator then has at most as many batches as the
      documents could fill, and the next pass continues there. With None, a pass lasts until the
      end of the data.
    global_mesh: Mesh to shard over.
    global_batch_size: Number of rows in a batch, over all hosts.
    dataloading_host_count: Number of hosts that load data.
    dataset_weights: Weight of each dataset in the mix; equal by default.
    worker_count: Number of processes that prepare batches; 0 prepares them in this process.
    worker_buffer_size: Number of batches that each worker prepares in advance.
    drop_remainder: Whether to drop the last batch of the last epoch if it is not full; otherwise,
      it is filled with padding rows.
    batch_class: Class of a batch: `LLMBatch`, a data class with some of its fields, or `dict`.
    reset_after_epoch: Whether each epoch starts with the first row again; otherwise, it continues
      where the previous epoch stopped.
    use_thread_prefetch: Whether threads prepare batches, instead of processes.
    batch_rampup_factors: Maps a step to the factor by which the batch size is multiplied from that
      step on; factors do not accumulate.
    when_exhausted: `stop` ends the mix as soon as one dataset ends. `repeat` starts such a dataset
      again, until each dataset has ended once.
    pad_shapes: Whether arrays are padded to the largest shape that any host has for a batch.
    data_sharding: Mesh axes over which rows (and tokens) are split, as a `PartitionSpec` or a
      config's list. By default, rows are split over all axes.
  """
  _check_choice("when_exhausted", when_exhausted, ("stop", "repeat"))
  # A single dataset is put into a list, because iterating over it would give its rows.
  if isinstance(grain_datasets, (grain.MapDataset, grain.IterDataset)):
    grain_datasets = [grain_datasets]
  if isinstance(dataset_lengths, numbers.Integral):
    dataset_lengths = [int(dataset_lengths)]
  lengths = None if dataset_lengths is None else list(dataset_lengths)  # type: ignore[arg-type]
  datasets = [
      dataset.to_iter_dataset() if isinstance(dataset, grain.MapDataset) else dataset
      for dataset in grain_datasets
  ]
  weights: list[float] = [1] * len(datasets) if dataset_weights is None else list(dataset_weights)
  if not datasets or len(weights) != len(datasets) or len(lengths or weights) != len(weights):
    raise ConfigError(
        f"Every dataset needs a weight and a length: there are {len(datasets)} datasets,"
        f" {len(weights)} weights, {'no' if lengths is None else len(lengths)}"
        " lengths."
    )
  ahead = max(1, worker_buffer_size) if worker_count else 0
  if use_thread_prefetch:
    # Threads get the buffer that the processes would have had together.
    ahead = max(1, worker_buffer_size * max(1, worker_count))
  batches = batches_lib.Batches(
      datasets=datasets,
      weights=weights,
      lengths=lengths,
      mesh=global_mesh,
      global_schedule=rampup_schedule(global_batch_size, batch_rampup_factors),
      hosts=dataloading_host_count,
      workers=0 if use_thread_prefetch else worker_count,
      ahead=ahead,
      drop_remainder=drop_remainder,
      batch_class=batch_class,
      repeat=when_exhausted == "repeat",
      spec=layout.partition_spec(global_mesh, data_sharding),
  )
  # Rows without a fixed length are padded to the longest row on each host, so hosts may differ.
  pad_shapes = pad_shapes or (batches.info.length is None and dataloading_host_count > 1)
  return iterator_lib.LLMIterator(
      batches, reset_after_epoch=reset_after_epoch, pad_shapes=pad_shapes
  )


def make_grain_llm_iterator(
    dataloading_host_index: int,
    dataloading_host_count: int,
    global_mesh: jax.sharding.Mesh,
    dataset: Any,
    global_batch_size: int,
    max_target_length: int,
    shuffle: bool,
    data_shuffle_seed: int,
    num_epochs: int | None = None,
    operations: Sequence[Any] | None = None,
    grain_packing: bool = False,
    grain_packing_bin_count: int | None = None,
    shift: bool = True,
    shift_target: bool = True,
    eod_token_id: int = 0,
    worker_count: int = 1,
    worker_buffer_size: int = 1,
    apply_padding: bool = True,
    drop_remainder: bool = True,
    batch_class: type = batch.LLMBatch,
    reset_after_epoch: bool = False,
    use_thread_prefetch: bool = False,
    batch_rampup_factors: Mapping[int, float] | None = None,
    *,
    packing: str | None = None,
    shard: str = "slice",
    long_documents: str = "error",
    packing_counts_path: str | None = None,
    pad_shapes: bool = False,
    data_sharding: Any = None,
) -> iterator_lib.LLMIterator:
  """Combines `make_grain_llm_dataset` and `make_grain_multihost_iterator`; see their arguments.

  >>> import numpy as np
  >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
  >>> iterator = make_grain_llm_iterator(
  ...     0, 1, mesh, [{"inputs": [5, 6, 0]}, {"inputs": [7, 0]}], global_batch_size=2,
  ...     max_target_length=4, shuffle=False, data_shuffle_seed=0, num_epochs=1, worker_count=0,
  ... )
  >>> next(iter(iterator)).inputs.tolist()
  [[5, 6, 0, 0], [7, 0, 0, 0]]
  """
  rows = make_grain_llm_dataset(
      dataloading_host_index,
      dataloading_host_count,
      dataset,
      global_batch_size,
      max_target_length,
      shuffle,
      data_shuffle_seed,
      num_epochs,
      operations,
      grain_packing,
      grain_packing_bin_count,
      shift,
      shift_target,
      eod_token_id,
      apply_padding,
      packing=packing,
      shard=shard,
      long_documents=long_documents,
      packing_counts_path=packing_counts_path,
  )
  return make_grain_multihost_iterator(
      [rows],
      [len(dataset)],
      global_mesh,
      global_batch_size,
      dataloading_host_count,
      None,
      worker_count,
      worker_buffer_size,
      drop_remainder,
      batch_class,
      reset_after_epoch,
      use_thread_prefetch,
      batch_rampup_factors,
      pad_shapes=pad_shapes,
      data_sharding=data_sharding,
  )


def rampup_schedule(
    batch_size: int, factors: Mapping[int, float] | None
) -> schedule_lib.BatchSchedule:
  """Returns a schedule in which each factor applies from its step until the next factor's step."""
  if factors is not None and not isinstance(factors, Mapping):
    raise ConfigError(
        f"batch_rampup_factors={factors!r}: expected a dict of steps and factors, such as"
        " {1000: 2.0}. (Only olmo_batch_rampup_factors in a config takes a list of pairs.)"
    )
  stages = {0: batch_size}
  for step, factor in sorted((factors or {}).items()):
    # The float of a factor such as 488 / 56 may be slightly too small.
    size = math.floor(batch_size * factor + 1e-6)
    if step < 0 or size < 1:
      raise ConfigError(
          f"batch_rampup_factors={dict(factors or {})}: from step {step} on, a batch would have"
          f" {size} rows."
      )
    stages[step] = size
  return schedule_lib.BatchSchedule(tuple(sorted(stages.items())))


def _check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
  if value not in known:
    raise ConfigError(f"{name}={value!r} is unknown; choose from {', '.join(map(repr, known))}.")
