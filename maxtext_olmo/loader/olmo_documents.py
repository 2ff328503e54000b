"""`dataset_type=olmo_documents`: the documents of an OLMo corpus, packed into rows or one per row.

With `olmo_packing=planned` (or `none` if long documents are not split) and `olmo_shard=batch`, a
row is a function of its position, and has all guarantees of `olmo_grain`: the same stream on any
number of hosts, a state of one integer, and resumes with other batch sizes. The other packings
stream through `make_grain_llm_iterator`, as Grain packs them.
"""

from __future__ import annotations

from typing import Any

import jax
from absl import logging

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import verify
from maxtext_olmo.devices import collectives
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import resume
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import mixture as mixture_rows
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments

_PLANNED_BINS = 1024


def make_documents_train_iterator(config: Any, global_mesh: jax.sharding.Mesh) -> Any:
  """Returns the train iterator, at the step where the run resumes."""
  options = config_lib.Options.read(config)
  source = open_documents(options.olmo_index_path, options.olmo_documents_path, options)
  if not options.random_access_documents:
    return _streaming(options, global_mesh, source)
  stream = train_stream(options, source)
  return wiring.train_iterator(
      options,
      global_mesh,
      stream.source,
      wiring.token_reader(options, source.files),
      stream,
      index=source.index,
  )


def make_documents_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns an iterator over one pass of the evaluation index's documents, from the beginning."""
  options = config_lib.Options.read(config)
  source = open_documents(options.olmo_eval_index_path, "", options)
  packing = options.olmo_packing if options.random_access_documents else "planned"
  options = options.replace(olmo_packing=packing, olmo_mixture={})
  stream = _stream(options, source, "sequential", 1)
  reader = wiring.token_reader(options, source.files)
  return wiring.eval_iterator(
      options, global_mesh, stream.source, reader, stream, index=source.index
  )


DATASET_TYPE = registry.DatasetType(make_documents_train_iterator, make_documents_eval_iterator)


def open_documents(
    index_path: str, documents_path: str, options: config_lib.Options
) -> source_lib.OlmoDocumentSource:
  """Returns the documents of an index; builds the document index if there is none.

  Process 0 builds it before the other processes look for it.
  """
  index, storage = collectives.run_on_all_processes(
      lambda: _open_index(index_path, options), "opening the corpus"
  )
  path = documents_path or documents_lib.default_path(index_path)

  def build() -> None:
    if not storage.exists(path):
      logging.info("Finding the documents of %s; the result is kept in %s", index_path, path)
      documents_lib.build_documents(
          index,
          path,
          options.olmo_eos_id,
          path_remap=options.path_remap,
          progress=True,
          storage=storage,
      )

  collectives.from_process_0(build, "finding the documents")
  # Then on each process, in case it does not share a file system with process 0.
  collectives.run_on_all_processes(build, "finding the documents")
  documents = collectives.run_on_all_processes(
      lambda: documents_lib.load_documents(path, index, options.olmo_eos_id, storage=storage),
      "opening the document index",
  )
  if not documents.num_documents:
    raise errors.CorpusError(f"The index {index_path} has no documents.")
  return source_lib.OlmoDocumentSource(
      index,
      documents,
      path_remap=options.path_remap,
      storage=storage,
      vocab_size=options.vocab_size,
  )


def _open_index(
    path: str, options: config_lib.Options
) -> tuple[index_lib.OlmoNpyIndex, storage_lib.Storage]:
  """Loads an index, and returns it with the storage that checked the sizes of its files."""
  storage = storage_lib.open_storage(
      options.store_options, max_open_files=options.olmo_max_open_files or None
  )
  index = index_lib.load_index(path, storage=storage)
  verify.check_sizes(index, path_remap=options.path_remap, storage=storage)
  return index, storage


def train_stream(
    options: config_lib.Options, source: source_lib.OlmoDocumentSource
) -> row_source.RowSequence:
  """Returns the stream of document rows that the options describe; not for streaming packings."""
  return _stream(options, source, options.order_name, options.olmo_num_epochs or None)


def _stream(
    options: config_lib.Options,
    source: source_lib.OlmoDocumentSource,
    order: str,
    num_epochs: int | None,
) -> row_source.RowSequence:
  """Returns a stream of all documents in one order, or a mixture with one order per label."""
  seed = options.data_shuffle_seed
  kind = f"{options.olmo_packing} rows of {options.max_target_length}"
  if options.olmo_packing == "planned":
    kind += f", bins {options.olmo_packing_bins or _PLANNED_BINS}"
  kind += f", long documents {options.olmo_long_documents}, EOS {options.olmo_eos_id}"
  if options.olmo_mixture:
    mixed, name = _mixed_rows(options, source, order)
    return row_source.RowSequence(
        mixed, name=f"{name}, {kind}", seed=seed, documents=source.documents.checksum
    )
  ranges = mixture_lib.Ranges([(0, len(source))])
  return _rows(options, source, ranges, order, seed, num_epochs, name=f"{order}, {kind}")


def _mixed_rows(
    options: config_lib.Options, source: source_lib.OlmoDocumentSource, order: str
) -> tuple[mixture_rows.MixedRows, str]:
  packed = options.olmo_packing == "planned"
  ranges = {label: mixture_lib.Ranges(parts) for label, parts in source.labels().items()}
  # Planned rows are full, so shares of tokens are shares of rows; unpacked, a row is a document.
  sizes = dict.fromkeys(ranges, 0)
  for entry in source.index.files:
    sizes[entry.label] += entry.n_tokens
  if not packed:
    sizes = {label: len(part) for label, part in ranges.items()}
  unit = options.olmo_mixture_unit
  values = mixture_lib.share_values(options.olmo_mixture, sizes, unit)
  weights = [value * sizes[label] if unit == "epochs" else value for label, value in values.items()]
  members = []
  for label in values:
    seed = mixture_lib.member_seed(options.data_shuffle_seed, label)
    members.append(_rows(options, source, ranges[label], order, seed, None, name=label))
  shares = ", ".join(f"{label}={float(value):.12g}" for label, value in values.items())
  return mixture_rows.MixedRows(members, weights), f"{order} mixture by {unit} ({shares})"


def _rows(
    options: config_lib.Options,
    source: source_lib.OlmoDocumentSource,
    ranges: mixture_lib.Ranges,
    order_name: str,
    seed: int,
    num_epochs: int | None,
    *,
    name: str,
) -> row_source.RowSequence:
  """Returns the rows of the documents in some ranges."""
  order = mixture_lib.RangesOrder(ranges, order_name, seed)
  length = options.max_target_length
  rule = segments.SegmentRule("part", options.olmo_eos_id)
  if options.olmo_packing == "none":
    rows: Any = document_rows.DocumentRows(
        source.documents,
        length,
        options.olmo_long_documents,
        rule,
    )
    return row_source.RowSequence(
        rows,
        name=name,
        seed=seed,
        num_epochs=num_epochs,
        order=order,
        documents=source.documents.checksum,
    )
  bins = options.olmo_packing_bins or _PLANNED_BINS
  plan = planned.PackingPlan(
      source.lengths,
      order,
      identity=f"{source!r}, {source.documents.checksum}, {len(ranges)} of them",
      row_length=length,
      window=row_dataset.window_of(source, len(source), bins, length),
      long_documents=options.olmo_long_documents,
      locate=source.documents.locate,
      counts_path=source.documents.path,
      writes_counts=jax.process_index() == 0,
  )
  rows = planned.PlannedRows(plan, length, source.index.fingerprint, rule, source.documents)
  return row_source.RowSequence(
      rows, name=name, seed=seed, num_epochs=num_epochs, documents=source.documents.checksum
  )


def _streaming(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    source: source_lib.OlmoDocumentSource,
) -> Any:
  """Returns an iterator over rows that are packed as they stream, or per host."""
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
  # Without lengths, all epochs come in one pass over the iterator.
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
