"""`maxtext-olmo picture`: the pictures of the guides, as SVG files."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

_ROW_HEIGHT, _GAP, _WIDTH = 13, 3, 560
_MARGIN, _TITLE, _TEXT = 16, 44, 12
_PADDING = "#e4e4e4"


def add_parser(subparsers: Any) -> None:
  """Adds `picture`."""
  parser = subparsers.add_parser(
      "picture",
      help="draw packed rows, or the design, as an SVG file",
      description=(
          "Packs documents of lognormal lengths in every way and draws the rows: a colour is a"
          " document, grey is padding, a white line is where a document begins. With --of design,"
          " draws the rooms of this package and a row as a list of parts."
      ),
  )
  parser.add_argument(
      "--of", choices=("packings", "design"), default="packings", help="(default: %(default)s)"
  )
  parser.add_argument("--output", required=True, metavar="FILE", help="the SVG file (required)")
  parser.add_argument(
      "--length", type=int, default=1024, help="tokens of a row (default: %(default)s)"
  )
  parser.add_argument(
      "--documents", type=int, default=48, help="how many documents (default: %(default)s)"
  )
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Draws the picture."""
  from maxtext_olmo import atomic
  from maxtext_olmo.cli import design_picture
  from maxtext_olmo.errors import ConfigError

  if args.length < 1 or args.documents < 1:
    raise ConfigError("--length and --documents must be positive.")
  is_design = args.of == "design"
  text = design_picture.draw() if is_design else draw(args.documents, args.length)
  atomic.write_atomically(args.output, text)
  print(f"{args.output} is drawn.")
  return 0


@dataclasses.dataclass(frozen=True)
class Panel:
  """The rows of one packing: for each token the document it is of, counted from 1; 0 is padding."""

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
  from maxtext_olmo.grain_llm import row_source
  from maxtext_olmo.order import permutations
  from maxtext_olmo.rows import packing
  from maxtext_olmo.rows import planned as planned_lib

  rng = np.random.default_rng(5)
  lengths = np.clip(rng.lognormal(5.6, 0.9, documents), 1, length).astype(int)
  # Each token says which document it is of, so the packers themselves say where documents went.
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
  parts = row_source.RecordParts(grain.MapDataset.source(records))
  order = permutations.FeistelOrder(num_instances=documents, seed=0)
  plan = planned_lib.PackingPlan(
      parts.lengths, order, identity="picture", row_length=length, window=documents
  )
  planned = row_source.PlannedRows(parts, plan, length, shift=None, num_epochs=1)
  rows = planned.rows(np.arange(plan.count(1)))
  found.append(Panel("planned", [row["inputs"].tolist() for row in rows]))
  return found


def draw(documents: int, length: int) -> str:
  """The picture as SVG text: the unpacked rows on the left, the packings on the right."""
  made = panels(documents, length)
  left, right = made[:1], made[1:]
  body: list[str] = []
  heights = []
  for column, group in enumerate((left, right)):
    x, y = _MARGIN + column * (_WIDTH + 2 * _MARGIN), _TITLE
    for panel in group:
      body += _draw_panel(panel, x, y, length)
      y += _TEXT + 8 + len(panel.rows) * (_ROW_HEIGHT + _GAP) + 18
    heights.append(y)
  width, height = 2 * _WIDTH + 4 * _MARGIN, max(heights)
  title = (
      f"{documents} documents in rows of {length} tokens: a colour is a document, grey is padding"
  )
  return "\n".join(
      [
          f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
          ' font-family="sans-serif">',
          f'<rect width="{width}" height="{height}" fill="white"/>',
          f'<text x="{_MARGIN}" y="24" font-size="16" font-weight="bold"'
          f' fill="#222222">{title}</text>',
          *body,
          "</svg>\n",
      ]
  )


def _draw_panel(panel: Panel, x: int, y: int, length: int) -> list[str]:
  text = f"{panel.title}: {len(panel.rows)} rows, {panel.padding:.1%} padding"
  lines = [f'<text x="{x}" y="{y + _TEXT}" font-size="{_TEXT + 1}" fill="#222222">{text}</text>']
  y += _TEXT + 8
  for row in panel.rows:
    start = 0
    for end in range(1, length + 1):
      if end < length and row[end] == row[start]:
        continue
      left, wide = start * _WIDTH / length, (end - start) * _WIDTH / length
      # The gap between documents is the white of the page.
      shown = max(0.4, wide - (0.8 if row[start] else 0))
      lines.append(
          f'<rect x="{x + left:.1f}" y="{y}" width="{shown:.1f}" height="{_ROW_HEIGHT}"'
          f' fill="{_colour(row[start])}"/>'
      )
      start = end
    y += _ROW_HEIGHT + _GAP
  return lines


def _colour(document: int) -> str:
  """Neighbours in number are far apart in hue."""
  if not document:
    return _PADDING
  import colorsys

  hue = document * 0.61803398875 % 1
  light = 0.42 + 0.16 * (document % 3) / 2
  return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, 0.5))
