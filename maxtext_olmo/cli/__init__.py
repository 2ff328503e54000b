"""The commands of `maxtext-olmo`, and what they share: parsers and tables."""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_TEXT_COLUMNS = ("label", "path", "checksum", "level", "finding")


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    description: str,
    **settings: Any,
) -> Callable[..., None]:
  """Adds a command and returns `add_option` for its parser.

  Args:
    commands: The subparsers to add it to.
    name: What the user types.
    run: Runs it and returns the exit code.
    description: What it does; lines are kept, and folded where they are too long.
    settings: Of its `ArgumentParser`.
  """
  parser = commands.add_parser(
      name,
      description="\n".join(textwrap.fill(line, 100) for line in description.splitlines()),
      formatter_class=argparse.RawDescriptionHelpFormatter,
      **settings,
  )
  parser.set_defaults(run=run)
  return functools.partial(add_option, parser)


def add_option(
    parser: argparse.ArgumentParser, usage: str, help: str, *, otherwise: str = "", **settings: Any
) -> None:
  """Adds an argument; the help of an option ends with its default, or with "required".

  Args:
    parser: The parser of a command.
    usage: The name, and what stands for its value: `INDEX`, `--steps N`, `--overwrite`.
    help: What it means.
    otherwise: What happens without it, where the default does not say that.
    settings: Of `ArgumentParser.add_argument`; the type follows from a default that is an int.
  """
  name, *metavar = usage.split()
  if metavar or not name.startswith("-"):
    settings["metavar"] = tuple(metavar) if len(metavar) > 1 else (metavar or [name])[0]
  if type(settings.get("default")) is int:
    settings["type"] = int
  if settings.get("required"):
    help += " (required)"
  elif name.startswith("-"):
    help += f" (default: {otherwise or '%(default)s'})"
  parser.add_argument(name if name.startswith("-") else name.lower(), help=help, **settings)


def read_options(path: str, keys: Sequence[str]) -> tuple[Any, int]:
  """Returns the data options of a config file, and the steps of its run.

  Args:
    path: A config file of the embedded trainer.
    keys: What to change in it: `--config.KEY=VALUE`.
  """
  from maxtext_olmo import config as config_lib
  from maxtext_olmo.trainers.tiny import config as trainer_config

  config = trainer_config.read_config(["maxtext-olmo", f"--config={path}", *keys])
  return config_lib.Options.read(trainer_config.for_data(config)), config.steps


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    style: Callable[[Sequence[Any]], str] = lambda row: "",
) -> None:
  """Prints a table as wide as the terminal, or in full to a pipe or a file.

  Args:
    columns: The headings. Numbers, in all columns but those of text, are aligned to the right.
    rows: The cells of each row: texts, whole numbers, or None for an empty cell.
    style: Returns the style of a row, such as "bold".
  """
  import rich.console
  import rich.table
  import rich.text

  table = rich.table.Table(header_style="bold")
  for column in columns:
    table.add_column(
        column, justify="left" if column in _TEXT_COLUMNS else "right", overflow="fold"
    )
  for row in rows:
    cells = (f"{cell:,}" if isinstance(cell, int) else cell or "" for cell in row)
    # Brackets in a path or a label are brackets, not markup.
    table.add_row(*map(rich.text.Text, cells), style=style(row))
  width = None if sys.stdout.isatty() else 10_000
  rich.console.Console(width=width, highlight=False).print(table)
