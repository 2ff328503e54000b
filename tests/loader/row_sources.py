"""Every kind of row source over one small corpus, for tests of what holds for all of them.

`OutsideInRows` stands for the row source of another package: rows of two parts, loss masks, and an
id of its own for padding.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

import maxtext_olmo
from maxtext_olmo.corpus import token_files
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import delivery
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments
from tests import corpora

LENGTH = 64
BATCH = 8
TOKENS_PER_FILE = (41 * LENGTH + 5, 30 * LENGTH, 7, 52 * LENGTH + 9)

_ALL: dict[str, Any] = {
    "max_target_length": LENGTH,
    "global_batch_size_to_load": BATCH,
    "vocab_size": 100,
    "data_shuffle_seed": 3,
}
_DOCUMENTS = {"dataset_type": "olmo_documents", "olmo_eos_id": 0, "olmo_packing_bins": 40}
_PACKED = {"dataset_type": "olmo_packed", "olmo_eos_id": 0, "olmo_pad_id": 99}
_PADDED = {"dataset_type": "olmo_padded", "olmo_eos_id": 0, "olmo_pad_id": 98}
_MIXTURE = {"olmo_mixture": {"label-0": 2.0, "label-*": 0.5}}
# From positions on where steps begin with all batch sizes that tests change to.
_STAGES = (
    {"from_tokens": 16 * LENGTH, "olmo_mixture": {"label-0": 1.0}},
    {"from_tokens": 24 * LENGTH, "olmo_mixture": {}, "leave_out_seen": True},
)
# What each row source adds to the config of a run.
SOURCES: dict[str, dict[str, Any]] = {
    "windows": {},
    "windows_held_out": {"olmo_eval_instances": 11},
    "windows_olmo_core": {"olmo_order": "olmo_core"},
    "windows_mixture": _MIXTURE,
    "windows_stages": {**_MIXTURE, "olmo_stages": _STAGES},
    "windows_document_mask": {"olmo_document_mask": True, "olmo_eos_id": 0},
    "planned": _DOCUMENTS,
    "planned_mixture": {**_DOCUMENTS, **_MIXTURE},
    "planned_stages": {**_DOCUMENTS, **_MIXTURE, "olmo_stages": _STAGES[:1]},
    "one_document": {**_DOCUMENTS, "olmo_packing": "none", "olmo_long_documents": "truncate"},
    "packed": _PACKED,
    "packed_olmo_core": {
        **_PACKED,
        "olmo_order": "olmo_core",
        "olmo_source_group_size": 3,
        "olmo_long_documents": "split",
        "olmo_document_mask": True,
        "olmo_apply_ngram_filter": True,
        "olmo_ngram_max_count": 20,
        "olmo_label_masks": ("*.mask",),
    },
    "padded": _PADDED,
    "padded_olmo_core": {
        **_PADDED,
        "olmo_order": "olmo_core",
        "olmo_apply_ngram_filter": True,
        "olmo_label_masks": ("*.mask",),
    },
    "windows_label_masks": {"olmo_label_masks": ("*.mask",)},
    "synthetic": {"dataset_type": "synthetic"},
    "outside_in": {"dataset_type": "outside_in"},
}
# Those whose rows come from token files.
FROM_FILES = tuple(name for name in SOURCES if name != "synthetic")


def write_corpus(directory: str) -> str:
  """Writes token files and loss masks, some that the filter rejects; returns the index."""
  index_path, _ = corpora.write_corpus(
      directory, tokens_per_file=TOKENS_PER_FILE, sequence_length=LENGTH
  )
  index = maxtext_olmo.load_index(index_path)
  for number in range(len(index.files)):
    path = pathlib.Path(index.resolve(number))
    tokens = np.fromfile(path, "<u2")
    tokens[10 * LENGTH : 12 * LENGTH] = 5
    tokens.tofile(path)
    np.random.Generator(np.random.PCG64(number)).integers(0, 2, len(tokens), np.uint8).tofile(
        mask_path(str(path))
    )
  return index_path


def config_values(source: str, index_path: str, order_cache: str) -> dict[str, Any]:
  """Returns what a run over a row source sets in its config."""
  values = {**_ALL, **SOURCES[source]}
  if source != "synthetic":
    values["olmo_index_path"] = index_path
  if values.get("olmo_order") == "olmo_core":
    values["olmo_order_cache_dir"] = order_cache
  return values


def pad_id(source: str) -> int:
  """Returns the id that fills the rows of a row source."""
  return OutsideInRows.pad_id if source == "outside_in" else SOURCES[source].get("olmo_pad_id", 0)


def mask_path(token_path: str) -> str:
  """Returns where the loss mask of a token file is."""
  return token_path + ".mask"


@dataclasses.dataclass(frozen=True)
class OutsideInRows(row_source.RowSourceDefaults):
  """Row i is piece i of the corpus and piece i from its end; no piece crosses a file."""

  index: maxtext_olmo.OlmoNpyIndex
  pad_id = 9
  row_length = 80
  piece = 36
  segment_rule = segments.SegmentRule("part")

  @property
  def fingerprint(self) -> str:
    return f"{self.index.fingerprint}, outside in"

  @property
  def mask_paths(self) -> list[str]:  # type: ignore[override]
    return [mask_path(self.index.resolve(number)) for number in range(len(self.index.files))]

  @functools.cached_property
  def _pieces(self) -> np.ndarray:
    """The file, first token and number of tokens of each piece."""
    found = [
        (number, first, min(self.piece, entry.n_tokens - first))
        for number, entry in enumerate(self.index.files)
        for first in range(0, entry.n_tokens, self.piece)
    ]
    return np.array(found)

  def num_rows(self, epoch: int) -> int:
    return -(-len(self._pieces) // 2)

  def parts(self, epoch: int, rows: np.ndarray) -> parts_lib.Parts:
    other = len(self._pieces) - 1 - rows
    pieces = np.stack([rows, other], axis=1)
    there = np.stack([np.ones(len(rows), np.bool_), other > rows], axis=1)
    bounds = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
    source, first, count = self._pieces[pieces[there]].T
    return parts_lib.Parts(bounds, source.astype(np.int32), first, count.astype(np.int32))


def _make_outside_in(config: Any, mesh: Any) -> iterator_lib.BatchIterator:
  index = maxtext_olmo.load_index(config.olmo_index_path)
  source = OutsideInRows(index)
  stream = row_sequence.RowSequence(
      source,
      name="outside in",
      seed=config.data_shuffle_seed,
      num_epochs=config.olmo_num_epochs or None,
      order=permutations.make_order(
          "feistel", num_instances=source.num_rows(0), seed=config.data_shuffle_seed
      ),
  )
  size = config.global_batch_size_to_load
  spec = layout_lib.partition_spec(mesh, config.data_sharding)
  return iterator_lib.BatchIterator(
      source,
      reader_lib.FileReader(token_files.TokenFiles.of_index(index)),
      state_lib.Start(0, schedule_lib.BatchSchedule.constant(size), stream),
      {size: layout_lib.BatchLayout(mesh, spec, size, source.row_length)},
      content=content_lib.Content(vocab_size=config.vocab_size),
      prefetch=delivery.Prefetch(
          workers=config.grain_worker_count,
          batches=config.olmo_prefetch_batches,
          on_device=config.olmo_device_prefetch,
      ),
  )


maxtext_olmo.register_dataset_type(
    "outside_in",
    _make_outside_in,
    reads=(
        "olmo_index_path",
        "olmo_num_epochs",
        "olmo_prefetch_batches",
        "olmo_device_prefetch",
    ),
)
