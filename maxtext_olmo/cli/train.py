"""`maxtext-olmo train`: runs the embedded trainer."""

import argparse
from typing import Any

from maxtext_olmo import cli


def add_parser(subparsers: Any) -> None:
  """Adds `train`."""
  cli.add_command(
      subparsers,
      "train",
      run,
      help="train a small language model on a corpus",
      usage="maxtext-olmo train [-h] [--config=FILE] [--config.KEY=VALUE ...]",
      description=(
          "Trains the embedded JAX language model. All arguments go to the trainer; the command is"
          " the same as `python -m maxtext_olmo.trainers.tiny`."
      ),
      epilog=(
          "example: maxtext-olmo train --config=configs/tiny.py --config.steps=200\n"
          "`maxtext-olmo train --helpfull` lists every KEY with its default, as"
          " docs/guides/configuration.md does."
      ),
  )


def run(args: argparse.Namespace) -> int:
  """Runs the trainer."""
  from maxtext_olmo.trainers.tiny import trainer

  return trainer.main_from_argv(["maxtext-olmo train", *args.rest])
