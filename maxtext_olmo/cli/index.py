"""`maxtext-olmo index build`, `show` and `documents`; the other commands are in `index_*`."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo import english
from maxtext_olmo.cli import index_checksums
from maxtext_olmo.cli import index_mixture
from maxtext_olmo.cli import index_pack
from maxtext_olmo.corpus import urls
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

if TYPE_CHECKING:
  from maxtext_olmo.corpus.index_builder import OlmoNpyIndex

_BUILD_EPILOG = """\
example:
  maxtext-olmo index build --mix-file OLMo-mix-0925-official.txt --base /mnt/olmo \\
      --sequence-length 8192 --output olmo-mix-0925.json
"""


def add_parser(subparsers: Any) -> None:
  """Adds `index` and its commands."""
  group = subparsers.add_parser("index", help="build an index of token files, or show one")
  commands = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
  _add_build(commands)
  index_mixture.add_parser(commands)
  index_pack.add_parser(commands)
  index_checksums.add_parser(commands)
  option = cli.add_command(
      commands,
      "show",
      run_show,
      help="show the contents of an index",
      description=(
          "Shows the labels of an index with their files, tokens and instances, and its"
          " fingerprint."
      ),
  )
  option("INDEX", "the index, a JSON file (an index made by MaxText works too)")
  cli.add_storage_options(option)
  option("--files", "show a line for each file", otherwise="one per label", action="store_true")
  _add_documents(commands)


def _add_build(commands: Any) -> None:
  option = cli.add_command(
      commands,
      "build",
      run_build,
      help="build the index of the files of a mix",
      description=(
          "Checks each file of a mix once and writes the index that training reads. Each local"
          " file takes a stat and a small read; for objects in a store, only sizes and ETags are"
          " requested."
      ),
      epilog=_BUILD_EPILOG,
  )
  option(
      "--mix-file FILE",
      "the manifest, with one `label,path` per line; AI2's manifests can be used as they are",
      required=True,
  )
  option(
      "--base DIR",
      "directory or URL to which the manifest's paths are relative, such as gs://bucket/olmo;"
      " MaxText's name for it is --gcs-base",
      otherwise="the directory of the manifest",
      aliases=("--gcs-base",),
  )
  option(
      "--allow-outside",
      "allow files outside the base: absolute paths, and paths that leave it through `..`",
      otherwise="they are refused",
      action="store_true",
  )
  option(
      "--tokenizer NAME",
      "value of {TOKENIZER} in the paths; part of the fingerprint",
      default="allenai/dolma3-tokenizer",
  )
  option("--sequence-length S", "tokens per instance", required=True, type=int)
  option(
      "--max-target-sequence-length M",
      "cut files into windows of M tokens, a multiple of S, so that later stages with any sequence"
      " length that divides M see the same tokens",
      otherwise="none",
      type=int,
  )
  option(
      "--source-permutation-seed SEED",
      "shuffle the files as OLMo-core does with this seed",
      otherwise="the manifest's order",
      type=int,
  )
  option(
      "--dtype",
      "dtype of the token files",
      otherwise="%(default)s, as in AI2's files",
      default="uint32",
      choices=("uint8", "uint16", "uint32", "uint64"),
  )
  option(
      "--checksums",
      "record a checksum of each file for `verify`; reads all data. `verify` can check xxh3-pieces"
      " piece by piece, on many machines at the same time; `index checksums` can add checksums"
      " later, also on many machines",
      otherwise="none",
      choices=("xxh3", "sha256", "xxh3-pieces"),
  )
  option("--workers N", "threads that check files", default=32)
  option(
      "--extends INDEX",
      "older index that this mix extends with more files; its held-out split is kept",
      otherwise="the output file, if it exists and the mix extends it",
  )
  option("--output FILE", "path or URL of the index to write, a JSON file", required=True)
  option(
      "--npy-headers",
      "look for .npy headers in objects of a store, which takes a small read of each",
      otherwise="objects are not read; headers of local files are always found",
      action="store_true",
  )
  cli.add_storage_options(option)


def _add_documents(commands: Any) -> None:
  option = cli.add_command(
      commands,
      "documents",
      run_documents,
      help="find the documents of an index, for dataset_type=olmo_documents",
      description=(
          "Finds the documents of a corpus by their EOS (this reads all tokens once), or from"
          " dolma's csv.gz boundary files if they are next to the token files. Writes the document"
          " index: a file with the beginning of each document, and its name if there is a boundary"
          " file."
      ),
  )
  option("INDEX", "path or URL of the index, a JSON file")
  option("--eos-id ID", "the token that ends a document", required=True, type=int)
  option(
      "--boundaries RULE",
      "'auto' prefers boundary files; 'eos' and 'csv' are the rules of dataset_type=olmo_padded",
      default="auto",
      choices=("auto", "eos", "csv"),
  )
  option(
      "--output FILE",
      "path or URL of the document index",
      otherwise="INDEX.documents, with the rule if it is not 'auto'",
  )
  option(
      "--hashes",
      "store a hash of each document's tokens, for olmo_exclude",
      otherwise="off",
      action="store_true",
  )
  cli.add_path_remap(option)
  cli.add_storage_options(option)
  cli.add_work_options(option)
  option(
      "--verify",
      "check the whole existing document index instead of making one",
      otherwise="off",
      action="store_true",
  )


def run_build(args: argparse.Namespace) -> int:
  """Builds an index."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import manifest as manifest_lib
  from maxtext_olmo.corpus import paths
  from maxtext_olmo.corpus.storage import open_storage
  from maxtext_olmo.loader import olmo_core_import

  _check_directory(args.output)  # Fail now rather than after an hour of checksums.
  if os.path.isdir(args.output):
    raise CorpusError(f"The output {args.output} is a directory. Give a file, such as index.json.")
  entries = manifest_lib.read_mix(args.mix_file, tokenizer=args.tokenizer)
  base = paths.absolute(args.base or os.path.dirname(paths.absolute(args.mix_file)))
  if not args.allow_outside:
    manifest_lib.check_inside(entries, args.mix_file, base)
  if args.source_permutation_seed is not None:
    entries = tuple(olmo_core_import.permute_sources(entries, args.source_permutation_seed))
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
      extends=None if args.extends is None else index_lib.load_index(args.extends),
      npy_headers=args.npy_headers,
  )
  if not index.total_instances:
    longest = max(entry.n_tokens for entry in index.files)
    raise CorpusError(
        "The corpus has no instances: each needs"
        f" {args.max_target_sequence_length or args.sequence_length} tokens, but the longest file"
        f" has {longest}. Choose a shorter --sequence-length."
    )
  if not args.extends and open_storage().exists(args.output):
    try:
      index = index_lib.keep_split(index, index_lib.load_index(args.output))
    except CorpusError as error:
      sys.stderr.write(f"note: {args.output} is replaced, with a new held-out split. {error}\n")
  index.save(args.output)
  _print_labels(index)
  print(f"Wrote {args.output}.", flush=True)
  if repeats := manifest_lib.describe_repeats(entries):
    sys.stderr.write(f"note: {repeats}\n")
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


def run_documents(args: argparse.Namespace) -> int:
  """Builds or checks the document index and prints its contents."""
  import numpy as np

  from maxtext_olmo.corpus import documents as documents_lib
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus.storage import open_storage

  index = index_lib.load_index(args.index)
  path = args.output or documents_lib.default_path(args.index, args.boundaries)
  _check_directory(path)
  if args.verify:
    documents = documents_lib.load_documents(path, index, args.eos_id, rule=args.boundaries)
    documents.verify()
  else:
    options = cli.work_options(args, path)
    outcome = documents_lib.find_documents(
        index,
        args.eos_id,
        options,
        rule=args.boundaries,
        hashes=args.hashes,
        path_remap=dict(args.path_remap),
        progress=True,
    )
    if options.part is not None:
      return cli.report_part(outcome, options)
    documents = documents_lib.write_documents(
        index, path, args.eos_id, outcome, rule=args.boundaries, hashes=args.hashes
    )
    outcome.discard()
  count = documents.num_documents
  sample = documents.lengths(np.linspace(0, count - 1, min(count, 100_000)).astype(np.int64))
  middle, long = np.percentile(sample, [50, 99]) if count else (0, 0)
  print(
      f"{english.count(count, 'document')}, {english.count(documents.num_tokens, 'token')};"
      f" the median length is {middle:,.0f}, and 99% have at most {long:,.0f}."
  )
  if by_csv := documents.num_boundary_files:
    print(
        f"Boundary files (csv.gz) list the documents of {by_csv:,} of"
        f" {english.count(documents.num_files, 'file')}."
    )
  named = documents.names.named if documents.names else 0
  have = "document has" if named == 1 else "documents have"
  print(f"{named:,} {have} a name; {'with' if documents.hashes else 'without'} hashes.")
  size = f"{open_storage().size(path):,} bytes"
  print(f"{path} is intact: {size}." if args.verify else f"Wrote {path}: {size}.")
  return 0


def _check_directory(output: str) -> None:
  if urls.is_url(output):
    return
  directory = os.path.dirname(os.path.abspath(output))
  if not os.path.isdir(directory):
    raise MissingFileError(f"The directory of --output, {directory}, does not exist. Create it.")


def _warn_of_dtype(index: "OlmoNpyIndex") -> None:
  """Warns if samples of a few files look like another dtype, because --dtype is easy to forget."""
  from maxtext_olmo.corpus import dtype_guess
  from maxtext_olmo.corpus.storage import open_storage
  from maxtext_olmo.corpus.work import pieces

  local = [source for source in pieces.source_files(index) if not urls.is_url(source.path)]
  for source in sorted(local, key=lambda source: -source.n_tokens)[:4]:
    if other := dtype_guess.likelier_dtype(open_storage(), source):
      sys.stderr.write(
          f"warning: {source.path} looks like {other}, not {index.dtype}: if it is, build the index"
          f" again with --dtype {other}.\n"
      )
      return


def _print_labels(index: "OlmoNpyIndex") -> None:
  sums: dict[str, list[int]] = {}
  for entry in index.files:
    numbers = sums.setdefault(entry.label, [0, 0, 0])
    for i, amount in enumerate((1, entry.n_tokens, entry.n_instances)):
      numbers[i] += amount
  instances = max(index.total_instances, 1)
  rows: list[Any] = [(name, *sums[name], f"{sums[name][2] / instances:.2%}") for name in sums]
  if len(sums) > 1:
    rows.append(("total", len(index.files), index.total_tokens, index.total_instances, None))
  cli.print_table(
      ("label", "files", "tokens", "instances", "share"),
      rows,
      style=lambda row: "bold" if row[-1] is None else "",
  )
  longest = index.max_target_sequence_length
  print(
      f"sequence length {index.sequence_length}"
      + (f" (windows of {longest})" if longest else "")
      + f", {index.dtype}, tokenizer {index.tokenizer}\nbase"
      f" {index.base or '(none: the index has full paths)'}\n"
      f"fingerprint {index.fingerprint}"
  )


def _print_files(index: "OlmoNpyIndex") -> None:
  fields = {
      "path": "path",
      "label": "label",
      "bytes": "size_bytes",
      "offset": "data_offset",
      "tokens": "n_tokens",
      "first instance": "instance_offset",
      "instances": "n_instances",
      "checksum": "checksum",
  }
  cli.print_table(
      ("file", *fields),
      [
          (str(number), *(getattr(entry, field) for field in fields.values()))
          for number, entry in enumerate(index.files)
      ],
  )
