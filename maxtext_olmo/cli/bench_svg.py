"""A bar chart as SVG, without a plotting library; readable on light and on dark pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from xml.sax import saxutils

_WIDTH = 860
_LEFT = 270
_RIGHT = 110
_ROW = 24
_BAR = 15
_GAP = 16
_TOP = 78
_BOTTOM = 44
_COLOURS = {"limit": "#8a8f98", "ours": "#0b7a75", "peer": "#c9772c"}
_TITLES = {"limit": "copy limit", "ours": "this library", "peer": "other loaders"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclasses.dataclass(frozen=True)
class Bar:
  """One bar, with its range."""

  label: str
  group: str
  value: float
  low: float
  high: float


def bar_chart(title: str, subtitle: str, sections: Sequence[tuple[str, Sequence[Bar]]]) -> str:
  """Sections of bars on one logarithmic axis, in million tokens per second."""
  bars = [bar for _, section in sections for bar in section]
  low = 10 ** math.floor(math.log10(min(bar.low for bar in bars)))
  high = max(bar.high for bar in bars) * 1.15
  axis = _Axis(low, high)
  height = _TOP + sum(_ROW * (len(section) + 1) + _GAP for _, section in sections) + _BOTTOM
  out = [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
      f' aria-label={saxutils.quoteattr(title)} font-family="{_FONT}" font-size="13">',
      "<style>"
      ".page{fill:#ffffff}.ink{fill:#1c2128}.faint{fill:#5c6470}.grid{stroke:#d5d9de}.range{stroke:#1c2128}"
      "@media (prefers-color-scheme: dark){.page{fill:#0d1117}.ink{fill:#e6edf3}.faint{fill:#9aa4af}"
      ".grid{stroke:#30363d}.range{stroke:#e6edf3}}"
      "</style>",
      f'<rect class="page" width="{_WIDTH}" height="{height}" rx="6"/>',
      _text(20, 28, title, "ink", size=17, weight=600),
      _text(20, 48, subtitle, "faint"),
      *_legend(),
  ]
  bottom = height - _BOTTOM
  for tick in axis.ticks():
    x = axis.x(tick)
    out.append(_text(x, bottom + 18, f"{tick:g}", "faint", anchor="middle"))
  out.append(
      _text(
          (_LEFT + _WIDTH - _RIGHT) / 2,
          bottom + 36,
          "million tokens per second (logarithmic)",
          "faint",
          anchor="middle",
      )
  )
  y = float(_TOP)
  for heading, section in sections:
    out.append(_text(20, y + 16, heading, "ink", weight=600))
    y += _ROW
    low_edge = y + _ROW * len(section)
    for tick in axis.ticks():
      x = axis.x(tick)
      out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{low_edge:.1f}"/>')
    for bar in section:
      out += _bar(bar, axis, y)
      y += _ROW
    y += _GAP
  return "\n".join([*out, "</svg>"]) + "\n"


@dataclasses.dataclass(frozen=True)
class _Axis:
  low: float
  high: float

  def x(self, value: float) -> float:
    share = math.log(value / self.low) / math.log(self.high / self.low)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

  def ticks(self) -> list[float]:
    first = round(math.log10(self.low))
    found = [10.0**power for power in range(first, math.floor(math.log10(self.high)) + 1)]
    return found


def _bar(bar: Bar, axis: _Axis, y: float) -> list[str]:
  middle = y + _ROW / 2
  end = axis.x(bar.value)
  low, high = axis.x(bar.low), axis.x(bar.high)
  beyond = max(end, high) + 8
  return [
      _text(_LEFT - 10, middle + 4.5, bar.label, "ink", anchor="end"),
      f'<rect x="{_LEFT}" y="{middle - _BAR / 2:.1f}" width="{max(1.0, end - _LEFT):.1f}" height="{_BAR}" rx="2"'
      f' fill="{_COLOURS[bar.group]}"/>',
      f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke-width="1.5"/>',
      _text(beyond, middle + 4.5, _number(bar.value), "ink"),
  ]


def _number(value: float) -> str:
  return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _legend() -> list[str]:
  out = []
  x = 20
  for group, title in _TITLES.items():
    out.append(f'<rect x="{x}" y="58" width="11" height="11" rx="2" fill="{_COLOURS[group]}"/>')
    out.append(_text(x + 17, 68, title, "faint", size=12))
    x += 40 + 7 * len(title)
  out.append(_text(x, 68, "thin line: from the slowest to the fastest round", "faint", size=12))
  return out


def _text(
    x: float,
    y: float,
    text: str,
    kind: str,
    *,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
) -> str:
  return (
      f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}"'
      f' text-anchor="{anchor}">{saxutils.escape(text)}</text>'
  )
