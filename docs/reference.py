"""Writes the reference pages of the site from the code: public names, commands, and the glossary.

`conf.py` calls `expand` on each page as Sphinx reads it. A line `<!-- public names -->`,
`<!-- commands -->` or `<!-- glossary -->` is replaced by Markdown that is generated from the code.
"""

from __future__ import annotations

import argparse
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator

import maxtext_olmo
from maxtext_olmo.cli import main as cli

_CONCEPTS = pathlib.Path(__file__).resolve().parent / "guides" / "concepts.md"

# The sections of the reference: a heading, a sentence, and the modules whose names it lists.
_SECTIONS = (
    (
        "Batches for a trainer",
        "One call makes the iterators of a run; `DataIterator` is their interface.",
        ("loader.registry", "config", "trainers.tiny.config", "order.status", "rows.explain"),
    ),
    (
        "Corpus and index",
        "Which token files there are, and where their instances and documents are.",
        (
            "corpus.index_builder",
            "corpus.index",
            "corpus.documents",
            "corpus.document_index",
            "corpus.source",
        ),
    ),
    ("Storage", "Where bytes come from.", ("corpus.storage",)),
    (
        "Order and schedule",
        "Which row is at which position, and which positions a step takes.",
        ("order.permutations", "order.schedule", "order.sampler"),
    ),
    (
        "Rows and batches",
        "What a row is made of, and the arrays of a batch.",
        ("rows.row_source", "rows.parts", "rows.batch", "rows.repetition"),
    ),
    (
        "Runs of OLMo-core",
        "From the config and the state of a run to the config that continues it.",
        ("loader.olmo_core_run",),
    ),
    ("Checkpoints", "Data states as items of an Orbax checkpoint.", ("loader.resume",)),
    (
        "Functions with MaxText's names",
        "The loader's functions as MaxText calls them.",
        ("loader.olmo_grain",),
    ),
    (
        "Grain pipelines",
        "Language-model batches from any Grain source of records.",
        ("grain_llm.pipeline", "grain_llm.records", "devices.multihost", "devices.global_batch"),
    ),
    (
        "Evaluation",
        "lm-evaluation-harness on JAX models, and the datasets below it.",
        (
            "evaluation.model",
            "evaluation.pipeline",
            "evaluation.requests",
            "evaluation.datasets",
        ),
    ),
    ("Errors", "What can go wrong, by kind.", ("errors",)),
)


def expand(text: str) -> str:
  """Returns a page with its placeholders replaced."""
  for name, write in _PLACEHOLDERS.items():
    line = f"<!-- {name} -->"
    if line in text:
      text = text.replace(line, "\n".join(write()))
  return text


def public_names() -> Iterator[str]:
  """Yields the reference of all public names, as Markdown with autodoc directives.

  Raises:
    KeyError: A public name belongs to a module that no section lists.
  """
  pending = {name: maxtext_olmo._MODULE_OF[name] for name in maxtext_olmo.__all__}
  for heading, sentence, modules in _SECTIONS:
    yield from (f"## {heading}", "", sentence, "", "```{eval-rst}")
    for module in modules:
      for name in [name for name, home in pending.items() if home == module]:
        del pending[name]
        yield from _directive(name)
    yield from ("```", "")
  if pending:
    raise KeyError(f"docs/reference.py lists no section for {', '.join(sorted(pending))}.")


def _directive(name: str) -> Iterator[str]:
  public = getattr(maxtext_olmo, name)
  if not inspect.isclass(public):
    yield from (f".. autofunction:: maxtext_olmo.{name}", "")
    return
  yield f".. autoclass:: maxtext_olmo.{name}"
  if not issubclass(public, BaseException):
    yield "   :members:"
  if issubclass(public, BaseException):
    yield "   :show-inheritance:"
  if name == "DataIterator":
    yield "   :special-members: __iter__, __next__"
  yield ""


def commands() -> Iterator[str]:
  """Yields the reference of all commands, as Markdown."""
  for parser in leaves(cli.make_parser()):
    yield from (f"## {parser.prog.removeprefix('maxtext-olmo ')}", "")
    yield from ("```text", parser.format_usage().removeprefix("usage: ").rstrip(), "```", "")
    yield from _paragraphs(parser.description or "")
    arguments = [action for action in parser._actions if action.dest not in ("help", "version")]
    if arguments:
      yield from ("| argument | meaning |", "|---|---|")
      yield from (f"| {_name(action)} | {_meaning(parser, action)} |" for action in arguments)
      yield ""
    if parser.epilog:
      yield from ("```text", parser.epilog.rstrip(), "```", "")


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
  """Returns the parsers of a command that have no commands below them."""
  groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
  if not groups:
    return [parser]
  return [leaf for child in groups[0].choices.values() for leaf in leaves(child)]


def _paragraphs(text: str) -> Iterator[str]:
  """Yields a description; its indented lines are code."""
  for paragraph in re.split(r"\n\s*\n", text.strip()):
    if paragraph.startswith(" "):
      yield from ("```text", paragraph, "```", "")
    else:
      yield from (_escape(paragraph), "")


def _name(action: argparse.Action) -> str:
  metavar = action.metavar if action.metavar is not None else action.dest.upper()
  if action.choices is not None and action.metavar is None:
    metavar = "{" + ",".join(map(str, action.choices)) + "}"
  value = metavar if isinstance(metavar, str) else " ".join(metavar)
  takes_value = action.nargs != 0
  words = [*action.option_strings[-1:], *([value] if takes_value else [])]
  return f"`{' '.join(words)}`"


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
  text = parser._get_formatter()._expand_help(action) if action.help else ""
  return _escape(text).replace("|", r"\|")


def _escape(text: str) -> str:
  """Returns text as Markdown that shows it; what is between backticks is code already."""
  pieces = re.split(r"(`[^`]*`)", text)
  return "".join(
      piece if piece.startswith("`") else re.sub(r"([<>*_\[\]#\\])", r"\\\1", piece)
      for piece in pieces
  )


def glossary() -> Iterator[str]:
  """Yields the words of the guide to concepts as a Sphinx glossary, sorted."""
  words = re.findall(r"(?m)^\| \*([^*|]+)\* \| (.*) \|$", _CONCEPTS.read_text())
  yield "```{glossary}"
  for word, meaning in sorted(words):
    yield from (word, f"  {re.sub(r'[(](?=[a-z_]+[.]md)', '(guides/', meaning)}", "")
  yield "```"


_PLACEHOLDERS: dict[str, Callable[[], Iterator[str]]] = {
    "public names": public_names,
    "commands": commands,
    "glossary": glossary,
}
