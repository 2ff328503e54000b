"""Reads the `dataset` and `data_loader` sections of OLMo-core's `config.json`.

OLMo-core writes the config of a run into each checkpoint folder. Each object in it names its class:

    {"dataset": {"_CLASS_": "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig", "mix": …},
     "data_loader": {"_CLASS_": "olmo_core.data.data_loader.NumpyDataLoaderConfig", "seed": …}}

`RunConfig.from_json` checks the fields of each object against its class. An unknown field is an
error, because it may change which tokens a step holds. The `trainer` section may be missing. Only
its `steps_to_skip` and a `max_duration` in epochs affect the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.loader import olmo_core_fields
from maxtext_olmo.loader import olmo_core_fingerprint

WINDOWS, PACKED, PADDED = "NumpyFSLDataset", "NumpyPackedFSLDataset", "NumpyPaddedFSLDataset"

# Fields that change how OLMo-core reads and logs, but not what it reads.
_DATASET_NO_EFFECT = ("work_dir", "include_instance_metadata")
_LOADER_NO_EFFECT = (
    "work_dir",
    "num_threads",
    "num_workers",
    "prefetch_factor",
    "target_device_type",
    "type",
)
_MIXTURE_NO_EFFECT = ("processes", "render_tables", "quiet", "seed")


@dataclasses.dataclass(frozen=True)
class Filter:
  """The parameters of OLMo-core's repetition filter."""

  max_period: int = 13
  min_period: int = 1
  max_count: int = 32


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The data settings in the OLMo-core config of a run.

  Attributes:
    dataset: Name of the dataset class: `WINDOWS`, `PACKED` or `PADDED`.
    ids: Special tokens and size of the vocabulary.
    tokenizer: Identifier of the tokenizer; empty if there is none.
    dtype: Dtype of the token files.
    sequence_length: Tokens per row.
    max_target_sequence_length: The longest sequence length that a later stage may use; None if the
      sequence length is fixed.
    paths: Token files, or patterns for them.
    labels: Label of each path; None if there are none.
    mix: Name of a mix; empty if there is none.
    mix_base_dir: Directory of the files of the mix.
    expand_glob: Whether paths are patterns.
    mask_paths: Label masks, one per path, or patterns for them.
    mixture: Sources of a source mixture; empty if there is none.
    mixture_tokens: Tokens that the mixture requests, and its global batch size in tokens.
    permutation_seed: Seed that shuffles the files; None keeps their order.
    filter: Repetition filter; None if there is none.
    document_lengths: Whether attention stays within documents.
    long_documents: Handling of documents longer than a row: `truncate` or `fragment`.
    group_size: Number of files that a packed dataset packs together.
    use_array_if_local: Whether to find document boundaries of local files in their tokens, not in
      boundary files; None if the config does not say, which means yes.
    batch_tokens: Tokens per global batch.
    seed: Seed of the order.
    ignore_fingerprint_mismatch: Whether the run accepts states with a different fingerprint.
    skips: Steps to read without training, as (first, end) pairs, counted from 0.
    num_epochs: Epochs of the run; 0 if its duration is not given in epochs.
    no_effect: Known fields that do not affect the data, as `section.field`.
  """

  dataset: str
  ids: olmo_core_fingerprint.TokenizerIds
  tokenizer: str
  dtype: str
  sequence_length: int
  max_target_sequence_length: int | None
  paths: tuple[str, ...]
  labels: tuple[str, ...] | None
  mix: str
  mix_base_dir: str
  expand_glob: bool
  mask_paths: tuple[str, ...] | None
  mixture: tuple[source_mixture.MixtureSource, ...]
  mixture_tokens: tuple[int, int]
  permutation_seed: int | None
  filter: Filter | None
  document_lengths: bool
  long_documents: str
  group_size: int
  use_array_if_local: bool | None
  batch_tokens: int
  seed: int
  ignore_fingerprint_mismatch: bool
  skips: tuple[tuple[int, int], ...]
  num_epochs: int
  no_effect: tuple[str, ...]

  @property
  def rows(self) -> int:
    """Rows per global batch."""
    return self.batch_tokens // self.sequence_length

  @property
  def uses_boundary_files(self) -> bool:
    """Whether document boundaries come from csv.gz files: for URLs, or if the config says so."""
    places = [self.mix_base_dir, *self.paths]
    return self.use_array_if_local is False or any(paths_lib.is_url(place) for place in places)

  @classmethod
  def from_json(cls, values: Any, where: str) -> RunConfig:
    """Parses and checks a config.

    Args:
      values: The content of `config.json`.
      where: Name of the config for error messages.

    Raises:
      ConfigError: The config is not an OLMo-core config, or has unsupported fields. The
        message lists every problem.
    """
    if not isinstance(values, dict) or not isinstance(values.get("dataset"), dict):
      raise errors.ConfigError(
          f"{where} is not a config of OLMo-core: expected a JSON object with the sections"
          " `dataset` and `data_loader`. Use the config.json of a checkpoint folder."
      )
    reader = olmo_core_fields.Reader()
    read = _read_run(reader, values)
    reader.raise_problems(f"{where} cannot be imported")
    return cls(**read, no_effect=tuple(reader.no_effect))


def _read_run(reader: olmo_core_fields.Reader, values: Mapping[str, Any]) -> dict[str, Any]:
  dataset = reader.section("dataset", values["dataset"], _DATASET_NO_EFFECT)
  name = dataset.name.removesuffix("Config")
  if name not in _DATASETS:
    reader.problems.append(_unsupported(dataset.name))
    return {}
  loader = reader.section("data_loader", values.get("data_loader"), _LOADER_NO_EFFECT)
  if loader.name not in ("NumpyDataLoaderConfig", ""):
    reader.problems.append(
        f"data_loader has the class {loader.name!r}; only NumpyDataLoaderConfig can be imported."
        " Composable sources are not supported: no official stage uses them."
    )
    return {}
  read = {
      "dataset": name,
      "max_target_sequence_length": None,
      "mask_paths": dataset.take_texts("label_mask_paths"),
      "mixture": (),
      "mixture_tokens": (0, 0),
      "document_lengths": False,
      "long_documents": "truncate",
      "group_size": 1,
      "use_array_if_local": None,
      **_read_files(reader, dataset),
      **_DATASETS[name](reader, dataset),
      "batch_tokens": loader.take("global_batch_size", int),
      "seed": loader.take("seed", int, 0),
      **_read_trainer(reader, values.get("trainer")),
  }
  ignore = [s.take("ignore_fingerprint_mismatch", bool, False) for s in (dataset, loader)]
  read["ignore_fingerprint_mismatch"] = any(ignore)
  dataset.end()
  loader.end()
  _check(reader, read)
  return read


def _unsupported(name: str) -> str:
  supported = ", ".join(f"{known}Config" for known in _DATASETS)
  if any(word in name for word in ("Interleaved", "VSL", "Composable", "Source")):
    return (
        f"dataset has the class {name!r}: interleaved, variable-length and composable datasets are"
        f" not supported, because no official stage uses them. Supported: {supported}."
    )
  return f"dataset has the class {name!r}, which is not known. Supported: {supported}."


def _read_files(
    reader: olmo_core_fields.Reader, dataset: olmo_core_fields.Section
) -> dict[str, Any]:
  """Reads the fields that all datasets have: tokenizer, files and filter."""
  tokenizer = reader.section("dataset.tokenizer", dataset.take("tokenizer", dict))
  ids = olmo_core_fingerprint.TokenizerIds(
      vocab_size=tokenizer.take("vocab_size", int),
      pad_id=tokenizer.take("pad_token_id", int),
      eos_id=tokenizer.take("eos_token_id", int),
      bos_id=tokenizer.take("bos_token_id", int, None),
  )
  identifier = tokenizer.take("identifier", str, "")
  tokenizer.end()
  values = dataset.take("instance_filter_config", dict, None)
  found = None
  if values is not None:
    section = reader.section("dataset.instance_filter_config", values)
    found = Filter(
        max_period=section.take("repetition_max_period", int, 13),
        min_period=section.take("repetition_min_period", int, 1),
        max_count=section.take("repetition_max_count", int, 32),
    )
    section.end()
  return {
      "ids": ids,
      "tokenizer": identifier,
      "dtype": dataset.take("dtype", str, None) or _smallest_dtype(ids.vocab_size),
      "sequence_length": dataset.take("sequence_length", int),
      "paths": dataset.take_texts("paths") or (),
      "labels": _labels(dataset),
      "mix": dataset.take("mix", str, ""),
      "mix_base_dir": dataset.take("mix_base_dir", str, ""),
      "expand_glob": dataset.take("expand_glob", bool, False),
      "permutation_seed": dataset.take("source_permutation_seed", int, None),
      "filter": found,
  }


def _labels(dataset: olmo_core_fields.Section) -> tuple[str, ...] | None:
  metadata = dataset.take("metadata", (list, tuple), None)
  if metadata is None:
    return None
  if not all(isinstance(one, dict) for one in metadata):
    dataset.refuse("dataset.metadata is not a list of objects.")
    return None
  return tuple(str(one.get("label", "")) for one in metadata)


def _smallest_dtype(vocab_size: int) -> str:
  """Returns the dtype that OLMo-core chooses for a vocabulary."""
  names = ("uint8", "uint16", "uint32", "uint64")
  return next(name for name in names if vocab_size - 1 <= np.iinfo(name).max)


def _read_windows(
    reader: olmo_core_fields.Reader, dataset: olmo_core_fields.Section
) -> dict[str, Any]:
  read = {
      "max_target_sequence_length": dataset.take("max_target_sequence_length", int, None),
      "document_lengths": dataset.take("generate_doc_lengths", bool, False),
  }
  values = dataset.take("source_mixture_config", dict, None)
  return read if values is None else {**read, **_read_mixture(reader, values)}


def _read_mixture(reader: olmo_core_fields.Reader, values: Any) -> dict[str, Any]:
  where = "dataset.source_mixture_config"
  section = reader.section(where, values, _MIXTURE_NO_EFFECT)
  listed = reader.section(f"{where}.source_list", section.take("source_list", dict))
  sources = read_sources(reader, listed.take("sources", (list, tuple), ()), f"{where}.sources")
  size = (section.take("requested_tokens", int), section.take("global_batch_size", int))
  listed.end()
  section.end()
  return {"mixture": sources, "mixture_tokens": size}


def read_sources(
    reader: olmo_core_fields.Reader, values: Any, where: str
) -> tuple[source_mixture.MixtureSource, ...]:
  """Reads the sources of a mixture."""
  sources = []
  for number, source in enumerate(values):
    section = reader.section(f"{where}[{number}]", source)
    sources.append(
        source_mixture.MixtureSource(
            name=section.take("source_name", str),
            target_ratio=float(section.take("target_ratio", (float, int))),
            paths=section.take_texts("paths") or (),
            max_repetition_ratio=float(section.take("max_repetition_ratio", (float, int), 1.0)),
            max_source_fraction=float(section.take("max_source_fraction", (float, int), 1.0)),
        )
    )
    section.end()
  return tuple(sources)


def parse_sources(values: Any, where: str) -> tuple[source_mixture.MixtureSource, ...]:
  """Returns the sources that a mixture file of OLMo-core lists under `sources`.

  Args:
    values: The content of the YAML or JSON file.
    where: Name of the file for error messages.
  """
  if not isinstance(values, dict) or not isinstance(values.get("sources"), list):
    raise errors.ConfigError(f"{where} is not a source mixture: expected a list `sources`.")
  reader = olmo_core_fields.Reader()
  section = reader.section(where, values)
  sources = read_sources(reader, section.take("sources", list), "sources")
  section.end()
  reader.raise_problems(f"{where} cannot be read")
  return sources


def _read_packed(
    reader: olmo_core_fields.Reader, dataset: olmo_core_fields.Section
) -> dict[str, Any]:
  del reader
  return {
      "document_lengths": dataset.take("generate_doc_lengths", bool, False),
      "long_documents": dataset.take("long_doc_strategy", str, "truncate"),
      "group_size": dataset.take("source_group_size", int, 1),
      "use_array_if_local": dataset.take("use_array_if_local", bool, None),
  }


def _read_padded(
    reader: olmo_core_fields.Reader, dataset: olmo_core_fields.Section
) -> dict[str, Any]:
  del reader, dataset
  return {}


_DATASETS: dict[
    str, Callable[[olmo_core_fields.Reader, olmo_core_fields.Section], dict[str, Any]]
] = {
    WINDOWS: _read_windows,
    PACKED: _read_packed,
    PADDED: _read_padded,
}


def _read_trainer(reader: olmo_core_fields.Reader, trainer: Any) -> dict[str, Any]:
  """Reads the steps to skip and the number of epochs; OLMo-core counts steps from 1."""
  trainer = trainer if isinstance(trainer, dict) else {}
  skips = []
  for number, values in enumerate(trainer.get("steps_to_skip") or ()):
    section = reader.section(f"trainer.steps_to_skip[{number}]", values)
    first, end = section.take("start", int), section.take("stop", int)
    section.end()
    if first < end:  # Otherwise, OLMo-core skips nothing.
      skips.append((max(first, 1) - 1, end - 1))
  duration = trainer.get("max_duration")
  duration = duration if isinstance(duration, dict) else {}
  epochs = duration.get("value") if duration.get("unit") == "epochs" else 0
  return {"skips": tuple(skips), "num_epochs": epochs if isinstance(epochs, int) else 0}


def _check(reader: olmo_core_fields.Reader, read: Mapping[str, Any]) -> None:
  """Adds a problem for each value that is invalid or contradicts another."""
  length, batch = read["sequence_length"], read["batch_tokens"]
  if length < 1 or batch < length or batch % length:
    reader.problems.append(
        f"data_loader.global_batch_size={batch} is not a multiple of dataset.sequence_length="
        f"{length}."
    )
  given = [bool(read[name]) for name in ("paths", "mix", "mixture")]
  if sum(given) != 1:
    reader.problems.append(
        "dataset needs exactly one of paths, mix and source_mixture_config, found" f" {sum(given)}."
    )
  if read["mix"] and not read["mix_base_dir"]:
    reader.problems.append("dataset.mix needs dataset.mix_base_dir.")
  labels, paths = read["labels"], read["paths"]
  if labels is not None and paths and not read["expand_glob"] and len(labels) != len(paths):
    reader.problems.append(f"dataset.metadata has {len(labels)} entries for {len(paths)} paths.")
  if read["mask_paths"] and read["mixture"]:
    reader.problems.append("dataset.label_mask_paths cannot be used with a source mixture.")
  if read["long_documents"] not in ("truncate", "fragment"):
    reader.problems.append(
        f"dataset.long_doc_strategy must be truncate or fragment, got {read['long_documents']!r}."
    )
  if not all(read["paths"]):
    reader.problems.append("dataset.paths has an empty path.")
