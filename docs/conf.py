"""The documentation site, built by `make docs` without a network."""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import maxtext_olmo
from docs import reference

project = "maxtext_olmo"
author = "the maxtext_olmo authors"
version = release = maxtext_olmo.__version__
copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
default_role = "code"  # Docstrings write `name`, as Markdown does.

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# The tutorial runs at every build; its outputs are part of the site, not of the repository.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
# Names of other packages, and of modules that are not public, lead nowhere: no network, no page.
nitpick_ignore_regex = [
    ("py:.*", r"(?!maxtext_olmo\.).*"),
    ("py:.*", r"maxtext_olmo\.[a-z_]+\..*"),
]

html_theme = "sphinx_book_theme"
html_title = "maxtext_olmo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_context = {"default_mode": "auto"}
html_show_copyright = False
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # The sidebar has the search field.
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}


def _expand(app, document, source):
  source[0] = reference.expand(source[0])


def _mark_code(app, what, name, obj, options, lines):
  """Turns the Markdown of docstrings into reStructuredText: indented examples, `name`s."""
  lines[:] = [re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]
  for number, line in enumerate(lines[:-2]):
    indented = re.match(r" *", line).end() < re.match(r" *", lines[number + 2]).end()
    if line.endswith(":") and not line.endswith("::") and not lines[number + 1] and indented:
      lines[number] = line + ":"


def _clean_signature(app, what, name, obj, options, signature, result):
  """Leaves out the signature of a protocol, which is never called, and what is not Python."""
  if getattr(obj, "_is_protocol", False):
    return "", None
  # The default of a field with a `default_factory`; Sphinx could not parse the signature with it.
  return signature and signature.replace("<factory>", "..."), result


def setup(app):
  app.connect("autodoc-process-signature", _clean_signature)
  app.connect("source-read", _expand)
  app.connect("autodoc-process-docstring", _mark_code, priority=400)  # Before napoleon.
