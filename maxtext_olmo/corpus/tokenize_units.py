"""Tokenizes units of text files: the first of the two steps of making a corpus.

    units/5b1c…-07fd….npy       the tokens of the unit's documents, as in a part of a corpus
    units/5b1c…-07fd….csv.gz    length, name, slice and line of each document

The line is counted from the beginning of the slice, because the number of lines in earlier slices
is not known yet. The result of a unit says how many lines, documents and tokens each slice has.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

from maxtext_olmo.corpus import part_files
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import text_units
from maxtext_olmo.corpus import tokenize
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import tasks
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import StoreUnavailableError


@dataclasses.dataclass
class SliceResult:
  """What a slice of a file contains.

  Attributes:
    documents: Number of documents that are not empty.
    empty: Number of empty documents.
    tokens: Number of tokens.
    lines: Number of lines.
    error: Why the rest of the slice cannot be read; empty if all of it was read.
  """

  documents: int = 0
  empty: int = 0
  tokens: int = 0
  lines: int = 0
  error: str = ""


@dataclasses.dataclass(frozen=True)
class TokenizeUnits(tasks.Work):
  """Work that writes the tokens of a unit to files of its own.

  Attributes:
    tokenizer: The tokenizer.
    form: How documents are found in text files.
    place: Directory or URL of the files.
  """

  name: ClassVar[str] = "tokenize"
  version: ClassVar[int] = 1

  tokenizer: tokenizer_lib.TokenizerSource
  form: text_files.TextFormat
  place: str

  def __call__(self, unit: text_units.TextUnit) -> dict[str, Any]:
    """Tokenizes a unit; returns its file, and the fields of a `SliceResult` for each slice."""
    tokenizer = self.tokenizer.load()
    counts = [SliceResult() for _ in unit.slices]
    encoded = tokenize.encode_documents(self._texts(unit, counts), tokenizer)
    # A new name each time, so that a result never refers to the tokens of another attempt.
    file = f"{unit.key}-{uuid.uuid4().hex}.npy"
    part_files.write_part(_count(encoded, counts), f"{self.place}/{file}")
    return {"file": file, "slices": [dataclasses.astuple(one) for one in counts]}

  @property
  def settings(self) -> dict[str, Any]:
    """The fields that decide what the tokens are."""
    return {
        "tokenizer": dataclasses.asdict(self.tokenizer),
        "form": dataclasses.asdict(self.form),
    }

  def _texts(
      self, unit: text_units.TextUnit, counts: list[SliceResult]
  ) -> Iterator[text_files.TextDocument]:
    """Yields the documents of a unit, with the number of the slice as their source."""
    for number, one in enumerate(unit.slices):
      reader = text_files.DocumentReader(one.path, self.form, one.first, one.end)
      try:
        for document in reader:
          reading.raise_if_stopped()
          yield document._replace(source=str(number))
      except StoreUnavailableError:
        raise
      except CorpusError as error:
        counts[number].error = str(error)
      counts[number].lines = reader.lines


def _count(
    documents: Iterator[part_files.EncodedDocument], counts: list[SliceResult]
) -> Iterator[part_files.EncodedDocument]:
  """Yields the documents that are not empty, and counts all."""
  for document in documents:
    found = counts[int(document.source)]
    if not document.length:
      found.empty += 1
      continue
    found.documents += 1
    found.tokens += document.length
    yield document
