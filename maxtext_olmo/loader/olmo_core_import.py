"""Import of OLMo-core runs: their order of files, and the state of their loader.

OLMo-core's data loader saves its place as a small dict:

    {"dataset_fingerprint": "…", "dataset_fingerprint_version": "v2.0", "dataset_type": "fsl",
     "seed": 34521, "epoch": 1, "batches_processed": 5, "tokens_processed": 2560,
     "sequence_length": 64, "max_target_sequence_length": null}

Epochs count from 1, both counters restart with each epoch, and OLMo-core resumes by the number of
tokens. Here that becomes one position: earlier epochs are complete, and tokens are samples times
the sequence length.
"""

from __future__ import annotations

import dataclasses
import random
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.loader import olmo_core_fingerprint

T = TypeVar("T")


def permute_sources(files: Sequence[T], seed: int) -> list[T]:
  """Returns the files in the order that OLMo-core's `source_permutation_seed` gives them."""
  places = list(range(len(files)))
  random.Random(seed).shuffle(places)
  return [files[place] for place in places]


@dataclasses.dataclass(frozen=True)
class LoaderState:
  """The state of an OLMo-core data loader, from its `state_dict`."""

  seed: int
  epoch: int
  batches_processed: int
  tokens_processed: int
  sequence_length: int
  dataset_type: str
  dataset_fingerprint: str
  dataset_fingerprint_version: str
  max_target_sequence_length: int | None = None

  @classmethod
  def from_json(cls, values: Any, where: str) -> LoaderState:
    """Parses the `state_dict` of a loader, or of a trainer that contains it as `data_loader`."""
    if isinstance(values, dict) and isinstance(values.get("data_loader"), dict):
      values = values["data_loader"]
    if not isinstance(values, dict):
      raise errors.ResumeError(
          f"{where} is not a state of OLMo-core's data loader: expected a JSON object, found"
          f" {type(values).__name__}. Save `data_loader.state_dict()` as JSON."
      )
    values = {"max_target_sequence_length": None, **values}
    for name, kind in typing.get_type_hints(cls).items():
      if not isinstance(values.get(name, ...), kind) or isinstance(values[name], bool):
        raise errors.ResumeError(
            f"{where} is not a state of OLMo-core's data loader: {name} is"
            f" {values.get(name, 'missing')!r}. Save `data_loader.state_dict()` as JSON."
        )
    state = cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})
    if state.dataset_type != "fsl":
      raise errors.ResumeError(
          f"{where} belongs to a dataset of type {state.dataset_type!r}; only states of type 'fsl'"
          " (windows, packed and padded rows, source mixtures) can be imported."
      )
    if state.epoch < 1 or min(state.batches_processed, state.tokens_processed, state.seed) < 0:
      raise errors.ResumeError(f"{where} has impossible numbers: {state}.")
    return state

  @property
  def rows(self) -> int | None:
    """The rows of a global batch; None if the counters do not determine them."""
    if not self.batches_processed:
      return None
    rows, rest = divmod(self.tokens_processed, self.batches_processed * self.sequence_length)
    return rows if not rest else None

  def position(self, index: index_lib.OlmoNpyIndex) -> int:
    """Returns the loader's progress as a position in the `olmo_core` order over an index."""
    return self.position_in_rows(
        index.total_instances, index.sequence_length, index.max_target_sequence_length
    )

  def position_in_rows(
      self, num_rows: int | None, row_length: int, longest: int | None = None
  ) -> int:
    """Returns the loader's progress as a position in the `olmo_core` order over rows.

    Args:
      num_rows: Number of rows of an epoch; may be None (unknown) in epoch 1.
      row_length: Tokens per row.
      longest: Longest sequence length of a later stage, for windows that have one.
    """
    if longest != self.max_target_sequence_length:
      raise errors.ResumeError(
          f"The loader had max_target_sequence_length={self.max_target_sequence_length}, the index"
          f" has {longest}: the instances differ. Build the index with the"
          " run's --max-target-sequence-length."
      )
    if longest is None and row_length != self.sequence_length:
      raise errors.ResumeError(
          f"The loader had a sequence length of {self.sequence_length}, the index has"
          f" {row_length}. Without max_target_sequence_length that is a different order"
          " (OLMo-core would silently continue with it). Build the index with --sequence-length"
          f" {self.sequence_length}."
      )
    samples, rest = divmod(self.tokens_processed, row_length)
    if rest:
      raise errors.ResumeError(
          f"The loader is at token {self.tokens_processed} of its epoch, inside an instance of"
          f" {row_length} tokens. Continue with a sequence length that divides that"
          " number."
      )
    if num_rows is None:
      if self.epoch > 1:
        raise errors.ResumeError(
            f"The loader is in epoch {self.epoch}, whose first position depends on the number of"
            " rows, which is not known."
        )
      return samples
    if samples > num_rows:
      raise errors.ResumeError(
          f"The loader has read {samples} instances of its epoch, the index has"
          f" {num_rows}: it describes another corpus. Build the index from the run's"
          " files."
      )
    return (self.epoch - 1) * num_rows + samples

  def check_dataset(self, *datasets: olmo_core_fingerprint.Dataset) -> str:
    """Returns the loader's fingerprint; raises ResumeError unless one of the datasets has it.

    Args:
      datasets: The dataset, as several releases of OLMo-core describe it.
    """
    if self.dataset_fingerprint_version != olmo_core_fingerprint.VERSION:
      raise errors.ResumeError(
          f"The state has a fingerprint of version {self.dataset_fingerprint_version!r}; only"
          f" {olmo_core_fingerprint.VERSION!r} can be checked. Leave out --vocab-size to skip the"
          " check."
      )
    expected = [dataset.fingerprint for dataset in datasets]
    if self.dataset_fingerprint not in expected:
      raise errors.ResumeError(
          f"The loader's dataset has the fingerprint {self.dataset_fingerprint}, this index has"
          f" {expected[0]}: {datasets[0].explain(self.dataset_fingerprint)}."
      )
    return self.dataset_fingerprint
