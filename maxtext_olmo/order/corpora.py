"""The corpora of the stages of a run: the index and the split of each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.order import seen as seen_lib
from maxtext_olmo.order import stages as stages_lib
from maxtext_olmo.order import stream as stream_lib


@dataclasses.dataclass(frozen=True)
class Corpora:
  """The corpora of the stages, and the settings that all stages share.

  Attributes:
    base: Index that the run began with. All stages hold out the same tokens as this index.
    others: Indexes of other stages, by fingerprint.
    held_out_instances: Number of instances of the base index that are held out.
    cache_dir: Directory of stored orders and bitmaps.
    consumed_path: Path of the bitmap of instances that the run's first epoch leaves out; empty if
      it leaves out none.
  """

  base: index_lib.OlmoNpyIndex
  others: Mapping[str, index_lib.OlmoNpyIndex] = dataclasses.field(default_factory=dict)
  held_out_instances: int = 0
  cache_dir: str = ""
  consumed_path: str = ""

  def index(self, stage: stages_lib.Stage) -> index_lib.OlmoNpyIndex:
    """Returns the index of a stage, with the run's sequence length."""
    settings = stage.settings
    if settings.fingerprint == self.base.fingerprint:
      return self.base
    if settings.fingerprint in self.others:
      return self.others[settings.fingerprint]
    index = index_builder.load_index(settings.index_path)
    if index.fingerprint != settings.fingerprint:
      raise errors.CorpusError(
          f"{stage.name} had the index {settings.index_path} with the fingerprint"
          f" {settings.fingerprint}, but that index now has {index.fingerprint}. Restore the old"
          " index."
      )
    return index.with_sequence_length(self.base.sequence_length)

  def chunk_size(self, stage: stages_lib.Stage, sequence_length: int) -> int:
    """Returns the number of consecutive rows that stay together in a stage."""
    return self.index(stage).window // sequence_length

  def split(self, index: index_lib.OlmoNpyIndex) -> stream_lib.Split:
    """Returns the split of an index, which holds out the same tokens as the base index does."""
    split = stream_lib.Split.of_index(self.base, self.held_out_instances)
    return seen_lib.split_like(index, self.base, split)
