"""The report of a run: one HTML file that needs no server and no network.

The page shows the sources over the run, the epochs of each label, the changes, the losses with
their spikes and suspect rows, and the identity of the stream. Bokeh draws the plots; its script is
part of the file (see `report_page`).
"""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import english
from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import picture
from maxtext_olmo.inspection import plan as plan_lib
from maxtext_olmo.inspection import report_page
from maxtext_olmo.inspection import sources as sources_lib
from maxtext_olmo.inspection import spike_section
from maxtext_olmo.inspection import spikes as spikes_lib

_SLOTS = 25  # Areas: one for each of the largest labels, and one for all others.
_VALUES = 200_000  # Maximum number of values in a series, over all labels and bins.
_LOSSES = 2000
_MARKED_SPIKES = 1000
_NUMBERED_CHANGES = 30


def make_page(
    plan: plan_lib.Plan,
    sources: sources_lib.Sources,
    *,
    title: str,
    losses: losses_lib.Losses | None = None,
    findings: spikes_lib.Findings | None = None,
) -> str:
  """Returns the report of a run, as HTML.

  Args:
    plan: The run.
    sources: The tokens of each label over the run.
    title: The heading.
    losses: The losses that the trainer logged.
    findings: The spikes of the losses, their comparison with calm steps, and the rows to look at.

  Raises:
    ConfigError: Bokeh is not installed.
  """
  changes = plan.find_changes()
  order = np.argsort(-sources.seen[-1], kind="stable")
  thin = _thinned(sources)
  data = {
      "edges": thin.edges.tolist(),
      "labels": [sources.labels[i] for i in order],
      "available": sources.available[order].tolist(),
      "shares": _float32(thin.shares[:, order]),
      "epochs": _float32(thin.epochs[:, order]),
      "changes": [[change.step, change.text] for change in changes],
      "slots": _SLOTS,
      "colours": picture.COLOURS,
      "other": picture.OTHER_COLOUR,
      "plots": _plots(thin, changes, plan.step, losses, findings),
  }
  body = [
      f"<h1>{html.escape(title)}</h1>",
      f"<p>{html.escape(_summary(plan, sources))}</p>",
      f'<p class="grey">{html.escape(sources.note)}</p>',
      '<p class="screen"><label>Filter labels <input id="filter" type="search"'
      ' placeholder="words or patterns: wiki stack-*" autocomplete="off"></label>'
      ' <span id="count" class="grey"></span></p>',
      '<p id="readout" class="screen" aria-live="polite"></p>',
      '<div id="plots"></div>',
      '<p class="grey screen">Drag to zoom. <kbd>←</kbd> <kbd>→</kbd> select a step,'
      " <kbd>+</kbd> <kbd>-</kbd> zoom, <kbd>0</kbd> shows all, <kbd>shift</kbd> with an arrow"
      " moves, <kbd>/</kbd> filters, <kbd>n</kbd> <kbd>p</kbd> go through the spikes.</p>",
      *_sources_section(sources, order),
      *_changes_section(changes),
      *(spike_section.make_section(findings) if findings is not None else ()),
      *_identity_section(plan),
  ]
  return report_page.make_page(title, body, data, "report.js")


def _float32(values: np.ndarray) -> str:
  return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def _thinned(sources: sources_lib.Sources) -> sources_lib.Sources:
  """Joins neighbouring bins until the series of all labels are small enough for a page."""
  every = -(-len(sources.edges) * len(sources.labels) // _VALUES)
  if every == 1:
    return sources
  kept = np.unique([*range(0, len(sources.edges), every), len(sources.edges) - 1])
  return dataclasses.replace(
      sources,
      edges=sources.edges[kept],
      tokens=np.add.reduceat(sources.tokens, kept[:-1], axis=0),
      seen=sources.seen[kept],
      rows=sources.rows[kept],
  )


def _plots(
    sources: sources_lib.Sources,
    changes: Sequence[changes_lib.Change],
    step: int,
    losses: losses_lib.Losses | None,
    findings: spikes_lib.Findings | None,
) -> Any:
  """Returns the plots as JSON for BokehJS; the page's script fills in the series of the labels."""
  report_page.check_bokeh()
  from bokeh import layouts
  from bokeh import models
  from bokeh import plotting
  from bokeh.embed import json_item

  first, last = int(sources.edges[0]), int(sources.edges[-1])
  steps = models.Range1d(first, last, bounds=(first, last))

  def new(name: str, title: str, height: int, **settings: Any) -> Any:
    figure = plotting.figure(
        height=height,
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,xbox_zoom,reset",
        active_drag="xbox_zoom",
        active_scroll=None,
        x_range=steps,
        name=name,
        title=title,
        min_border_left=60,
        **settings,
    )
    # Make the plots transparent, so that the page's background shows.
    figure.background_fill_color = figure.border_fill_color = None
    figure.toolbar.logo = None
    figure.toolbar.autohide = True
    figure.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    for number, change in enumerate(changes, 1):
      figure.add_layout(models.Span(location=change.step, name="change", line_dash="dashed"))
      if name == "shares" and number <= _NUMBERED_CHANGES:
        place = {"x": change.step, "y": 1.0, "x_offset": 3, "y_offset": 2}
        text = {"text": str(number), "text_font_size": "11px"}
        figure.add_layout(models.Label(name="number", **place, **text))
    if first < step < last:
      figure.add_layout(models.Span(location=step, name="now", line_color="#e53935", line_width=2))
    figure.add_layout(models.Span(name="cursor", line_width=1, visible=False))
    for span in figure.select(models.Span):
      span.dimension = "height"
    return figure

  shares = new("shares", "Share of each label in the batches, by step", 300, y_range=(0.0, 1.08))
  shares.yaxis.formatter = models.NumeralTickFormatter(format="0%")
  shares.yaxis.ticker = [0, 0.25, 0.5, 0.75, 1]
  # Begin with two points, because BokehJS 3.9 hangs on an area without points.
  flat = {f"y{i}": [0, 0] for i in range(_SLOTS + 1)}
  areas = models.ColumnDataSource({"x": [first, last], **flat})
  epochs = new("epochs", "Epochs of each label, by step", 220)
  flat = {f"e{i}": [0, 0] for i in range(_SLOTS)}
  lines = models.ColumnDataSource({"x": [first, last], **flat})
  for i in range(_SLOTS):
    shares.varea_step("x", f"y{i}", f"y{i + 1}", source=areas, name=f"area{i}", step_mode="after")
    epochs.line("x", f"e{i}", source=lines, name=f"line{i}", line_width=2)
  made = [shares, epochs]
  if losses is not None:
    figure = new("loss", f"{losses.name}, by step; spikes are marked", 220)
    made.append(figure)
    places = _extremes(losses)
    points = losses.steps[places].tolist(), losses.values[places].tolist()
    figure.line(*points, color="#4e79a7", name="losses", line_width=1.5)
    spikes = () if findings is None else findings.spikes[:_MARKED_SPIKES]
    finite = [spike for spike in spikes if np.isfinite(spike.loss)]
    figure.scatter(
        [spike.peak for spike in finite],
        [spike.loss for spike in finite],
        size=9,
        marker="inverted_triangle",
        color="#e53935",
    )
  return json_item(layouts.column(made, sizing_mode="stretch_width"), "plots")


def _extremes(losses: losses_lib.Losses) -> np.ndarray:
  """Returns the indices of the losses to draw: all, or the lowest and the highest of each bin."""
  finite = np.flatnonzero(np.isfinite(losses.values))
  if len(finite) <= 2 * _LOSSES:
    return finite
  bins = np.array_split(finite, _LOSSES)
  values = losses.values
  kept = [(b[np.argmin(values[b])], b[np.argmax(values[b])]) for b in bins]
  return np.unique(kept)


def _summary(plan: plan_lib.Plan, sources: sources_lib.Sources) -> str:
  first, last = int(sources.edges[0]), int(sources.edges[-1])
  tokens = float(sources.seen[-1].sum())
  done = f", of which {plan.step:,} are done (the red line)" if plan.step else ""
  if first:
    done += f"; those before {first:,} belong to another stream"
  return (
      f"Steps {first:,} to {last:,}{done}: {int(sources.rows[-1]):,} rows, {tokens:,.0f} tokens of"
      f" {english.count(len(sources.labels), 'label')}."
  )


def _sources_section(sources: sources_lib.Sources, order: np.ndarray) -> Iterable[str]:
  yield "<h2>Sources</h2><div class='scroll'><table id='sources'><thead><tr>"
  heads = ("label", "tokens", "share", "tokens seen", "epochs", "all seen after step")
  yield "".join(f"<th>{head}</th>" for head in heads) + "</tr></thead><tbody>"
  total = max(1.0, float(sources.seen[-1].sum()))
  last = int(sources.edges[-1])
  for place, i in enumerate(order.tolist()):
    label, complete = html.escape(sources.labels[i]), sources.complete[i]
    after = "never" if complete is None else f"{complete:,}"
    if complete is not None and complete > last:
      after += " (after the run)"
    swatch = f'<span class="swatch c{place % len(picture.COLOURS)}"></span>'
    cells = (
        f"{sources.available[i]:,.0f}",
        f"{sources.seen[-1, i] / total:.2%}",
        f"{sources.seen[-1, i]:,.0f}",
        f"{sources.epochs[-1, i]:.3f}",
        after,
    )
    yield f'<tr data-label="{label}"><td>{swatch}{label}</td>'
    yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
  yield "</tbody></table></div>"


def _changes_section(changes: Sequence[changes_lib.Change]) -> Iterable[str]:
  if changes:
    yield "<h2>Changes</h2><ol>"
    yield from (f"<li>step {c.step:,}: {html.escape(c.text)}</li>" for c in changes)
    yield "</ol>"


def _identity_section(plan: plan_lib.Plan) -> Iterable[str]:
  yield "<h2>Identity</h2>"
  yield '<p class="grey">This page describes the stream with this identity.</p><dl>'
  for name, value in plan.identity.items():
    yield f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>"
  yield "</dl>"
