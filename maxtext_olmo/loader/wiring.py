"""Builds the iterators of any dataset type from its rows, its stream and the options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from maxtext_olmo import atomic
from maxtext_olmo import config as config_lib
from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import joined as joined_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spooled
from maxtext_olmo.devices import collectives
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import announce
from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import delivery
from maxtext_olmo.loader import history_file
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import restart
from maxtext_olmo.loader import resume
from maxtext_olmo.loader import run_config
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stored
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import exclude
from maxtext_olmo.rows import explain
from maxtext_olmo.rows import loss_mask
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import row_source


def train_iterator(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    source: row_source.RowSource,
    reader: reader_lib.Reader,
    stream: Any,
    *,
    content: content_lib.Content | None = None,
    index: index_lib.OlmoNpyIndex | None = None,
    corpus: corpus_change.CorpusPolicy | None = None,
    stages: stages_lib.StagePolicy | None = None,
    joined: joined_lib.Joined | None = None,
) -> iterator_lib.BatchIterator:
  """Returns the iterator over training batches, at the step where the run resumes.

  Args:
    stream: Maps positions to rows.
    content: Settings for processing tokens; by default, from the options.
    index: The corpus, for the names of its labels and documents; None if rows have none.
    corpus: Policy for a corpus that changed since the checkpoint; None requires an identical one.
    stages: Policy for stages; None for a dataset type without stages.
    joined: The files of all indexes, if the reader reads from several indexes.
  """
  content = dataclasses.replace(
      content or _content(options), label_masks=loss_mask.digest(source, reader)
  )
  named = index if joined is None else joined.index
  if options.olmo_exclude and index is not None and named is not None:
    content = dataclasses.replace(content, exclusions=_exclusions(options, index, named))
  schedule = options.schedule()
  if stream.drops_tails:
    schedule = schedule.within(stream.batch_epochs)
  layouts_by_size = layouts(options, mesh, schedule)
  _check_agreement(options, stream)
  record = content.record(source.segment_rule)
  policy = restart.RestartPolicy(
      corpus, options.resumes_whole_batches, options.skips, stages, _names(options, content)
  )
  start = resume.find_start(options, stream, schedule, record, policy)

  def prepare_directory() -> None:
    if jax.process_index() == 0 and options.enable_checkpointing and options.checkpoint_dir:
      with atomic.write_errors(options.checkpoint_dir):
        epath.Path(options.checkpoint_dir).mkdir(parents=True, exist_ok=True)
    if corpus is not None:
      corpus.keep_copy(resumed=start.history is not None)

  collectives.run_on_all_processes(prepare_directory, "preparing checkpoint_dir")
  return iterator_lib.BatchIterator(
      source,
      reader,
      start,
      layouts_by_size,
      content=content,
      prefetch=prefetch_of(options),
      pad_after_end=options.generate_padding_batch_train,
      restart=policy,
      labels=None if named is None else labels(named),
      on_start=_starter(options),
      provenance=_provenance(options, index, joined, stages),
  )


def eval_iterator(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    source: row_source.RowSource,
    reader: reader_lib.Reader,
    stream: Any,
    *,
    content: content_lib.Content | None = None,
    index: index_lib.OlmoNpyIndex | None = None,
) -> iterator_lib.BatchIterator:
  """Returns the iterator over evaluation batches, which always starts at the beginning."""
  size = options.global_batch_size_to_eval_on
  schedule = schedule_lib.BatchSchedule.constant(size).within(stream.batch_epochs)
  layout = _layout(options, mesh, options.global_batch_size_to_load_eval)
  _check_agreement(options, stream)
  return iterator_lib.BatchIterator(
      source,
      reader,
      state_lib.Start(0, schedule, stream),
      {size: layout},
      content=content or _content(options),
      prefetch=prefetch_of(options),
      restart_on_iter=True,
      pad_after_end=options.generate_padding_batch_eval,
      labels=None if index is None else labels(index),
  )


def open_whole_files(
    path: str, options: config_lib.Options
) -> tuple[index_lib.OlmoNpyIndex, storage_lib.Storage]:
  """Loads an index of whole files and checks their sizes; returns the index and its storage."""
  storage = storage_lib.open_storage(
      options.store_options, max_open_files=options.olmo_max_open_files or None
  )
  index = index_builder.load_index(path, storage=storage)
  if index.has_heads:
    raise errors.ConfigError(
        f"The index {path} is a source mixture: it uses only the beginnings of files, which may end"
        " within a document. Use dataset_type='olmo_grain'."
    )
  verify.check_sizes(index, path_remap=options.path_remap, storage=storage)
  return index, storage


def open_documents(
    index: index_lib.OlmoNpyIndex,
    path: str,
    rule: str,
    options: config_lib.Options,
    storage: storage_lib.Storage,
) -> documents_lib.DocumentIndex:
  """Opens the document index of a corpus; builds it, by reading all tokens once, if there is none.

  Process 0 builds it before the other processes try to open it. A process that shares no file
  system with process 0 builds its own. If `path` is a URL, a local copy is read.
  """

  def build() -> None:
    logging.info("Finding the documents of %s; the result is kept in %s", index.base, path)
    documents_lib.build_documents(
        index,
        path,
        options.olmo_eos_id,
        rule=rule,
        path_remap=options.path_remap,
        progress=True,
        storage=storage,
    )

  def build_if_missing() -> None:
    if not storage.exists(path):
      build()

  def load() -> documents_lib.DocumentIndex:
    return documents_lib.load_documents(
        path, index, options.olmo_eos_id, rule=rule, storage=storage, cache_dir=cache_dir(options)
    )

  def load_or_build() -> documents_lib.DocumentIndex:
    try:
      return load()
    except errors.MissingFileError:
      build()
      return load()

  collectives.from_process_0(build_if_missing, "finding the documents")
  return collectives.run_on_all_processes(load_or_build, "opening the document index")


def cache_dir(options: config_lib.Options) -> str:
  """Returns the local directory of stored orders, and of copies of objects."""
  return options.olmo_order_cache_dir or stored.default_cache_dir()


def _starter(options: config_lib.Options) -> Callable[[iterator_lib.BatchIterator], None]:
  """Returns a function that logs the start of a run and writes its history and config."""

  def record(iterator: iterator_lib.BatchIterator) -> None:
    announce.announce(options.dataset_type, iterator)
    if jax.process_index() != 0 or not (options.enable_checkpointing and options.checkpoint_dir):
      return
    history_file.record(options.checkpoint_dir, iterator.history, iterator.step)
    try:
      run_config.keep(options)
    except errors.WriteError as error:
      logging.warning(
          "The config of this run cannot be kept, so `maxtext-olmo inspect` will need --config: %s",
          error,
      )

  return record


def labels(index: index_lib.OlmoNpyIndex) -> np.ndarray:
  """Returns the label id of each file. Labels get the ids 0, 1, … in order of first appearance."""
  numbers: dict[str, int] = {}
  return np.array([numbers.setdefault(f.label, len(numbers)) for f in index.files], np.int32)


def _provenance(
    options: config_lib.Options,
    index: index_lib.OlmoNpyIndex | None,
    joined: joined_lib.Joined | None,
    stages: stages_lib.StagePolicy | None,
) -> explain.Provenance | None:
  if index is None:
    return None
  path, rule = _documents_path(options), options.documents_rule
  directory = cache_dir(options)
  if joined is None or stages is None:
    return explain.Provenance(index, path, rule, cache_dir=directory)
  others = {}
  for request in stages.requests:
    settings = request.settings
    if settings.fingerprint != index.fingerprint:
      documents = documents_lib.default_path(settings.index_path)
      numbers = joined.numbers[settings.fingerprint].tolist()
      others[settings.fingerprint] = (
          explain.Provenance(joined.indexes[settings.fingerprint], documents, cache_dir=directory),
          {number: own for own, number in enumerate(numbers)},
      )
  return explain.Provenance(
      joined.index, path, rule, tuple(others.values()), index, cache_dir=directory
  )


def _documents_path(options: config_lib.Options) -> str:
  return options.olmo_documents_path or documents_lib.default_path(
      options.olmo_index_path, options.documents_rule
  )


def layouts(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    schedule: schedule_lib.BatchSchedule,
    process: int | None = None,
) -> dict[int, layout_lib.BatchLayout]:
  """Returns the layout of training batches of each size of a schedule.

  Args:
    options: The data keys of the run.
    mesh: The mesh.
    schedule: The schedule.
    process: The process whose rows are asked for; None for this one.
  """
  load = options.global_batch_size_to_load
  return {
      size: _layout(options, mesh, size if options.has_batch_schedule else load, process)
      for size in schedule.sizes
  }


def _layout(
    options: config_lib.Options,
    mesh: jax.sharding.Mesh,
    batch: int,
    process: int | None = None,
) -> layout_lib.BatchLayout:
  spec = layout_lib.partition_spec(mesh, options.data_sharding)
  return layout_lib.BatchLayout(mesh, spec, batch, options.max_target_length, process)


def _content(options: config_lib.Options) -> content_lib.Content:
  return content_lib.Content(
      vocab_size=options.vocab_size,
      ngram_filter=options.olmo_apply_ngram_filter,
      repetition=repetition.RepetitionRule(
          options.olmo_ngram_min_period,
          options.olmo_ngram_max_period,
          options.olmo_ngram_max_count,
      ),
      shift=batch_lib.Shift(options.olmo_shift, max(0, options.olmo_eos_id)),
      extras=tuple(options.olmo_batch_extras),
  )


def _exclusions(
    options: config_lib.Options, index: index_lib.OlmoNpyIndex, named: index_lib.OlmoNpyIndex
) -> exclude.Exclusions:
  """Reads the exclusions from the file `olmo_exclude`; all processes must read the same ones.

  Args:
    index: The corpus, whose documents the file may list.
    named: The index of all stages together, whose files and rows the file may list.
  """

  def documents() -> documents_lib.DocumentIndex:
    return documents_lib.load_documents(
        _documents_path(options),
        index,
        rule=options.documents_rule,
        cache_dir=cache_dir(options),
        download=False,
    )

  def read() -> exclude.Exclusions:
    return exclude.read_exclusions(options.olmo_exclude, named, documents=documents)

  exclusions = collectives.run_on_all_processes(read, "reading olmo_exclude")
  collectives.check_equal({"olmo_exclude": exclusions.digest})
  logging.info(
      "olmo_exclude=%s leaves %s in %s out of the loss.",
      options.olmo_exclude,
      english.count(exclusions.num_tokens, "token"),
      english.count(len(exclusions.firsts), "range"),
  )
  return exclusions


def _names(options: config_lib.Options, content: content_lib.Content) -> dict[str, str]:
  """Returns a description of the exclusions, keyed by their digest; empty if there are none."""
  found = content.exclusions
  if found is None:
    return {}
  tokens = english.count(found.num_tokens, "token")
  return {found.digest: f"{options.olmo_exclude} ({tokens} without loss)"}


def token_reader(
    options: config_lib.Options, files: token_files.TokenFiles
) -> reader_lib.FileReader:
  """Returns a reader of token files, through a spool if the options name one."""
  if options.olmo_spool_dir:
    if files.storage.wants_concurrency(files.paths):
      spool = spool_lib.Spool(options.olmo_spool_dir, int(options.olmo_spool_gib * 2**30))
      storage = spooled.SpooledStorage(files.storage, spool)
      files = dataclasses.replace(files, storage=storage)
    else:
      logging.info("olmo_spool_dir is not used: all token files are local.")
  return reader_lib.FileReader(files)


def prefetch_of(options: config_lib.Options) -> delivery.Prefetch:
  """Returns how many batches are made in advance."""
  return delivery.Prefetch(
      workers=max(0, options.grain_worker_count),
      per_worker=max(1, options.grain_per_worker_buffer_size),
      batches=options.olmo_prefetch_batches,
      on_device=options.olmo_device_prefetch,
  )


def _check_agreement(options: config_lib.Options, stream: Any) -> None:
  """Raises ConfigError on all processes if their options or streams differ."""
  collectives.check_equal({**options.run_options(), **stream.identity()})
