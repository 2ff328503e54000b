"""The `maxtext-olmo` command.

Each command is a module of this package whose `add_parser(subparsers)` calls `cli.add_command`. To
add a command, add its name to `COMMANDS`. A module imports heavy packages only when its command
runs, so that `--help` is fast.

Exit codes: 0, success; 1, the command found a problem or no result; 2, the command failed; 75, an
object store did not answer or workers kept dying, so the same command may succeed later.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import maxtext_olmo
from maxtext_olmo import cli
from maxtext_olmo import errors
from maxtext_olmo.corpus import urls
from maxtext_olmo.trainers import RESTART_CODE

COMMANDS = (
    "corpus",
    "index",
    "verify",
    "storage",
    "stats",
    "plan",
    "report",
    "doctor",
    "train",
    "inspect",
    "eval",
    "demo",
    "order",
    "olmo-core",
    "maxtext",
)
# Arguments after these commands are parsed by another program.
_PASSED_ON = (["train"], ["maxtext", "train"], ["maxtext", "sft"], ["maxtext", "dataloader"])

# These commands accept keys of the trainer's config in addition to their own options.
_TAKE_KEYS = (["doctor"], ["eval"], ["inspect"], ["plan"], ["report"], ["index", "pack"])

_DESCRIPTION = """\
The OLMo data path for JAX trainers.

From text to a training run:
  maxtext-olmo corpus make --output data docs/      token files and a mix manifest
  maxtext-olmo index build --mix-file data/mix.txt --tokenizer bytes --dtype uint16 \\
      --sequence-length 256 --output data/index.json
  maxtext-olmo verify data/index.json --vocab-size 258 --eos-id 256
  maxtext-olmo train --config=configs/tiny.py --config.dataset_type=olmo_grain \\
      --config.olmo_index_path=data/index.json --config.max_target_length=256 \\
      --config.checkpoint_dir=checkpoints
  maxtext-olmo inspect checkpoints --step 20 --text
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; an error that the user can fix is printed as one line on stderr."""
  argv = list(sys.argv[1:] if argv is None else argv)
  # Messages may repeat arguments, so arguments must not contain the credentials of URLs.
  argv = [urls.clean_text(word) for word in argv]
  # Adds only this command's options: adding those of all commands takes longer than many commands
  # take to run.
  parser = make_parser(argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS)
  own, rest = _split_arguments(argv)
  args = parser.parse_args(own)
  args.argv, args.rest = argv, rest
  try:
    if getattr(args, "anonymous", None) is not None:
      from maxtext_olmo.corpus.storage import stores

      stores.use_by_default(cli.store_options(args))
    return args.run(args)
  except BrokenPipeError:  # The reader of our output, such as `head`, has exited.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except KeyboardInterrupt:
    sys.stderr.write("interrupted\n")
    return 130
  except (errors.MaxtextOlmoError, OSError) as error:
    if args.debug:
      raise
    sys.stderr.write(f"error: {_one_line(error)}\n")
    return RESTART_CODE if errors.is_transient(error) else 2


def make_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
  """Returns the parser of these commands."""
  parser = argparse.ArgumentParser(
      prog="maxtext-olmo",
      description=_DESCRIPTION,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  cli.add_option(
      parser, "--debug", "show the traceback of an error", otherwise="one line", action="store_true"
  )
  parser.add_argument(
      "--version",
      action="version",
      version=f"maxtext-olmo {maxtext_olmo.__version__}",
      help="show the version and exit",
  )
  subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
  for name in commands:
    module = importlib.import_module(f"maxtext_olmo.cli.{name.replace('-', '_')}")
    module.add_parser(subparsers)
  return parser


def _split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
  """Returns our own arguments, and those that another program parses."""
  first = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
  for command in _PASSED_ON:
    end = first + len(command)
    if argv[first:end] == command and argv[end : end + 1] not in (["-h"], ["--help"]):
      return argv[:end], argv[end:]
  if not any(argv[first : first + len(command)] == command for command in _TAKE_KEYS):
    return argv, []
  # Keys of the trainer's config are not options of the command.
  keys = [word for word in argv if word.startswith("--config.")]
  return [word for word in argv if word not in keys], keys


def _one_line(error: Exception) -> str:
  if isinstance(error, OSError) and error.filename:
    return f"{error.filename}: {error.strerror}"
  return str(error)
