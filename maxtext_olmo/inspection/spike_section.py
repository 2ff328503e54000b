"""The report's section on loss spikes: how their data differs from the usual, and suspect rows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from maxtext_olmo import english
from maxtext_olmo.inspection import contrast as contrast_lib
from maxtext_olmo.inspection import figures as figures_lib
from maxtext_olmo.inspection import spike_detection
from maxtext_olmo.inspection import spikes as spikes_lib

_SOURCES = 10
_ROW_CHARACTERS = 8_000
_TEXT_BYTES = 1_500_000  # Limit on the text of all rows, as HTML.


def make_section(findings: spikes_lib.Findings) -> Iterable[str]:
  """Yields the section as HTML; everything from the corpus is escaped."""
  yield "<h2>Spikes of the loss</h2>"
  yield f"<p>{findings.logged:,} steps with a loss, {findings.summary}</p>"
  if findings.together is None:
    return
  if len(findings.spikes) > len(findings.each):
    yield f'<p class="grey">The {len(findings.each):,} highest are examined here.</p>'
  yield from _contrast(findings.together.contrast, len(findings.each))
  yield "<h3>Rows to look at first</h3>"
  heads = ("step", "row", "label", "file", "bytes", "document", "score", "reason")
  yield from _table(heads, map(_suspect_cells, findings.together.shown), text=(2, 3, 7))
  yield "<h3>Each spike</h3>"
  shown = _Text()
  for number, one in enumerate(findings.each):
    yield from _spike(one, shown, is_open=number == 0)
  if shown.missing:
    yield (
        '<p class="grey">Rows have no text here, because the tokenizer is not known: give'
        " <code>--tokenizer</code>.</p>"
    )


def _contrast(contrast: contrast_lib.Contrast, spikes: int) -> Iterable[str]:
  yield f"<h3>What sets {'them' if spikes > 1 else 'it'} apart</h3>"
  yield (
      f"<p>{contrast.notable:,} of {len(contrast.rows):,} rows in {len(contrast.steps):,} steps"
      f" stand out from those of {len(contrast.calm_steps):,} calm steps nearby."
  )
  if contrast.without_loss:
    yield f" Left out: {english.count(contrast.without_loss, 'more row')} without loss."
  if not contrast.notable:
    yield " The data looks like that of the calm steps."
  yield "</p>"
  rows = [
      ("", *figures_lib.describe(figure.name, figure.found, figure.usual), f"{figure.notable:,}")
      for figure in contrast.figures
      if figure.notable or abs(figure.score) > figures_lib.NOTABLE
  ]
  if rows:
    yield from _table(("figure", "mean", "usually", "rows that stand out"), rows, text=(0,))
  for name, sources in (("label", contrast.labels), ("file", contrast.files)):
    heads = (name, "share", "usually", "rows that stand out", "score")
    yield from _table(heads, map(_source_cells, sources[:_SOURCES]), text=(0,))
    if len(sources) > _SOURCES:
      yield f'<p class="grey">{len(sources) - _SOURCES:,} more with lower scores.</p>'


def _source_cells(source: contrast_lib.SourceScore) -> Sequence[str]:
  """Returns the label that the page's filter uses, and the cells of a line."""
  shares = f"{source.share:.2%}", f"{source.usual_share:.2%}"
  name = html.escape(str(source.source[-1]))
  return source.source[0], name, *shares, f"{source.notable:,}", f"{source.score:.1f}"


def _suspect_cells(suspect: spikes_lib.Suspect) -> Sequence[str]:
  score = suspect.score
  link = f'<a href="#s{score.step}r{score.row}">{score.step:,}</a>'
  where = map(html.escape, (score.label, *suspect.place))
  reason = html.escape(score.reason)
  return score.label, link, f"{score.row:,}", *where, f"{score.score:.1f}", reason


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int]
) -> Iterable[str]:
  """Yields a table.

  Args:
    rows: The label of each line, then its cells as HTML.
    text: The columns that hold text rather than numbers.
  """
  kind = ["text" if column in text else "number" for column in range(len(heads))]
  cells = (f'<th class="{kind[i]}">{head}</th>' for i, head in enumerate(heads))
  yield f'<div class="scroll"><table><thead><tr>{"".join(cells)}</tr></thead><tbody>'
  for label, *row in rows:
    data = f' data-label="{html.escape(label)}"' if label else ""
    cells = (f'<td class="{kind[i]}">{cell}</td>' for i, cell in enumerate(row))
    yield f"<tr{data}>{''.join(cells)}</tr>"
  yield "</tbody></table></div>"


def _spike(one: spikes_lib.Examined, shown: _Text, is_open: bool) -> Iterable[str]:
  (spike,), contrast = one.spikes, one.contrast
  attributes = f'class="spike" data-step="{spike.peak}"{" open" if is_open else ""}'
  yield f"<details {attributes}><summary>{_heading(spike)}</summary>"
  yield (
      f"<p>{contrast.notable:,} of {len(contrast.rows):,} rows in steps {contrast.steps[0]:,} to"
      f" {contrast.steps[-1]:,} stand out.</p>"
  )
  if contrast.notable:
    yield "<ul>"
    for figure in contrast.figures:
      if figure.notable:
        noun, found, usual = figures_lib.describe(figure.name, figure.found, figure.usual)
        rows = english.count(figure.notable, "row")
        yield f"<li>{noun}: {rows}, mean {found}, usually {usual}</li>"
    yield "</ul>"
  for suspect in one.shown:
    yield from _row(suspect, shown)
  yield "</details>"


def _heading(spike: spike_detection.Spike) -> str:
  steps = f"step {spike.first:,}"
  if spike.last > spike.first:
    steps = f"steps {spike.first:,} to {spike.last:,}"
  return (
      f"{steps}: loss {spike.loss:.4g} at step {spike.peak:,}, usually {spike.usual:.4g} (z-score"
      f" {spike.score:.1f})"
  )


class _Text:
  """Tracks how many bytes of text still fit on the page, and whether any row has no text."""

  def __init__(self) -> None:
    self.left = _TEXT_BYTES
    self.missing = False

  def fit(self, text: str, characters: int) -> str:
    """Returns up to `characters` of a text as HTML, or nothing if they no longer fit."""
    escaped = html.escape(text[: max(0, characters)])
    if len(escaped.encode()) > self.left:
      return ""
    self.left -= len(escaped.encode())
    return escaped


def _row(suspect: spikes_lib.Suspect, shown: _Text) -> Iterable[str]:
  score, row = suspect.score, suspect.row
  title = f"step {score.step:,}, row {score.row:,}: {score.label or 'no label'}"
  yield (
      f'<div class="row" id="s{score.step}r{score.row}" data-label="{html.escape(score.label)}">'
      f"<h4>{html.escape(title)} · {html.escape(score.reason)}</h4>"
  )
  for part in row.parts:
    if part.file == score.file:
      yield f'<p class="grey where">{html.escape(_where(part))}</p>'
  shown.missing |= not suspect.text
  left = _ROW_CHARACTERS
  total = sum(len(text) for _, text in suspect.text)
  written = 0
  for heading, text in suspect.text:
    fitting = shown.fit(text, left)
    if fitting or not text:
      yield f'<p class="grey heading">{html.escape(heading)}</p><pre dir="auto">{fitting}</pre>'
      written += min(len(text), left)
      left -= len(text)
  if written < total:
    yield f'<p class="grey">{total - written:,} more characters are not shown.</p>'
  yield "</div>"


def _where(part: Any) -> str:
  if part.first_byte is None:
    return part.file
  return f"{part.file}, bytes {part.first_byte:,} to {part.end_byte:,}"
