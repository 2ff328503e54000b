"""Token ranges → the steps of a run that hold them, by the inverse of its order."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.inspection import search
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.rows import row_source

_READ = 16  # Visits whose rows are read, to say whether the filter keeps them.


@dataclasses.dataclass(frozen=True)
class Visit:
  """A row of the run that holds tokens of a range.

  Attributes:
    epoch: The epoch, counted from 0 at the beginning of the stage.
    position: The position in the run.
    step: The step that takes it; None if no batch does, in the tail of an epoch that is dropped.
    row: The row of that step.
    seen: Whether the run has done the step.
    columns: The first and the last column of the row that hold tokens of the range; None if the row
      was not read.
    tokens: How many tokens of the range the row holds.
    kept: Whether the repetition filter keeps the row in the loss.
    stage: The stage, from 0; 0 in a run without stages.
  """

  epoch: int
  position: int
  step: int | None
  row: int | None
  seen: bool
  columns: tuple[int, int] | None = None
  tokens: int | None = None
  kept: bool | None = None
  stage: int = 0


@dataclasses.dataclass(frozen=True)
class Visits:
  """All visits to a range of tokens.

  Attributes:
    file: The path of its file.
    label: The label of the file.
    first_byte: The byte of the file where it begins.
    end_byte: The byte after its last.
    tokens: Its number of tokens.
    documents: The documents that it lies in, if there is a document index.
    visits: Every row that holds some of it, in the order of the run.
    until: Positions from here on were not looked at.
    reason: Why there is no visit; empty if there is one.
  """

  file: str
  label: str
  first_byte: int
  end_byte: int
  tokens: int
  documents: tuple[int, ...]
  visits: tuple[Visit, ...]
  until: int
  reason: str

  def to_json(self) -> dict[str, Any]:
    """Returns the visits as a JSON-able dict."""
    return dataclasses.asdict(self)


def document_range(iterator: iterator_lib.BatchIterator, document: int) -> search.TokenRange:
  """Returns the tokens of a document."""
  documents = iterator.provenance and iterator.provenance.documents
  if not documents:
    raise errors.ConfigError(
        "--document needs the document index of the corpus: make one with `maxtext-olmo index"
        " documents`."
    )
  if not 0 <= document < documents.num_documents:
    raise errors.ConfigError(
        f"--document={document}: the corpus has the documents 0 to {documents.num_documents - 1}."
    )
  number = np.array([document])
  file, first = documents.locate(number)
  return search.TokenRange(int(file[0]), int(first[0]), int(documents.lengths(number)[0]))


def find_visits(
    iterator: iterator_lib.BatchIterator, target: search.TokenRange, until_step: int | None = None
) -> Visits:
  """Returns every step, past or to come, that holds tokens of a range.

  Args:
    iterator: At the state of the run.
    target: The range.
    until_step: Steps from here on are not looked at; by default those after the next epoch's end.
  """
  if iterator.provenance is None:
    raise errors.ConfigError("This run does not read files, so nothing can be found in it.")
  end = _end(iterator, until_step)
  epochs, positions = row_source.positions_of(
      iterator.source, iterator.stream, target.file, target.first, target.count, end
  )
  visits = [
      visit
      for epoch, position in zip(epochs.tolist(), positions.tolist())
      for visit in _visits_at(iterator, epoch, position)
  ]
  visits = [
      _read(iterator, visit, target) if number < _READ else visit
      for number, visit in enumerate(visits)
  ]
  index = iterator.provenance.index
  documents = iterator.provenance.spans(target.file, target.first, target.count, 0)
  first_byte, end_byte = iterator.files.byte_range(target.file, target.first, target.count)
  return Visits(
      file=iterator.files.paths[target.file],
      label=index.files[target.file].label,
      first_byte=first_byte,
      end_byte=end_byte,
      tokens=target.count,
      documents=tuple(span.document for span in documents),
      visits=tuple(visits),
      until=end,
      reason="" if visits else _reason(iterator, target, end),
  )


def _end(iterator: iterator_lib.BatchIterator, until_step: int | None) -> int:
  """Returns the position up to which to look."""
  stream, position = iterator.stream, iterator.position
  last = stream.num_positions
  if until_step is not None:
    end = iterator.history.at(until_step).schedule.start(until_step)
    return end if last is None else min(end, last)
  if last is not None:
    return last
  if stream.epochs is not None:
    return stream.epochs.start(stream.epochs.epoch(position) + 2)
  count_rows = getattr(iterator.source, "count_rows", None)
  if count_rows is None:  # A mixture of packed rows, whose members have epochs of their own.
    return 2 * position + 1000
  epoch, row = (int(found[0]) for found in stream.locate(np.array([position])))
  return position - row + sum(count_rows(e, sys.maxsize) for e in (epoch, epoch + 1))


def _visits_at(iterator: iterator_lib.BatchIterator, epoch: int, position: int) -> list[Visit]:
  """Returns the steps that take a position, as far as this stream was in force."""
  found = []
  ((stage, epoch),) = row_source.stages_of(iterator.stream, np.array([epoch]))
  steps = iterator.history.steps_at(position)
  for step in steps:
    entry = iterator.history.at(step)
    try:
      state_lib.check_same_stream(entry, iterator.stream, step)
    except errors.OrderError:
      continue
    row = int(np.searchsorted(entry.schedule.positions(step), position))
    found.append(Visit(epoch, position, step, row, step < iterator.step, stage=stage))
  if not steps and iterator.stream.drops_tails:
    found.append(Visit(epoch, position, None, None, False, stage=stage))
  return found


def _read(iterator: iterator_lib.BatchIterator, visit: Visit, target: search.TokenRange) -> Visit:
  """Returns a visit with what its row holds of the range, and whether the filter keeps it."""
  if visit.step is None or visit.row is None:
    return visit
  row = iterator.explain(visit.step).rows[visit.row]
  columns = []
  for part in row.parts:
    if part.file == iterator.files.paths[target.file]:
      low = max(part.first, target.first)
      high = min(part.first + part.count, target.first + target.count)
      columns += [part.column + token - part.first for token in (low, high - 1) if low < high]
  if not columns:
    return dataclasses.replace(visit, kept=row.kept)
  held = sum(b - a + 1 for a, b in zip(columns[::2], columns[1::2]))
  return dataclasses.replace(
      visit, columns=(min(columns), max(columns)), tokens=held, kept=row.kept
  )


def _reason(iterator: iterator_lib.BatchIterator, target: search.TokenRange, end: int) -> str:
  """Returns why no row up to a position holds tokens of a range."""
  rows_of = getattr(iterator.source, "rows_of", None)
  rows = None if rows_of is None else rows_of(0, target.file, target.first, target.count)
  staged = hasattr(iterator.stream, "stages")
  if rows is not None and not len(rows) and not staged:
    if iterator.stream.epochs is not None and hasattr(iterator.source, "index"):
      return "in the tail of its file, which is shorter than an instance and belongs to none"
    return "cut off: it lies beyond the row that its document is cut to"
  split = getattr(iterator.stream, "split", None) if rows is None or len(rows) else None
  if split is not None and rows is not None and (split.train_ranks(rows) < 0).all():
    return "held out for evaluation, so training never sees it"
  label = iterator.provenance.index.files[target.file].label if iterator.provenance else ""
  members = getattr(getattr(iterator.stream, "order", None), "members", None)
  if members is not None and label not in {member.label for member in members}:
    return f"its label, {label!r}, is left out of the mixture"
  return f"not before position {end:,}; look further with --until"
