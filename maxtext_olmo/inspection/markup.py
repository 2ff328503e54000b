"""HTML of the pages of `maxtext-olmo inspect RUN --serve`, without scripts.

Corpora contain live HTML, so a page escapes all text that is not an instance of `Html`.
"""

from __future__ import annotations

import functools
import html
import importlib.resources
import urllib.parse
from collections.abc import Iterable, Sequence

from maxtext_olmo.inspection import text as text_lib

_WIDE = ("file", "text", "place")  # Columns whose text is wrapped.

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
    forms: Whether to show the forms for further requests.
  """
  top = f'<p><a href="./">The run</a></p>{_FORMS}' if forms else ""
  again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
  return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width, initial-scale=1">'
      f"{again}<title>{escape(title)}</title><style>{style()}</style></head>\n<body>\n"
      f"{top}<h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
  )


def make_message(title: str, text: str, *, forms: bool = True) -> str:
  """Returns a page with a single message."""
  return make_page(title, [paragraph(text)], forms=forms)


def escape(value: object) -> str:
  """Returns HTML that displays the text of a value."""
  if isinstance(value, Html):
    return value
  return html.escape(text_lib.printable(str(value)))


def paragraph(text: str, css: str = "") -> str:
  """Returns a paragraph with a CSS class."""
  return f'<p class="{css}">{escape(text)}</p>'


def link(page: str, text: str, **query: int | str) -> Html:
  """Returns a link to a page with query parameters."""
  address = html.escape(f"{page}?{urllib.parse.urlencode(query)}")
  return Html(f'<a href="{address}">{escape(text)}</a>')


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  """Returns a table."""
  kinds = [' class="wide"' if head in _WIDE else "" for head in heads]
  lines = [
      "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row)) for row in rows
  ]
  return (
      '<div class="scroll"><table class="left"><thead><tr>'
      + "".join(f"<th>{escape(head)}</th>" for head in heads)
      + "</tr></thead><tbody>"
      + "".join(f"<tr>{line}</tr>" for line in lines)
      + "</tbody></table></div>"
  )
