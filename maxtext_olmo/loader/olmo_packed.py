"""`dataset_type=olmo_packed`: documents packed into rows exactly as OLMo-core packs them.

The rows are those of `NumpyPackedFSLDataset`, which AI2 used in the long-context stage and the
fine-tuning of OLMo 3. The plan of all rows is built once and kept in a file next to the index. The
rows are shuffled like the instances of `olmo_grain`, with the same guarantees.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.storage import local_copy
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import label_masks
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import packed
from maxtext_olmo.rows import packed_plan
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import segments


@dataclasses.dataclass(frozen=True)
class OpenedRows:
  """The packed rows of an index.

  Attributes:
    index: The index. Its order of files decides which files are packed together.
    storage: Storage of the files. Their sizes have been checked.
    rows: The rows.
  """

  index: index_lib.OlmoNpyIndex
  storage: storage_lib.Storage
  rows: packed.PackedRows

  def reader(self, options: config_lib.Options) -> reader_lib.FileReader:
    """Returns the reader of the rows' tokens."""
    files = token_files.TokenFiles.of_index(
        self.index, path_remap=options.path_remap, storage=self.storage
    )
    return wiring.token_reader(options, files)


def make_packed_train_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns the train iterator, at the step where the run resumes."""
  options = config_lib.Options.read(config)
  opened = open_rows(options, options.olmo_index_path)
  return wiring.train_iterator(
      options,
      global_mesh,
      opened.rows,
      opened.reader(options),
      train_stream(options, opened.rows),
      index=opened.index,
  )


def make_packed_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns an iterator over one pass of the evaluation index's rows, from the beginning."""
  options = config_lib.Options.read(config)
  opened = open_rows(options.replace(olmo_label_masks=()), options.olmo_eval_index_path)
  stream = _stream(options, opened.rows, permutations.SequentialOrder.name, 1)
  return wiring.eval_iterator(
      options, global_mesh, opened.rows, opened.reader(options), stream, index=opened.index
  )


DATASET_TYPE = registry.DatasetType(make_packed_train_iterator, make_packed_eval_iterator)


def open_rows(options: config_lib.Options, index_path: str) -> OpenedRows:
  """Returns the packed rows of an index; builds their plan if there is none."""

  def open_index() -> tuple[index_lib.OlmoNpyIndex, storage_lib.Storage, tuple[str, ...] | None]:
    index = index_lib.load_index(index_path)
    if index.has_heads:
      raise errors.ConfigError(
          f"The index {index_path} is a source mixture: it uses only the beginnings of files, which"
          " may end within a document. dataset_type=olmo_packed needs an index of whole files."
      )
    storage = storage_lib.open_storage(
        options.store_options, max_open_files=options.olmo_max_open_files or None
    )
    verify.check_sizes(index, path_remap=options.path_remap, storage=storage)
    return index, storage, label_masks.mask_paths(options, index)

  index, storage, masks = collectives.run_on_all_processes(open_index, "opening the corpus")
  plan = open_plan(options, index, index_path, packing_rule(options), storage)
  rows = packed.PackedRows(plan, options.olmo_pad_id, segment_rule(options), masks)
  return OpenedRows(index, storage, rows)


def open_plan(
    options: config_lib.Options,
    index: index_lib.OlmoNpyIndex,
    index_path: str,
    rule: packed_plan.PackingRule,
    storage: storage_lib.Storage,
) -> packed_plan.PackedPlan:
  """Opens the plan of an index; process 0 builds it first if there is none."""
  cache_dir = options.olmo_packing_cache_dir
  url = plan_url(options, index, index_path, rule)

  def find() -> str:
    own = plan_path(options, index, index_path, rule)
    if url is None or os.path.exists(own):
      return own
    try:
      return local_copy.local_path(url, storage, wiring.cache_dir(options))
    except errors.MissingFileError:
      return own
    except errors.CorpusError as error:
      logging.warning("The plan next to the index cannot be used: %s", error)
      return own

  path = collectives.run_on_all_processes(find, "looking for the plan")

  def build() -> None:
    if not os.path.exists(path):
      with atomic.write_errors(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
      logging.info("Packing the documents of %s; the plan is kept in %s", index_path, path)
      packed_plan.build_plan(
          index,
          path,
          rule,
          cache_dir=cache_dir,
          path_remap=options.path_remap,
          progress=True,
          storage=storage,
      )

  def load() -> packed_plan.PackedPlan:
    try:
      return packed_plan.load_plan(path, index, rule, storage=storage)
    except errors.CorpusError as error:
      if path == plan_path(options, index, index_path, rule):
        raise
      raise errors.CorpusError(f"{error} It is a copy of {url}: delete that, too.") from error

  collectives.from_process_0(build, "packing the documents")
  # Then each process builds the plan, unless it shares a file system with process 0.
  collectives.run_on_all_processes(build, "packing the documents")
  plan = collectives.run_on_all_processes(load, "opening the plan")
  if not plan.num_rows:
    raise errors.CorpusError(
        f"The index {index_path} has no documents, so there are no rows. Check olmo_eos_id,"
        " olmo_bos_id and olmo_boundaries."
    )
  return plan


def plan_path(
    options: config_lib.Options,
    index: index_lib.OlmoNpyIndex,
    index_path: str,
    rule: packed_plan.PackingRule,
) -> str:
  """Returns the local path where a run looks for its plan first, and where it writes it."""
  place, cache_dir = _local_place(options, index_path), options.olmo_packing_cache_dir
  return packed_plan.default_path(place, index, rule, cache_dir)


def plan_url(
    options: config_lib.Options,
    index: index_lib.OlmoNpyIndex,
    index_path: str,
    rule: packed_plan.PackingRule,
) -> str | None:
  """Returns the URL from which hosts download the plan; None if the index is a local file."""
  if not urls.is_url(index_path):
    return None
  place, cache_dir = urls.without_secrets(index_path), options.olmo_packing_cache_dir
  return packed_plan.default_path(place, index, rule, cache_dir)


def _local_place(options: config_lib.Options, index_path: str) -> str:
  """Returns the path next to which a plan is stored: the index or, for a URL, a path in a cache."""
  if not urls.is_url(index_path):
    return index_path
  return os.path.join(
      wiring.cache_dir(options), urls.without_secrets(index_path).rpartition("/")[2]
  )


def packing_rule(options: config_lib.Options) -> packed_plan.PackingRule:
  """Returns the packing rule that the options describe."""
  return packed_plan.PackingRule(
      row_length=options.max_target_length,
      group_size=options.olmo_source_group_size,
      long_documents=options.olmo_long_documents,
      ties=options.olmo_packing_ties,
      boundaries=document_spans.BoundaryRule(
          options.olmo_boundaries, options.olmo_eos_id, options.olmo_bos_id
      ),
  )


def segment_rule(options: config_lib.Options) -> segments.SegmentRule:
  """Returns the rule for where segments begin in a packed row.

  OLMo-core 2.5 searches the padded row for document ends. So does 3.0, unless boundaries come from
  `.csv.gz` files: then each document is a segment, whether or not it ends with an EOS.
  """
  if not options.olmo_document_mask:
    return segments.SegmentRule()
  exact = options.olmo_packed_segments == "documents" and options.olmo_boundaries == "csv"
  return segments.SegmentRule(
      "part_and_padding" if exact else "after_eos", options.olmo_eos_id, options.olmo_bos_id
  )


def train_stream(options: config_lib.Options, rows: packed.PackedRows) -> row_sequence.RowSequence:
  """Returns the stream of packed rows that the options describe."""
  return _stream(options, rows, options.order_name, options.olmo_num_epochs or None)


def _stream(
    options: config_lib.Options, rows: packed.PackedRows, name: str, num_epochs: int | None
) -> row_sequence.RowSequence:
  order = permutations.make_order(
      name,
      num_instances=rows.plan.num_rows,
      seed=options.data_shuffle_seed,
      cache_dir=options.olmo_order_cache_dir,
  )
  rule = rows.plan.rule
  return row_sequence.RowSequence(
      rows,
      name=f"{name}, packed rows of {rule.row_length}, ties {rule.ties}, pad {rows.pad_id}",
      seed=options.data_shuffle_seed,
      num_epochs=num_epochs,
      order=order,
  )
