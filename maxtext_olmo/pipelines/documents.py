"""`dataset_type=olmo_documents`: the documents of an OLMo corpus, packed into rows or one to a row.

With `olmo_packing=planned` (or `none` where long documents are not split) and `olmo_shard=batch`, a row is a function of
its position, and all that holds for `olmo_grain` holds here: the same stream on any number of hosts, a state of one
integer, resumes with other batch sizes. The other packings stream, as Grain packs, through `make_grain_llm_iterator`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import grain
import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from maxtext_olmo import errors
from maxtext_olmo.batches import plan as plan_lib
from maxtext_olmo.batches import row_steps
from maxtext_olmo.batches import rows as rows_lib
from maxtext_olmo.batches import steps
from maxtext_olmo.corpus import document_index
from maxtext_olmo.corpus import document_source
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import verify
from maxtext_olmo.devices import sharding
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.pipelines import iterator as iterator_lib
from maxtext_olmo.pipelines import llm
from maxtext_olmo.pipelines import llm_rows
from maxtext_olmo.pipelines import options as options_lib
from maxtext_olmo.pipelines import prefetch
from maxtext_olmo.pipelines import registry
from maxtext_olmo.pipelines import resume
from maxtext_olmo.pipelines import row_stream

_PLANNED_BINS = 1024


@dataclasses.dataclass(frozen=True)
class RowStream:
  """Rows by position, as the state and the resume see them."""

  source: rows_lib.RowSource
  sequence_length: int
  fingerprint: str
  order: str
  seed: int

  @property
  def num_positions(self) -> int | None:
    """Rows until the end; None where there is none, or where it has not been counted yet."""
    return self.source.num_rows

  def identity(self) -> dict[str, Any]:
    """What decides which row comes at which position."""
    return {"fingerprint": self.fingerprint, "order": self.order, "seed": self.seed}


class DocumentIterator(iterator_lib.OlmoIterator):
  """`OlmoIterator` over rows of documents."""

  _stream: Any

  def __next__(self) -> dict[str, jax.Array]:
    self._stream.source.count_ahead(self.position)
    return super().__next__()

  def __len__(self) -> int:
    """Steps to the end of the data; TypeError where there is none, or it has not been counted yet."""
    source = self._stream.source
    if source.endless:
      raise TypeError("This stream has no end (olmo_num_epochs=0), so it has no length.")
    source.count_ahead(self.position)
    if source.num_rows is None:
      raise TypeError(
          "The packing plan is still being counted, so the length is not known yet; ask again later."
      )
    step, schedule = self._beginning
    return len(self._dataset(step, schedule))

  def instance_ids(self, step: int) -> np.ndarray:
    """Rows of documents are of no instance."""
    raise errors.ConfigError(
        f"The rows of step {step} are made of documents, not of instances: olmo_documents has no instance ids."
    )

  def close(self) -> None:
    self._stream.source.close()
    super().close()

  def _dataset(self, step: int, schedule: schedule_lib.BatchSchedule) -> Any:
    rows = {size: layout.rows for size, layout in self._layouts.items()}
    return row_steps.RowStepDataset(
        self._stream.source,
        schedule,
        rows,
        length=self._stream.sequence_length,
        first_step=step,
    )

  def _open(self) -> grain.DatasetIterator:
    workers = max(0, self._prefetch.workers)
    ahead = self._prefetch.per_worker if workers else self._prefetch.batches
    dataset = self._dataset(self._step, self._schedule)
    return iter(prefetch.PrefetchedDataset(dataset, workers=workers, ahead=ahead))


def make_documents_train_iterator(config: Any, global_mesh: jax.sharding.Mesh) -> Any:
  """The train iterator, at the step where the run goes on."""
  options = options_lib.Options.read(config)
  source = open_documents(options.olmo_index_path, options.olmo_documents_path, options)
  if not options.random_access_documents:
    return _streaming(options, global_mesh, source)
  stream = _stream(options, source, options.order_name, options.olmo_num_epochs or None)
  schedule = options.schedule()
  constant = not options.olmo_batch_schedule
  layouts = {
      size: _layout(options, global_mesh, options.global_batch_size_to_load if constant else size)
      for size in schedule.sizes
  }
  content = _content(options)
  resume.check_agreement({**stream.identity(), "stages": [list(s) for s in schedule.stages]})
  step, schedule = resume.find_start(options, stream, schedule, content)  # type: ignore[arg-type]
  iterator = DocumentIterator(
      source,  # type: ignore[arg-type]
      stream,  # type: ignore[arg-type]
      schedule,
      layouts,
      content=content,
      prefetch=_prefetch(options),
      first_step=step,
      pad_after_end=options.generate_padding_batch_train,
  )
  logging.info(
      "olmo_documents: step %d at position %d of the rows of %d documents, %s",
      iterator.step,
      iterator.position,
      len(source),
      ", ".join(f"{k} {v}" for k, v in stream.identity().items()),
  )
  return iterator


def make_documents_eval_iterator(config: Any, global_mesh: jax.sharding.Mesh) -> DocumentIterator:
  """One pass over the documents of another index, always from its beginning."""
  options = options_lib.Options.read(config)
  source = open_documents(options.olmo_eval_index_path, "", options)
  packing = options.olmo_packing if options.random_access_documents else "planned"
  options = dataclasses.replace(options, olmo_packing=packing, olmo_mixture={})
  stream = _stream(options, source, "sequential", 1)
  size = options.global_batch_size_to_eval_on
  return DocumentIterator(
      source,  # type: ignore[arg-type]
      stream,  # type: ignore[arg-type]
      schedule_lib.BatchSchedule.constant(size),
      {size: _layout(options, global_mesh, options.global_batch_size_to_load_eval)},
      content=_content(options),
      prefetch=_prefetch(options),
      restart_on_iter=True,
      pad_after_end=options.generate_padding_batch_eval,
  )


DATASET_TYPE = registry.DatasetType(make_documents_train_iterator, make_documents_eval_iterator)


def open_documents(
    index_path: str, documents_path: str, options: options_lib.Options
) -> document_source.OlmoDocumentSource:
  """The documents of an index; they are found now where that has not been done, by process 0 before the others look."""
  index = index_lib.load_index(index_path)
  verify.check_sizes(index, path_remap=options.path_remap)
  path = documents_path or document_index.default_path(index_path)

  def build() -> None:
    if not os.path.exists(path):
      logging.info("Finding the documents of %s, once, into %s", index_path, path)
      document_index.build_documents(
          index, path, options.olmo_eos_id, path_remap=options.path_remap, progress=True
      )

  failed = None
  try:
    if jax.process_index() == 0:
      build()
  except (errors.MaxtextOlmoError, OSError) as error:
    failed = error
  if jax.process_count() > 1:
    # The others wait here, and none is left behind where it fails.
    others_failed = bool(multihost_utils.broadcast_one_to_all(np.int32(failed is not None)))
    if others_failed and failed is None:
      raise errors.CorpusError(
          f"Process 0 could not find the documents of {index_path}; see its log."
      )
  if failed is not None:
    raise failed
  build()  # on a file system that process 0 does not share
  documents = document_index.load_documents(path, index, options.olmo_eos_id)
  if not documents.num_documents:
    raise errors.CorpusError(f"The index {index_path} has no document.")
  return document_source.OlmoDocumentSource(
      index,
      documents,
      path_remap=options.path_remap,
      max_open_files=options.olmo_max_open_files,
      vocab_size=options.vocab_size,
  )


def _stream(
    options: options_lib.Options,
    source: document_source.OlmoDocumentSource,
    order: str,
    num_epochs: int | None,
) -> RowStream:
  """All documents in one order, or those of each label in one of their own, mixed."""
  if not options.olmo_mixture:
    ranges = mixture_lib.Ranges([(0, len(source))])
    rows = _rows(options, source, ranges, order, options.data_shuffle_seed, num_epochs)
    name = order
  else:
    rows, name = _mixed_rows(options, source, order)
  kind = f"{options.olmo_packing} rows of {options.max_target_length}"
  if options.olmo_packing == "planned":
    kind += f", bins {options.olmo_packing_bins or _PLANNED_BINS}"
  return RowStream(
      source=rows,
      sequence_length=options.max_target_length,
      fingerprint=source.index.fingerprint,
      order=f"{name}, {kind}, long documents {options.olmo_long_documents}, EOS {options.olmo_eos_id}",
      seed=options.data_shuffle_seed,
  )


def _mixed_rows(
    options: options_lib.Options, source: document_source.OlmoDocumentSource, order: str
) -> tuple[rows_lib.RowSource, str]:
  packed = options.olmo_packing == "planned"
  ranges = {label: mixture_lib.Ranges(parts) for label, parts in source.labels().items()}
  # Rows of a plan are full, so shares of tokens are shares of rows; unpacked, a row is a document.
  sizes = dict.fromkeys(ranges, 0)
  for entry in source.index.files:
    sizes[entry.label] += entry.n_tokens
  if not packed:
    sizes = {label: len(part) for label, part in ranges.items()}
  unit = options.olmo_mixture_unit
  values = mixture_lib.share_values(options.olmo_mixture, sizes, unit)
  weights = [value * sizes[label] if unit == "epochs" else value for label, value in values.items()]
  members = [
      _rows(
          options,
          source,
          ranges[label],
          order,
          mixture_lib.member_seed(options.data_shuffle_seed, label),
          None,
      )
      for label in values
  ]
  shares = ", ".join(f"{label}={float(value):.12g}" for label, value in values.items())
  return rows_lib.MixedRows(members, weights), f"{order} mixture by {unit} ({shares})"


def _rows(
    options: options_lib.Options,
    source: document_source.OlmoDocumentSource,
    ranges: mixture_lib.Ranges,
    order_name: str,
    seed: int,
    num_epochs: int | None,
) -> rows_lib.RowSource:
  order = mixture_lib.RangesOrder(ranges, order_name, seed)
  length = options.max_target_length
  shift = rows_lib.Shift(options.olmo_shift, options.olmo_eos_id)
  if options.olmo_packing == "none":
    documents = grain.MapDataset.source(source)
    dataset = (
        rows_lib.OrderedDataset(documents, order, num_epochs)
        .map(row_stream.ToRecord())
        .map(row_stream.ToRow(length, options.olmo_long_documents, True, shift))
    )
    return rows_lib.MapRows(dataset, len(ranges), length)
  bins = options.olmo_packing_bins or _PLANNED_BINS
  plan = plan_lib.PackingPlan(
      source.lengths,
      order,
      identity=f"{source!r}, {len(ranges)} of them",
      row_length=length,
      window=llm_rows.window_of(source, len(source), bins, length),
      long_documents=options.olmo_long_documents,
      counts_path=source.documents.path,
      writes_counts=jax.process_index() == 0,
  )
  return rows_lib.PlannedRows(source, plan, length, shift=shift, num_epochs=num_epochs)


def _streaming(
    options: options_lib.Options,
    mesh: jax.sharding.Mesh,
    source: document_source.OlmoDocumentSource,
) -> Any:
  """Rows packed as they come, or of each host's own documents; the iterator's state says where it is."""
  schedule = options.schedule()
  base = schedule.stages[0][1]
  return llm.make_grain_llm_iterator(
      jax.process_index(),
      jax.process_count(),
      mesh,
      source,
      base,
      options.max_target_length,
      options.order_name != "sequential",
      options.data_shuffle_seed,
      options.olmo_num_epochs or None,
      grain_packing_bin_count=options.olmo_packing_bins or None,
      shift_target=options.olmo_shift == "left",
      eod_token_id=options.olmo_eos_id,
      worker_count=max(0, options.grain_worker_count),
      worker_buffer_size=max(1, options.grain_per_worker_buffer_size),
      drop_remainder=False,
      batch_class=dict,
      use_thread_prefetch=options.grain_worker_count <= 0,
      batch_rampup_factors={step: size / base for step, size in schedule.stages},
      packing=None if options.olmo_packing == "none" else options.olmo_packing,
      shard=options.olmo_shard,
      long_documents=options.olmo_long_documents,
      data_sharding=options.data_sharding or None,
  )


def _layout(
    options: options_lib.Options, mesh: jax.sharding.Mesh, size: int
) -> sharding.BatchLayout:
  spec = sharding.partition_spec(mesh, options.data_sharding)
  return sharding.BatchLayout(mesh, spec, size, options.max_target_length)


def _content(options: options_lib.Options) -> steps.Content:
  return steps.Content(
      vocab_size=options.vocab_size, ngram_filter=False, document_eos_id=options.olmo_eos_id
  )


def _prefetch(options: options_lib.Options) -> iterator_lib.Prefetch:
  return iterator_lib.Prefetch(
      workers=options.grain_worker_count,
      per_worker=max(1, options.grain_per_worker_buffer_size),
      batches=options.olmo_prefetch_batches,
  )
