"""Draws the pictures of the guides as SVG files (`make pictures`).

`packed_rows.svg` shows what each packing makes of the same documents. `design.svg` shows the rooms
of this package as boxes from left to right, and below them a row of 16 tokens that is put together
from ranges of three files. `sources.svg` is what `maxtext-olmo plan --svg` draws for a run that
doubles its batch, and changes its mixture for the last fifth of its steps.
"""

from __future__ import annotations

import colorsys
import dataclasses
import functools
import html
import pathlib
from typing import Any

_INK, _GREY, _PADDING, _BOX, _SIDE_BOX = "#222222", "#666666", "#e4e4e4", "#eaf1fb", "#f3f3f3"

# The packings.
_ROW_HEIGHT, _ROW_GAP, _ROW_WIDTH = 13, 3, 560
_ROW_MARGIN, _TITLE = 16, 44

# The design.
_WIDTH, _HEIGHT, _MARGIN = 1080, 616, 20
_BOX_WIDTH, _BOX_HEIGHT, _BOX_TOP, _GAP = 122, 152, 56, 60
_LINE = 15  # Distance between lines of text.
_COLOURS = ("#8fb8e8", "#f2b880", "#9fd19f")

# Name, question, and what it holds, for each room on the way of a batch.
_ROOMS = (
    ("corpus", ("what tokens", "are there?"), ("index", "documents", "token_files", "storage/")),
    (
        "order",
        ("which row is at", "which position?"),
        ("schedule", "stream", "permutations", "timeline"),
    ),
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
# Other rooms: name, what it serves, and below which box it is drawn.
_SIDE_ROOMS = (
    ("grain_llm", "any Grain source", 3),
    ("evaluation", "and inspection", 4),
    ("cli", "the commands", 5),
)
# A row of 16 tokens: the file, the first token and the number of tokens of each part.
_ROW_LENGTH, _FILE_LENGTH = 16, 24
_ROW = ((3, 1, 6), (0, 9, 5), (7, 17, 3))


@dataclasses.dataclass(frozen=True)
class Panel:
  """The rows of one packing: the document of each token, counted from 1; 0 is padding."""

  title: str
  rows: list[list[int]]

  @property
  def padding(self) -> float:
    cells = [cell for row in self.rows for cell in row]
    return cells.count(0) / len(cells)


def panels(documents: int, length: int) -> list[Panel]:
  """The rows that each packing makes of the same documents."""
  import grain
  import numpy as np

  from maxtext_olmo.grain_llm import records as records_lib
  from maxtext_olmo.grain_llm import rows_by_position
  from maxtext_olmo.order import permutations
  from maxtext_olmo.rows import packing
  from maxtext_olmo.rows import planned as planned_lib

  rng = np.random.default_rng(5)
  lengths = np.clip(rng.lognormal(5.6, 0.9, documents), 1, length).astype(int)
  # Each token is the number of its document, so the packed rows show where documents went.
  records = [records_lib.record_of({"inputs": [i + 1] * n}) for i, n in enumerate(lengths.tolist())]
  found = [
      Panel(
          "none: a row each",
          [records_lib.padded(record, length)["inputs"].tolist() for record in records],
      )
  ]
  for name in packing.STREAMING:
    stream = grain.MapDataset.source(records).to_iter_dataset()
    rows = records_lib.pack_stream(stream, name, length=length, bins=8, shuffle=False, seed=0)
    found.append(Panel(name, [row["inputs"].tolist() for row in rows]))
  parts = rows_by_position.RecordParts(grain.MapDataset.source(records))
  order = permutations.FeistelOrder(num_instances=documents, seed=0)
  plan = planned_lib.PackingPlan(
      parts.lengths, order, identity="picture", row_length=length, window=documents
  )
  planned = rows_by_position.PlannedRecords(parts, plan, length, shift=None, num_epochs=1)
  rows = planned.rows(np.arange(plan.count(1)))
  found.append(Panel("planned", [row["inputs"].tolist() for row in rows]))
  return found


def draw_packings(documents: int, length: int) -> str:
  """Returns the picture of the packings: unpacked rows on the left, packed ones on the right."""
  made = panels(documents, length)
  title = (
      f"{documents} documents in rows of {length} tokens: a colour is a document, grey is padding"
  )
  body = [_text(_ROW_MARGIN, 24, title, size=16, bold=True)]
  heights = []
  for column, group in enumerate((made[:1], made[1:])):
    x, y = _ROW_MARGIN + column * (_ROW_WIDTH + 2 * _ROW_MARGIN), _TITLE
    for panel in group:
      body += _draw_panel(panel, x, y, length)
      y += len(panel.rows) * (_ROW_HEIGHT + _ROW_GAP) + 38
    heights.append(y)
  return _svg(2 * _ROW_WIDTH + 4 * _ROW_MARGIN, max(heights), body)


def _draw_panel(panel: Panel, x: int, y: int, length: int) -> list[str]:
  text = f"{panel.title}: {len(panel.rows)} rows, {panel.padding:.1%} padding"
  found = [_text(x, y + 12, text, size=13)]
  y += 20
  for row in panel.rows:
    start = 0
    for end in range(1, length + 1):
      if end < length and row[end] == row[start]:
        continue
      left, wide = start * _ROW_WIDTH / length, (end - start) * _ROW_WIDTH / length
      # The gap between documents is the white of the page.
      shown = max(0.4, wide - (0.8 if row[start] else 0))
      found.append(
          f'<rect x="{x + left:.1f}" y="{y}" width="{shown:.1f}" height="{_ROW_HEIGHT}"'
          f' fill="{_colour(row[start])}"/>'
      )
      start = end
    y += _ROW_HEIGHT + _ROW_GAP
  return found


def _colour(document: int) -> str:
  """Returns a colour; consecutive numbers have very different hues."""
  if not document:
    return _PADDING
  hue = document * 0.61803398875 % 1
  light = 0.42 + 0.16 * (document % 3) / 2
  return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, 0.5))


def draw_design() -> str:
  """Returns the picture of the design guide."""
  return _svg(
      _WIDTH,
      _HEIGHT,
      [
          '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
          f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{_GREY}"/></marker>'
          "</defs>",
          _text(_MARGIN, 30, "From token files to the batch of a step", size=17, bold=True),
          *_draw_rooms(),
          *_draw_row(_BOX_TOP + _BOX_HEIGHT + 148),
      ],
  )


def _svg(width: int, height: int, body: list[str]) -> str:
  return "\n".join(
      [
          f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
          ' font-family="sans-serif">',
          f'<rect width="{width}" height="{height}" fill="white"/>',
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
    found.append(_centred(middle, _BOX_TOP + 20, name, size=15, bold=True))
    lines = [(line, _INK) for line in (*question, "")] + [(line, _GREY) for line in modules]
    for place, (line, colour) in enumerate(lines):
      found.append(_centred(middle, _BOX_TOP + 40 + _LINE * place, line, colour))
  for number, data in enumerate(_DATA):
    x, y = _box_left(number) + _BOX_WIDTH, _BOX_TOP + _BOX_HEIGHT / 2
    found.append(_arrow((x + 3, y), (x + _GAP - 3, y)))
    for place, line in enumerate(data):
      found.append(_centred(x + _GAP / 2, y - 8 - _LINE * (1 - place), line))
  # What skips a room: the bytes, and the state.
  left, right = _box_left(0) + _BOX_WIDTH / 2, _box_left(2) + _BOX_WIDTH / 2
  trainer, loader = _box_left(5) - 3, _box_left(4) + _BOX_WIDTH + 3
  y = _BOX_TOP + _BOX_HEIGHT / 2 + 34
  found += [
      _arrow((left, bottom), (left, bottom + 24), (right, bottom + 24), (right, bottom + 3)),
      _centred((left + right) / 2, bottom + 42, "where documents lie; bytes of the files"),
      _arrow((loader, y), (trainer, y)),
      _arrow((trainer, y), (loader, y)),
      _centred((loader + trainer) / 2, y - 6, "state"),
  ]
  for name, what, number in _SIDE_ROOMS:
    middle = _box_left(number) + _BOX_WIDTH / 2
    found.append(_box(_box_left(number), bottom + 20, _BOX_WIDTH, 48, _SIDE_BOX))
    found.append(_centred(middle, bottom + 39, name, size=14, bold=True))
    found.append(_centred(middle, bottom + 57, what, _GREY))
  rule = "A room imports from rooms to its left only:"
  order = "corpus → order → rows → devices → grain_llm → loader"
  order += " → evaluation, inspection → trainers → cli"
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
    found.append(_box(x, y, width, 20, _COLOURS[number], f"[{first}, {first + count})"))
  found.append(_text(_MARGIN, row_top + 18, "row"))
  for number, (column, count) in enumerate(zip(table.column.tolist(), table.count.tolist())):
    x, width = row_left + row_cell * column, row_cell * count
    found.append(_box(x, row_top, width, 26, _COLOURS[number], f"part {number}"))
    first = int(table.first[number])
    begin = (files_left + cell * (first + count / 2), top + 42 + 34 * number)
    found.append(_arrow(begin, (x + width / 2, row_top - 3)))
  x, width = row_left + row_cell * used, row_cell * (_ROW_LENGTH - used)
  found.append(_box(x, row_top, width, 26, _SIDE_BOX, "padding"))
  segments = [0] * _ROW_LENGTH
  for column, count, segment in zip(table.column, table.count, table.segment):
    segments[column : column + count] = [int(segment)] * int(count)
  for place, (name, values) in enumerate((("column", range(_ROW_LENGTH)), ("segment", segments))):
    y = row_top + 45 + 18 * place
    found.append(_text(_MARGIN, y, name, _GREY))
    for column, value in enumerate(values):
      found.append(_centred(row_left + row_cell * (column + 0.5), y, str(value), _GREY))
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


def _box(x: float, y: float, width: float, height: float, fill: str, label: str = "") -> str:
  box = (
      f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"'
      f' stroke="{_GREY}"/>'
  )
  return box + (_centred(x + width / 2, y + height // 2 + 4, label) if label else "")


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


_centred = functools.partial(_text, anchor="middle")


# Tokens of each label in billions, and how often each stage takes them.
_LABELS = {"web": 60, "code": 18, "papers": 9, "math": 4, "wiki": 3}
_STAGE_1 = {"web": 1.0, "code": 1.0, "papers": 1.0, "math": 1.5, "wiki": 2.0}
_STAGE_2 = {"web": 0.1, "code": 0.6, "papers": 0.8, "math": 3.0, "wiki": 2.0}


def draw_sources() -> str:
  """Draws the sources of a run over its steps."""
  from maxtext_olmo.corpus import index as index_lib
  from maxtext_olmo.inspection import changes
  from maxtext_olmo.inspection import picture
  from maxtext_olmo.inspection import sources
  from maxtext_olmo.order import mixture
  from maxtext_olmo.order import schedule

  length = 8192
  files = [
      index_lib.OlmoNpyFileEntry(
          path=f"{label}/part-0.npy",
          n_tokens=billions * 10**9,
          n_instances=billions * 10**9 // length,
          instance_offset=0,
          label=label,
          size_bytes=4 * billions * 10**9,
      )
      for label, billions in _LABELS.items()
  ]
  index = index_lib.make_index(files, length, dtype="uint32", tokenizer="dolma2", base="")
  stretches, position = [], 0
  for first, end, rows, shares in (
      (0, 6000, 512, _STAGE_1),
      (6000, 16000, 1024, _STAGE_1),
      (16000, 20000, 1024, _STAGE_2),
  ):
    batches = schedule.BatchSchedule.constant(rows).anchored(first, position)
    stream = mixture.mixture_stream(index, shares, "epochs", order="feistel", seed=0)
    stretches.append(changes.Stretch(first, end, batches, stream, index))
    position = batches.position(end)
  return picture.draw_svg(
      sources.count_sources(stretches, bins=100),
      (
          changes.Change(6000, "batches of 1,024"),
          changes.Change(16000, "the mixture of the last stage"),
      ),
      title="What a run of 20,000 steps sees of each source",
  )


def main() -> None:
  """Draws all pictures."""
  guides = pathlib.Path(__file__).parent / "guides"
  (guides / "packed_rows.svg").write_text(draw_packings(48, 1024))
  (guides / "design.svg").write_text(draw_design())
  (guides / "sources.svg").write_text(draw_sources())


if __name__ == "__main__":
  main()
