"""Examines the loss spikes of a run: how their data differs, and which rows to look at first.

    losses ──▶ spikes ──▶ steps of each spike, calm steps before it ──▶ contrast ──▶ rows, files, …

Only these steps are read, one at a time. Each spike is compared with calm steps near it, because
the mixture may change during a run. Then the comparisons are combined, so that a bad file that
causes many spikes is ranked first.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo import progress as progress_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import contrast as contrast_lib
from maxtext_olmo.inspection import figures as figures_lib
from maxtext_olmo.inspection import losses as losses_lib
from maxtext_olmo.inspection import spike_detection
from maxtext_olmo.inspection import text as text_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.rows import explain

MOST_SPIKES = 20
MOST_ROWS = 10
_SHOWN_ANYWAY = 3
_CHECKED = 1000
_BLAMED = ("label", "file", "document")


@dataclasses.dataclass(frozen=True)
class Suspect:
  """A row to look at.

  Attributes:
    score: The row's score, and why it stands out.
    row: The explanation of the row.
    text: The row's text as (heading, text) pairs; empty without a tokenizer.
  """

  score: contrast_lib.RowScore
  row: explain.RowExplanation
  text: tuple[tuple[str, str], ...] = ()

  @property
  def place(self) -> tuple[str, str, str]:
    """The file, the byte range and the document that the row is attributed to, as text."""
    score = self.score
    part = next((p for p in self.row.parts if p.file == score.file), self.row.parts[0])
    where = "" if part.first_byte is None else f"{part.first_byte}-{part.end_byte}"
    return score.file, where, str(score.document) if score.document >= 0 else ""

  def to_json(self) -> dict[str, Any]:
    """Returns the row as a JSON-able dict."""
    scored = dataclasses.asdict(self.score)
    values = {**self.row.to_json(), **{f"blamed_{n}": scored.pop(n) for n in _BLAMED}, **scored}
    if self.text:
      values["text"] = [{"heading": heading, "text": text} for heading, text in self.text]
    return values


@dataclasses.dataclass(frozen=True)
class Examined:
  """A spike, or several spikes combined, compared with calm steps nearby.

  Attributes:
    spikes: The spikes.
    contrast: The comparison with calm steps.
    suspects: The rows to look at, the most suspicious first.
  """

  spikes: tuple[spike_detection.Spike, ...]
  contrast: contrast_lib.Contrast
  suspects: tuple[Suspect, ...]

  @property
  def shown(self) -> tuple[Suspect, ...]:
    """The suspects that stand out, or a few suspects if none does."""
    return self.suspects[: self.contrast.notable or _SHOWN_ANYWAY]

  def to_json(self) -> dict[str, Any]:
    """Returns a JSON-able dict; losses and scores that are not finite become None."""
    contrast = self.contrast
    return {
        "spikes": [_finite(dataclasses.asdict(spike)) for spike in self.spikes],
        "steps": list(contrast.steps),
        "calm_steps": sorted(contrast.calm_steps),
        "rows_compared": len(contrast.rows),
        "rows_without_loss": contrast.without_loss,
        "rows_that_stand_out": contrast.notable,
        "figures": [dataclasses.asdict(figure) for figure in contrast.figures],
        "labels": _sources(contrast.labels, ("label",)),
        "files": _sources(contrast.files, ("label", "file")),
        "documents": _sources(contrast.documents, ("label", "file", "document")),
        "rows": [suspect.to_json() for suspect in self.suspects],
    }


@dataclasses.dataclass(frozen=True)
class Findings:
  """The spikes of a run and their comparisons with calm steps.

  Attributes:
    name: The name of the loss in the log.
    logged: The number of steps with a loss.
    spikes: All spikes, the highest score first.
    threshold: The score above which a loss counts as a spike.
    highest: The highest score and its step; None if there are too few losses.
    together: All examined spikes combined; None if there is none.
    each: Each examined spike, the highest score first.
  """

  name: str
  logged: int
  spikes: tuple[spike_detection.Spike, ...]
  threshold: float
  highest: tuple[float, int] | None
  together: Examined | None
  each: tuple[Examined, ...]

  @property
  def summary(self) -> str:
    """The number of spikes as text, with the highest score if there are no spikes."""
    count = len(self.spikes)
    spikes = english.count(count, "spike") if count else "no spike"
    text = f"{spikes} (robust z-score above {self.threshold:g})."
    if count:
      return text
    if self.highest is None:
      return f"{text} There are too few steps to compare."
    score, step = self.highest
    if score <= 0:
      return text
    lower = math.floor(score * 10 - 1e-9) / 10
    text += f" The highest score is {score:.1f}, at step {step:,}"
    return f"{text}; see it with --threshold {lower:g}." if lower > 0 else f"{text}."

  def to_json(self) -> dict[str, Any]:
    """Returns everything as a JSON-able dict."""
    return {
        "loss": self.name,
        "logged_steps": self.logged,
        "threshold": self.threshold,
        "spikes_found": len(self.spikes),
        "highest": self.highest and _finite(dict(zip(("score", "step"), self.highest))),
        "together": None if self.together is None else self.together.to_json(),
        "each": [one.to_json() for one in self.each],
    }


def examine(
    iterator: iterator_lib.BatchIterator,
    losses: losses_lib.Losses,
    *,
    threshold: float = spike_detection.THRESHOLD,
    most_spikes: int = MOST_SPIKES,
    most_rows: int = MOST_ROWS,
    tokenizer: Any = None,
    progress: bool = False,
) -> Findings:
  """Finds the spikes of a run and compares them with calm steps.

  Args:
    iterator: An iterator at the state of the run.
    losses: The losses that the trainer logged.
    threshold: The robust z-score above which a loss counts as a spike.
    most_spikes: The maximum number of spikes to examine, the highest score first.
    most_rows: The maximum number of suspects for each spike, and for all spikes combined.
    tokenizer: Tokenizer that decodes the suspects; None omits their text.
    progress: Whether to show progress on stderr.

  Raises:
    ConfigError: The run lacks a logged step, or the log has a different position for a step.
  """
  _check(iterator, losses, _sample(iterator, losses))
  spikes = spike_detection.find_spikes(losses, threshold=threshold)
  if spikes:
    highest: tuple[float, int] | None = spikes[0].score, spikes[0].peak
  else:
    highest = spike_detection.highest_score(losses)
  about = (losses.name, len(losses.steps), tuple(spikes), threshold, highest)
  examined = spikes[:most_spikes]
  if not examined:
    return Findings(*about, None, ())
  to_compare = [contrast_lib.steps_to_compare(losses, spike, spikes) for spike in examined]
  _check(iterator, losses, (step for steps, _ in to_compare for step in steps))
  eos_id = _eos_id(iterator)
  contrasts = []
  loss_tokens: dict[int, int] = {}  # by step

  def read(step: int) -> figures_lib.StepRows:
    explanation = _explain(iterator, step)
    loss_tokens[step] = sum(row.loss_tokens for row in explanation.rows)
    return _step_rows(explanation)

  with progress_lib.progress_bar(
      "comparing steps", len(examined), enabled=progress, unit="spikes"
  ) as advance:
    for steps, calm_steps in to_compare:
      known = [step for step in calm_steps if step >= iterator.history.entries[0].step]
      contrasts.append(contrast_lib.contrast(read, steps, known, eos_id=eos_id))
      advance(1)
  merged = contrast_lib.merge(contrasts)
  wanted = [one.rows[:most_rows] for one in (merged, *contrasts)]
  rows = _read_rows(iterator, (row for rows in wanted for row in rows), loss_tokens, tokenizer)
  groups = [tuple(examined), *((spike,) for spike in examined)]
  together, *each = (
      Examined(group, one, tuple(Suspect(row, *rows[row.step, row.row]) for row in own))
      for group, one, own in zip(groups, (merged, *contrasts), wanted)
  )
  return Findings(*about, together, tuple(each))


def _sample(iterator: iterator_lib.BatchIterator, losses: losses_lib.Losses) -> list[int]:
  """Returns a sample of the logged steps whose positions to check, including the last.

  If the run was restarted, logged steps after its current step are left out, because they may have
  been logged before the run went back to a checkpoint.
  """
  first, *others = (entry.step for entry in iterator.history.entries)
  end = iterator.step if others else math.inf
  steps = sorted(step for step in losses.positions if first <= step < end)
  return [*steps[:: 1 + len(steps) // _CHECKED], *steps[-1:]]


def _check(
    iterator: iterator_lib.BatchIterator, losses: losses_lib.Losses, steps: Iterable[int]
) -> None:
  """Raises ConfigError if the log and the run disagree on the position of a step."""
  for step in steps:
    logged = losses.positions.get(step)
    if logged is None:
      continue
    schedule = iterator.history.at(step).schedule
    position = state_lib.position_after(iterator.stream, schedule, step)
    if np.float32(logged) != np.float32(position):  # Event files store float32.
      raise errors.ConfigError(
          f"Step {step:,} begins at position {logged:,} in the log, but at position {position:,} in"
          " this run. The log belongs to another run, or to steps that were later repeated from an"
          " earlier checkpoint. Give the checkpoint or the config that belongs to the log."
      )


def _explain(iterator: iterator_lib.BatchIterator, step: int) -> explain.StepExplanation:
  try:
    return iterator.explain(step)
  except errors.OrderError as error:
    raise errors.ConfigError(
        f"The losses spike near step {step:,}, which this run does not have: {error} Check that the"
        " log belongs to this run."
    ) from error


def _eos_id(iterator: iterator_lib.BatchIterator) -> int:
  """Returns the id of the token that ends a document; -1 if unknown."""
  eos_id = iterator.source.segment_rule.eos_id
  provenance = iterator.provenance
  if eos_id < 0 and provenance is not None:
    if provenance.documents is not None:
      eos_id = provenance.documents.eos_id
    elif provenance.index.tokenizer == tokenizer_lib.ByteTokenizer.name:
      eos_id = tokenizer_lib.ByteTokenizer.eos_id
  return eos_id


def _step_rows(explanation: explain.StepExplanation) -> figures_lib.StepRows:
  rows = explanation.rows
  return figures_lib.StepRows(
      tokens=[row.tokens for row in rows],
      width=explanation.sequence_length,
      trained=[row.loss_tokens > 0 for row in rows],
      pieces=[[piece for part in row.parts for piece in _pieces(part)] for row in rows],
  )


def _pieces(part: explain.PartExplanation) -> Iterable[figures_lib.Piece]:
  if not part.documents:
    yield figures_lib.Piece(part.label, part.file, -1, part.column, part.count, 0, part.first)
  for span in part.documents:
    count, first = span.last - span.first + 1, part.first + span.column - part.column
    yield figures_lib.Piece(
        part.label, part.file, span.document, span.column, count, span.length, first
    )


_Row = tuple[explain.RowExplanation, tuple[tuple[str, str], ...]]


def _read_rows(
    iterator: iterator_lib.BatchIterator,
    rows: Iterable[contrast_lib.RowScore],
    loss_tokens: Mapping[int, int],
    tokenizer: Any,
) -> dict[tuple[int, int], _Row]:
  """Returns some rows of a run and their text, keyed by step and row.

  Args:
    loss_tokens: step → number of tokens of the whole step that are in the loss.
  """
  wanted: dict[int, set[int]] = collections.defaultdict(set)
  for score in rows:
    wanted[score.step].add(score.row)
  found: dict[tuple[int, int], _Row] = {}
  for step, numbers in wanted.items():
    for row in iterator.explain(step, sorted(numbers)).rows:
      share = row.loss_tokens / max(1, loss_tokens[step])
      row = dataclasses.replace(row, loss_share=share)
      text = () if tokenizer is None else tuple(text_lib.pieces(row, tokenizer))
      found[step, row.row] = row, text
  return found


def _sources(
    sources: Sequence[contrast_lib.SourceScore], names: Sequence[str]
) -> list[dict[str, Any]]:
  found = []
  for source in sources:
    values = dataclasses.asdict(source)
    found.append(dict(zip(names, values.pop("source"))) | values)
  return found


def _finite(values: dict[str, Any]) -> dict[str, Any]:
  return {
      name: None if isinstance(value, float) and not math.isfinite(value) else value
      for name, value in values.items()
  }
