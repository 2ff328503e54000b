"""What the commands print: tables, as wide as the terminal, or in full in a pipe or a file."""

import sys

import rich.console
import rich.table
import rich.text

_WORDS = ("label", "path", "checksum", "level", "finding")


def console() -> rich.console.Console:
  """Prints to stdout; outside a terminal nothing is cut to a width of 80 characters."""
  return rich.console.Console(
      width=None if sys.stdout.isatty() else 10_000, highlight=False, soft_wrap=True
  )


def new_table(*columns: str) -> rich.table.Table:
  """An empty table; all columns but those of words go to the right, because they hold numbers."""
  made = rich.table.Table(header_style="bold")
  for column in columns:
    made.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
  return made


def add_row(table: rich.table.Table, *cells: str, style: str = "") -> None:
  """Adds a row; brackets in a path or a label are brackets, not markup."""
  table.add_row(*(rich.text.Text(cell) for cell in cells), style=style)
