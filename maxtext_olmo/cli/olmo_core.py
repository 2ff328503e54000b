"""`maxtext-olmo olmo-core import`: imports an OLMo-core run from its own config."""

from __future__ import annotations

import argparse
import os
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo.cli import config_file

_DESCRIPTION = """\
Reads the sections `dataset` and `data_loader` of OLMo-core's config.json, builds the index of the
run's token files, and writes a config with which this library yields the same rows in the same
order. With a state, the run continues exactly where it stopped, and the fingerprint of its data is
checked.

Prints the settings that it found. An unknown field is an error, because it may change the data.

STATE is a checkpoint folder, its train/rank0.pt (torch is not needed), or a JSON file with the
loader's `state_dict()`.
"""

_EPILOG = """\
examples:
  maxtext-olmo olmo-core import step1000 --base /data/ai2-llm --output run.py
  maxtext-olmo olmo-core import step1000 --state step1000 --base /data/ai2-llm \\
      --mix-file OLMo-mix-0925-official.txt --output continue.py
"""


def add_parser(subparsers: Any) -> None:
  """Adds `olmo-core import`."""
  group = subparsers.add_parser("olmo-core", help="import an OLMo-core run from its config.json")
  option = cli.add_command(
      group.add_subparsers(title="commands", metavar="COMMAND", required=True),
      "import",
      run_import,
      help="write a config that yields the rows of an OLMo-core run",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("CONFIG", "a checkpoint folder of the run, or its config.json")
  option(
      "--state STATE",
      "the loader's state: a checkpoint folder or a file",
      otherwise="the run begins at step 0",
  )
  option(
      "--base DIR_OR_URL",
      "directory or URL of the token files; it replaces mix_base_dir, or the directory that all"
      " paths have in common",
      otherwise="the paths as in CONFIG",
  )
  option(
      "--mix-file FILE",
      "manifest of a named mix",
      otherwise="NAME.txt next to CONFIG, in the current directory, or in an installed OLMo-core",
  )
  option(
      "--index FILE",
      "index of the token files; it is built if it does not exist",
      otherwise="a file next to the output, named after it",
  )
  option(
      "--output FILE",
      "file for the config: .py for the embedded trainer, .yml for MaxText, or .json",
      required=True,
  )
  cli.add_storage_options(option)


def run_import(args: argparse.Namespace) -> int:
  """Writes the config and prints the settings that were found."""
  from maxtext_olmo.loader import olmo_core_run

  config_file.check(args.output)
  imported = olmo_core_run.import_run(
      args.config,
      base=args.base,
      state=args.state,
      mix_file=args.mix_file,
      index_path=args.index or f"{os.path.splitext(args.output)[0]}.index.json",
      progress=True,
  )
  reached = cli.store_options(args)
  values = imported.values | {
      f"olmo_storage_{name}": value
      for name in ("endpoint", "region", "anonymous")
      if (value := getattr(reached, name))
  }
  comment = "\n".join(f"{what}: {value}" for what, value in imported.understood)
  title = f"The rows of the OLMo-core run of {args.config}."
  config_file.write(args.output, values, f"{comment}\n\n{config_file.STEP_NOTE}", title)
  cli.print_table(("setting", "value"), imported.understood)
  print(f"Wrote {args.output}.")
  return 0
