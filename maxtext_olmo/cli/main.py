"""The `maxtext-olmo` command.

Each command is a module of this package, with `add_parser(subparsers)` that sets `run`, a function
of the parsed arguments that returns the exit code. A new one is a name in `COMMANDS`. A module
imports what is heavy when it runs, so that `--help` answers at once.

Exit codes: 0 all is well; 1 the command looked and found something wrong; 2 it could not do what
was asked.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from maxtext_olmo.errors import MaxtextOlmoError

COMMANDS = (
    "corpus",
    "index",
    "verify",
    "plan",
    "picture",
    "train",
    "eval",
    "demo",
    "order",
    "maxtext",
)

_DESCRIPTION = """\
The OLMo data path for JAX trainers.

From text to a training run:
  maxtext-olmo corpus make --output data docs/      token files and a mix manifest
  maxtext-olmo index build --mix-file data/mix.txt --tokenizer bytes --dtype uint16 \\
      --sequence-length 256 --output data/index.json
  maxtext-olmo verify data/index.json --vocab-size 258 --eos-id 256
  maxtext-olmo train --config=configs/tiny.py --config.dataset_type=olmo_grain \\
      --config.olmo_index_path=data/index.json --config.max_target_length=256
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; errors that are the user's to fix are one line on stderr, not a traceback."""
  argv = list(sys.argv[1:] if argv is None else argv)
  modules = {name: importlib.import_module(f"maxtext_olmo.cli.{name}") for name in COMMANDS}
  parser = make_parser(modules)
  own, rest = _split_arguments(argv, modules)
  args = parser.parse_args(own)
  args.rest = rest
  try:
    return args.run(args)
  except BrokenPipeError:  # The reader of our output, `head` perhaps, has seen enough.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except KeyboardInterrupt:
    sys.stderr.write("interrupted\n")
    return 130
  except (MaxtextOlmoError, OSError) as error:
    if args.debug:
      raise
    sys.stderr.write(f"error: {_one_line(error)}\n")
    return 2


def make_parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
  """The parser of all commands."""
  parser = argparse.ArgumentParser(
      prog="maxtext-olmo",
      description=_DESCRIPTION,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
      "--debug", action="store_true", help="show the traceback of an error (default: one line)"
  )
  subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
  for module in modules.values():
    module.add_parser(subparsers)
  return parser


def _split_arguments(
    argv: list[str], modules: dict[str, ModuleType]
) -> tuple[list[str], list[str]]:
  """Our own arguments, and those behind a command that hands them to another program's parser."""
  place = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
  module = modules.get(argv[place]) if place < len(argv) else None
  takes_all = getattr(module, "PASSES_ARGUMENTS_ON", False)
  if takes_all and argv[place + 1 : place + 2] not in (["-h"], ["--help"]):
    return argv[: place + 1], argv[place + 1 :]
  return argv, []


def _one_line(error: Exception) -> str:
  if isinstance(error, OSError) and error.filename:
    return f"{error.filename}: {error.strerror}"
  return str(error)
