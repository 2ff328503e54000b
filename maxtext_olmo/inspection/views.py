"""The pages of `maxtext-olmo inspect RUN --serve`, as HTML without scripts.

    ./            the summary of the data state     document   the steps that hold a document
    step?n=5      the rows of a step                file       the steps that hold a byte of a file
    row?step=5&row=3                                range      the steps that hold a token range
                  one row, with its text            find       a search for text (`Search`)

This module does not use sockets, and never changes the run.
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.inspection import markup
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import search
from maxtext_olmo.inspection import searches as searches_lib
from maxtext_olmo.inspection import summary
from maxtext_olmo.inspection import text as text_lib
from maxtext_olmo.inspection import visits as visits_lib
from maxtext_olmo.loader import iterator as iterator_lib

_ROWS = 200  # Rows of a step on one page.
_SNIPPET_TOKENS, _SNIPPET = 48, 90
_MOST_READ = 100  # Rows per page that are read to learn whether the repetition filter keeps them.
# If several documents have the same name, at most 1000 are listed, and the steps of 20 are shown.
_MOST_DOCUMENTS, _LOCATED = 1000, 20


class NotFoundError(errors.MaxtextOlmoError, LookupError):
  """The requested page does not exist."""


class Views:
  """Makes the pages about a run.

  Args:
    run: The run.
    iterator: An iterator at the state of the run; used from several threads and never moved.
    tokenizer: The tokenizer of the corpus; None shows no text.
    until_step: The step at which searches stop; None for the end of the next epoch.
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
    walk = [markup.link("step", f"step {step}", n=step) for step in (0, last)]
    return markup.make_page(
        f"The run {self._run.path}",
        [f'<p class="walk">{"".join(walk)}</p>', f"<pre class='row'>{markup.escape(lines)}</pre>"],
    )

  def _show_step(self, query: Mapping[str, str]) -> str:
    step, first = _number(query, "n"), _number(query, "first", 0)
    size = self._size(step)
    last = max(first, min(first + _ROWS, size) - 1)
    explanation = self._iterator.explain(step, range(first, last + 1))
    labels = collections.Counter(row.label or "-" for row in explanation.rows if row.parts)
    walk = [markup.link("step", "← previous step", n=step - 1) if step else ""]
    walk.append(markup.link("step", "next step →", n=step + 1))
    if first:
      walk.append(markup.link("step", "earlier rows", n=step, first=max(0, first - _ROWS)))
    if last + 1 < size:
      walk.append(markup.link("step", "further rows", n=step, first=first + _ROWS))
    body = [
        f'<p class="walk">{"".join(walk)}</p>',
        markup.paragraph(
            f"{self._when(step).capitalize()}: {size:,} rows of {explanation.sequence_length:,}"
            f" tokens from position {explanation.position:,}, repetition filter"
            f" {'on' if explanation.ngram_filter else 'off'}. Rows {first:,} to {last:,} by label:"
            f" {', '.join(f'{label} {count:,}' for label, count in labels.most_common())}."
        ),
        markup.table(
            ("row", "position", "epoch", "label", "file", "documents", "kept", "in loss", "text"),
            (
                (
                    markup.link("row", f"{row.row}", step=step, row=row.row),
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
    return markup.make_page(f"Step {step:,}", body)

  def _show_row(self, query: Mapping[str, str]) -> str:
    step, number = _number(query, "step"), _number(query, "row")
    (row,) = self._iterator.explain(step, [number]).rows
    verdict = _verdict(row.kept, row.excluded, row.used)
    partly = f"kept except {row.excluded:,} excluded tokens"
    kept = {"yes": "kept", "part": partly}.get(verdict, verdict)
    walk = [markup.link("row", "← previous row", step=step, row=number - 1) if number else ""]
    if number + 1 < self._size(step):
      walk.append(markup.link("row", "next row →", step=step, row=number + 1))
    walk.append(markup.link("step", f"all rows of step {step:,}", n=step))
    body = [
        f'<p class="walk">{"".join(walk)}</p>',
        f"<p>{self._when(step).capitalize()}, position {row.position:,}, epoch"
        f" {text_lib.describe_epoch(row)}, {row.used:,} tokens, of which {row.loss_tokens:,} are in"
        f" the loss, {kept}.</p>",
        markup.table(
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
      body += [markup.paragraph(span) for span in spans]
      body.append(markup.paragraph("Text needs --tokenizer.", "grey"))
    else:
      for heading, text in text_lib.pieces(row, self._tokenizer):
        body.append(
            f"<h3>{markup.escape(heading)}</h3>"
            f'<pre class="row" dir="auto">{markup.escape(text)}</pre>'
        )
    return markup.make_page(f"Step {step:,}, row {number:,}", body)

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
          markup.paragraph(
              f"{done / 1e9:,.2f} of {found.total / 1e9:,.2f} GB scanned, {found.num_hits:,} hits."
              " This page reloads every second; closing it ends the search."
          ),
      ]
      return markup.make_page(title, body, refresh=1)
    body = [markup.paragraph(found.summary())]
    for visits in found.visits:
      body += self._visits(visits)
    return markup.make_page(title, [*body, *self._more(found.hits[len(found.visits) :])])

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
    return markup.make_page(title, [*body, *self._more(targets[_LOCATED:])])

  def _visits(self, visits: visits_lib.Visits) -> list[str]:
    """Returns HTML with the location of a token range and the steps that hold it."""
    body = [
        f"<h3>{markup.escape(visits.file)}</h3>",
        markup.paragraph(
            f"bytes {visits.first_byte:,}-{visits.end_byte:,},"
            f" {english.count(visits.tokens, 'token')}, label {visits.label}"
            f"{visits.describe_documents()}"
        ),
    ]
    if visits.reason:
      return [*body, markup.paragraph(f"No step has it: {visits.reason}.")]
    rows = []
    for visit in visits.visits:
      step: markup.Html | str = visits_lib.describe_unseen(visit)
      if visit.step is not None:
        step = markup.link(
            "row", f"{visit.step:,}, row {visit.row}", step=visit.step, row=visit.row or 0
        )
      held = "all" if visit.tokens == visits.tokens else f"{visit.tokens:,} of {visits.tokens:,}"
      columns = f"{visit.columns[0]}-{visit.columns[1]}"
      when = "" if visit.step is None else self._when(visit.step)
      verdict = _verdict(visit.kept, visit.excluded, visit.tokens)
      epoch = text_lib.describe_epoch(visit)
      rows.append((step, when, epoch, f"{visit.position:,}", columns, held, verdict))
    body.append(
        markup.table(("step", "when", "epoch", "position", "columns", "tokens", "kept"), rows)
    )
    if visits.unread:
      body.append(
          markup.paragraph(
              f"The last {visits.unread:,} rows were not read, so it is unknown whether they are in"
              " the loss; the pages of these rows show it.",
              "grey",
          )
      )
    return body

  def _more(self, hits: Sequence[search.TokenRange]) -> list[str]:
    """Returns HTML with a link to each hit whose steps are not shown; empty if there are none."""
    links = []
    for hit in hits:
      path, last = self._iterator.files.paths[hit.file], hit.first + hit.count - 1
      text = f"{path}, tokens {hit.first:,} to {last:,}"
      links.append(markup.link("range", text, file=hit.file, first=hit.first, count=hit.count))
    table = markup.table(("place",), ((link,) for link in links))
    return (
        [markup.paragraph("More occurrences; each link shows its steps:"), table] if links else []
    )

  def _when(self, step: int) -> str:
    return "seen" if step < self._iterator.step else "to come"

  def _size(self, step: int) -> int:
    return self._iterator.history.at(step).schedule.size(step)

  def _file_of(self, row: Any) -> str:
    """Returns a row's first file, relative to the corpus directory, and how many files follow."""
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


def _verdict(kept: bool | None, excluded: int, tokens: int) -> markup.Html:
  verdict = text_lib.describe_verdict(kept, excluded, tokens)
  return markup.Html(f'<span class="masked">{verdict}</span>' if verdict.isupper() else verdict)
