"""`maxtext-olmo doctor`: checks hosts, devices, storage and config before a run."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from maxtext_olmo import cli
from maxtext_olmo import english

_DESCRIPTION = """\
Checks what a run needs, before it starts: versions, devices, batch, the processes of the run, file
descriptors, clocks, the index, the storage of the corpus, checkpoint_dir, and that all hosts have
the same config and code. Trains nothing and changes nothing.

Start it the way you start the run, in one process or in all of them, for example with srun; process
0 prints the findings. Each is ok, a warning or wrong; the last two say what to do.

CONFIG is the config file of the run: a Python file, a config of this package by name, or a YAML or
JSON file, such as MaxText's. --config=FILE means the same. --config.KEY=VALUE changes keys, as in
training.
"""

_EPILOG = """\
exit codes: 0 nothing is wrong (there may be warnings); 1 something is wrong; 2 CONFIG was not found

examples:
  maxtext-olmo doctor
  maxtext-olmo doctor configs/tiny.py --config.checkpoint_dir=checkpoints
  srun --ntasks=4 maxtext-olmo doctor my_config.py
"""
_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def add_parser(subparsers: Any) -> None:
  """Adds `doctor`."""
  option = cli.add_command(
      subparsers,
      "doctor",
      run,
      help="check hosts, devices, storage and config before a run",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option("CONFIG", "config file of the run", nargs="?")
  option(
      "--config FILE",
      "the same as CONFIG, so that the arguments of `train` can be used as they are",
      otherwise="CONFIG",
      dest="config_flag",
  )
  option("--wait SECONDS", "how long to wait for the other processes", default=300)


def run(args: argparse.Namespace) -> int:
  """Runs the checks; returns 1 if something is wrong."""
  from maxtext_olmo.errors import ConfigError
  from maxtext_olmo.trainers import doctor
  from maxtext_olmo.trainers.tiny import report

  if args.wait < 1:
    raise ConfigError(f"--wait={args.wait} must be at least 1.")
  report.show_on_stderr(0)
  findings, ok = doctor.examine(_read_config(args), wait_seconds=args.wait, give_up=_print_and_exit)
  if findings:
    _print(findings, ok)
  return 0 if ok else 1


def _print_and_exit(findings: Sequence[Any]) -> NoReturn:
  """Prints findings and ends the process, whose main thread waits for other processes."""
  _print(findings, False)
  sys.stdout.flush()
  os._exit(1)


def _print(findings: Sequence[Any], ok: bool) -> None:
  """Prints the findings: as a table on a terminal, and otherwise as lines, which fit in a log."""
  if sys.stdout.isatty():
    cli.print_table(
        ("level", "check", "finding", "remedy"),
        [(found.level, found.check, found.found, found.remedy) for found in findings],
        style=lambda row: _COLOURS[row[0]],
    )
  else:
    for found in findings:
      print(f"{found.level:7}  {found.check}: {cli.plain(found.found)}")
      if found.remedy:
        print(f"{'':7}    {cli.plain(found.remedy)}")
  n_ok, n_warnings, n_wrong = (sum(f.level == level for f in findings) for level in _COLOURS)
  counts = (f"{n_ok} ok", english.count(n_warnings, "warning"), f"{n_wrong} wrong")
  print(f"{'ok' if ok else 'NOT OK'}: {', '.join(counts)}")


def _read_config(args: argparse.Namespace) -> Any:
  """Returns the trainer's config; None without a config file and keys."""
  from maxtext_olmo.errors import ConfigError
  from maxtext_olmo.trainers.tiny import config as config_lib

  if args.config and args.config_flag:
    raise ConfigError("Give one config file: CONFIG or --config=FILE.")
  file = args.config or args.config_flag
  if file is None and not args.rest:
    return None
  if file and not file.endswith((".yml", ".yaml", ".json")):
    return config_lib.read_config(["maxtext-olmo doctor", f"--config={file}", *args.rest])
  config = config_lib.read_config(["maxtext-olmo doctor", *args.rest])
  if file:
    config.update(cli.read_config(file, args.rest)[0])
  return config
