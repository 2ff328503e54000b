"""The pages of `maxtext-olmo inspect RUN --serve`, as HTML without scripts.

    ./            the summary of the data state     document   the steps that have a document
    step?n=5      the rows of a step                file       the steps that have a byte of a file
    row?step=5&row=3                                range      the steps that have a range of tokens
                  one row, with its text            find       a search for text (`Search`)

Corpora contain live HTML, so everything that is not already `Html` is escaped when it is put into a
page. This module does not use sockets, and never changes the run.
"""

from __future__ import annotations

import collections
import functools
import html
import importlib.resources
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import search
from maxtext_olmo.inspection import searches as searches_lib
from maxtext_olmo.inspection import summary
from maxtext_olmo.inspection import text as text_lib
from maxtext_olmo.inspection import visits as visits_lib
from maxtext_olmo.loader import iterator as iterator_lib

_ROWS = 200  # Rows of a step on one page.
_SNIPPET_TOKENS, _SNIPPET = 48, 90
_WIDE = ("file", "text", "place")  # Columns whose text is folded.
_MOST_READ = 100  # Rows per page whose filter verdict is looked up.
_MOST_DOCUMENTS, _LOCATED = 1000, 20  # Documents of one name; those whose steps are looked up.

_FORMS = """\
<nav class="screen">
<form action="step"><label>Step <input name="n" inputmode="numeric" required></label>
<button>Show</button></form>
<form action="find"><label>Text <input name="text" required></label>
<label>in labels <input name="label" placeholder="*"></label> <button>Find</button></form>
<form action="document"><label>Document <input name="id" placeholder="number or name" required>
</label> <button>Find</button></form>
<form action="file"><label>File <input name="name" required></label>
<label>byte <input name="byte" inputmode="numeric" required></label> <button>Find</button></form>
</nav>
"""
_STYLE = """
nav { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; padding: .6rem 0;
  border-bottom: 1px solid var(--line) }
nav input { width: 9rem } [name=n], [name=byte] { width: 6rem }
button { font: inherit; padding: .3rem .7rem } td, th { vertical-align: top }
.left td, .left th { text-align: left } .masked { color: var(--accent); font-weight: bold }
a { color: inherit } .walk a { margin-right: 1.2rem } progress { width: 100% }
td, th { white-space: nowrap } td.wide { white-space: normal;
  overflow-wrap: anywhere; min-width: 13rem }
pre.row { max-height: none }
"""


class Html(str):
  """Text that is already HTML; all other text is escaped."""

  __slots__ = ()


class NotFoundError(errors.MaxtextOlmoError, LookupError):
  """The requested page does not exist."""


@functools.cache
def style() -> str:
  """Returns the style sheet of every page."""
  of_report = importlib.resources.files(__package__).joinpath("report.css")
  return of_report.read_text(encoding="utf-8") + _STYLE


def make_page(title: str, body: Iterable[str], *, refresh: int = 0, forms: bool = True) -> str:
  """Returns a whole page.

  Args:
    title: The heading.
    body: Pieces of HTML.
    refresh: Seconds after which the browser reloads the page; 0 for never.
    forms: Whether to show the forms for another request.
  """
  top = f'<p><a href="./">The run</a></p>{_FORMS}' if forms else ""
  again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
  return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width, initial-scale=1">'
      f"{again}<title>{_escape(title)}</title><style>{style()}</style></head>\n<body>\n"
      f"{top}<h1>{_escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
  )


def make_message(title: str, text: str, *, forms: bool = True) -> str:
  """Returns a page with a single message."""
  return make_page(title, [_paragraph(text)], forms=forms)


class Views:
  """Makes the pages about a run.

  Args:
    run: The run.
    iterator: An iterator at the state of the run; used from several threads and never moved.
    tokenizer: The tokenizer of the corpus; None shows no text.
    until_step: The step up to which searches look; None for the end of the next epoch.
  """

  def __init__(
      self,
      run: run_lib.Run,
      iterator: iterator_lib.BatchIterator,
      tokenizer: Any = None,
      until_step: int | None = None,
  ):
    self._run = run
    self._iterator = iterator
    self._tokenizer = tokenizer
    self._until = until_step
    self.searches = searches_lib.Searches(iterator, tokenizer, until_step)
    self._pages: dict[str, Callable[[Mapping[str, str]], str]] = {
        "": self._show_run,
        "step": self._show_step,
        "row": self._show_row,
        "find": self._show_search,
        "document": self._show_document,
        "file": self._show_file,
        "range": self._show_range,
    }

  def page(self, name: str, query: Mapping[str, str]) -> str:
    """Returns a page.

    Raises:
      NotFoundError: There is no page of that name.
      MaxtextOlmoError: The request cannot be answered; the message says why.
    """
    if name not in self._pages:
      raise NotFoundError(f"There is no page {name!r}.")
    return self._pages[name](query)

  def _show_run(self, query: Mapping[str, str]) -> str:
    del query
    lines = "\n".join(summary.summarize(self._run).lines())
    last = max(0, self._iterator.step - 1)
    walk = [_link("step", f"step {step}", n=step) for step in (0, last)]
    return make_page(
        f"The run {self._run.path}",
        [f'<p class="walk">{"".join(walk)}</p>', f"<pre class='row'>{_escape(lines)}</pre>"],
    )

  def _show_step(self, query: Mapping[str, str]) -> str:
    step, first = _number(query, "n"), _number(query, "first", 0)
    size = self._size(step)
    last = max(first, min(first + _ROWS, size) - 1)
    explanation = self._iterator.explain(step, range(first, last + 1))
    labels = collections.Counter(row.label or "-" for row in explanation.rows if row.parts)
    walk = [_link("step", "← previous step", n=step - 1) if step else ""]
    walk.append(_link("step", "next step →", n=step + 1))
    if first:
      walk.append(_link("step", "earlier rows", n=step, first=max(0, first - _ROWS)))
    if last + 1 < size:
      walk.append(_link("step", "further rows", n=step, first=first + _ROWS))
    body = [
        f'<p class="walk">{"".join(walk)}</p>',
        _paragraph(
            f"{self._when(step).capitalize()}: {size:,} rows of {explanation.sequence_length:,}"
            f" tokens from position {explanation.position:,}, repetition filter"
            f" {'on' if explanation.ngram_filter else 'off'}. Rows {first:,} to {last:,} by label:"
            f" {', '.join(f'{label} {count:,}' for label, count in labels.most_common())}."
        ),
        _table(
            ("row", "position", "epoch", "label", "file", "documents", "kept", "in loss", "text"),
            (
                (
                    _link("row", f"{row.row}", step=step, row=row.row),
                    f"{row.position:,}",
                    text_lib.describe_epoch(row) if row.parts else "",
                    row.label if row.parts else "padding",
                    self._file_of(row),
                    sum(len(part.documents) for part in row.parts) or "",
                    _verdict(row.kept if row.parts else None, row.excluded, row.used),
                    f"{row.loss_tokens:,}",
                    self._snippet(row),
                )
                for row in explanation.rows
            ),
        ),
    ]
    return make_page(f"Step {step:,}", body)

  def _show_row(self, query: Mapping[str, str]) -> str:
    step, number = _number(query, "step"), _number(query, "row")
    (row,) = self._iterator.explain(step, [number]).rows
    verdict = _verdict(row.kept, row.excluded, row.used)
    partly = f"kept except {row.excluded:,} excluded tokens"
    kept = {"yes": "kept", "part": partly}.get(verdict, verdict)
    walk = [_link("row", "← previous row", step=step, row=number - 1) if number else ""]
    if number + 1 < self._size(step):
      walk.append(_link("row", "next row →", step=step, row=number + 1))
    walk.append(_link("step", f"all rows of step {step:,}", n=step))
    body = [
        f'<p class="walk">{"".join(walk)}</p>',
        f"<p>{self._when(step).capitalize()}, position {row.position:,}, epoch"
        f" {text_lib.describe_epoch(row)}, {row.used:,} tokens, of which {row.loss_tokens:,} are in"
        f" the loss, {kept}.</p>",
        _table(
            ("column", "label", "file", "bytes", "tokens"),
            (
                (
                    part.column,
                    part.label,
                    part.file,
                    "" if part.first_byte is None else f"{part.first_byte:,}-{part.end_byte:,}",
                    f"{part.count:,}",
                )
                for part in row.parts
            ),
        ),
    ]
    if self._tokenizer is None:
      spans = [text_lib.describe_span(span) for part in row.parts for span in part.documents]
      body += [_paragraph(span) for span in spans]
      body.append(_paragraph("Text needs --tokenizer.", "grey"))
    else:
      for heading, text in text_lib.pieces(row, self._tokenizer):
        body.append(f'<h3>{_escape(heading)}</h3><pre class="row" dir="auto">{_escape(text)}</pre>')
    return make_page(f"Step {step:,}, row {number:,}", body)

  def _show_search(self, query: Mapping[str, str]) -> str:
    if self._tokenizer is None:
      raise errors.ConfigError("A search for text needs the tokenizer: serve with --tokenizer.")
    text, label = query.get("text", ""), query.get("label") or "*"
    found = self.searches.get(text, label)
    title = f"Search for {text_lib.printable(text)!r}"
    if found.error is not None:
      raise found.error
    if not found.finished:
      done = min(found.scanned, found.total)
      body = [
          f'<progress max="{max(1, found.total)}" value="{done}"></progress>',
          _paragraph(
              f"{done / 1e9:,.2f} of {found.total / 1e9:,.2f} GB scanned, {found.num_hits:,} hits."
              " This page reloads every second; closing it ends the search."
          ),
      ]
      return make_page(title, body, refresh=1)
    body = [_paragraph(found.summary())]
    for visits in found.visits:
      body += self._visits(visits)
    return make_page(title, [*body, *self._more(found.hits[len(found.visits) :])])

  def _show_document(self, query: Mapping[str, str]) -> str:
    name = query.get("id", "").strip()
    numbers = visits_lib.find_documents(self._iterator, name)
    shown = numbers[:_MOST_DOCUMENTS]
    targets = [visits_lib.document_range(self._iterator, number) for number in shown]
    title = f"Document {name}" + (f": {len(numbers):,} documents" if numbers[1:] else "")
    return self._show_targets(title, *targets)

  def _show_file(self, query: Mapping[str, str]) -> str:
    files, index = searches_lib.corpus_of(self._iterator)
    number = search.file_number(files, query.get("name", ""))
    target = search.range_of_byte(files, index, number, _number(query, "byte"))
    return self._show_targets(f"Byte {query['byte']} of {files.paths[number]}", target)

  def _show_range(self, query: Mapping[str, str]) -> str:
    files, index = searches_lib.corpus_of(self._iterator)
    file, first, count = (_number(query, name) for name in ("file", "first", "count"))
    if file >= len(index.files) or not 0 < count <= index.files[file].n_tokens - first:
      raise NotFoundError("The corpus has no such range of tokens.")
    return self._show_targets(
        f"Tokens {first:,} to {first + count - 1:,} of {files.paths[file]}",
        search.TokenRange(file, first, count),
    )

  def _show_targets(self, title: str, *targets: search.TokenRange) -> str:
    body, left = [], _MOST_READ
    for target in targets[:_LOCATED]:
      visits = visits_lib.find_visits(self._iterator, target, self._until, left)
      body += self._visits(visits)
      left -= visits.rows_read
    return make_page(title, [*body, *self._more(targets[_LOCATED:])])

  def _visits(self, visits: visits_lib.Visits) -> list[str]:
    """Returns the location of a range, and the steps that have it."""
    body = [
        f"<h3>{_escape(visits.file)}</h3>",
        _paragraph(
            f"bytes {visits.first_byte:,}-{visits.end_byte:,},"
            f" {english.count(visits.tokens, 'token')}, label {visits.label}"
            f"{visits.describe_documents()}"
        ),
    ]
    if visits.reason:
      return [*body, _paragraph(f"No step has it: {visits.reason}.")]
    rows = []
    for visit in visits.visits:
      step: Html | str = visits_lib.describe_unseen(visit)
      if visit.step is not None:
        step = _link("row", f"{visit.step:,}, row {visit.row}", step=visit.step, row=visit.row or 0)
      held = "all" if visit.tokens == visits.tokens else f"{visit.tokens:,} of {visits.tokens:,}"
      columns = f"{visit.columns[0]}-{visit.columns[1]}"
      when = "" if visit.step is None else self._when(visit.step)
      verdict = _verdict(visit.kept, visit.excluded, visit.tokens)
      epoch = text_lib.describe_epoch(visit)
      rows.append((step, when, epoch, f"{visit.position:,}", columns, held, verdict))
    body.append(_table(("step", "when", "epoch", "position", "columns", "tokens", "kept"), rows))
    if visits.unread:
      body.append(
          _paragraph(
              f"The last {visits.unread:,} rows were not read, so it is unknown whether they are in"
              " the loss; the pages of these rows show it.",
              "grey",
          )
      )
    return body

  def _more(self, hits: Sequence[search.TokenRange]) -> list[str]:
    """Returns links to the steps of ranges that are not shown."""
    links = []
    for hit in hits:
      path, last = self._iterator.files.paths[hit.file], hit.first + hit.count - 1
      text = f"{path}, tokens {hit.first:,} to {last:,}"
      links.append(_link("range", text, file=hit.file, first=hit.first, count=hit.count))
    table = _table(("place",), ((link,) for link in links))
    return [_paragraph("More occurrences; each link shows its steps:"), table] if links else []

  def _when(self, step: int) -> str:
    return "seen" if step < self._iterator.step else "to come"

  def _size(self, step: int) -> int:
    return self._iterator.history.at(step).schedule.size(step)

  def _file_of(self, row: Any) -> str:
    """Returns the file that a row begins with, relative to the directory that holds all files."""
    files = list(dict.fromkeys(part.file for part in row.parts))
    if not files or self._iterator.files is None:
      return "".join(files[:1])
    more = f" and {len(files) - 1} more" if files[1:] else ""
    return os.path.relpath(files[0], self._base) + more

  @functools.cached_property
  def _base(self) -> str:
    return os.path.commonpath([os.path.dirname(path) for path in self._iterator.files.paths])

  def _snippet(self, row: Any) -> str:
    if self._tokenizer is None:
      return ""
    text = text_lib.printable(self._tokenizer.decode(row.tokens[:_SNIPPET_TOKENS]))
    return " ".join(text.split())[:_SNIPPET]


def _number(query: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
  """Returns a query parameter as a whole number."""
  text = query.get(name, "").strip().replace(",", "")
  if not text and otherwise is not None:
    return otherwise
  if not (text.isascii() and text.isdigit() and len(text) < 19):
    raise errors.ConfigError(f"{name} must be a whole number, 0 or more, got {text[:40]!r}.")
  return int(text)


def _verdict(kept: bool | None, excluded: int, tokens: int) -> Html:
  verdict = text_lib.describe_verdict(kept, excluded, tokens)
  return Html(f'<span class="masked">{verdict}</span>' if verdict.isupper() else verdict)


def _escape(value: object) -> str:
  if isinstance(value, Html):
    return value
  return html.escape(text_lib.printable(str(value)))


def _paragraph(text: str, css: str = "") -> str:
  return f'<p class="{css}">{_escape(text)}</p>'


def _link(page: str, text: str, **query: int | str) -> Html:
  address = html.escape(f"{page}?{urllib.parse.urlencode(query)}")
  return Html(f'<a href="{address}">{_escape(text)}</a>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  kinds = [' class="wide"' if head in _WIDE else "" for head in heads]
  lines = [
      "".join(f"<td{kind}>{_escape(cell)}</td>" for kind, cell in zip(kinds, row)) for row in rows
  ]
  return (
      '<div class="scroll"><table class="left"><thead><tr>'
      + "".join(f"<th>{_escape(head)}</th>" for head in heads)
      + "</tr></thead><tbody>"
      + "".join(f"<tr>{line}</tr>" for line in lines)
      + "</tbody></table></div>"
  )
