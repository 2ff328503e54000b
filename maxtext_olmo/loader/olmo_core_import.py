"""Imports the file order and the loader state of OLMo-core runs.

OLMo-core's data loader saves its place as a small dict:

    {"dataset_fingerprint": "…", "dataset_fingerprint_version": "v2.0", "dataset_type": "fsl",
     "seed": 34521, "epoch": 1, "batches_processed": 5, "tokens_processed": 2560,
     "sequence_length": 64, "max_target_sequence_length": null}

Epochs are counted from 1, both counters restart with each epoch, and OLMo-core resumes from
`tokens_processed`. This module turns the dict into one position: the number of samples in all
earlier epochs, plus `tokens_processed` divided by the sequence length.
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
      raise errors.ResumeError(
          f"{where} has impossible numbers: {state}. Save `data_loader.state_dict()` again."
      )
    return state

  @property
  def rows(self) -> int | None:
    """Rows per global batch, computed from the two counters; None if they do not divide evenly."""
    if not self.batches_processed:
      return None
    rows, rest = divmod(self.tokens_processed, self.batches_processed * self.sequence_length)
    return rows if not rest else None

  def position(self, index: index_lib.OlmoNpyIndex) -> int:
    """Returns the loader's progress as a position in the `olmo_core` order of an index."""
    return self.position_in_rows(
        index.total_instances, index.sequence_length, index.max_target_sequence_length
    )

  def position_in_rows(
      self, num_rows: int | None, row_length: int, longest: int | None = None
  ) -> int:
    """Returns the loader's progress as a position in the `olmo_core` order of some rows.

    Args:
      num_rows: Number of rows in an epoch. It may be None (unknown) if the loader is in epoch 1.
      row_length: Tokens per row.
      longest: The index's `max_target_sequence_length`; None if it has none.
    """
    if longest != self.max_target_sequence_length:
      raise errors.ResumeError(
          f"The loader had max_target_sequence_length={self.max_target_sequence_length}, but the"
          f" index has {longest}, so the instances differ. Build the index with the run's"
          " --max-target-sequence-length."
      )
    if longest is None and row_length != self.sequence_length:
      raise errors.ResumeError(
          f"The loader had a sequence length of {self.sequence_length}, but the index has"
          f" {row_length}. Without max_target_sequence_length, that changes the order (OLMo-core"
          " would silently continue). Build the index with --sequence-length"
          f" {self.sequence_length}."
      )
    samples, rest = divmod(self.tokens_processed, row_length)
    if rest:
      raise errors.ResumeError(
          f"The loader is at token {self.tokens_processed} of its epoch, inside an instance of"
          f" {row_length} tokens. Continue with a sequence length that divides"
          f" {self.tokens_processed}."
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
          f"The loader has read {samples} instances of its epoch, but the index has only"
          f" {num_rows}, so it describes a different corpus. Build the index from the run's files."
      )
    return (self.epoch - 1) * num_rows + samples

  def check_dataset(self, *datasets: olmo_core_fingerprint.Dataset) -> str:
    """Returns the loader's fingerprint; raises ResumeError unless one of the datasets has it.

    Args:
      datasets: The same dataset, as different releases of OLMo-core describe it.
    """
    if self.dataset_fingerprint_version != olmo_core_fingerprint.VERSION:
      raise errors.ResumeError(
          f"The state has a fingerprint of version {self.dataset_fingerprint_version!r}; only"
          f" {olmo_core_fingerprint.VERSION!r} can be checked. To skip the check, leave out all of"
          " --vocab-size, --pad-id, --eos-id and --bos-id (`order import-olmo-core`), or set"
          " ignore_fingerprint_mismatch in the run's config (`olmo-core import`)."
      )
    expected = [dataset.fingerprint for dataset in datasets]
    if self.dataset_fingerprint not in expected:
      raise errors.ResumeError(
          f"The loader's dataset has the fingerprint {self.dataset_fingerprint}, but this index has"
          f" {expected[0]}: {datasets[0].explain(self.dataset_fingerprint)}."
      )
    return self.dataset_fingerprint
