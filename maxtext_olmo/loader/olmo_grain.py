"""`dataset_type=olmo_grain`: batches of the instances of an OLMo corpus, in a chosen order."""

from __future__ import annotations

import copy
from typing import Any

import grain
import jax
from absl import logging

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import joined as joined_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import verify
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import label_masks
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import stage_config
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import sampler as sampler_lib
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import reader
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import segments
from maxtext_olmo.rows import staged
from maxtext_olmo.rows import windows
from maxtext_olmo.rows import workers

_Opened = tuple[index_lib.OlmoNpyIndex, storage_lib.Storage]


def make_olmo_grain_train_iterator(
    config: Any, global_mesh: jax.sharding.Mesh, process_indices: Any = None
) -> iterator_lib.BatchIterator:
  """Returns the train iterator, at the step where the run resumes.

  Args:
    config: Any object with the data keys as attributes.
    global_mesh: The trainer's mesh.
    process_indices: Not used; MaxText passes it, but the mesh decides which rows a process loads.

  Example:
    >>> import tempfile
    >>> import jax
    >>> import numpy as np
    >>> import maxtext_olmo
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.arange(400, dtype="uint32").tofile(f"{folder.name}/part.npy")
    >>> index = maxtext_olmo.build_index(
    ...     [("part.npy", "web")], 16, tokenizer="none", base=folder.name)
    >>> index.save(f"{folder.name}/index.json")
    >>> config = maxtext_olmo.get_config()
    >>> config.update(olmo_index_path=f"{folder.name}/index.json", max_target_length=16)
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    >>> train = make_olmo_grain_train_iterator(config, mesh)
    >>> next(train)["targets"].shape
    (8, 16)
    >>> train.close()
    >>> folder.cleanup()
  """
  del process_indices
  options = config_lib.Options.read(config)
  index, storage = collectives.run_on_all_processes(
      lambda: _open_index(options.olmo_index_path, options), "opening the corpus"
  )
  return _train(options, global_mesh, index, storage)


def make_olmo_grain_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh, process_indices: Any = None
) -> iterator_lib.BatchIterator:
  """Returns an iterator over the held-out instances or the evaluation index, from the beginning.

  Args:
    config: Any object with the data keys as attributes.
    global_mesh: The trainer's mesh.
    process_indices: Not used, as in `make_olmo_grain_train_iterator`.

  Raises:
    ConfigError: The config is invalid, or has no evaluation data.

  Example:
    >>> import tempfile
    >>> import jax
    >>> import numpy as np
    >>> import maxtext_olmo
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.arange(400, dtype="uint32").tofile(f"{folder.name}/part.npy")
    >>> index = maxtext_olmo.build_index(
    ...     [("part.npy", "web")], 16, tokenizer="none", base=folder.name)
    >>> index.save(f"{folder.name}/index.json")
    >>> config = maxtext_olmo.get_config()
    >>> config.update(olmo_index_path=f"{folder.name}/index.json", max_target_length=16)
    >>> config.olmo_eval_instances = 10
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    >>> evaluation = make_olmo_grain_eval_iterator(config, mesh)
    >>> len(list(evaluation))  # 10 instances in batches of 8 rows.
    2
    >>> evaluation.close()
    >>> folder.cleanup()
  """
  del process_indices
  options = config_lib.Options.read(config)
  if not (options.olmo_eval_index_path or options.olmo_eval_instances):
    raise errors.ConfigError("Evaluation needs olmo_eval_index_path or olmo_eval_instances.")
  path = options.olmo_eval_index_path or options.olmo_index_path
  index, storage = collectives.run_on_all_processes(
      lambda: _open_index(path, options), "opening the evaluation corpus"
  )
  return _eval(options, global_mesh, index, storage)


def _make_both(
    config: Any, mesh: jax.sharding.Mesh
) -> tuple[iterator_lib.BatchIterator, iterator_lib.BatchIterator]:
  """Returns both iterators; if they share an index, its files are checked only once."""
  options = config_lib.Options.read(config)

  def open_indexes() -> tuple[_Opened, _Opened]:
    train = index, storage = _open_index(options.olmo_index_path, options)
    other = options.olmo_eval_index_path
    return train, _open_index(other, options) if other else (index, copy.copy(storage))

  opened, eval_opened = collectives.run_on_all_processes(open_indexes, "opening the corpus")
  train = _train(options, mesh, *opened)
  try:
    return train, _eval(options, mesh, *eval_opened)
  except BaseException:
    train.close()
    raise


DATASET_TYPE = registry.DatasetType(
    make_olmo_grain_train_iterator, make_olmo_grain_eval_iterator, _make_both
)


def _train(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    index: index_lib.OlmoNpyIndex,
    storage: storage_lib.Storage,
) -> iterator_lib.BatchIterator:
  stages = collectives.run_on_all_processes(
      lambda: stage_config.policy_of(options, index, lambda path: _open(path, options, storage)),
      "opening the stages",
  )
  collectives.check_equal({"olmo_stages": repr(stages.requests)})
  stream = collectives.run_on_all_processes(
      lambda: stages.stream(stages.beginning), "opening the order"
  )
  if options.olmo_mixture:
    _say_left_out(index, stream)
  corpus = corpus_change.CorpusPolicy(
      index,
      options.olmo_allow_corpus_change,
      options.checkpoint_dir if options.enable_checkpointing else "",
  )
  joined = joined_lib.join([index, *stages.corpora.others.values()])
  rows: Any
  rows, reader_ = _rows(index, options, storage)
  if len(joined.indexes) > 1:
    rows = staged.StagedRows(rows, joined, rows.segment_rule)
    reader_ = _reader(joined.index, options, storage)
  return wiring.train_iterator(
      options,
      mesh,
      rows,
      reader_,
      stream,
      index=index,
      corpus=corpus,
      stages=stages,
      joined=joined if len(joined.indexes) > 1 else None,
  )


def _eval(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    index: index_lib.OlmoNpyIndex,
    storage: storage_lib.Storage,
) -> iterator_lib.BatchIterator:
  held_out = None if options.olmo_eval_index_path else options.olmo_eval_instances
  stream = stream_lib.eval_stream(index, held_out_instances=held_out)
  if options.olmo_eval_index_path:  # Label masks belong to the training index.
    options = options.replace(olmo_label_masks=())
  return wiring.eval_iterator(options, mesh, *_rows(index, options, storage), stream, index=index)


def make_olmo_grain_data_loader(
    index: index_lib.OlmoNpyIndex,
    *,
    seed: int,
    batch_size: int,
    shard_index: int,
    shard_count: int,
    apply_ngram_filter: bool = True,
    shift_to_inputs_targets: bool = True,
    path_remap: dict[str, str] | None = None,
    grain_worker_count: int = 0,
    grain_worker_buffer_size: int = 1,
    initial_step: int = 0,
    order: str = "feistel",
    order_cache_dir: str | None = None,
) -> grain.DataLoader:
  """Returns a `grain.DataLoader` over an OLMo corpus, with the same batches for any worker count.

  Host h of H gets rows [h · batch_size, (h + 1) · batch_size) of global batches of H · batch_size
  rows, in the same order as `create_data_iterator`. To resume with any number of workers and hosts,
  use `initial_step`; Grain's own state requires the same number of workers.

  Args:
    index: The corpus.
    seed: Seed of the order.
    batch_size: Rows per batch on this host.
    shard_index: Index of this host among the hosts that load data.
    shard_count: Number of hosts that load data.
    apply_ngram_filter: Whether to mask rows with long repetitions out of the loss.
    shift_to_inputs_targets: Whether to return inputs and targets; otherwise, unshifted tokens.
    path_remap: Path prefixes of token files, mapped to their replacements.
    grain_worker_count: Worker processes; 0 reads in this process.
    grain_worker_buffer_size: Batches that each worker prepares in advance.
    initial_step: Number of records (not steps) that this host has consumed, which is the number of
      steps done times `batch_size`.
    order: Name of the order; see `OlmoIndexSampler`.
    order_cache_dir: Directory that stores the `olmo_core` and `maxtext` orders; by default, the
      user's cache directory.

  Example:
    >>> import tempfile
    >>> import numpy as np
    >>> import maxtext_olmo
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.arange(400, dtype="uint32").tofile(f"{folder.name}/part.npy")
    >>> index = maxtext_olmo.build_index(
    ...     [("part.npy", "web")], 16, tokenizer="none", base=folder.name)
    >>> loader = make_olmo_grain_data_loader(
    ...     index, seed=0, batch_size=4, shard_index=0, shard_count=2)
    >>> next(iter(loader))["inputs"].shape  # This host's rows of a global batch of 8.
    (4, 16)
    >>> folder.cleanup()
  """
  operations: list[Any] = []
  if apply_ngram_filter:
    operations.append(repetition.NgramFilterTransform())
  if shift_to_inputs_targets:
    operations.append(batch_lib.ShiftToInputsTargets())
  operations.append(grain.transforms.Batch(batch_size=batch_size, drop_remainder=True))
  sampler = sampler_lib.OlmoIndexSampler(
      total_instances=index.total_instances,
      seed=seed,
      shard_index=shard_index,
      shard_count=shard_count,
      initial_step=initial_step,
      order=order,
      batch_size=batch_size,
      worker_count=grain_worker_count,
      chunk_size=index.chunk_size,
      cache_dir=order_cache_dir,
  )
  if grain_worker_count > 0:
    workers.parse_grain_flags()
  return grain.DataLoader(
      data_source=source_lib.OlmoNpyDataSource(index, path_remap=path_remap),
      sampler=sampler,
      operations=operations,
      # The sampler shards the data; Grain must not shard it a second time.
      shard_options=grain.sharding.NoSharding(),
      worker_count=grain_worker_count,
      worker_buffer_size=grain_worker_buffer_size,
  )


def _open_index(path: str, options: config_lib.Options) -> _Opened:
  """Loads an index, adapts it to the run's sequence length, and checks the sizes of its files.

  Returns:
    The index, and its storage, which refuses any file that is replaced after this check.
  """
  storage = storage_lib.open_storage(
      options.store_options, max_open_files=options.olmo_max_open_files or None
  )
  return _open(path, options, storage), storage


def _open(
    path: str, options: config_lib.Options, storage: storage_lib.Storage
) -> index_lib.OlmoNpyIndex:
  index = load_index(path, options)
  verify.check_sizes(index, path_remap=options.path_remap, storage=storage)
  return index


def load_index(path: str, options: config_lib.Options) -> index_lib.OlmoNpyIndex:
  """Loads an index and adapts it to the run's sequence length; opens no token file."""
  index = index_lib.load_index(path)
  if index.sequence_length != options.max_target_length:
    index = index.with_sequence_length(options.max_target_length)
  if index.total_instances == 0:
    raise errors.CorpusError(
        f"The index {path} has no instances: no file holds {index.window} tokens. Build the index"
        " with a shorter --sequence-length, or add data."
    )
  return index


def _rows(
    index: index_lib.OlmoNpyIndex, options: config_lib.Options, storage: storage_lib.Storage
) -> tuple[windows.WindowRows, reader.FileReader]:
  """Returns the rows of an index, and their reader."""
  return window_rows(index, options), _reader(index, options, storage)


def window_rows(index: index_lib.OlmoNpyIndex, options: config_lib.Options) -> windows.WindowRows:
  """Returns the instances of an index as rows."""
  rule = segments.SegmentRule()
  if options.olmo_document_mask:
    rule = segments.SegmentRule("after_eos", options.olmo_eos_id, options.olmo_bos_id)
  return windows.WindowRows(index, rule, label_masks.mask_paths(options, index))


def _reader(
    index: index_lib.OlmoNpyIndex, options: config_lib.Options, storage: storage_lib.Storage
) -> reader.FileReader:
  files = token_files.TokenFiles.of_index(index, path_remap=options.path_remap, storage=storage)
  return wiring.token_reader(options, files)


def _say_left_out(index: index_lib.OlmoNpyIndex, stream: stream_lib.Stream) -> None:
  order = stream.order
  mixed = {member.label for member in getattr(order, "members", ())}
  left_out = sorted({entry.label for entry in index.files if entry.n_instances} - mixed)
  if left_out:
    logging.warning(
        "olmo_mixture leaves out %d labels, which are never read: %s%s. Add '*' to include all"
        " other labels.",
        len(left_out),
        ", ".join(left_out[:10]),
        ", …" if len(left_out) > 10 else "",
    )
