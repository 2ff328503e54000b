"""The commands of `maxtext-olmo`, and shared code for options, finding runs, and tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxtext_olmo import errors
from maxtext_olmo.cli.work_options import add_path_remap as add_path_remap
from maxtext_olmo.cli.work_options import add_work_options as add_work_options
from maxtext_olmo.cli.work_options import has_work_options as has_work_options
from maxtext_olmo.cli.work_options import report_part as report_part
from maxtext_olmo.cli.work_options import work_options as work_options

if TYPE_CHECKING:
  from maxtext_olmo.corpus.storage import stores

_MOST_STYLED = 50
_NARROWEST = 8
_TEXT_COLUMNS = (
    "label",
    "path",
    "check",
    "checksum",
    "level",
    "finding",
    "figure",
    "limit",
    "reason",
    "remedy",
    "setting",
    "value",
)


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
    commands: The subparsers to add the command to.
    name: The name that the user types.
    run: Runs the command and returns the exit code.
    description: The description in its help; line breaks are kept, and long lines are wrapped.
    settings: Further arguments of its `ArgumentParser`.
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
    parser: argparse.ArgumentParser,
    usage: str,
    help: str,
    *,
    otherwise: str = "",
    aliases: Sequence[str] = (),
    **settings: Any,
) -> None:
  """Adds an argument; the help of an option ends with its default, or with "required".

  Args:
    parser: The parser of a command.
    usage: The name, and a placeholder for its value: `INDEX`, `--steps N`, `--overwrite`.
    help: The description of the argument.
    otherwise: What happens without the option, if the default does not say so.
    aliases: Other names of an option.
    settings: Further arguments of `ArgumentParser.add_argument`; a default that is an int implies
      the type.
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
  names = (name, *aliases) if name.startswith("-") else (name.lower(),)
  parser.add_argument(*names, help=help, **settings)


def add_run_options(option: Callable[..., None]) -> None:
  """Adds the options that `find_run` reads."""
  option(
      "--config FILE", "config file of the run", otherwise="the one kept next to the checkpoints"
  )
  option(
      "--checkpoint N",
      "the checkpoint to use",
      otherwise="the one that PATH names, or the latest",
      type=int,
  )


def add_storage_options(option: Callable[..., None]) -> None:
  """Adds the options that say how object stores are reached; `main` applies them."""
  option(
      "--endpoint URL",
      "server for gs://, s3:// and az:// paths, such as http://localhost:9000",
      otherwise="the provider's own, or the one set in the environment",
  )
  option("--region NAME", "region of s3:// buckets", otherwise="AWS_REGION, or us-east-1")
  option(
      "--anonymous",
      "read object stores without credentials, as for public buckets",
      otherwise="credentials from the environment are used",
      action="store_true",
  )


def store_options(args: argparse.Namespace) -> stores.StoreOptions:
  """Returns the settings of object stores that the options of `add_storage_options` give."""
  from maxtext_olmo.corpus.storage import stores as stores_lib

  check_endpoint("--endpoint", args.endpoint)
  return stores_lib.StoreOptions(
      endpoint=args.endpoint or "", region=args.region or "", anonymous=args.anonymous
  )


def check_endpoint(option: str, endpoint: str | None) -> None:
  """Raises ConfigError unless an endpoint is a URL, or empty."""
  if endpoint and not endpoint.startswith(("http://", "https://")):
    raise errors.ConfigError(
        f"{option} {endpoint} must begin with http:// or https://, as in {option} http://{endpoint}."
    )


def endpoint_option() -> str:
  """Returns the option for the current endpoint, for commands that are printed; empty if none."""
  from maxtext_olmo.corpus.storage import stores as stores_lib

  endpoint = stores_lib.default_options().endpoint
  return f" --endpoint {endpoint}" if endpoint else ""


def use_cpu() -> None:
  """Keeps JAX away from the accelerators of this machine, which a run may be using."""
  import jax

  jax.config.update("jax_platforms", "cpu")


def find_run(path: str, args: argparse.Namespace) -> Any:
  """Returns the run that a path names, with the config of the command line.

  Args:
    path: A checkpoint, a directory with checkpoints, or a config file.
    args: The options of `add_run_options`; `rest` has the keys to change, as
      `--config.KEY=VALUE`.
  """
  from maxtext_olmo.inspection import run as run_lib

  keys = [word for word in args.rest if word.startswith("--config.")]
  path = _shipped(path)
  if os.path.isfile(path):
    _refuse_index(path)
    values, steps = read_config(path, keys)
    return run_lib.run_of_config(path, values, args.checkpoint, steps)
  found = run_lib.find_run(path, label=args.checkpoint)
  if args.config or keys:
    values, steps = read_config(args.config, keys, found.config if not args.config else None)
    found = run_lib.find_run(path, config=values, label=args.checkpoint)
    found = dataclasses.replace(found, steps=steps)
  return found


def _refuse_index(path: str) -> None:
  """Raises ConfigError if a file is an index, which other commands take in its place."""
  from maxtext_olmo.corpus import index_builder

  with contextlib.suppress(errors.CorpusError):
    if path.endswith(".json") and index_builder.load_index(path):
      raise errors.ConfigError(
          f"{path} is an index, but this command needs a run: give a directory with checkpoints, or"
          f" a config file with olmo_index_path={path!r}."
      )


def _shipped(path: str) -> str:
  """Returns the full path if `path` names a config that comes with this package."""
  from maxtext_olmo.trainers.tiny import config as config_lib

  return config_lib.shipped_config(path) or path


def read_config(
    path: str | None, keys: Sequence[str], kept: dict[str, Any] | None = None
) -> tuple[dict[str, Any], int | None]:
  """Returns the data keys of a config file, or of a kept config, and the steps of the run.

  Args:
    path: A Python file with `get_config`, or a YAML or JSON file, such as a config of MaxText.
    keys: The changes, as `--config.KEY=VALUE`.
    kept: The data keys that were kept with the run, if there is no file.
  """
  from maxtext_olmo import config as data_keys
  from maxtext_olmo.trainers.tiny import config as config_lib

  steps = None
  path = path and _shipped(path)
  if path and not os.path.isfile(path):
    raise errors.ConfigError(f"The config file {path} does not exist.")
  if path and not path.endswith(".py"):
    values = read_values(path)
    kept = {name: values[name] for name in data_keys.defaults() if name in values}
    steps = values.get("steps")
  config = config_lib.read_config(
      ["maxtext-olmo", *([f"--config={path}"] if path and kept is None else []), *keys]
  )
  changed = {word.removeprefix("--config.").split("=")[0] for word in keys}
  if "steps" in changed or (path and kept is None):
    steps = config.steps
  if kept is None:
    return {name: config[name] for name in data_keys.defaults()}, steps
  known = changed & data_keys.defaults().keys()
  return {**kept, **{name: config[name] for name in known}}, _positive(steps)


def _positive(steps: Any) -> int | None:
  return steps if isinstance(steps, int) and steps > 0 else None


def read_values(path: str) -> dict[str, Any]:
  """Returns the keys and values of a YAML or JSON file."""
  import yaml

  with open(path, encoding="utf-8") as file:
    try:
      values = yaml.safe_load(file)  # JSON is YAML.
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
      raise errors.ConfigError(f"The config file {path} cannot be read: {error}") from error
  if not isinstance(values, dict):
    raise errors.ConfigError(f"The config file {path} does not contain keys and values.")
  return values


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    style: Callable[[Sequence[Any]], str] = lambda row: "",
) -> None:
  """Prints a table that fits the terminal; output to a pipe or a file is not folded.

  Args:
    columns: The headings. All columns except text columns are aligned to the right.
    rows: The cells of each row: text, whole numbers, or None for an empty cell.
    style: Returns the style of a row, such as "bold".
  """
  rows = list(rows)
  if not sys.stdout.isatty() or len(rows) > _MOST_STYLED:
    _print_plain(columns, rows)
    return
  import rich.console
  import rich.table
  import rich.text

  table = rich.table.Table(header_style="bold")
  for column in columns:
    table.add_column(
        column, justify="left" if column in _TEXT_COLUMNS else "right", overflow="fold"
    )
  for row in rows:
    # As `Text`, because brackets in a path or a label are not markup.
    table.add_row(*map(rich.text.Text, map(_cell, row)), style=style(row))
  rich.console.Console(highlight=False).print(table)


def _cell(value: Any) -> str:
  return f"{value:,}" if isinstance(value, int) else plain(value or "")


def plain(text: str) -> str:
  """Returns a name from a corpus on one line, with unprintable characters escaped."""
  return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def announce_base(files: Iterable[str], shown: Iterable[str]) -> Mapping[str, str]:
  """Prints the base directory of a corpus, and maps files to their names relative to it.

  Args:
    files: Paths of all files of the corpus, so that no name refers to two files.
    shown: Paths of the files that a table shows.
  """
  from maxtext_olmo.corpus import paths

  base, names = paths.shorten(files, shown)
  if any(name != path for path, name in names.items()):
    print(f"Paths are relative to {plain(base)}.")
  return names


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
  """Prints a table as rich does, without styles; rich would take a second per thousand rows."""
  from rich import cells

  texts = [list(columns), *([_cell(value) for value in row] for row in rows)]
  widths = [max(map(cells.cell_len, column)) for column in zip(*texts)]
  if sys.stdout.isatty():  # Fold the widest columns until the table fits.
    left = shutil.get_terminal_size().columns - 3 * len(widths) - 1
    while sum(widths) > left and max(widths) > _NARROWEST:
      widths[widths.index(max(widths))] -= 1

  def line(row: Sequence[str], bar: str) -> str:
    folded = [cells.chop_cells(text, width) or [""] for text, width in zip(row, widths)]
    lines = []
    for parts in itertools.zip_longest(*folded, fillvalue=""):
      padded = []
      for name, part, width in zip(columns, parts, widths):
        space = " " * (width - cells.cell_len(part))
        padded.append(part + space if name in _TEXT_COLUMNS else space + part)
      lines.append(f"{bar} {f' {bar} '.join(padded)} {bar}\n")
    return "".join(lines)

  def rule(left: str, fill: str, between: str, right: str) -> str:
    return left + between.join(fill * (width + 2) for width in widths) + right + "\n"

  head, *body = texts
  sys.stdout.write(rule(*"┏━┳┓") + line(head, "┃") + rule(*"┡━╇┩"))
  sys.stdout.writelines(line(row, "│") for row in body)
  sys.stdout.write(rule(*"└─┴┘"))
