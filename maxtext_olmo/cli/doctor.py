"""`maxtext-olmo doctor`: checks hosts, devices, storage and config before a run."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from maxtext_olmo import cli

_DESCRIPTION = """\
Checks what a run needs, before it starts: versions, devices, the processes of the run, file
descriptors, clocks, the index, the storage of the corpus, checkpoint_dir, and that all hosts have
the same config and code. Trains nothing, and changes nothing.

Start it like the run, on one process or on all of them, such as with srun; process 0 prints. Each
line is ok, a warning, or wrong, and says what to do.

CONFIG is the config file of the run: a Python file, a config of this package by name, or a YAML or
JSON file, such as MaxText's. --config.KEY=VALUE changes keys, as in training.
"""

_EPILOG = """\
exit codes: 0 nothing is wrong (there may be warnings); 1 something is wrong; 2 no such CONFIG

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
  cli.print_table(
      ("level", "check", "finding", "remedy"),
      [(found.level, found.check, found.found, found.remedy) for found in findings],
      style=lambda row: _COLOURS[row[0]],
  )
  counts = [f"{sum(f.level == level for f in findings)} {level}" for level in _COLOURS]
  print(f"{'ok' if ok else 'NOT OK'}: {', '.join(counts)}")


def _read_config(args: argparse.Namespace) -> Any:
  """Returns the trainer's config; None without CONFIG and keys."""
  from maxtext_olmo.trainers.tiny import config as config_lib

  if args.config is None and not args.rest:
    return None
  if args.config and not args.config.endswith((".yml", ".yaml", ".json")):
    return config_lib.read_config(["maxtext-olmo doctor", f"--config={args.config}", *args.rest])
  config = config_lib.read_config(["maxtext-olmo doctor", *args.rest])
  if args.config:
    config.update(cli.read_config(args.config, args.rest)[0])
  return config
