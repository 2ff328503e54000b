"""`maxtext-olmo index mixture`: builds the index of a source mixture."""

from __future__ import annotations

import argparse
import os
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import errors

_DESCRIPTION = """\
Builds the index of a source mixture as OLMo-core's SourceMixtureDatasetConfig does. Each source
contributes its share of the requested tokens, from the beginning of each of its files, in whole
rows that fill whole batches. A source with too few tokens is read several times, up to
max_repetition_ratio.

MIXTURE is OLMo-core's YAML file, or a JSON file, with a list `sources`. Each source has a
source_name, a target_ratio, and paths, in which `*` and `**` are wildcards.
"""

_EPILOG = """\
example:
  maxtext-olmo index mixture OLMo3-32B-midtraining-modelnamefilter.yaml --base /data/preprocessed \\
      --requested-tokens 100000000000 --global-batch-size 4194304 --sequence-length 8192 \\
      --output hybrid_midtrain.json
"""


def add_parser(commands: Any) -> None:
  """Adds `index mixture`."""
  option = cli.add_command(
      commands,
      "mixture",
      run,
      help="build the index of a source mixture of OLMo-core",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("MIXTURE", "the sources, a YAML or JSON file")
  option("--requested-tokens N", "tokens in the mixture", required=True, type=int)
  option("--global-batch-size N", "tokens in a global batch", required=True, type=int)
  option("--sequence-length S", "tokens per instance", required=True, type=int)
  option(
      "--max-target-sequence-length M",
      "cut files into windows of M tokens, a multiple of S",
      otherwise="none",
      type=int,
  )
  option(
      "--base DIR",
      "directory of the files on this machine; it replaces the directory that all paths share",
      otherwise="the paths as in MIXTURE",
  )
  option(
      "--tokenizer NAME",
      "name of the tokenizer; part of the fingerprint",
      default="allenai/dolma2-tokenizer",
  )
  option(
      "--dtype",
      "dtype of the token files",
      otherwise="%(default)s, as in AI2's files",
      default="uint32",
      choices=("uint8", "uint16", "uint32", "uint64"),
  )
  option("--workers N", "threads that check files", default=32)
  option("--output FILE", "the index to write, a JSON file", required=True)
  cli.add_storage_options(option)


def run(args: argparse.Namespace) -> int:
  """Builds the index, and prints what each source contributes."""
  from maxtext_olmo.corpus import source_mixture
  from maxtext_olmo.loader import olmo_core_config
  from maxtext_olmo.loader import olmo_core_files

  if not os.path.isfile(args.mixture):
    raise errors.ConfigError(f"The source mixture {args.mixture} is not a file.")
  given = olmo_core_config.parse_sources(cli.read_values(args.mixture), args.mixture)
  sources, base = olmo_core_files.resolve_sources(given, args.base)
  index = source_mixture.build_mixture_index(
      sources,
      source_mixture.MixtureSize(
          args.requested_tokens, args.global_batch_size, args.sequence_length
      ),
      tokenizer=args.tokenizer,
      dtype=args.dtype,
      base=base or None,
      max_target_sequence_length=args.max_target_sequence_length,
      workers=args.workers,
      progress=True,
  )
  index.save(args.output)
  cli.print_table(("label", "files", "tokens", "read", "ratio", "passes"), _rows(sources, index))
  print(
      f"{index.total_instances:,} instances of {index.sequence_length:,} tokens.\n"
      f"Wrote {args.output}."
  )
  return 0


def _rows(sources: Any, index: Any) -> list[tuple[Any, ...]]:
  """Returns a row of the table for each source."""
  rows = []
  total = index.total_instances * index.sequence_length
  for source in sources:
    entries = [entry for entry in index.files if entry.label == source.name]
    has = sum({entry.path: entry.n_tokens for entry in entries}.values())
    read = sum(entry.n_instances for entry in entries) * index.sequence_length
    row = (source.name, len(source.paths), has, read, f"{read / total:.6f}", f"{read / has:.3f}")
    rows.append(row)
  return rows
