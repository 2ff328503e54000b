"""Takes over a run of OLMo-core: from its `config.json` to a config of this library.

    config.json ──► RunConfig ──► files ──► index ──► keys of the config
    state ────────► LoaderState ─────────────┴──────► the position, and a check of the fingerprint

`create_data_iterator` with the resulting config gives the rows of the run in its order and, with a
state, from exactly where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from maxtext_olmo import atomic
from maxtext_olmo import config as config_lib
from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.loader import olmo_core_config
from maxtext_olmo.loader import olmo_core_files
from maxtext_olmo.loader import olmo_core_fingerprint
from maxtext_olmo.loader import olmo_core_import
from maxtext_olmo.loader import olmo_packed
from maxtext_olmo.loader import olmo_padded
from maxtext_olmo.order import stored

_TYPES = {
    olmo_core_config.WINDOWS: "olmo_grain",
    olmo_core_config.PACKED: "olmo_packed",
    olmo_core_config.PADDED: "olmo_padded",
}
_CONFIG_EXPECTED = "Expected the config.json that OLMo-core writes to each checkpoint folder."
_STATE_EXPECTED = (
    "Expected the loader's state_dict() as JSON. `maxtext-olmo olmo-core import --help` shows the"
    " command that makes it from train/rank0.pt of a checkpoint."
)
Source = str | os.PathLike[str] | Mapping[str, Any]


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
    config: The run's config.json, or its content.
    base: Directory or URL of the token files on this machine: it takes the place of `mix_base_dir`,
      or of the directory that all paths have in common.
    state: JSON file with the state of the run's data loader, or its content; None begins anew.
    mix_file: Manifest of a named mix, if it is neither next to the config nor in an installed
      OLMo-core.
    index_path: Index of the token files. If there is none yet, it is built there; by default, in
      the user's cache directory.

  Raises:
    ConfigError: The config has fields that are not supported.
    ResumeError: The state belongs to other data.
  """
  return import_run(config, base=base, state=state, mix_file=mix_file, index_path=index_path).config


@dataclasses.dataclass(frozen=True)
class ImportedRun:
  """A run of OLMo-core as this library continues it.

  Attributes:
    values: Keys of the config that differ from their defaults.
    understood: What was understood, as (what, value) pairs of text.
  """

  values: dict[str, Any]
  understood: tuple[tuple[str, str], ...]

  @property
  def config(self) -> ConfigDict:
    """The config."""
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
  """Reads a run of OLMo-core; see `from_olmo_core` for the arguments."""
  content, where, near = _read_json(config, "the config", _CONFIG_EXPECTED)
  run = olmo_core_config.RunConfig.from_json(content, where)
  loader = None
  if state is not None:
    read = _read_json(state, "the state", _STATE_EXPECTED)
    loader = olmo_core_import.LoaderState.from_json(*read[:2])
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
  understood = _understood(run, seed, index, index_path, files, datasets[0], content)
  if loader is not None:
    values |= _continue(run, loader, index, values, datasets)
    position = values["olmo_initial_position"]
    understood.append(("state", _describe_state(run, loader, position, datasets)))
  return ImportedRun(values, tuple(understood))


def _read_json(source: Source, what: str, expected: str) -> tuple[Any, str, str]:
  """Returns the content of a JSON file, its name for errors, and its directory."""
  if isinstance(source, Mapping):
    return dict(source), what, ""
  path = os.fspath(source)
  data = storage_lib.open_storage().read(path)
  if not data.strip():
    raise errors.ConfigError(f"{path} is empty. {expected}")
  try:
    content = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise errors.ConfigError(f"{path} is not JSON: {error}. {expected}") from error
  return content, path, os.path.dirname(os.path.abspath(path))


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
  """Raises ConfigError if an existing index cannot be that of the run."""
  checks: list[tuple[str, Any, Any]] = [("dtype", run.dtype, index.dtype)]
  if run.dataset == olmo_core_config.WINDOWS:
    longest = run.max_target_sequence_length or run.sequence_length
    checks += [
        ("tokens per window", longest, index.window),
        ("heads of files", bool(run.mixture), index.has_heads),
    ]
  if run.paths and not run.expand_glob:
    checks.append(("number of files", len(run.paths), len(index.files)))
  for what, expected, found in checks:
    if expected != found:
      raise errors.ConfigError(
          f"The index {path} is not that of the run: {what} should be {expected}, found {found}."
          " Give the name of a file that does not exist, and the index is built there."
      )


def _keys(
    run: olmo_core_config.RunConfig, index_path: str, masks: tuple[str, ...] | None
) -> dict[str, Any]:
  """Returns the keys of the config that a run has set."""
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
    values["olmo_boundaries"] = "csv" if _uses_boundary_files(run) else "eos"
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


def _uses_boundary_files(run: olmo_core_config.RunConfig) -> bool:
  """Returns whether documents came from csv.gz files: for URLs, or if the config says so."""
  places = [run.mix_base_dir, *run.paths]
  return run.use_array_if_local is False or any(paths_lib.is_url(place) for place in places)


def describe_dataset(
    run: olmo_core_config.RunConfig, index: index_builder.OlmoNpyIndex
) -> list[olmo_core_fingerprint.Dataset]:
  """Returns what the fingerprint of a run's dataset covers, for each release of OLMo-core.

  If boundary files are missing, that of release 3.0, which hashes them, is left out.
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
  if _uses_boundary_files(run):
    try:
      hashes = olmo_core_fingerprint.hash_boundary_files(index, storage_lib.open_storage())
    except errors.MissingFileError as error:
      logging.warning(
          "Documents of this run came from boundary files, but %s If every document ends in exactly"
          " one EOS, set olmo_boundaries='eos' instead.",
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
  """Returns the keys that continue a run from a state; the state's seed wins, as in OLMo-core."""
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
  """Returns the number of rows of an epoch, which for documents means finding them all."""
  config = config_lib.get_config()
  config.update(values)
  options = config_lib.Options.read(config)
  if options.dataset_type == "olmo_packed":
    return olmo_packed.open_rows(options, options.olmo_index_path).rows.plan.num_rows
  return olmo_padded.open_rows(options.olmo_index_path, options)[0].num_rows(0)


def _describe_state(
    run: olmo_core_config.RunConfig,
    loader: olmo_core_import.LoaderState,
    position: int,
    datasets: list[olmo_core_fingerprint.Dataset],
) -> str:
  agrees = loader.dataset_fingerprint in [dataset.fingerprint for dataset in datasets]
  seed = "" if loader.seed == run.seed else f"; its seed {loader.seed} is used, not the config's"
  return (
      f"epoch {loader.epoch} (epoch {loader.epoch - 1} here), {loader.tokens_processed:,} tokens:"
      f" position {position:,}; its fingerprint {'agrees' if agrees else 'differs and is ignored'}"
      f"{seed}"
  )


def _understood(
    run: olmo_core_config.RunConfig,
    seed: int,
    index: index_builder.OlmoNpyIndex,
    index_path: str,
    files: olmo_core_files.Files | None,
    dataset: olmo_core_fingerprint.Dataset,
    content: Any,
) -> list[tuple[str, str]]:
  ids, found = run.ids, []
  found.append(("dataset", dataset.name))
  origin = "" if files is None else f" ({files.origin}, below {files.base or '/'})"
  found.append(("files", f"{len(index.files):,} with {index.total_tokens:,} tokens{origin}"))
  special = f"EOS {ids.eos_id}, padding {ids.pad_id}"
  special += "" if ids.bos_id is None else f", BOS {ids.bos_id}"
  found.append(("tokens", f"{run.dtype}, vocabulary {ids.vocab_size:,}, {special}"))
  longest = run.max_target_sequence_length
  rows = f"{run.sequence_length:,} tokens" + (f", from windows of {longest:,}" if longest else "")
  if run.dataset == olmo_core_config.PACKED:
    files_at_a_time = english.count(run.group_size, "file")
    rows += f", packed from {files_at_a_time} at a time, long documents {run.long_documents}d"
  found.append(("rows", rows))
  found.append(("batch", f"{run.rows:,} rows, {run.batch_tokens:,} tokens"))
  if run.mixture:
    found.append(("source mixture", f"{run.mixture_tokens[0]:,} tokens requested"))
  shuffled = "" if run.permutation_seed is None else f"; files shuffled with {run.permutation_seed}"
  found.append(("order", f"olmo_core, seed {seed}{shuffled}"))
  if run.filter is None:
    found.append(("repetition filter", "none"))
  else:
    periods = f"periods {run.filter.min_period} to {run.filter.max_period}"
    found.append(("repetition filter", f"{periods}, {run.filter.max_count} times"))
  masks = "from files" if run.mask_paths is not None else "none"
  found.append(("label masks", masks))
  found.append(("attention", "within documents" if run.document_lengths else "across the row"))
  if run.dataset != olmo_core_config.WINDOWS:
    found.append(("boundaries", "csv.gz files" if _uses_boundary_files(run) else "EOS"))
  if run.dataset == olmo_core_config.PACKED:
    ties = config_lib.defaults()["olmo_packing_ties"]
    found.append(("equally long documents", f"in the order of {ties} (olmo_packing_ties)"))
  if run.num_epochs:
    found.append(("epochs", str(run.num_epochs)))
  if run.skips:
    steps = ", ".join(f"{first} to {end - 1}" for first, end in run.skips)
    found.append(("steps without training", f"{steps}, counted from 0"))
  found.append(("index", index_path))
  found.append(("OLMo-core's fingerprint", dataset.fingerprint))
  used = {"dataset", "data_loader", *(["trainer"] if run.skips or run.num_epochs else [])}
  ignored = [*run.no_effect, *sorted(set(content) - used)]
  found.append(("not needed", ", ".join(ignored) or "nothing"))
  return found
