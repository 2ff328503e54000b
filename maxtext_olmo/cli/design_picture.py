"""The picture of the design guide: the rooms, the data between them, and a row as a list of parts.

`maxtext-olmo picture --of design` writes it. The rooms are boxes from left to right; below them, a
row of 16 tokens is put together from ranges of three files.
"""

from __future__ import annotations

import html
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 1080, 616, 20
_BOX_WIDTH, _BOX_HEIGHT, _BOX_TOP, _GAP = 122, 152, 56, 60
_LINE = 15  # Distance between lines of text.
_INK, _GREY, _BOX, _SIDE_BOX = "#222222", "#666666", "#eaf1fb", "#f3f3f3"
_COLOURS = ("#8fb8e8", "#f2b880", "#9fd19f")

# Name, question, and what it holds, for each room on the way of a batch.
_ROOMS = (
    ("corpus", ("what tokens", "are there?"), ("index", "documents", "token_files", "storage/")),
    ("order", ("which row is at", "which position?"), ("schedule", "stream", "split", "timeline")),
    ("rows", ("what does a", "row hold?"), ("row_source", "parts", "reader", "steps")),
    ("devices", ("where does", "a row go?"), ("layout", "expand", "collectives")),
    ("loader", ("what does the", "trainer hold?"), ("registry", "iterator", "state", "resume")),
    ("trainers", ("who consumes", "batches?"), ("tiny/", "maxtext/")),
)
# What each room hands to the one on its right.
_DATA = (
    ("row", "count"),
    ("epoch,", "rows"),
    ("tokens,", "bits"),
    ("global", "arrays"),
    ("batch k", ""),
)
# Rooms beside that way: name, what it serves, and below which box it is drawn.
_SIDE_ROOMS = (
    ("grain_llm", "any Grain source", 3),
    ("evaluation", "requests to scores", 4),
    ("cli", "the commands", 5),
)
# A row of 16 tokens: the file, the first token and the number of tokens of each part.
_ROW_LENGTH, _FILE_LENGTH = 16, 24
_ROW = ((3, 1, 6), (0, 9, 5), (7, 17, 3))


def draw() -> str:
  """Returns the picture as SVG text."""
  body = [_text(_MARGIN, 30, "From token files to the batch of a step", size=17, bold=True)]
  body += _draw_rooms()
  body += _draw_row(_BOX_TOP + _BOX_HEIGHT + 148)
  return "\n".join(
      [
          f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
          ' font-family="sans-serif">',
          f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
          '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
          f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_GREY}"/></marker>'
          "</defs>",
          *body,
          "</svg>\n",
      ]
  )


def _draw_rooms() -> list[str]:
  found = []
  bottom = _BOX_TOP + _BOX_HEIGHT
  for number, (name, question, modules) in enumerate(_ROOMS):
    x = _box_left(number)
    found.append(_box(x, _BOX_TOP, _BOX_WIDTH, _BOX_HEIGHT, _BOX))
    middle = x + _BOX_WIDTH / 2
    found.append(_text(middle, _BOX_TOP + 20, name, size=15, bold=True, anchor="middle"))
    lines = [(line, _INK) for line in question] + [("", _INK)] + [(line, _GREY) for line in modules]
    for place, (line, colour) in enumerate(lines):
      found.append(_text(middle, _BOX_TOP + 40 + _LINE * place, line, colour, anchor="middle"))
  for number, data in enumerate(_DATA):
    x, y = _box_left(number) + _BOX_WIDTH, _BOX_TOP + _BOX_HEIGHT / 2
    found.append(_arrow((x + 3, y), (x + _GAP - 3, y)))
    for place, line in enumerate(data):
      found.append(_text(x + _GAP / 2, y - 8 - _LINE * (1 - place), line, anchor="middle"))
  # What skips a room: the bytes, and the state.
  left, right = _box_left(0) + _BOX_WIDTH / 2, _box_left(2) + _BOX_WIDTH / 2
  found.append(
      _arrow((left, bottom), (left, bottom + 24), (right, bottom + 24), (right, bottom + 3))
  )
  found.append(
      _text(
          (left + right) / 2,
          bottom + 42,
          "where documents lie; bytes of the files",
          anchor="middle",
      )
  )
  trainer, loader = _box_left(5), _box_left(4) + _BOX_WIDTH
  y = _BOX_TOP + _BOX_HEIGHT / 2 + 34
  found += [_arrow((loader + 3, y), (trainer - 3, y)), _arrow((trainer - 3, y), (loader + 3, y))]
  found.append(_text((loader + trainer) / 2, y - 6, "state", anchor="middle"))
  for name, what, number in _SIDE_ROOMS:
    middle = _box_left(number) + _BOX_WIDTH / 2
    found.append(_box(_box_left(number), bottom + 20, _BOX_WIDTH, 48, _SIDE_BOX))
    found.append(_text(middle, bottom + 39, name, size=14, bold=True, anchor="middle"))
    found.append(_text(middle, bottom + 57, what, _GREY, anchor="middle"))
  rule = "A room imports from rooms to its left only:"
  order = "corpus → order → rows → devices → grain_llm → loader → evaluation → trainers → cli"
  found.append(_text(_MARGIN, bottom + 98, f"{rule}  {order}"))
  return found


def _draw_row(top: int) -> list[str]:
  from maxtext_olmo.rows import parts as parts_lib

  table = parts_lib.Parts.of_rows([_ROW])
  used = int(table.used[0])
  found = [_text(_MARGIN, top, "A row is a list of parts", size=17, bold=True)]
  cell, row_cell, files_left = 18, 30, _MARGIN + 52
  row_left, row_top = files_left, top + 168
  for number, (source, first, count) in enumerate(_ROW):
    y = top + 22 + 34 * number
    found.append(_text(_MARGIN, y + 14, f"file {source}"))
    found.append(_box(files_left, y, cell * _FILE_LENGTH, 20, "white"))
    x, width = files_left + cell * first, cell * count
    found.append(_box(x, y, width, 20, _COLOURS[number]))
    found.append(_text(x + width / 2, y + 14, f"[{first}, {first + count})", anchor="middle"))
  found.append(_text(_MARGIN, row_top + 18, "row"))
  for number, (column, count) in enumerate(zip(table.column.tolist(), table.count.tolist())):
    x, width = row_left + row_cell * column, row_cell * count
    found.append(_box(x, row_top, width, 26, _COLOURS[number]))
    found.append(_text(x + width / 2, row_top + 18, f"part {number}", anchor="middle"))
    first = int(table.first[number])
    begin = (files_left + cell * (first + count / 2), top + 42 + 34 * number)
    found.append(_arrow(begin, (x + width / 2, row_top - 3)))
  x, width = row_left + row_cell * used, row_cell * (_ROW_LENGTH - used)
  found.append(_box(x, row_top, width, 26, _SIDE_BOX))
  found.append(_text(x + width / 2, row_top + 18, "padding", anchor="middle"))
  segments = [0] * _ROW_LENGTH
  for column, count, segment in zip(table.column, table.count, table.segment):
    segments[column : column + count] = [int(segment)] * int(count)
  for place, (name, values) in enumerate((("column", range(_ROW_LENGTH)), ("segment", segments))):
    y = row_top + 45 + 18 * place
    found.append(_text(_MARGIN, y, name, _GREY))
    for column, value in enumerate(values):
      found.append(
          _text(row_left + row_cell * (column + 0.5), y, str(value), _GREY, anchor="middle")
      )
  return found + _draw_table(table, 640, top + 36)


def _draw_table(table: Any, left: int, top: int) -> list[str]:
  """Draws the columns of a table of parts as lines, with what they mean."""
  lines = (
      ("bounds", table.bounds.tolist(), "row r has parts bounds[r] to bounds[r + 1]"),
      ("source", table.source.tolist(), "the file"),
      ("first", table.first.tolist(), "the first token there"),
      ("count", table.count.tolist(), "the number of tokens"),
  )
  found = [_text(left, top, "The table that says so (rows/parts.py: Parts)", bold=True)]
  for number, (name, values, meaning) in enumerate(lines):
    y = top + 24 + 20 * number
    found.append(_text(left, y, name))
    for place, value in enumerate(values):
      found.append(_text(left + 72 + 30 * place, y, str(value), anchor="end"))
    found.append(_text(left + 152, y, meaning, _GREY))
  notes = (
      "Fixed windows: one part that fills the row.",
      "Packed documents: a part for each document, or piece of one.",
      "One document per row: one part, then padding.",
      "A mixture: rows of several sources, joined into one table.",
  )
  for number, note in enumerate(notes):
    found.append(_text(left, top + 124 + 20 * number, note))
  return found


def _box_left(number: int) -> int:
  return _MARGIN + number * (_BOX_WIDTH + _GAP)


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
  return (
      f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"'
      f' stroke="{_GREY}"/>'
  )


def _arrow(*points: tuple[float, float]) -> str:
  path = " ".join(f"{x:g},{y:g}" for x, y in points)
  return f'<polyline points="{path}" fill="none" stroke="{_GREY}" marker-end="url(#head)"/>'


def _text(
    x: float,
    y: float,
    text: str,
    colour: str = _INK,
    *,
    size: int = 12,
    bold: bool = False,
    anchor: str = "start",
) -> str:
  weight = ' font-weight="bold"' if bold else ""
  return (
      f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{anchor}"'
      f' fill="{colour}">{html.escape(text)}</text>'
  )
