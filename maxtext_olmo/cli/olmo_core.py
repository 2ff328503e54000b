"""`maxtext-olmo olmo-core import`: takes over a run of OLMo-core by its own config."""

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
compared.

Prints what was understood. A field that is not known is an error, because it may change the data.

STATE is a JSON file with the loader's `state_dict()`, or with a trainer's that has a `data_loader`.
To make it from a checkpoint, where torch is installed:
  python -c "import json, torch; print(json.dumps(torch.load('step1000/train/rank0.pt',
      weights_only=False)['data_loader']))" > state.json
"""

_EPILOG = """\
examples:
  maxtext-olmo olmo-core import step1000/config.json --base /data/ai2-llm --output run.py
  maxtext-olmo olmo-core import step1000/config.json --state state.json --base /data/ai2-llm \\
      --mix-file OLMo-mix-0925-official.txt --output continue.py
"""


def add_parser(subparsers: Any) -> None:
  """Adds `olmo-core import`."""
  group = subparsers.add_parser("olmo-core", help="take over a run of OLMo-core by its config.json")
  option = cli.add_command(
      group.add_subparsers(title="commands", metavar="COMMAND", required=True),
      "import",
      run_import,
      help="write a config that yields the rows of an OLMo-core run",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("CONFIG", "the run's config.json, from a checkpoint folder")
  option("--state STATE", "the loader's state, a JSON file", otherwise="the run begins anew")
  option(
      "--base DIR_OR_URL",
      "where the token files are on this machine, in place of mix_base_dir or of the directory that"
      " all paths have in common",
      otherwise="as the config says",
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
  """Writes the config and prints what was understood."""
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
  title = f"The rows of the OLMo-core run of {os.path.basename(args.config)}."
  config_file.write(args.output, values, f"{comment}\n\n{config_file.STEP_NOTE}", title)
  cli.print_table(("setting", "value"), imported.understood)
  print(f"Wrote {args.output}.")
  return 0
