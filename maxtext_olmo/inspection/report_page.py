"""HTML pages with plots: one file that needs no server and no network.

Bokeh draws the plots; its script is part of the file. Corpora contain live HTML and scripts, so all
text must be escaped, and a content security policy allows only the scripts of the page, which it
names by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo.inspection import picture


def check_bokeh() -> None:
  """Raises ConfigError if Bokeh is not installed."""
  try:
    import bokeh  # noqa: F401
  except ImportError as error:
    raise errors.ConfigError(
        "A report needs Bokeh. Install it with `pip install bokeh`."
    ) from error


def make_page(title: str, body: Iterable[str], data: Mapping[str, Any], script: str) -> str:
  """Returns a page, as HTML.

  Args:
    title: The title of the page.
    body: Pieces of HTML, one of which has an element `plots`.
    data: JSON values for the script; `plots` is what Bokeh's `json_item` returned.
    script: The name of the script of this page, a file of this package.
  """
  # A < inside a script element could end the element.
  text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
  nonce = hashlib.sha256(text.encode()).hexdigest()[:32]
  # BokehJS makes <style> elements, which the policy allows only with the page's own nonce.
  allow_styles = (
      "const make = document.createElement.bind(document);"
      "document.createElement = (name, options) => {"
      " const made = make(name, options);"
      f' if (name === "style") made.nonce = "{nonce}";'
      " return made; };"
  )
  scripts = [f"{allow_styles}\n{_bokeh_script()}", _resource("plots.js"), _resource(script)]
  hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
  policy = (
      f"default-src 'none'; script-src {hashes}; style-src 'nonce-{nonce}'; img-src data:;"
      " base-uri 'none'; form-action 'none'"
  )
  swatches = "".join(
      f".c{i} {{ background: {colour} }} " for i, colour in enumerate(picture.COLOURS)
  )
  return (
      '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
      f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
      '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
      f"<title>{html.escape(title)}</title>\n"
      f'<style nonce="{nonce}">{_resource("report.css")}{swatches}</style></head>\n<body>\n'
      + "\n".join(body)
      + f'\n<script type="application/json" id="data">{text}</script>\n'
      + "\n".join(f"<script>{script}</script>" for script in scripts)
      + "\n</body></html>\n"
  )


def _bokeh_script() -> str:
  from bokeh import resources

  return "\n".join(resources.Resources(mode="inline", components=["bokeh"], minified=True).js_raw)


def _resource(name: str) -> str:
  return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(script: str) -> str:
  return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
