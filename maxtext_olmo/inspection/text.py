"""Decodes rows to text that is safe to print to a terminal, with a heading for each document."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np

from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.rows import explain


def tokenizer_of(index: index_lib.OlmoNpyIndex | None, spec: str = "") -> Any:
  """Returns the tokenizer of a corpus.

  Args:
    index: The corpus.
    spec: `bytes`, or the path of a tokenizer.json. It may be empty if the index names `bytes`.

  Raises:
    ConfigError: `spec` is empty, and the index does not name `bytes`.
  """
  named = "" if index is None else index.tokenizer
  if not spec and named != tokenizer_lib.ByteTokenizer.name:
    raise errors.ConfigError(
        f"To show text, the tokenizer of the corpus, {named!r}, is needed. Give the path of its"
        " tokenizer.json with --tokenizer."
    )
  return tokenizer_lib.load_tokenizer(spec or named)


def tokenizer_if_known(index: index_lib.OlmoNpyIndex | None, spec: str = "") -> Any:
  """Like `tokenizer_of`, but returns None instead of raising if the tokenizer is unknown."""
  known = index is not None and index.tokenizer == tokenizer_lib.ByteTokenizer.name
  return tokenizer_of(index, spec) if spec or known else None


def printable(text: str) -> str:
  """Returns text with control characters escaped, because a terminal would interpret them."""
  return "".join(
      char if char in "\n\t" or unicodedata.category(char)[0] != "C" else _escape(char)
      for char in text
  )


def _escape(char: str) -> str:
  return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def pieces(row: explain.RowExplanation, tokenizer: Any) -> list[tuple[str, str]]:
  """Returns the text of a row as (heading, text) pairs, one for each document.

  Without a document index, documents end at the tokenizer's EOS.
  """
  found = []
  for part in row.parts:
    tokens = row.tokens[part.column : part.column + part.count]
    if part.documents:
      for span in part.documents:
        first = span.column - part.column
        ids = tokens[first : first + span.last - span.first + 1]
        found.append((describe_span(span), printable(tokenizer.decode(ids))))
      continue
    ends = (np.flatnonzero(tokens == tokenizer.eos_id) + 1).tolist()
    for first, end in zip([0, *ends], [*ends, len(tokens)]):
      if end > first:
        heading = f"columns {part.column + first} to {part.column + end - 1}"
        found.append((heading, printable(tokenizer.decode(tokens[first:end]))))
  return found


def describe_span(span: explain.DocumentSpan) -> str:
  """Returns a description of a span: its document, and which part of it."""
  named = f"document {span.document}{describe_name(span.name, span.source, span.line)}"
  if span.whole:
    return f"{named}, whole, {english.count(span.length, 'token')}, at column {span.column}"
  cut = "beginning" if span.first == 0 else "end" if span.last == span.length - 1 else "middle"
  tokens = f"tokens {span.first} to {span.last} of {span.length}"
  return f"{named}, {cut}: {tokens}, at column {span.column}"


def describe_epoch(found: Any) -> str:
  """Returns the epoch of a row or a visit as text, with the stage unless it is the first."""
  return f"{found.epoch} (stage {found.stage})" if found.stage else str(found.epoch)


def describe_verdict(kept: bool | None, excluded: int, tokens: int) -> str:
  """Returns a word that says whether some tokens of a row are in the loss; empty if unknown.

  Args:
    kept: Whether the row of the tokens is in the loss; None if unknown.
    excluded: The number of these tokens that are excluded from the loss.
    tokens: The number of these tokens.
  """
  if kept is None:
    return ""
  if not kept:
    return "MASKED"
  return "yes" if not excluded else "EXCLUDED" if excluded >= tokens else "part"


def describe_name(name: str, source: str = "", line: int | None = None) -> str:
  """Returns the name and origin of a document, to print after its number; may be empty."""
  place = document_names.DocumentName(name, source, line).place
  texts = [name, f"from {place}" if place and place != name else ""]
  shown = ", ".join(printable(text).replace("\n", "\\n") for text in texts if text)
  return f" ({shown})" if shown else ""
