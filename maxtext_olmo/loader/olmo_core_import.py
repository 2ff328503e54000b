"""Import of OLMo-core runs: their order of files, their fingerprint, and the state of their loader.

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
import hashlib
import os
import random
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib

_FINGERPRINT_VERSION = "v2.0"
T = TypeVar("T")


def permute_sources(files: Sequence[T], seed: int) -> list[T]:
  """Returns the files in the order that OLMo-core's `source_permutation_seed` gives them."""
  places = list(range(len(files)))
  random.Random(seed).shuffle(places)
  return [files[place] for place in places]


def fingerprint(
    index: index_lib.OlmoNpyIndex,
    *,
    vocab_size: int,
    pad_id: int,
    eos_id: int,
    bos_id: int | None = None,
) -> str:
  """Returns the fingerprint that OLMo-core 3 gives a fixed-length dataset of these files."""
  head = (
      f"class=NumpyFSLDatasetvocab_size={vocab_size},pad_token_id={pad_id},eos_token_id={eos_id},"
      f"dtype=<class 'numpy.{index.dtype}'>,"
      f"max_target_sequence_length={index.max_target_sequence_length},bos_token_id={bos_id},"
  )
  files = "".join(
      f"path={os.path.basename(entry.path)},size={index.expected_size(i)},"
      for i, entry in enumerate(index.files)
  )
  return hashlib.sha256((head + files).encode()).hexdigest()


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
          " (NumpyFSLDataset) can be imported."
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
    if index.max_target_sequence_length != self.max_target_sequence_length:
      raise errors.ResumeError(
          f"The loader had max_target_sequence_length={self.max_target_sequence_length}, the index"
          f" has {index.max_target_sequence_length}: the instances differ. Build the index with the"
          " run's --max-target-sequence-length."
      )
    if index.max_target_sequence_length is None and index.sequence_length != self.sequence_length:
      raise errors.ResumeError(
          f"The loader had a sequence length of {self.sequence_length}, the index has"
          f" {index.sequence_length}. Without max_target_sequence_length that is a different order"
          " (OLMo-core would silently continue with it). Build the index with --sequence-length"
          f" {self.sequence_length}."
      )
    samples, rest = divmod(self.tokens_processed, index.sequence_length)
    if rest:
      raise errors.ResumeError(
          f"The loader is at token {self.tokens_processed} of its epoch, inside an instance of"
          f" {index.sequence_length} tokens. Continue with a sequence length that divides that"
          " number."
      )
    if samples > index.total_instances:
      raise errors.ResumeError(
          f"The loader has read {samples} instances of its epoch, the index has"
          f" {index.total_instances}: it describes another corpus. Build the index from the run's"
          " files."
      )
    return (self.epoch - 1) * index.total_instances + samples

  def check_fingerprint(self, expected: str) -> None:
    """Raises ResumeError if the loader's dataset does not have the expected fingerprint."""
    if self.dataset_fingerprint_version != _FINGERPRINT_VERSION:
      raise errors.ResumeError(
          f"The state has a fingerprint of version {self.dataset_fingerprint_version!r}; only"
          f" {_FINGERPRINT_VERSION!r} can be checked. Leave out --vocab-size to skip the check."
      )
    if self.dataset_fingerprint != expected:
      raise errors.ResumeError(
          f"The loader's dataset has the fingerprint {self.dataset_fingerprint}, this index has"
          f" {expected}: the files, their sizes, their order (--source-permutation-seed of `index"
          " build`), the dtype, or the ids given here differ from the run's."
      )
