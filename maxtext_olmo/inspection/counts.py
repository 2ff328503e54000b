"""Counts the tokens of each label that a stream has consumed up to a position.

The method depends on the stream:

    mixture, sequential order      exactly, from a closed form of the position
    shuffle of a whole corpus      on average, and exactly at the ends of epochs
    packed documents               on average
    mixture of packed documents    exactly, in whole rows

If a count is only an average, a `Counter` can also count individual rows: all rows of a range if
there are few (`tally`), otherwise a sample of them (`sample`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.rows import mixture as mixed_rows
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source

_WINDOWS_FOR_MEAN = 8
_FEW_ROWS = 1 << 14  # Packing this many rows of documents takes about a second.

# For each label, two sums over some rows: of the label's share of each row, and of the squares of
# these shares.
Tally = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Counter:
  """Counts the tokens of each label in a stream.

  Attributes:
    labels: The labels.
    available: The tokens of each label that training may see (float64).
    row_length: Tokens per row.
    num_positions: The number of rows of the stream; None if it is endless.
    before: Returns the tokens of each label before each of some positions (positions, labels).
    tally: Returns the `Tally` of the rows at some positions; None if `before` is exact.
    sample: Like `tally`, but may count nearby rows instead if that is faster; also returns the
      number of rows that it counted.
    rows_per_call: The approximate number of rows that `sample` counts for each position.
    enumerable: Streams of at most this many rows are counted row by row.
  """

  labels: tuple[str, ...]
  available: np.ndarray
  row_length: int
  num_positions: int | None
  before: Callable[[np.ndarray], np.ndarray]
  tally: Callable[[np.ndarray], Tally] | None = None
  sample: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, int]] | None = None
  rows_per_call: int = 1
  enumerable: int = 0


def make_counter(stream: Any, index: index_lib.OlmoNpyIndex) -> Counter:
  """Returns the counter of a stream over a corpus."""
  if isinstance(stream, row_sequence.RowSequence):
    if isinstance(stream.source, mixed_rows.MixedRows):
      return _mixed_documents(stream.source, index)
    return _documents(stream, index)
  if isinstance(stream, staged_stream.StagedStream):
    return _staged(stream)
  if isinstance(stream.order, mixture_lib.MixtureOrder):
    return _mixture(stream, stream.order, index)
  return _windows(stream, index)


def _mixture(
    stream: stream_lib.Stream, order: mixture_lib.MixtureOrder, index: index_lib.OlmoNpyIndex
) -> Counter:
  size = order.chunk_size

  def before(positions: np.ndarray) -> np.ndarray:
    chunks, rest = np.divmod(positions, size)
    counts = order.interleave.taken_before(chunks) * float(size)
    if size > 1:
      counts[np.arange(len(positions)), order.interleave.locate(chunks)[0]] += rest
    return counts * index.sequence_length

  return Counter(
      labels=tuple(member.label for member in order.members),
      available=np.array([len(m.chunks) for m in order.members]) * float(index.window),
      row_length=index.sequence_length,
      num_positions=stream.num_positions,
      before=before,
  )


def _staged(stream: staged_stream.StagedStream) -> Counter:
  """Returns the counter of a stream with stages, which adds up the counts of its stages."""
  numbers = range(len(stream.stages))
  counters = [make_counter(stream.stream(number), stream.index(number)) for number in numbers]
  labels = tuple(dict.fromkeys(label for counter in counters for label in counter.labels))
  columns = [[labels.index(label) for label in counter.labels] for counter in counters]
  available = np.zeros(len(labels))
  for counter, own in zip(counters, columns):
    available[own] = np.maximum(available[own], counter.available)

  def before(positions: np.ndarray) -> np.ndarray:
    counts = np.zeros((len(positions), len(labels)))
    for number, counter, own in zip(numbers, counters, columns):
      inside = np.clip(positions - stream.stages[number].position, 0, stream.length(number))
      counts[:, own] += counter.before(inside)
    return counts

  def count(positions: np.ndarray, *, few: bool) -> Tally:
    """Counts the rows at all positions if `few`; otherwise, counts a sample and scales it up."""
    sums, squares = np.zeros((2, len(labels)))
    stage_of = np.array([stream.number_at(position) for position in positions.tolist()])
    for number in np.unique(stage_of).tolist():
      counter, own = counters[number], columns[number]
      places = positions[stage_of == number] - stream.stages[number].position
      rows = len(places)
      if counter.tally is None:
        found = _tally_closed_form(counter, places)
      elif few:
        found = counter.tally(places)
      else:
        *found, rows = counter.sample(places)  # type: ignore[misc]
      sums[own] += found[0] * len(places) / rows
      squares[own] += found[1] * len(places) / rows
    return sums, squares

  end = counters[-1].num_positions
  counter = Counter(
      labels,
      available,
      stream.sequence_length,
      None if end is None else stream.stages[-1].position + end,
      before,
  )
  counted = [counter for counter in counters if counter.tally is not None]
  if not counted:
    return counter
  return dataclasses.replace(
      counter,
      tally=lambda positions: count(positions, few=True),
      sample=lambda positions: (*count(positions, few=False), len(positions)),
      rows_per_call=max(counter.rows_per_call for counter in counted),
      enumerable=min(counter.enumerable for counter in counted),
  )


def _tally_closed_form(counter: Counter, positions: np.ndarray) -> Tally:
  """Returns the `Tally` of the rows at some positions, computed from the exact `before`."""
  shares = (counter.before(positions + 1) - counter.before(positions)) / counter.row_length
  return shares.sum(axis=0), (shares**2).sum(axis=0)


def _with_tally(counter: Counter, tally: Callable[[np.ndarray], Tally]) -> Counter:
  """Returns a counter that uses `tally` to count all rows of a range, or a sample of them."""
  return dataclasses.replace(
      counter,
      tally=tally,
      sample=lambda positions: (*tally(positions), len(positions)),
      enumerable=1 << 21,
  )


def _mixed_documents(rows: mixed_rows.MixedRows, index: index_lib.OlmoNpyIndex) -> Counter:
  labels = tuple(member.name for member in rows.members)
  tokens = dict(zip(*_labels_and_tokens(index)))

  def before(positions: np.ndarray) -> np.ndarray:
    return rows.taken_before(positions) * float(rows.row_length)

  available = np.array([tokens[name] for name in labels])
  return Counter(labels, available, rows.row_length, None, before)


def _labels_and_tokens(index: index_lib.OlmoNpyIndex) -> tuple[tuple[str, ...], np.ndarray]:
  """Returns the labels of all files in order of first appearance, and the tokens of each."""
  tokens: dict[str, int] = {}
  for entry in index.files:
    tokens[entry.label] = tokens.get(entry.label, 0) + entry.n_tokens
  return tuple(tokens), np.array(list(tokens.values()), np.float64)


def _windows(stream: stream_lib.Stream, index: index_lib.OlmoNpyIndex) -> Counter:
  labels = tuple(dict.fromkeys(entry.label for entry in index.files if entry.n_instances))
  numbers = {label: number for number, label in enumerate(labels)}
  label_of = np.array([numbers.get(entry.label, 0) for entry in index.files])
  ends = np.cumsum([entry.n_instances for entry in index.files]) // index.chunk_size
  # The number of training instances before each file, and in all files.
  starts = stream.split.train_windows_before(np.concatenate([[0], ends])) * index.chunk_size
  sizes = np.diff(starts)
  one_hot = np.zeros((len(index.files), len(labels)))
  one_hot[np.arange(len(index.files)), label_of] = sizes
  by_file = np.concatenate([np.zeros((1, len(labels))), np.cumsum(one_hot, axis=0)])

  def in_corpus_order(places: np.ndarray) -> np.ndarray:
    file = np.clip(np.searchsorted(starts, places, side="right") - 1, 0, len(index.files) - 1)
    counts = by_file[file]
    counts[np.arange(len(places)), label_of[file]] += places - starts[file]
    return counts

  epochs = stream.epochs
  extents = [files for _, files, _ in stream.history]
  if len(extents) != len(epochs.parts):
    extents = [len(index.files)] * len(epochs.parts)
  totals = by_file[extents]
  lengths = np.array([length for _, _, length in epochs.parts], np.float64)
  # If a different loader has consumed the beginning of the first epoch, that epoch has fewer rows.
  # Assume that the rest has the same shares as the whole.
  totals = totals * (lengths / totals.sum(axis=1))[:, None]
  sequential = isinstance(stream.order, permutations.SequentialOrder)

  def before(positions: np.ndarray) -> np.ndarray:
    counts = np.zeros((len(positions), len(labels)))
    firsts = [start for start, _, _ in epochs.parts]
    for part, (start, _, length) in enumerate(epochs.parts):
      end = firsts[part + 1] if part + 1 < len(firsts) else None
      inside = np.clip(positions - start, 0, None if end is None else end - start)
      whole, place = np.divmod(inside, length)
      rest = in_corpus_order(place) if sequential else place[:, None] / length * totals[part]
      counts += whole[:, None] * totals[part] + rest
    return counts * index.sequence_length

  def tally(positions: np.ndarray) -> Tally:
    files = index.locate(stream.instance_ids(positions))[0]
    counts = np.bincount(label_of[files], minlength=len(labels)).astype(np.float64)
    return counts, counts

  length = index.sequence_length
  counter = Counter(labels, by_file[-1] * length, length, stream.num_positions, before)
  if sequential:
    return counter
  return _with_tally(counter, tally)


def _documents(stream: row_sequence.RowSequence, index: index_lib.OlmoNpyIndex) -> Counter:
  labels, available = _labels_and_tokens(index)
  numbers = {label: number for number, label in enumerate(labels)}
  label_of = np.array([numbers[entry.label] for entry in index.files])
  length = stream.source.row_length

  def tally_parts(parts: parts_lib.Parts) -> Tally:
    cells = parts.row.astype(np.int64) * len(labels) + label_of[parts.source]
    tokens = np.bincount(cells, parts.count, minlength=parts.num_rows * len(labels))
    shares = tokens.reshape(-1, len(labels)) / length
    return shares.sum(axis=0), (shares**2).sum(axis=0)

  def tally(positions: np.ndarray) -> Tally:
    return tally_parts(row_source.parts_at(stream.source, stream, positions))

  plan = stream.source.plan if isinstance(stream.source, planned.PlannedRows) else None
  if plan is None:
    if stream.epochs is None:
      raise TypeError(f"{stream.name}: rows without known epochs cannot be counted by label")
    rows, end = float(stream.epochs.length(0)), stream.num_positions
  else:
    # To count all rows of a plan, all documents would have to be packed. So estimate the number
    # from a few packing windows.
    few = min(plan.num_windows, _WINDOWS_FOR_MEAN)
    rows = sum(plan.window(0, i).num_rows for i in range(few)) * plan.num_windows / few
    end = None
    if stream.num_epochs is not None:
      end = int(rows * stream.num_epochs)
      if end <= _FEW_ROWS:
        end = plan.count(stream.num_epochs)

  def before(positions: np.ndarray) -> np.ndarray:
    return positions[:, None] / rows * available

  def sample(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    if plan is None:
      return (*tally(positions), len(positions))
    # For each position, take the packing window at about the same fraction of the epoch, so that
    # no earlier windows have to be counted.
    epochs, places = np.divmod(positions, rows)
    windows = (places / rows * plan.num_windows).astype(np.int64)
    tables = [plan.window(int(e), w) for e, w in zip(epochs.tolist(), windows.tolist())]
    tallies = [tally_parts(table) for table in tables]
    sums, squares = (np.sum(column, axis=0) for column in zip(*tallies))
    return sums, squares, sum(table.num_rows for table in tables)

  return Counter(
      labels,
      available,
      length,
      end,
      before,
      tally=tally,
      sample=sample,
      rows_per_call=1 if plan is None else max(1, int(rows / plan.num_windows)),
      enumerable=_FEW_ROWS,
  )
