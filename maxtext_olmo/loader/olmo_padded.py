"""`dataset_type=olmo_padded`: OLMo-core's `NumpyPaddedFSLDataset`, one document per row.

OLMo-core evaluates language models on such rows in its training loop. The eval iterator yields the
batches of that evaluation, always in OLMo-core's order for seed 0 and epoch 1. If the last rows do
not fill a batch, they are left out. The train iterator is for fine-tuning without packing.
"""

from __future__ import annotations

from typing import Any

import jax

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.devices import collectives
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import label_masks
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stored
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_sequence

_EVAL_SEED = 0


def make_padded_train_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns the train iterator, at the step where the run resumes."""
  options = config_lib.Options.read(config)
  rows, reader, index = open_rows(options.olmo_index_path, options)
  stream = train_stream(options, rows)
  return wiring.train_iterator(options, global_mesh, rows, reader, stream, index=index)


def make_padded_eval_iterator(
    config: Any, global_mesh: jax.sharding.Mesh
) -> iterator_lib.BatchIterator:
  """Returns an iterator over OLMo-core's evaluation batches, from the first one."""
  options = config_lib.Options.read(config)
  rows, reader, index = open_rows(options.olmo_eval_index_path, options, masks=False)
  stream = _stream(options, rows, stored.OlmoCoreOrder.name, _EVAL_SEED, 1)
  return wiring.eval_iterator(options, global_mesh, rows, reader, stream, index=index)


DATASET_TYPE = registry.DatasetType(make_padded_train_iterator, make_padded_eval_iterator)


def open_rows(
    index_path: str, options: config_lib.Options, *, masks: bool = True
) -> tuple[document_rows.DocumentRows, reader_lib.FileReader, index_lib.OlmoNpyIndex]:
  """Returns the rows of an index, their reader, and the index.

  If there is no document index yet, it is built; see `wiring.open_documents`.
  """
  index, storage = collectives.run_on_all_processes(
      lambda: wiring.open_whole_files(index_path, options), "opening the corpus"
  )
  rule = options.documents_rule
  path = options.olmo_documents_path or documents_lib.default_path(index_path, rule)
  documents = wiring.open_documents(index, path, rule, options, storage)
  if not documents.num_documents:
    raise errors.CorpusError(
        f"The index {index_path} has no documents: no file has the EOS {options.olmo_eos_id}. Set"
        " olmo_eos_id to the EOS of the tokenizer."
    )
  rows = document_rows.DocumentRows(
      documents,
      options.max_target_length,
      "truncate",
      pad_id=options.olmo_pad_id,
      mask_paths=label_masks.mask_paths(options, index) if masks else None,
  )
  files = token_files.TokenFiles.of_index(index, path_remap=options.path_remap, storage=storage)
  return rows, wiring.token_reader(options, files), index


def train_stream(
    options: config_lib.Options, rows: document_rows.DocumentRows
) -> row_sequence.RowSequence:
  """Returns the stream of rows that the options describe."""
  epochs = options.olmo_num_epochs or None
  return _stream(options, rows, options.order_name, options.data_shuffle_seed, epochs)


def _stream(
    options: config_lib.Options,
    rows: document_rows.DocumentRows,
    name: str,
    seed: int,
    num_epochs: int | None,
) -> row_sequence.RowSequence:
  order = permutations.make_order(
      name,
      num_instances=rows.num_rows(0),
      seed=seed,
      cache_dir=options.olmo_order_cache_dir or None,
  )
  return row_sequence.RowSequence(
      rows,
      name=f"{name}, padded rows of {rows.row_length}, pad {rows.pad_id}",
      seed=seed,
      num_epochs=num_epochs,
      order=order,
      documents=rows.documents.checksum,
  )
