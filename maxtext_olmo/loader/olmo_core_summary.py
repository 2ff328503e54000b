"""Describes an imported run of OLMo-core in words, for `maxtext-olmo olmo-core import`."""

from __future__ import annotations

from typing import Any

from maxtext_olmo import config as config_lib
from maxtext_olmo import english
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.loader import olmo_core_config
from maxtext_olmo.loader import olmo_core_files
from maxtext_olmo.loader import olmo_core_fingerprint
from maxtext_olmo.loader import olmo_core_import


def describe_state(
    run: olmo_core_config.RunConfig,
    loader: olmo_core_import.LoaderState,
    position: int,
    datasets: list[olmo_core_fingerprint.Dataset],
) -> str:
  """Returns a line about the state of a run's data loader."""
  agrees = loader.dataset_fingerprint in [dataset.fingerprint for dataset in datasets]
  seed = "" if loader.seed == run.seed else f"; its seed {loader.seed} is used, not the config's"
  return (
      f"epoch {loader.epoch} (epoch {loader.epoch - 1} here), {loader.tokens_processed:,} tokens:"
      f" position {position:,}; its fingerprint {'agrees' if agrees else 'differs and is ignored'}"
      f"{seed}"
  )


def describe_run(
    run: olmo_core_config.RunConfig,
    seed: int,
    index: index_builder.OlmoNpyIndex,
    index_path: str,
    files: olmo_core_files.Files | None,
    dataset: olmo_core_fingerprint.Dataset,
    content: Any,
) -> list[tuple[str, str]]:
  """Describes the config of a run, as (name, value) pairs of text.

  Args:
    run: The config.
    seed: Seed of the order, from the state if there is one.
    index: Index of the run's token files.
    index_path: Path of the index.
    files: The token files; None if there already was an index, so the files were not searched for.
    dataset: The dataset as OLMo-core's fingerprint describes it.
    content: The content of `config.json`.
  """
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
    long = {"fragment": "split"}.get(run.long_documents, "truncated")
    rows += f", packed from {files_at_a_time} at a time, long documents {long}"
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
    found.append(("boundaries", "csv.gz files" if run.uses_boundary_files else "EOS"))
  if run.dataset == olmo_core_config.PACKED:
    ties = config_lib.defaults()["olmo_packing_ties"]
    guess = f"in the order of {ties} (olmo_packing_ties); the fingerprint does not cover this"
    found.append(("equally long documents", guess))
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
