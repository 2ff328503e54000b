"""`dataset_type=olmo_documents`: the documents of an OLMo corpus, packed into rows or one per row.

With `olmo_shard=batch` and `olmo_packing=planned` (or `none`, if long documents are not split), the
position alone determines the row. Then all guarantees of `olmo_grain` hold: the same stream on any
number of hosts, a state of one integer, and resuming with a different batch size. Otherwise, a
Grain pipeline makes the rows, as in `make_grain_llm_iterator`.
"""

from __future__ import annotations

from typing import Any

import jax

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import joined as joined_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.devices import collectives
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from maxtext_olmo.loader import document_streams
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import resume
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.loader import wiring
from maxtext_olmo.rows import staged


def make_documents_train_iterator(config: Any, global_mesh: jax.sharding.Mesh) -> Any:
  """Returns the train iterator, at the step where the run resumes."""
  options = config_lib.Options.read(config)
  source = open_documents(options.olmo_index_path, options.olmo_documents_path, options)
  if not options.random_access_documents:
    return _streaming(options, global_mesh, source)
  stages = stage_policy(options, source)
  stream = stages.stream(stages.beginning)
  joined = joined_lib.join([source.index, *stages.corpora.others.values()])
  several = len(joined.indexes) > 1
  files = source.files
  if several:
    files = token_files.TokenFiles.of_index(
        joined.index, path_remap=options.path_remap, storage=files.storage
    )
  return wiring.train_iterator(
      options,
      global_mesh,
      staged.StagedRows(stream.source, joined, stream.source.segment_rule),
      wiring.token_reader(options, files),
      stream,
      index=source.index,
      stages=stages,
      joined=joined if several else None,
  )


def make_documents_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns an iterator over one pass of the evaluation index's documents, from the beginning."""
  options = config_lib.Options.read(config)
  source = open_documents(options.olmo_eval_index_path, "", options)
  packing = options.olmo_packing if options.random_access_documents else "planned"
  options = options.replace(olmo_packing=packing, olmo_mixture={})
  stream = document_streams.make_stream(options, source, "sequential", 1)
  reader = wiring.token_reader(options, source.files)
  return wiring.eval_iterator(
      options, global_mesh, stream.source, reader, stream, index=source.index
  )


DATASET_TYPE = registry.DatasetType(make_documents_train_iterator, make_documents_eval_iterator)


def open_documents(
    index_path: str, documents_path: str, options: config_lib.Options
) -> source_lib.OlmoDocumentSource:
  """Returns the documents of an index; builds the document index if there is none.

  Process 0 builds it before the other processes try to open it; see `wiring.open_documents`.
  """
  index, storage = collectives.run_on_all_processes(
      lambda: wiring.open_whole_files(index_path, options), "opening the corpus"
  )
  path = documents_path or documents_lib.default_path(index_path)
  documents = wiring.open_documents(index, path, "auto", options, storage)
  if not documents.num_documents:
    raise errors.CorpusError(
        f"The index {index_path} has no documents: all its files are empty. Build an index of"
        " other files."
    )
  return source_lib.OlmoDocumentSource(
      index,
      documents,
      path_remap=options.path_remap,
      storage=storage,
      vocab_size=options.vocab_size,
  )


def stage_policy(
    options: config_lib.Options, source: source_lib.OlmoDocumentSource
) -> stages_lib.StagePolicy:
  """Returns the stage policy of the options, with the documents of all stages opened."""
  policy = document_streams.policy_of(
      options, source, lambda path: open_documents(path, "", options)
  )
  collectives.check_equal({"olmo_stages": repr(policy.requests)})
  return policy


def _streaming(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    source: source_lib.OlmoDocumentSource,
) -> Any:
  """Returns an iterator over the rows of a Grain pipeline, which have no positions."""
  schedule = options.schedule()
  base = schedule.stages[0][1]
  rows = pipeline_lib.make_grain_llm_dataset(
      jax.process_index(),
      jax.process_count(),
      source,
      base,
      options.max_target_length,
      options.order_name != "sequential",
      options.data_shuffle_seed,
      options.olmo_num_epochs or None,
      grain_packing_bin_count=options.olmo_packing_bins or None,
      shift_target=options.olmo_shift == "left",
      eod_token_id=options.olmo_eos_id,
      packing=None if options.olmo_packing == "none" else options.olmo_packing,
      shard=options.olmo_shard,
      long_documents=options.olmo_long_documents,
  )
  # Without dataset lengths, one pass over the iterator covers all epochs.
  iterator = pipeline_lib.make_grain_multihost_iterator(
      [rows],
      None,
      mesh,
      base,
      jax.process_count(),
      worker_count=max(0, options.grain_worker_count),
      worker_buffer_size=max(1, options.grain_per_worker_buffer_size),
      drop_remainder=False,
      batch_class=dict,
      use_thread_prefetch=options.grain_worker_count <= 0,
      batch_rampup_factors={step: size / base for step, size in schedule.stages},
      data_sharding=options.data_sharding or None,
  )
  resume.restore_latest(options, iterator)
  return iterator
