"""`maxtext-olmo index checksums`: adds checksums to an index, on one machine or on many."""

from __future__ import annotations

import argparse
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import english

_EPILOG = """\
examples:
  maxtext-olmo index checksums index.json
  maxtext-olmo index checksums index.json --part 3 --of 64
  maxtext-olmo index checksums index.json --merge
on many machines: docs/guides/fleet.md
"""


def add_parser(commands: Any) -> None:
  """Adds `index checksums`."""
  option = cli.add_command(
      commands,
      "checksums",
      run,
      help="add checksums of the files to an index, for `verify`",
      description=(
          "Reads all files of an index and writes the index again, with a checksum of each file for"
          " `verify` to check. The fingerprint of the index does not change, so runs that use it"
          " are not affected. `index build --checksums` does the same on one machine."
      ),
      epilog=_EPILOG,
  )
  option("INDEX", "the index, a JSON file")
  option(
      "--algorithm",
      "xxh3-pieces divides large files among the workers; the others are checksums of whole files",
      default="xxh3-pieces",
      choices=("xxh3", "sha256", "xxh3-pieces"),
  )
  option(
      "--replace",
      "replace checksums that use another algorithm or no longer match their files",
      otherwise="stop with an error",
      action="store_true",
  )
  option("--output FILE", "path or URL of the index to write", otherwise="INDEX")
  cli.add_path_remap(option)
  cli.add_storage_options(option)
  cli.add_work_options(option)


def run(args: argparse.Namespace) -> int:
  """Computes the checksums and writes the index."""
  from maxtext_olmo.corpus import checksum_files
  from maxtext_olmo.corpus import index_builder

  output = args.output or args.index
  options = cli.work_options(args, output)
  index = index_builder.load_index(args.index)
  outcome = checksum_files.sum_pieces(
      index,
      args.algorithm,
      options,
      replace=args.replace,
      path_remap=dict(args.path_remap),
      progress=True,
  )
  if options.part is not None:
    return cli.report_part(outcome, options)
  summed = checksum_files.with_checksums(index, args.algorithm, outcome, replace=args.replace)
  summed.save(output)
  outcome.discard()
  print(f"Wrote {output}, with checksums of {english.count(len(index.files), 'file')}.")
  return 0
