"""Explanations of the rows of a step, down to files, bytes, documents and loss.

An explanation uses the table of parts from which the step is read, so it always agrees with the
batch that the trainer receives:

    step 5                            position 40, 8 rows of 8192 tokens
    └─ row 3                          position 43, epoch 0, instance 17, label wiki, kept
       └─ part at column 0            wiki/part-003.npy, tokens [8192, 16384), bytes [32768, 65536)
          ├─ document 901, column 0     tokens 512 to 699 of 700 (its end), name wiki-417
          └─ document 902, column 188   tokens 0 to 8003 of 9000 (its beginning)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import content as content_lib
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import steps


@dataclasses.dataclass(frozen=True)
class DocumentSpan:
  """The tokens of one document in a part.

  >>> span = DocumentSpan(document=901, column=0, first=512, last=699, length=700)
  >>> span.whole
  False

  Attributes:
    document: Number of the document in the document index.
    column: Column of the row where the tokens begin.
    first: First token, counted from the beginning of the document.
    last: Last token, also counted from the beginning of the document.
    length: Number of tokens of the whole document.
    name: Name of the document; empty if the document index has none for it.
    source: File that the text came from; empty if unknown.
    line: Line of the text in that file; None if unknown.
  """

  document: int
  column: int
  first: int
  last: int
  length: int
  name: str = ""
  source: str = ""
  line: int | None = None

  @property
  def whole(self) -> bool:
    """True if these are all tokens of the document."""
    return self.first == 0 and self.last == self.length - 1


@dataclasses.dataclass(frozen=True)
class PartExplanation:
  """A range of a token file in a row.

  >>> part = PartExplanation("wiki/part.npy", "wiki", 0, 8192, 4, 32768, 32784, documents=())
  >>> part.end_byte - part.first_byte  # 4 tokens of 4 bytes.
  16

  Attributes:
    file: Path of the file, or `record n` if the row is read from records instead of files.
    label: Label of the file.
    column: Column of the row where the part begins.
    first: First token of the part in the file.
    count: Number of tokens.
    first_byte: Byte offset of the part in the file; None if the part is not read from a file.
    end_byte: Offset of the byte after the part; None if the part is not read from a file.
    documents: Tokens of each document in the part; empty if there is no document index.
  """

  file: str
  label: str
  column: int
  first: int
  count: int
  first_byte: int | None
  end_byte: int | None
  documents: tuple[DocumentSpan, ...]


@dataclasses.dataclass(frozen=True)
class RowExplanation:
  """A row of a step.

  >>> row = RowExplanation(
  ...     row=3, position=43, epoch=0, number=17, label="wiki", used=2, kept=True, loss_tokens=1,
  ...     loss_share=0.125, parts=(), tokens=np.array([5, 0]),
  ... )
  >>> row.to_json()["number"]
  17

  Attributes:
    row: Number of the row in the global batch.
    position: Position of the row in the run.
    epoch: Epoch of the position, counted from the beginning of the stage; -1 for a padding row.
    number: Number of the row in the corpus (for windows, the instance id); -1 for a padding row.
    label: Label of the first part.
    used: Number of tokens that are not padding.
    kept: Whether the row is in the loss: neither the repetition filter nor olmo_skip masks it.
      Individual tokens may still be excluded.
    loss_tokens: Number of tokens in the loss.
    loss_share: Loss tokens of this row divided by the loss tokens of all explained rows.
    parts: Parts of the row.
    tokens: Tokens of the row, without padding.
    stage: Stage of the position, from 0; 0 in a run without stages.
    excluded: Number of tokens that olmo_exclude leaves out of the loss.
    excluded_columns: Whether each token is excluded; empty without olmo_exclude.
  """

  row: int
  position: int
  epoch: int
  number: int
  label: str
  used: int
  kept: bool
  loss_tokens: int
  loss_share: float
  parts: tuple[PartExplanation, ...]
  tokens: np.ndarray = dataclasses.field(repr=False, compare=False)
  stage: int = 0
  excluded: int = 0
  excluded_columns: np.ndarray = dataclasses.field(
      default_factory=lambda: np.zeros(0, np.bool_), repr=False, compare=False
  )

  def to_json(self) -> dict[str, Any]:
    """Returns everything except the tokens as a JSON-able dict."""
    found: dict[str, Any] = _to_json(self)
    return found


@dataclasses.dataclass(frozen=True)
class StepExplanation:
  """A step of a run, as returned by an iterator's `explain(step)`.

  >>> step = StepExplanation(
  ...     step=5, position=40, sequence_length=8192, ngram_filter=True, rows=(), arrays={}
  ... )
  >>> step.to_json()
  {'step': 5, 'position': 40, 'sequence_length': 8192, 'ngram_filter': True, 'rows': []}

  Attributes:
    step: Number of the step, from 0.
    position: Position of the first row.
    sequence_length: Number of tokens per row.
    ngram_filter: Whether the repetition filter runs at this step.
    rows: Rows in the order of the global batch.
    arrays: Arrays that a trainer on a single host receives for these rows, by name.
  """

  step: int
  position: int
  sequence_length: int
  ngram_filter: bool
  rows: tuple[RowExplanation, ...]
  arrays: dict[str, np.ndarray] = dataclasses.field(repr=False, compare=False)

  def to_json(self) -> dict[str, Any]:
    """Returns everything except tokens and arrays as a JSON-able dict."""
    found: dict[str, Any] = _to_json(self)
    return found


def _to_json(value: Any) -> Any:
  if isinstance(value, tuple):
    return [_to_json(item) for item in value]
  if not dataclasses.is_dataclass(value):
    return value
  shown = [field.name for field in dataclasses.fields(value) if field.repr]
  whole = {"whole": value.whole} if isinstance(value, DocumentSpan) else {}
  return {**{name: _to_json(getattr(value, name)) for name in shown}, **whole}


@dataclasses.dataclass(frozen=True)
class Provenance:
  """The labels and documents of the files that rows are read from.

  Attributes:
    index: Index of the corpus, whose files have labels.
    documents_path: Path of the document index, which need not exist.
    documents_rule: Rule that the document index was made with.
    others: `(provenance, file numbers)` pairs for other indexes whose files are also read. The map
      converts file numbers of `index` to file numbers of the other index.
    documented: Index that the document index belongs to, if `index` joins several indexes.
    cache_dir: Directory where a run may have put a local copy of the document index. If there is no
      copy, the object is read: looking up a few documents is no reason to download all.
  """

  index: index_lib.OlmoNpyIndex
  documents_path: str = ""
  documents_rule: str = "auto"
  others: tuple[tuple[Provenance, Mapping[int, int]], ...] = ()
  documented: index_lib.OlmoNpyIndex | None = None
  cache_dir: str | None = None

  @functools.cached_property
  def documents(self) -> documents_lib.DocumentIndex | None:
    """The document index; None if this corpus has none."""
    if not self.documents_path:
      return None
    try:
      return documents_lib.load_documents(
          self.documents_path,
          self.documented or self.index,
          rule=self.documents_rule,
          cache_dir=self.cache_dir,
          download=False,
      )
    except errors.MissingFileError:
      return None
    except errors.CorpusError as error:
      logging.warning("The document index cannot be used, so documents are not named: %s", error)
      return None

  def spans(self, file: int, first: int, count: int, column: int) -> tuple[DocumentSpan, ...]:
    """Returns the documents in a range of a file; the range begins at `column` of its row."""
    for other, own in self.others:
      if file in own and (self.documents is None or file >= self.documents.num_files):
        return other.spans(own[file], first, count, column)
    if self.documents is None:
      return ()
    numbers = self.documents.within(file, first, count)
    starts, lengths = self.documents.locate(numbers)[1], self.documents.lengths(numbers)
    names = self.documents.describe(numbers)
    return tuple(
        DocumentSpan(
            document=number,
            column=column + max(start - first, 0),
            first=max(first - start, 0),
            last=min(first + count - start, length) - 1,
            length=length,
            **name._asdict(),
        )
        for number, start, length, name in zip(
            numbers.tolist(), starts.tolist(), lengths.tolist(), names
        )
    )


def explain(
    source: row_source.RowSource,
    reader: reader_lib.Reader,
    stream: row_source.RowStream,
    schedule: schedule_lib.BatchSchedule,
    content: content_lib.Content,
    step: int,
    provenance: Provenance | None = None,
    masked: skips_lib.Skips = skips_lib.Skips(),
    rows: Sequence[int] | None = None,
) -> StepExplanation:
  """Explains a step.

  Args:
    source: Row source, which returns the parts of rows.
    reader: Reader of the parts.
    stream: Stream, which maps positions to rows.
    schedule: Schedule in force at the step.
    content: Settings for processing tokens, as in force at the step.
    step: Step to explain.
    provenance: Labels and documents; without it, rows have neither.
    masked: Positions that were delivered without loss.
    rows: Rows to read and explain; None for all.

  Raises:
    OrderError: The stream has no such step.
  """
  size = schedule.size(step)
  chosen = np.arange(size) if rows is None else np.asarray(rows, np.int64)
  absent = chosen[(chosen < 0) | (chosen >= size)]
  if absent.size:
    raise errors.OrderError(
        f"Step {step} has rows 0 to {size - 1}, so there is no row {absent[0]}."
    )
  # The vocabulary is not checked, because users often explain a step that failed this check.
  content = dataclasses.replace(content, vocab_size=0, extras=())
  dataset = steps.StepDataset(
      source,
      reader,
      stream,
      schedule,
      {size: chosen},
      first_step=step,
      content=content,
      masked=masked,
      block_steps=1,
  )
  try:
    batch = dataset[0]
    if not batch:
      last = steps.end_step(schedule, stream.num_positions) - 1
      raise errors.OrderError(f"Step {step} is outside the stream, which ends with step {last}.")
    parts, numbers = dataset.parts(step), dataset.row_numbers(step)
  finally:
    dataset.close()
  positions = schedule.positions(step)[chosen]
  epochs = np.full(len(chosen), -1, np.int64)
  epochs[numbers >= 0] = stream.locate(positions[numbers >= 0])[0]
  stages = row_source.stages_of(stream, epochs)
  arrays = batch_lib.to_arrays(batch, content.shift)
  # Row by row, because NumPy counts several times more slowly along an axis.
  loss = [int(np.count_nonzero(row)) for row in arrays[batch_lib.TARGETS_SEGMENTATION]]
  total_loss = max(1, sum(loss))
  of_rows = _explain_parts(parts, reader, provenance)
  used = parts.used.tolist()
  excluded = np.zeros((len(chosen), 0), np.bool_)
  if content.exclusions is not None:
    excluded = content.exclusions.excluded(parts, source.row_length)
  num_excluded = excluded.sum(axis=1).tolist()
  explained = tuple(
      RowExplanation(
          row=row,
          position=int(positions[i]),
          epoch=stages[i][1],
          number=int(numbers[i]),
          label=of_rows[i][0].label if of_rows[i] else "",
          used=used[i],
          kept=bool(batch["trained"][i]),
          loss_tokens=loss[i],
          loss_share=loss[i] / total_loss,
          parts=of_rows[i],
          tokens=batch["tokens"][i, : used[i]],
          stage=stages[i][0],
          excluded=num_excluded[i],
          excluded_columns=excluded[i, : used[i]],
      )
      for i, row in enumerate(chosen.tolist())
  )
  return StepExplanation(
      step=step,
      position=int(schedule.positions(step)[0]),
      sequence_length=source.row_length,
      ngram_filter=content.ngram_filter,
      rows=explained,
      arrays=arrays,
  )


def _explain_parts(
    parts: parts_lib.Parts, reader: reader_lib.Reader, provenance: Provenance | None
) -> list[tuple[PartExplanation, ...]]:
  """Returns the explanations of the parts of each row."""
  files = getattr(reader, "files", None)
  found: list[list[PartExplanation]] = [[] for _ in range(parts.num_rows)]
  columns = (parts.row, parts.column, parts.source, parts.first, parts.count)
  for row, column, source, first, count in zip(*(values.tolist() for values in columns)):
    bytes_of = (None, None) if files is None else files.byte_range(source, first, count)
    named = provenance if files is not None else None
    part = PartExplanation(
        file=f"record {source}" if files is None else files.paths[source],
        label="" if named is None else named.index.files[source].label,
        column=column,
        first=first,
        count=count,
        first_byte=bytes_of[0],
        end_byte=bytes_of[1],
        documents=() if named is None else named.spans(source, first, count, column),
    )
    found[row].append(part)
  return [tuple(row) for row in found]
