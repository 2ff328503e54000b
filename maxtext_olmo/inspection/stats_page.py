"""The page of a corpus's statistics: a table of labels, document lengths, and token frequencies."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import english
from maxtext_olmo.corpus import stats as stats_lib
from maxtext_olmo.inspection import picture
from maxtext_olmo.inspection import report_page

_DRAWN = 12  # Only this many labels, the largest, are drawn.
_RANKS = 200


def make_page(
    labels: Sequence[stats_lib.Stats],
    whole: stats_lib.Stats,
    *,
    title: str,
    tokens: Sequence[tuple[str, int]] = (),
) -> str:
  """Returns the page, as HTML.

  Args:
    labels: The statistics of each label.
    whole: The statistics of the corpus.
    title: The heading.
    tokens: The most frequent tokens, as text, and their counts.

  Raises:
    ConfigError: Bokeh is not installed.
  """
  ordered = sorted(labels, key=lambda label: -label.tokens)
  body = [
      f"<h1>{html.escape(title)}</h1>",
      f"<p>{html.escape(_summary(ordered, whole))}</p>",
      '<p class="screen"><label>Filter labels <input id="filter" type="search"'
      ' placeholder="words" autocomplete="off"></label></p>',
      '<div id="plots"></div>',
      '<p class="grey screen">Click on a label in a legend to hide its line; drag to zoom.</p>',
      *_labels_section(ordered, whole),
      *_tokens_section(tokens, whole),
  ]
  return report_page.make_page(title, body, {"plots": _plots(ordered)}, "stats.js")


def row_of(stats: stats_lib.Stats, whole: stats_lib.Stats) -> tuple[str, ...]:
  """Returns the cells of a label in a table, without its name; `HEADS` names the columns."""
  lengths = stats.lengths
  documents = ("",) * 4
  if lengths is not None:
    documents = (
        f"{lengths.documents:,}",
        f"{stats.mean_length:,.0f}",
        f"{lengths.median:,}",
        f"{lengths.longest:,}",
    )
  return (
      f"{stats.files:,}",
      f"{stats.tokens:,}",
      f"{stats.tokens / max(1, whole.tokens):.2%}",
      *documents,
      f"{stats.distinct:,}",
      f"{stats.bits:.2f}",
  )


HEADS = (
    "label",
    "files",
    "tokens",
    "share",
    "documents",
    "mean length",
    "median (about)",
    "longest",
    "distinct ids",
    "bits per token",
)


def _summary(labels: Sequence[stats_lib.Stats], whole: stats_lib.Stats) -> str:
  text = (
      f"{whole.tokens:,} tokens in {english.count(whole.files, 'file')} of"
      f" {english.count(len(labels), 'label')}"
  )
  if whole.lengths is not None:
    text += f", {english.count(whole.lengths.documents, 'document')}"
  return f"{text}, {english.count(whole.distinct, 'distinct id')}."


def _labels_section(labels: Sequence[stats_lib.Stats], whole: stats_lib.Stats) -> Iterable[str]:
  yield "<h2>Labels</h2><div class='scroll'><table><thead><tr>"
  yield "".join(f"<th>{head}</th>" for head in HEADS) + "</tr></thead><tbody>"
  for place, stats in enumerate(labels):
    label = html.escape(stats.label)
    swatch = f'<span class="swatch c{place}"></span>' if place < _DRAWN else ""
    yield f'<tr data-label="{label}"><td class="label">{swatch}{label}</td>'
    yield "".join(f"<td>{cell}</td>" for cell in row_of(stats, whole)) + "</tr>"
  yield "<tr><td>all</td>" + "".join(f"<td>{cell}</td>" for cell in row_of(whole, whole)) + "</tr>"
  yield "</tbody></table></div>"


def _tokens_section(tokens: Sequence[tuple[str, int]], whole: stats_lib.Stats) -> Iterable[str]:
  if tokens:
    yield "<h2>Most frequent tokens</h2><div class='scroll'><table><thead><tr>"
    yield "<th>token</th><th>count</th><th>share</th></tr></thead><tbody>"
    for text, count in tokens:
      cells = (html.escape(text), f"{count:,}", f"{count / max(1, whole.tokens):.2%}")
      yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


def _plots(labels: Sequence[stats_lib.Stats]) -> Any:
  """Returns the plots as JSON for BokehJS."""
  report_page.check_bokeh()
  from bokeh import layouts
  from bokeh import models
  from bokeh import plotting
  from bokeh.embed import json_item

  def new(name: str, title: str, **settings: Any) -> Any:
    figure = plotting.figure(
        height=320,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,reset",
        active_drag="box_zoom",
        name=name,
        title=title,
        min_border_left=60,
        x_axis_type="log",
        **settings,
    )
    # Transparent, to show the page's background.
    figure.background_fill_color = figure.border_fill_color = None
    figure.toolbar.logo = None
    figure.toolbar.autohide = True
    figure.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    return figure

  drawn = [label for label in labels[:_DRAWN] if label.tokens]
  made = []
  if any(label.lengths is not None and label.lengths.documents for label in drawn):
    figure = new("lengths", "Share of documents by length in tokens, in bins of one octave")
    figure.yaxis.formatter = models.NumeralTickFormatter(format="0%")
    for label, colour in zip(drawn, picture.COLOURS):
      if label.lengths is not None and label.lengths.documents:
        bounds, counts = label.lengths.octaves()
        figure.line(
            (bounds * 2**0.5).tolist(),
            (counts / counts.sum()).tolist(),
            color=colour,
            line_width=2,
            legend_label=label.label,
        )
    made.append(figure)
  figure = new(
      "ids", "Share of tokens with the n-th most frequent id, by rank n", y_axis_type="log"
  )
  for label, colour in zip(drawn, picture.COLOURS):
    ranks, shares = _by_rank(label.ids)
    figure.line(ranks, shares, color=colour, line_width=2, legend_label=label.label)
  made.append(figure)
  for figure in made:
    for legend in figure.legend:
      legend.click_policy = "hide"
      legend.background_fill_alpha = legend.border_line_alpha = 0.0
  return json_item(layouts.column(made, sizing_mode="stretch_width"), "plots")


def _by_rank(ids: np.ndarray) -> tuple[list[int], list[float]]:
  """Returns some ranks, evenly spaced on a logarithmic axis, and the share of the id at each."""
  counts = np.sort(ids[ids > 0])[::-1]
  if not len(counts):
    return [], []
  ranks = np.unique(np.geomspace(1, len(counts), _RANKS).astype(np.int64))
  return ranks.tolist(), (counts[ranks - 1] / counts.sum()).tolist()
