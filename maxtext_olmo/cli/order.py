"""`maxtext-olmo order`: continues an OLMo-core run, and measures how well orders mix."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import errors
from maxtext_olmo.cli import config_file

_MOST_INSTANCES = 1 << 40

_IMPORT_DESCRIPTION = """\
Reads the state of OLMo-core's data loader and prints a config with which this library continues
exactly where that run stopped.

STATE is a checkpoint folder, its train/rank0.pt (torch is not needed), or a JSON file with the
loader's `state_dict()`. If the folder has a config.json, use `maxtext-olmo olmo-core import`
instead: it needs fewer options.
"""

_IMPORT_EPILOG = """\
example:
  maxtext-olmo order import-olmo-core state.json --index olmo-mix-0925.json \\
      --vocab-size 100278 --pad-id 100277 --eos-id 100257 --write continue.py
"""


def add_parser(subparsers: Any) -> None:
  """Adds `order import-olmo-core` and `order stats`."""
  group = subparsers.add_parser(
      "order", help="measure how well orders mix; continue an OLMo-core run without its config"
  )
  commands = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
  option = cli.add_command(
      commands,
      "import-olmo-core",
      run_import,
      help="print a config that continues where an OLMo-core run stopped",
      description=_IMPORT_DESCRIPTION,
      epilog=_IMPORT_EPILOG,
  )
  option("STATE", "the loader's state: a checkpoint folder or a file")
  option("--index INDEX", "the index of the run's files", required=True)
  option(
      "--sequence-length S",
      "continue with rows of S tokens, if the run had a max_target_sequence_length",
      otherwise="the run's",
      type=int,
  )
  option("--batch-size ROWS", "rows of a global batch", otherwise="as in the run", type=int)
  option(
      "--vocab-size V",
      "the run's vocabulary size; with --pad-id and --eos-id, the fingerprint is checked",
      otherwise="no check",
      type=int,
  )
  option("--pad-id ID", "the run's padding token", otherwise="no check", type=int)
  option("--eos-id ID", "the run's end-of-document token", otherwise="no check", type=int)
  option("--bos-id ID", "the run's beginning-of-document token", otherwise="none", type=int)
  option(
      "--write FILE",
      "file for the config: .py for the embedded trainer, .yml for MaxText, or .json",
      otherwise="print it",
  )
  option = cli.add_command(
      commands,
      "stats",
      run_stats,
      help="measure how well each order mixes, compared with a true shuffle",
      description=(
          "Compares each order, and Grain's own shuffle, with a true shuffle: displacement, serial"
          " correlation, the mixing of files within batches, and a chi-square test. Figures are"
          " standard deviations from what a true shuffle is expected to"
          " give."
      ),
  )
  option(
      "--instances N",
      "sizes of the corpus",
      otherwise="1000000 724000000",
      type=int,
      nargs="+",
      default=[1_000_000, 724_000_000],
  )
  option(
      "--largest-stored N",
      "omit olmo_core, which needs 4 bytes per instance, above this size",
      default=50_000_000,
  )
  option("--seed", "seed of the orders", default=0)


def run_import(args: argparse.Namespace) -> int:
  """Prints or writes the config."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.loader import olmo_core_checkpoint
  from maxtext_olmo.loader import olmo_core_import
  from maxtext_olmo.order import epochs as epochs_lib
  from maxtext_olmo.order import schedule

  state = olmo_core_import.LoaderState.from_json(*olmo_core_checkpoint.read_state(args.state))
  index = index_lib.load_index(args.index)
  length = args.sequence_length or state.sequence_length
  if index.max_target_sequence_length is not None:
    index = index.with_sequence_length(length)
  checked = _check_fingerprint(args, state, index)
  position = state.position(index)
  rows = args.batch_size or (
      state.rows * state.sequence_length // index.sequence_length if state.rows else None
  )
  if rows is None:
    raise errors.ConfigError(
        "The state does not determine the batch size, because the run has processed no batch in"
        " this epoch, or batches of several sizes. Set --batch-size."
    )
  values = {
      "dataset_type": "olmo_grain",
      "olmo_index_path": os.path.abspath(args.index),
      "olmo_order": "olmo_core",
      "data_shuffle_seed": state.seed,
      "max_target_length": index.sequence_length,
      "global_batch_size_to_load": rows,
      "olmo_initial_position": position,
  }
  epochs = epochs_lib.Epochs.constant(index.total_instances)
  steps = schedule.BatchSchedule.constant(rows).within(epochs).step_at(position)
  said = (
      f"The run is in epoch {state.epoch} (epoch {state.epoch - 1} here),"
      f" {state.tokens_processed:,} tokens into it: position {position:,}, which is step {steps:,}"
      f" with batches of {rows} rows.\n{checked}\n"
  )
  if args.write:
    comment = f"{said}{config_file.STEP_NOTE}"
    config_file.write(args.write, values, comment, "Continues an OLMo-core run.")
    print(said + f"Wrote {args.write}.")
  else:
    print(
        said
        + config_file.STEP_NOTE
        + "\n"
        + "\n".join(f"{name}={value}" for name, value in values.items())
    )
  return 0


def run_stats(args: argparse.Namespace) -> int:
  """Prints the measurements."""
  from maxtext_olmo.order import statistics as statistics_lib

  if max(args.instances) > _MOST_INSTANCES or not 0 <= args.seed < 1 << 32:
    raise errors.ConfigError(
        f"--instances must be at most {_MOST_INSTANCES}, and --seed from 0 to 2**32 - 1, as in"
        f" Grain's shuffle; got {args.instances} and {args.seed}."
    )
  sys.stdout.write(
      statistics_lib.report(args.instances, seed=args.seed, largest_stored=args.largest_stored)
  )
  return 0


def _check_fingerprint(args: argparse.Namespace, state: Any, index: Any) -> str:
  from maxtext_olmo.loader import olmo_core_fingerprint

  ids = (args.vocab_size, args.pad_id, args.eos_id)
  if all(value is None for value in (*ids, args.bos_id)):
    return "The fingerprint was not checked; give --vocab-size, --pad-id and --eos-id to check it."
  if any(value is None for value in ids):
    raise errors.ConfigError("--vocab-size, --pad-id and --eos-id work only together; give all.")
  tokenizer = olmo_core_fingerprint.TokenizerIds(*ids, args.bos_id)
  found = state.check_dataset(
      *(
          olmo_core_fingerprint.windows(index, tokenizer, release=release)
          for release in olmo_core_fingerprint.RELEASES
      )
  )
  return f"The index lists the run's corpus: both have the OLMo-core fingerprint {found}."
