"""Finds the steps of a run that hold a token range, by inverting the order of the run."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.inspection import search
from maxtext_olmo.inspection import text as text_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.rows import explain
from maxtext_olmo.rows import row_source

# Maximum number of rows to read in order to learn whether the repetition filter keeps them. Reading
# this many takes a second or two.
MOST_READ = 1000
_BLOCK = 4096  # Positions whose parts are computed at once.


@dataclasses.dataclass(frozen=True)
class Visit:
  """A row of the run that holds tokens of the range that is searched for.

  Attributes:
    epoch: The epoch, counted from 0 at the beginning of the stage.
    position: The position in the run.
    step: The step that takes the row; None if no batch takes it, because olmo_skip skips it or it
      is in the dropped tail of an epoch.
    row: The index of the row in that step; None if there is no step.
    seen: Whether the run has done the step.
    columns: The first and the last column of the row that hold tokens of the range.
    tokens: The number of tokens of the range that the row holds.
    kept: Whether the row as a whole is in the loss: neither rejected by the repetition filter nor
      masked by olmo_skip. None if the row was not read, or no step takes it.
    stage: The stage, counted from 0; always 0 in a run without stages.
    excluded: The number of `tokens` that olmo_exclude leaves out of the loss; 0 if the row was not
      read.
    skipped: Whether olmo_skip leaves the row out of the run.
  """

  epoch: int
  position: int
  step: int | None
  row: int | None
  seen: bool
  columns: tuple[int, int]
  tokens: int
  kept: bool | None = None
  stage: int = 0
  excluded: int = 0
  skipped: bool = False


@dataclasses.dataclass(frozen=True)
class Visits:
  """All visits to a range of tokens, that is, all rows that hold tokens of the range.

  Attributes:
    file: The path of the file.
    label: The label of the file.
    first_byte: The byte of the file where the range begins.
    end_byte: The byte after the range.
    tokens: The number of tokens in the range.
    documents: The documents that contain the range, if there is a document index.
    names: The names of the documents; an unnamed document has an empty name.
    visits: The visits, in the order of the run.
    until: The position at which the search stopped.
    rows_read: The number of rows that were read to learn whether the filter keeps them.
    reason: Why there is no visit; empty if there is one.
  """

  file: str
  label: str
  first_byte: int
  end_byte: int
  tokens: int
  documents: tuple[int, ...]
  names: tuple[str, ...]
  visits: tuple[Visit, ...]
  until: int
  rows_read: int
  reason: str

  @property
  def unread(self) -> int:
    """The number of visits for which `kept` is unknown, because their rows were not read."""
    return sum(visit.kept is None and visit.step is not None for visit in self.visits)

  def describe_documents(self) -> str:
    """Returns the documents and their names, to print after the label; may be empty."""
    named = [
        f"{number}{text_lib.describe_name(name)}"
        for number, name in zip(self.documents, self.names)
    ]
    return f", document {', '.join(named)}" if named else ""

  def to_json(self) -> dict[str, Any]:
    """Returns the visits as a JSON-able dict."""
    return dataclasses.asdict(self)


def describe_unseen(visit: Visit) -> str:
  """Returns why no step takes the row of a visit whose `step` is None."""
  return "skipped (olmo_skip)" if visit.skipped else "never: the tail of an epoch"


def find_documents(iterator: iterator_lib.BatchIterator, name: str) -> list[int]:
  """Returns the documents with a given number or name, in the order of their numbers."""
  documents = _documents(iterator)
  (found,) = documents.find_names([name])
  # Digits may be a number as well as a name; 20 digits or more are too many for a number.
  if name.isdecimal() and len(name) < 20 and int(name) < documents.num_documents:
    found = np.union1d(found, [int(name)])
  if not found.size:
    named = documents.names.named if documents.names else 0
    hint = documents.example_of_a_name
    if not named:
      hint = " `maxtext-olmo index documents` takes names from boundary files."
    raise errors.ConfigError(
        f"--document={name}: no document has this number or name. The corpus has documents 0 to"
        f" {documents.num_documents - 1}, of which {named:,} have a name.{hint}"
    )
  return found.tolist()


def document_range(iterator: iterator_lib.BatchIterator, document: int) -> search.TokenRange:
  """Returns the token range of a document."""
  documents = _documents(iterator)
  if not 0 <= document < documents.num_documents:
    raise errors.ConfigError(
        f"--document={document}: the corpus has documents 0 to {documents.num_documents - 1}."
    )
  number = np.array([document])
  file, first = documents.locate(number)
  return search.TokenRange(int(file[0]), int(first[0]), int(documents.lengths(number)[0]))


def _documents(iterator: iterator_lib.BatchIterator) -> documents_lib.DocumentIndex:
  documents = iterator.provenance and iterator.provenance.documents
  if not documents:
    raise errors.ConfigError(
        "--document needs the document index of the corpus. Make one with `maxtext-olmo index"
        " documents`."
    )
  return documents


def find_visits(
    iterator: iterator_lib.BatchIterator,
    target: search.TokenRange,
    until_step: int | None = None,
    most_read: int = MOST_READ,
) -> Visits:
  """Returns every past and future step that holds tokens of a range.

  Args:
    iterator: An iterator at the state of the run.
    target: The range.
    until_step: The step at which the search stops; by default, the end of the next epoch.
    most_read: The maximum number of rows to read, in the order of the run, to learn whether the
      filter keeps them and which tokens are excluded. If the run has neither a filter nor
      exclusions, no rows are read.
  """
  if iterator.provenance is None:
    raise errors.ConfigError("This run does not read files, so it cannot be searched.")
  end = _end(iterator, until_step)
  epochs, positions = row_source.positions_of(
      iterator.source, iterator.stream, target.file, target.first, target.count, end
  )
  visits = [
      visit
      for first in range(0, len(positions), _BLOCK)
      for visit in _visits_at(
          iterator, target, epochs[first : first + _BLOCK], positions[first : first + _BLOCK]
      )
  ]
  visits, rows_read = _with_verdicts(iterator, target, visits, most_read)
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
      names=tuple(span.name for span in documents),
      visits=tuple(visits),
      until=end,
      rows_read=rows_read,
      reason="" if visits else _reason(iterator, target, end),
  )


def _end(iterator: iterator_lib.BatchIterator, until_step: int | None) -> int:
  """Returns the position at which the search stops."""
  stream, position = iterator.stream, iterator.position
  last = stream.num_positions
  if until_step is not None:
    end = iterator.history.at(until_step).schedule.start(until_step)
    return end if last is None else min(end, last)
  if last is not None:
    return last
  _, own, first = staged_stream.stage_at(stream, position)
  if own.epochs is not None:
    return first + own.epochs.start(own.epochs.epoch(position - first) + 2)
  count_rows = getattr(own.source, "count_rows", None)
  if count_rows is None:
    # In a mixture of packed rows, each label has its own epochs. So search about as far again as
    # the run has come.
    return 2 * position + 1000
  epoch, row = (int(found[0]) for found in own.locate(np.array([position - first])))
  return position - row + sum(count_rows(e, sys.maxsize) for e in (epoch, epoch + 1))


def _visits_at(
    iterator: iterator_lib.BatchIterator,
    target: search.TokenRange,
    epochs: np.ndarray,
    positions: np.ndarray,
) -> list[Visit]:
  """Returns the visits at some positions, except in steps when a different stream was in force."""
  found = []
  firsts, lasts, held = _columns(iterator, target, positions)
  stages = row_source.stages_of(iterator.stream, epochs)
  dropped = skips_lib.positions_of(iterator.history.present.skips, "drop").contains(positions)
  columns = (positions, firsts, lasts, held, dropped)
  rows = zip(stages, *(values.tolist() for values in columns))
  for (stage, epoch), position, first, last, tokens, skipped in rows:
    steps = iterator.history.steps_at(position)
    for step in steps:
      entry = iterator.history.at(step)
      try:
        state_lib.check_same_stream(entry, iterator.stream, step)
      except errors.OrderError:
        continue
      row = int(np.searchsorted(entry.schedule.positions(step), position))
      seen = step < iterator.step
      found.append(Visit(epoch, position, step, row, seen, (first, last), tokens, stage=stage))
    if not steps and (skipped or iterator.stream.drops_tails):
      visit = Visit(epoch, position, None, None, False, (first, last), tokens, stage=stage)
      found.append(dataclasses.replace(visit, skipped=skipped))
  return found


def _columns(
    iterator: iterator_lib.BatchIterator, target: search.TokenRange, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns, for each row, the first and last column of a range, and the number of its tokens."""
  parts = row_source.parts_at(iterator.source, iterator.stream, positions)
  low = np.maximum(parts.first, target.first)
  high = np.minimum(parts.first + parts.count, target.first + target.count)
  hits = (parts.source == target.file) & (low < high)
  row, shift = parts.row[hits], (parts.column - parts.first)[hits]
  firsts = np.full(len(positions), np.iinfo(np.int64).max)
  lasts, held = np.zeros((2, len(positions)), np.int64)
  np.minimum.at(firsts, row, low[hits] + shift)
  np.maximum.at(lasts, row, high[hits] + shift - 1)
  np.add.at(held, row, (high - low)[hits])
  return firsts, lasts, held


def _with_verdicts(
    iterator: iterator_lib.BatchIterator,
    target: search.TokenRange,
    visits: list[Visit],
    most_read: int,
) -> tuple[list[Visit], int]:
  """Returns the visits with `kept` and `excluded` filled in, and the number of rows read."""
  by_step: dict[int, list[int]] = {}
  for number, visit in enumerate(visits):
    if visit.step is not None:
      by_step.setdefault(visit.step, []).append(number)
  found, read = list(visits), 0
  for step, numbers in sorted(by_step.items()):
    entry = iterator.history.at(step)
    excluded = [0] * len(numbers)
    if entry.content.get("ngram_filter", True) or entry.content.get("exclude") is not None:
      numbers = numbers[: most_read - read]
      if not numbers:
        continue
      rows = iterator.explain(step, [visits[n].row or 0 for n in numbers]).rows
      kept = [row.kept for row in rows]
      excluded = [_excluded(iterator, target, row) for row in rows]
      read += len(rows)
    else:
      masked = skips_lib.positions_of(entry.skips, "mask")
      kept = [not hit for hit in masked.contains(np.array([visits[n].position for n in numbers]))]
    for n, verdict, count in zip(numbers, kept, excluded):
      found[n] = dataclasses.replace(visits[n], kept=bool(verdict), excluded=count)
  return found, read


def _excluded(
    iterator: iterator_lib.BatchIterator, target: search.TokenRange, row: explain.RowExplanation
) -> int:
  """Returns how many tokens of a range in a row are excluded from the loss."""
  if not row.excluded:
    return 0
  path, found = iterator.files.paths[target.file], 0
  for part in row.parts:
    low = max(part.first, target.first)
    high = min(part.first + part.count, target.first + target.count)
    if part.file == path and low < high:
      shift = part.column - part.first
      found += int(row.excluded_columns[low + shift : high + shift].sum())
  return found


def _reason(iterator: iterator_lib.BatchIterator, target: search.TokenRange, end: int) -> str:
  """Returns why no row up to a position holds tokens of a range."""
  source: Any = iterator.source
  staged, files = hasattr(iterator.stream, "stages"), [target.file]
  if hasattr(source, "of_stage"):
    source, numbers = source.of_stage(0)
    files = np.flatnonzero(numbers == target.file).tolist()
  rows = None
  if files and hasattr(source, "rows_of"):
    rows = source.rows_of(0, files[0], target.first, target.count)
  if rows is not None and not len(rows) and not staged:
    if hasattr(source, "index"):
      return "in the tail of its file, which is shorter than an instance and never read"
    return "cut off: its document was truncated to one row, which ends before it"
  split = getattr(iterator.stream, "split", None) if rows is None or len(rows) else None
  if split is not None and rows is not None and (split.train_ranks(rows) < 0).all():
    return "held out for evaluation, so training never sees it"
  label = iterator.provenance.index.files[target.file].label if iterator.provenance else ""
  members = getattr(getattr(iterator.stream, "order", None), "members", None)
  if members is not None and label not in {member.label for member in members}:
    return f"its label, {label!r}, is left out of the mixture"
  return f"not before position {end:,}; look further with --until"
