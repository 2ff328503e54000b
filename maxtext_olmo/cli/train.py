"""`maxtext-olmo train`: the embedded trainer."""

import argparse
from typing import Any

# The trainer has absl flags of its own; everything behind `train` is for it.
PASSES_ARGUMENTS_ON = True


def add_parser(subparsers: Any) -> None:
  """Adds `train`."""
  parser = subparsers.add_parser(
      "train",
      help="train a small language model on a corpus",
      usage="maxtext-olmo train [-h] [--config=FILE] [--config.KEY=VALUE ...]",
      description=(
          "Trains the embedded JAX language model. All arguments go to the trainer, which is also"
          " `python -m maxtext_olmo.trainers.tiny`."
      ),
      epilog=(
          "Example: maxtext-olmo train --config=configs/tiny.py --config.steps=200. `maxtext-olmo"
          " train --helpfull` lists every KEY with its default, as docs/guides/configuration.md"
          " does."
      ),
  )
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Hands over to the trainer."""
  from maxtext_olmo.trainers.tiny import trainer

  return trainer.main_from_argv(["maxtext-olmo train", *args.rest])
