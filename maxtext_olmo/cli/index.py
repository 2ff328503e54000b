"""`maxtext-olmo index build` and `maxtext-olmo index show`."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from maxtext_olmo.cli import documents

if TYPE_CHECKING:
  from maxtext_olmo.corpus.index_builder import OlmoNpyIndex

_BUILD_EPILOG = """\
example:
  maxtext-olmo index build --mix-file OLMo-mix-0925-official.txt --base /mnt/olmo \\
      --sequence-length 8192 --output olmo-mix-0925.json
"""


def add_parser(subparsers: Any) -> None:
  """Adds `index build`, `index show` and `index documents`."""
  group = subparsers.add_parser("index", help="build an index of token files, or show one")
  commands = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
  _add_build(commands)
  _add_show(commands)
  documents.add_parser(commands)


def _add_build(commands: Any) -> None:
  parser = commands.add_parser(
      "build",
      help="look at the files of a mix and write their index",
      description=(
          "Looks at each file of a mix once (a stat and a small read) and writes the index that"
          " training reads."
      ),
      epilog=_BUILD_EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
      "--mix-file",
      required=True,
      metavar="FILE",
      help="the manifest: one `label,path` per line; AI2's own can be used as they are (required)",
  )
  parser.add_argument(
      "--base",
      metavar="DIR",
      help=(
          "the directory that the manifest's paths are relative to (default: the directory of the"
          " manifest)"
      ),
  )
  parser.add_argument(
      "--tokenizer",
      default="allenai/dolma3-tokenizer",
      metavar="NAME",
      help=(
          "what {TOKENIZER} stands for in the paths; part of the fingerprint (default: %(default)s)"
      ),
  )
  parser.add_argument(
      "--sequence-length",
      type=int,
      required=True,
      metavar="S",
      help="tokens per instance (required)",
  )
  parser.add_argument(
      "--max-target-sequence-length",
      type=int,
      metavar="M",
      help=(
          "cut files into windows of M tokens, a multiple of S, so that later stages with any S"
          " that divides M see the same tokens (default: none)"
      ),
  )
  parser.add_argument(
      "--source-permutation-seed",
      type=int,
      metavar="SEED",
      help="shuffle the files as OLMo-core does with this seed (default: the manifest's order)",
  )
  parser.add_argument(
      "--dtype",
      default="uint32",
      choices=("uint8", "uint16", "uint32", "uint64"),
      help="dtype of the token files (default: %(default)s, as AI2's are)",
  )
  parser.add_argument(
      "--checksums",
      choices=("xxh3", "sha256"),
      help="record a checksum of each file, for `verify`; reads all data (default: none)",
  )
  parser.add_argument(
      "--workers",
      type=int,
      default=32,
      metavar="N",
      help="threads that look at files (default: %(default)s)",
  )
  parser.add_argument(
      "--extends",
      metavar="INDEX",
      help=(
          "an older index that this mix continues with more files: its held-out split is kept"
          " (default: the output file, if it is there already and the mix continues it)"
      ),
  )
  parser.add_argument(
      "--output", required=True, metavar="FILE", help="the index, a JSON file (required)"
  )
  parser.set_defaults(run=run_build)


def _add_show(commands: Any) -> None:
  parser = commands.add_parser(
      "show",
      help="show what is in an index",
      description=(
          "Shows the labels of an index with their files, tokens and instances, and its"
          " fingerprint."
      ),
  )
  parser.add_argument("index", metavar="INDEX", help="the index, a JSON file (MaxText's own too)")
  parser.add_argument(
      "--files", action="store_true", help="show each file (default: a line for each label)"
  )
  parser.set_defaults(run=run_show)


def run_build(args: argparse.Namespace) -> int:
  """Builds an index."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import manifest as manifest_lib
  from maxtext_olmo.errors import CorpusError
  from maxtext_olmo.loader import olmo_core_import

  directory = os.path.dirname(os.path.abspath(args.output))
  if not os.path.isdir(directory):  # Better now than after an hour of checksums.
    raise CorpusError(f"The directory of the output does not exist: {directory}.")
  if os.path.isdir(args.output):
    raise CorpusError(f"The output {args.output} is a directory: name a file, such as index.json.")
  entries = manifest_lib.read_mix(args.mix_file, tokenizer=args.tokenizer)
  if args.source_permutation_seed is not None:
    entries = tuple(olmo_core_import.permute_sources(entries, args.source_permutation_seed))
  base = args.base or os.path.dirname(os.path.abspath(args.mix_file))
  index = index_lib.build_index(
      [(entry.path, entry.label) for entry in entries],
      args.sequence_length,
      tokenizer=args.tokenizer,
      dtype=args.dtype,
      base=base,
      max_target_sequence_length=args.max_target_sequence_length,
      checksums=args.checksums,
      workers=args.workers,
      progress=True,
      extends=index_lib.load_index(args.extends) if args.extends else None,
  )
  if not index.total_instances:
    longest = max(entry.n_tokens for entry in index.files)
    raise CorpusError(
        "The corpus has no instance: each needs"
        f" {args.max_target_sequence_length or args.sequence_length} tokens, and the longest file"
        f" has {longest}. Choose a shorter --sequence-length."
    )
  if not args.extends and os.path.exists(args.output):
    try:
      index = index_lib.keep_split(index, index_lib.load_index(args.output))
    except CorpusError as error:
      sys.stderr.write(f"note: {args.output} is replaced, with a new held-out split. {error}\n")
  index.save(args.output)
  _print_labels(index)
  print(f"Wrote {args.output}.", flush=True)
  _warn_of_dtype(index)
  return 0


def run_show(args: argparse.Namespace) -> int:
  """Shows an index."""
  from maxtext_olmo.corpus import index_builder as index_lib

  index = index_lib.load_index(args.index)
  if args.files:
    _print_files(index)
  else:
    _print_labels(index)
  return 0


def _warn_of_dtype(index: "OlmoNpyIndex") -> None:
  """A forgotten --dtype is the likeliest mistake, and a few bytes of a few files give it away."""
  from maxtext_olmo.corpus import verify
  from maxtext_olmo.corpus.token_files import TokenFiles

  files = TokenFiles.of_index(index)
  largest = sorted(range(len(index.files)), key=lambda i: -index.files[i].n_tokens)[:4]
  for file_id in largest:
    if other := verify.likelier_dtype(index, files, file_id):
      sys.stderr.write(
          f"warning: {files.paths[file_id]} looks like {other}, not {index.dtype}: if it is, build"
          " the index again"
          f" with --dtype {other}.\n"
      )
      return


def _print_labels(index: "OlmoNpyIndex") -> None:
  from maxtext_olmo.cli import tables

  sums: dict[str, list[int]] = {}
  for entry in index.files:
    numbers = sums.setdefault(entry.label, [0, 0, 0])
    for i, amount in enumerate((1, entry.n_tokens, entry.n_instances)):
      numbers[i] += amount
  table = tables.new_table("label", "files", "tokens", "instances", "share")
  for label, (files, tokens, instances) in sums.items():
    share = instances / max(index.total_instances, 1)
    tables.add_row(table, label, f"{files:,}", f"{tokens:,}", f"{instances:,}", f"{share:.2%}")
  if len(sums) > 1:
    table.add_section()
    total = (len(index.files), index.total_tokens, index.total_instances)
    tables.add_row(table, "total", *(f"{number:,}" for number in total), "")
  console = tables.console()
  console.print(table)
  longest = index.max_target_sequence_length
  console.print(
      f"sequence length {index.sequence_length}"
      + (f" (windows of {longest})" if longest else "")
      + f", {index.dtype}, tokenizer {index.tokenizer}\nbase"
      f" {index.base or '(none: the paths are full)'}\n"
      f"fingerprint {index.fingerprint}",
      markup=False,
  )


def _print_files(index: "OlmoNpyIndex") -> None:
  from maxtext_olmo.cli import tables

  table = tables.new_table(
      "file",
      "path",
      "label",
      "bytes",
      "offset",
      "tokens",
      "first instance",
      "instances",
      "checksum",
  )
  for file_id, entry in enumerate(index.files):
    numbers = (
        entry.size_bytes,
        entry.data_offset,
        entry.n_tokens,
        entry.instance_offset,
        entry.n_instances,
    )
    shown = [f"{number:,}" for number in numbers]
    tables.add_row(table, str(file_id), entry.path, entry.label, *shown, entry.checksum or "")
  tables.console().print(table)
