"""The sources of a run as an SVG picture: shares as stacked areas, and epochs as lines."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import sources as sources_lib

# Each colour stands out on white, on black, and from its neighbours.
COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948",
    "#b07aa1", "#ff9da7", "#9c755f", "#8cd17d", "#499894", "#d37295",
)  # fmt: skip
OTHER_COLOUR = "#999999"

_SHOWN = 24
_WIDTH, _LEFT, _TOP, _LEGEND = 1000, 70, 60, 230
_PLOT_WIDTH = _WIDTH - _LEFT - _LEGEND
_SHARES_HEIGHT, _EPOCHS_HEIGHT, _BETWEEN = 260, 180, 50
_STYLE = """
text { font: 12px sans-serif; fill: #222 } .grey { fill: #666 } .title { font-size: 15px }
.axis { stroke: #888; fill: none } .change { stroke: #222; stroke-dasharray: 4 3 }
.now { stroke: #c00; stroke-width: 1.5 } .ground { fill: #fff }
.line { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .grey { fill: #aaa } .change { stroke: #ddd } .ground { fill: #16181c }
}
"""


def draw_svg(
    sources: sources_lib.Sources,
    changes: Sequence[changes_lib.Change] = (),
    *,
    title: str = "",
    step: int = 0,
) -> str:
  """Returns the picture of a run's sources, as text.

  Args:
    sources: The tokens of each label over the run. The largest labels are drawn separately, all
      others as one.
    changes: The changes during the run, marked by dashed lines.
    title: The title above the picture.
    step: The number of steps done, marked by a line unless it is 0.
  """
  order = np.argsort(-sources.seen[-1], kind="stable")
  shown, rest = order[:_SHOWN], order[_SHOWN:]
  names = [sources.labels[i] for i in shown]
  colours = [COLOURS[i % len(COLOURS)] for i in range(len(shown))]
  shares = sources.shares[:, shown]
  epochs = sources.epochs[:, shown]
  if len(rest):
    names.append(f"{len(rest)} other labels")
    colours.append(OTHER_COLOUR)
    shares = np.column_stack([shares, sources.shares[:, rest].sum(axis=1)])
    others = sources.seen[:, rest].sum(axis=1) / max(1, sources.available[rest].sum())
    epochs = np.column_stack([epochs, others])
  first, last = int(sources.edges[0]), int(sources.edges[-1])
  x = _LEFT + (sources.edges - first) / (last - first) * _PLOT_WIDTH
  epochs_top = _TOP + _SHARES_HEIGHT + _BETWEEN
  bottom = epochs_top + _EPOCHS_HEIGHT
  height = max(bottom + 56, _TOP + 18 * len(names) + 30)
  body = [
      _text(_LEFT, 24, title or "Sources of the run", "title"),
      _text(_LEFT, 42, f"steps {first:,} to {last:,}. {sources.note}", "grey"),
  ]
  ends = _TOP + _SHARES_HEIGHT * (1 - np.cumsum(shares, axis=1))
  tops = np.column_stack([np.full(len(shares), _TOP + _SHARES_HEIGHT), ends])
  for i, (name, colour) in enumerate(zip(names, colours)):
    area = [*_staircase(x, tops[:, i + 1]), *reversed(_staircase(x, tops[:, i]))]
    body.append(_shape("polygon", area, f'fill="{colour}"', f"{name}: {shares[:, i].mean():.2%}"))
  highest = max(1e-9, float(epochs.max()))
  for i, (name, colour) in enumerate(zip(names, colours)):
    y = bottom - epochs[:, i] / highest * _EPOCHS_HEIGHT
    points = list(zip(x.tolist(), y.tolist()))
    said = f"{name}: {epochs[-1, i]:.3f} epochs"
    body.append(_shape("polyline", points, f'class="line" stroke="{colour}"', said))
    top = _TOP + 18 * i
    left = _LEFT + _PLOT_WIDTH + 16
    body.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>')
    body.append(_text(left + 18, top + 11, f"{_shortened(name)}  {epochs[-1, i]:.2f} ep."))
  body += _axes(_TOP, _SHARES_HEIGHT, [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")], "share")
  ticks = [(tick / highest, f"{tick:g}") for tick in _ticks(0, highest)]
  body += _axes(epochs_top, _EPOCHS_HEIGHT, ticks, "epochs")
  for tick in _ticks(first, last):
    at = _LEFT + (tick - first) / (last - first) * _PLOT_WIDTH
    body.append(_text(at, bottom + 18, f"{int(tick):,}", "grey", "middle"))
  body.append(_text(_LEFT + _PLOT_WIDTH / 2, bottom + 38, "step", "grey", "middle"))
  for change in changes:
    if first <= change.step <= last:
      at = _LEFT + (change.step - first) / (last - first) * _PLOT_WIDTH
      body.append(_mark(at, bottom, "change", f"step {change.step:,}: {change.text}"))
  if first < step <= last:
    at = _LEFT + (step - first) / (last - first) * _PLOT_WIDTH
    body.append(_mark(at, bottom, "now", f"now: step {step:,}"))
  return (
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
      f' width="{_WIDTH}" height="{height}">\n<style>{_STYLE}</style>\n'
      f'<rect class="ground" width="{_WIDTH}" height="{height}"/>\n'
      + "\n".join(body)
      + "\n</svg>\n"
  )


def _shortened(name: str) -> str:
  """Returns a name that fits into the legend. Its end is kept, because many labels differ there."""
  return name if len(name) <= 24 else f"{name[:10]}…{name[-13:]}"


def _staircase(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
  """Returns the corners of a line that is constant within each bin."""
  left, right = zip(x[:-1].tolist(), y.tolist()), zip(x[1:].tolist(), y.tolist())
  return [point for pair in zip(left, right) for point in pair]


def _shape(kind: str, points: Sequence[tuple[float, float]], how: str, said: str) -> str:
  path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
  return f'<{kind} points="{path}" {how}><title>{html.escape(said)}</title></{kind}>'


def _mark(x: float, bottom: float, kind: str, said: str) -> str:
  line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" class="{kind}"/>'
  return f"<g>{line}<title>{html.escape(said)}</title></g>"


def _axes(top: float, height: float, ticks: Sequence[tuple[float, str]], name: str) -> list[str]:
  bottom = top + height
  found = [f'<path class="axis" d="M{_LEFT},{top}V{bottom}H{_LEFT + _PLOT_WIDTH}"/>']
  found += [_text(_LEFT - 6, bottom - at * height + 4, said, "grey", "end") for at, said in ticks]
  middle = f"translate(16, {top + height / 2:.0f}) rotate(-90)"
  return [*found, f'<g transform="{middle}">{_text(0, 0, name, "grey", "middle")}</g>']


def _ticks(low: float, high: float) -> list[float]:
  """Returns four to nine round numbers between two numbers."""
  step = 10 ** math.floor(math.log10(max(high - low, 1e-9) / 4))
  step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 9)
  return [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
  how = f' class="{kind}"' if kind else ""
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{how}>{html.escape(said)}</text>'
