"""Tests of the tables that commands print."""

import contextlib
import io
import os
import unittest.mock

import rich.cells
import rich.console
import rich.table
import rich.text
from absl.testing import absltest

from maxtext_olmo import cli

_COLUMNS = ("row", "label", "path", "loss")
_ROWS = [
    (0, "web", "/data/[bold]/a.npy", "1.50%"),
    (1234567, "日本語", "/data/" + "long/" * 20 + "b.npy", ""),
    (None, "", "", None),
]


class _Terminal(io.StringIO):

  def isatty(self):
    return True


class TablesTest(absltest.TestCase):

  def printed(self, rows, out):
    with contextlib.redirect_stdout(out):
      cli.print_table(_COLUMNS, rows)
    return out.getvalue()

  def test_a_pipe_gets_what_rich_would_print_without_styles(self):
    table = rich.table.Table()
    for column in _COLUMNS:
      table.add_column(column, justify="left" if column in ("label", "path") else "right")
    for row in _ROWS:
      cells = [f"{cell:,}" if isinstance(cell, int) else cell or "" for cell in row]
      table.add_row(*map(rich.text.Text, cells))
    expected = io.StringIO()
    rich.console.Console(file=expected, width=10_000, highlight=False).print(table)
    self.assertEqual(self.printed(_ROWS, io.StringIO()), expected.getvalue())

  def test_names_cannot_command_the_terminal(self):
    rows = [(0, "web\x1b]52;c;aGk=\x07", "/data/\u202egpj.npy\nrow", "")]
    for out in (io.StringIO(), _Terminal()):
      with unittest.mock.patch.dict(os.environ, {"COLUMNS": "200"}):
        text = self.printed(rows, out)
      self.assertIn(r"web\x1b]52;c;aGk=\x07", text)
      self.assertIn(r"/data/\u202egpj.npy\nrow", text)

  def test_a_long_table_is_folded_to_the_width_of_the_terminal(self):
    with unittest.mock.patch.dict(os.environ, {"COLUMNS": "70"}):
      lines = self.printed(_ROWS * 40, _Terminal()).splitlines()
    self.assertEqual({rich.cells.cell_len(line) for line in lines}, {70})
    paths = "".join(line.split("│")[3].strip() for line in lines if line.startswith("│"))
    self.assertEqual(paths, "".join(path for _, _, path, _ in _ROWS) * 40)


if __name__ == "__main__":
  absltest.main()
