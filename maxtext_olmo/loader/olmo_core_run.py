"""Takes over a run of OLMo-core: turns its `config.json` into a config of this library.

    config.json ──► RunConfig ──► files ──► index ──► keys of the config
    state ────────► LoaderState ─────────────┴──────► the position, and a check of the fingerprint

With the resulting config, the iterators of `create_data_iterator` yield the rows of the run in the
same order. If a state is given, they continue exactly where the run stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from maxtext_olmo import atomic
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.loader import olmo_core_checkpoint
from maxtext_olmo.loader import olmo_core_config
from maxtext_olmo.loader import olmo_core_files
from maxtext_olmo.loader import olmo_core_fingerprint
from maxtext_olmo.loader import olmo_core_import
from maxtext_olmo.loader import olmo_core_summary
from maxtext_olmo.loader import olmo_packed
from maxtext_olmo.loader import olmo_padded
from maxtext_olmo.order import stored

_TYPES = {
    olmo_core_config.WINDOWS: "olmo_grain",
    olmo_core_config.PACKED: "olmo_packed",
    olmo_core_config.PADDED: "olmo_padded",
}
Source = olmo_core_checkpoint.Source


def from_olmo_core(
    config: Source,
    *,
    base: str | os.PathLike[str] | None = None,
    state: Source | None = None,
    mix_file: str | os.PathLike[str] | None = None,
    index_path: str | os.PathLike[str] | None = None,
) -> ConfigDict:
  """Returns the config with which `create_data_iterator` continues a run of OLMo-core.

  >>> import maxtext_olmo, numpy as np, tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.arange(12, dtype="uint16").tofile(f"{folder}/part.npy")
  ...   config = maxtext_olmo.from_olmo_core(
  ...       {
  ...           "dataset": {
  ...               "_CLASS_": "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig",
  ...               "tokenizer": {"vocab_size": 50000, "eos_token_id": 0, "pad_token_id": 1},
  ...               "paths": [f"{folder}/part.npy"],
  ...               "sequence_length": 4,
  ...           },
  ...           "data_loader": {"global_batch_size": 8, "seed": 34521},
  ...       },
  ...       index_path=f"{folder}/index.json",
  ...   )
  >>> config.olmo_order, config.global_batch_size_to_load
  ('olmo_core', 2)

  Args:
    config: A checkpoint folder of the run, its config.json, or the content of that file.
    base: Directory or URL of the token files on this machine. It replaces `mix_base_dir`, or the
      common directory of all paths.
    state: State of the run's data loader: a checkpoint folder, its train/rank0.pt, a JSON file, or
      the content of that file. None starts at step 0.
    mix_file: Manifest of a named mix, if it is neither next to the config nor in an installed
      OLMo-core.
    index_path: Path of the index of the token files. The index is built if it does not exist. By
      default, a path in the user's cache directory.

  Raises:
    ConfigError: The config has fields that are not supported.
    ResumeError: The state belongs to a run with different data.
  """
  return import_run(config, base=base, state=state, mix_file=mix_file, index_path=index_path).config


@dataclasses.dataclass(frozen=True)
class ImportedRun:
  """A run of OLMo-core, translated into a config of this library.

  Attributes:
    values: Keys of the config that differ from their defaults.
    understood: Description of the run, as (name, value) pairs of text.
  """

  values: dict[str, Any]
  understood: tuple[tuple[str, str], ...]

  @property
  def config(self) -> ConfigDict:
    """The config for `create_data_iterator`."""
    config = config_lib.get_config()
    config.update(self.values)
    return config


def import_run(
    config: Source,
    *,
    base: str | os.PathLike[str] | None = None,
    state: Source | None = None,
    mix_file: str | os.PathLike[str] | None = None,
    index_path: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> ImportedRun:
  """Imports a run of OLMo-core; see `from_olmo_core` for the arguments."""
  content, where, near = olmo_core_checkpoint.read_config(config)
  run = olmo_core_config.RunConfig.from_json(content, where)
  loader = None
  if state is not None:
    loader = olmo_core_import.LoaderState.from_json(*olmo_core_checkpoint.read_state(state))
  files = None
  if index_path is None or not os.path.exists(index_path):
    files = olmo_core_files.find_files(run, base=base, mix_file=mix_file, near=near)
    index_path = os.fspath(index_path) if index_path else _cached_index_path(run, files)
    index = _build_index(run, files, progress=progress)
    with atomic.write_errors(index_path):
      os.makedirs(os.path.dirname(os.path.abspath(index_path)), exist_ok=True)
    index.save(index_path)
  else:
    index = index_builder.load_index(index_path)
    _check_index(run, index, os.fspath(index_path))
    if run.mask_paths is not None:
      files = olmo_core_files.find_files(run, base=base, mix_file=mix_file, near=near)
  index_path = os.path.abspath(index_path)
  values = _keys(run, index_path, None if files is None else files.masks)
  datasets = describe_dataset(run, index)
  seed = run.seed if loader is None else loader.seed
  understood = olmo_core_summary.describe_run(
      run, seed, index, index_path, files, datasets[0], content
  )
  if loader is not None:
    values |= _continue(run, loader, index, values, datasets)
    position = values["olmo_initial_position"]
    understood.append(("state", olmo_core_summary.describe_state(run, loader, position, datasets)))
  return ImportedRun(values, tuple(understood))


def _cached_index_path(run: olmo_core_config.RunConfig, files: olmo_core_files.Files) -> str:
  request = [files.paths, files.labels, run.sequence_length, run.max_target_sequence_length]
  request += [run.dtype, run.tokenizer, repr(run.mixture), run.mixture_tokens]
  digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16]
  folder = os.path.join(os.path.dirname(stored.default_cache_dir()), "indexes")
  return os.path.join(folder, f"{digest}.json")


def _build_index(
    run: olmo_core_config.RunConfig, files: olmo_core_files.Files, *, progress: bool
) -> index_builder.OlmoNpyIndex:
  settings: dict[str, Any] = {
      "tokenizer": run.tokenizer or "unknown",
      "dtype": run.dtype,
      "base": files.base or None,
      "max_target_sequence_length": run.max_target_sequence_length,
      "progress": progress,
  }
  if files.sources:
    size = source_mixture.MixtureSize(*run.mixture_tokens, run.sequence_length)
    return source_mixture.build_mixture_index(files.sources, size, **settings)
  pairs = list(zip(files.paths, files.labels))
  return index_builder.build_index(pairs, run.sequence_length, **settings)


def _check_index(
    run: olmo_core_config.RunConfig, index: index_builder.OlmoNpyIndex, path: str
) -> None:
  """Raises ConfigError if an existing index cannot belong to the run."""
  checks: list[tuple[str, Any, Any]] = [("dtype", run.dtype, index.dtype)]
  if run.dataset == olmo_core_config.WINDOWS:
    longest = run.max_target_sequence_length or run.sequence_length
    checks += [
        ("tokens per window", longest, index.window),
        ("only the beginnings of files", bool(run.mixture), index.has_heads),
    ]
  if run.paths and not run.expand_glob:
    checks.append(("number of files", len(run.paths), len(index.files)))
  for what, expected, found in checks:
    if expected != found:
      raise errors.ConfigError(
          f"The index {path} does not match the run: {what}: expected {expected}, found {found}."
          " Give a path where no file exists yet, so that the right index is built there."
      )


def _keys(
    run: olmo_core_config.RunConfig, index_path: str, masks: tuple[str, ...] | None
) -> dict[str, Any]:
  """Returns the config keys that describe a run."""
  values: dict[str, Any] = {
      "dataset_type": _TYPES[run.dataset],
      "olmo_index_path": index_path,
      "olmo_order": "olmo_core",
      "data_shuffle_seed": run.seed,
      "max_target_length": run.sequence_length,
      "global_batch_size_to_load": run.rows,
      "vocab_size": run.ids.vocab_size,
      "olmo_eos_id": run.ids.eos_id,
      "olmo_apply_ngram_filter": run.filter is not None,
  }
  if run.filter is not None and run.filter != olmo_core_config.Filter():
    values |= {
        "olmo_ngram_max_period": run.filter.max_period,
        "olmo_ngram_min_period": run.filter.min_period,
        "olmo_ngram_max_count": run.filter.max_count,
    }
  if run.dataset != olmo_core_config.PADDED:
    values["olmo_document_mask"] = run.document_lengths
    if run.ids.bos_id is not None:
      values["olmo_bos_id"] = run.ids.bos_id
  if run.dataset != olmo_core_config.WINDOWS:
    values["olmo_pad_id"] = run.ids.pad_id
    values["olmo_boundaries"] = "csv" if run.uses_boundary_files else "eos"
  if run.dataset == olmo_core_config.PACKED:
    values["olmo_long_documents"] = {"fragment": "split"}.get(run.long_documents, "truncate")
    values["olmo_source_group_size"] = run.group_size
  if masks is not None:
    values["olmo_label_masks"] = masks
    if run.permutation_seed is not None:
      values["olmo_label_masks_seed"] = run.permutation_seed
  if run.num_epochs:
    values["olmo_num_epochs"] = run.num_epochs
  if run.skips:
    values |= {"olmo_skip": run.skips, "olmo_skip_unit": "steps", "olmo_skip_mode": "mask"}
  return values


def describe_dataset(
    run: olmo_core_config.RunConfig, index: index_builder.OlmoNpyIndex
) -> list[olmo_core_fingerprint.Dataset]:
  """Returns a run's dataset as each release of OLMo-core fingerprints it.

  If boundary files are needed but missing, release 3.0 is left out, because it hashes these files.
  """
  if run.dataset == olmo_core_config.PADDED:
    return [olmo_core_fingerprint.padded(index, run.ids, run.sequence_length)]
  if run.dataset == olmo_core_config.WINDOWS:
    return [
        olmo_core_fingerprint.windows(index, run.ids, release=release)
        for release in olmo_core_fingerprint.RELEASES
    ]
  hashes: list[tuple[str, str]] = []
  releases = olmo_core_fingerprint.RELEASES
  if run.uses_boundary_files:
    try:
      hashes = olmo_core_fingerprint.hash_boundary_files(index, storage_lib.open_storage())
    except errors.MissingFileError as error:
      logging.warning(
          "The documents of this run are defined by boundary files: %s If every document ends in"
          " exactly one EOS, set olmo_boundaries='eos' instead.",
          error,
      )
      releases = ("2.5",)
  return [
      olmo_core_fingerprint.packed(
          index,
          run.ids,
          run.sequence_length,
          long_documents=run.long_documents,
          group_size=run.group_size,
          use_array_if_local=run.use_array_if_local,
          boundary_hashes=hashes,
          release=release,
      )
      for release in releases
  ]


def _continue(
    run: olmo_core_config.RunConfig,
    loader: olmo_core_import.LoaderState,
    index: index_builder.OlmoNpyIndex,
    values: dict[str, Any],
    datasets: list[olmo_core_fingerprint.Dataset],
) -> dict[str, Any]:
  """Returns the config keys with which a run continues from a state.

  As in OLMo-core, the state's seed overrides the seed in the run's config.
  """
  try:
    loader.check_dataset(*datasets)
  except errors.ResumeError as error:
    if not run.ignore_fingerprint_mismatch:
      raise
    logging.warning("ignore_fingerprint_mismatch: %s", error)
  num_rows: int | None = index.total_instances
  if run.dataset != olmo_core_config.WINDOWS:
    num_rows = _count_rows(values) if loader.epoch > 1 else None
  longest = run.max_target_sequence_length
  return {
      "data_shuffle_seed": loader.seed,
      "olmo_initial_position": loader.position_in_rows(num_rows, run.sequence_length, longest),
  }


def _count_rows(values: dict[str, Any]) -> int:
  """Returns the number of rows in an epoch. To count them, it finds all documents of the corpus."""
  config = config_lib.get_config()
  config.update(values)
  options = config_lib.Options.read(config)
  if options.dataset_type == "olmo_packed":
    return olmo_packed.open_rows(options, options.olmo_index_path).rows.plan.num_rows
  return olmo_padded.open_rows(options.olmo_index_path, options)[0].num_rows(0)
