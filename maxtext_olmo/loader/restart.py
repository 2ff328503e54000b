"""The starting point of a run that resumes from a state or moves to a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxtext_olmo.loader import corpus_change
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import skips as skips_lib
from maxtext_olmo.order import timeline


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
  """Decides where a run continues, and with which data.

  Attributes:
    corpus: Policy for a corpus that changed since a state was saved; None requires an identical
      corpus.
    whole_batches: Whether a restored position is rounded down to a whole number of batches, as
      OLMo-core does.
    skips: The ranges of data that the config asks to skip.
    stages: Policy for stages; None for a dataset type without stages.
    exclusions: Description of the tokens that `olmo_exclude` leaves out of the loss, keyed by their
      digest; empty if there are none.
  """

  corpus: corpus_change.CorpusPolicy | None = None
  whole_batches: bool = False
  skips: skips_lib.Requests = skips_lib.Requests()
  stages: stages_lib.StagePolicy | None = None
  exclusions: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def from_state(
      self,
      state: dict[str, Any],
      stream: Any,
      schedule: schedule_lib.BatchSchedule,
      content: dict[str, Any],
  ) -> state_lib.Start:
    """Returns the start of a run that resumes from a state.

    Args:
      state: The state.
      stream: The stream that the config describes, without stages that lie ahead.
      schedule: The schedule of the config.
      content: This run's settings for processing tokens, in the form that a state records.

    Raises:
      ResumeError: The state belongs to another stream.
    """
    return state_lib.read_state(
        state,
        stream,
        schedule,
        content,
        corpus=self.corpus,
        whole_batches=self.whole_batches,
        skips=self.skips,
        stages=self.stages,
        exclusions=self.exclusions,
    )

  def first_stream(self, beginning: state_lib.Start) -> Any:
    """Returns the stream that a run begins with, without stages that lie ahead."""
    stages = self.stages
    return beginning.stream if stages is None else stages.stream(stages.beginning)

  def at_step(
      self,
      start: state_lib.Start,
      history: timeline.Timeline,
      beginning: state_lib.Start,
      content: dict[str, Any],
      step: int,
      position: int | None,
  ) -> state_lib.Start:
    """Returns the start of a run that moves to a step and keeps its history up to that step.

    Args:
      start: The current start of the run.
      history: The history of the run.
      beginning: The start that the config describes.
      content: As for `from_state`.
      step: The next step.
      position: The position of that step; by default, where the schedule in force then puts it.
    """
    known = history.until(step)
    if position is None and known and known.present is not history.present:
      schedule = known.present.schedule
      position = schedule.position(step)
      if self.stages is not None:  # The stages may have been different then, too.
        state = state_lib.make_state(known, start.stream, schedule, step)
        return self.from_state(state, self.first_stream(beginning), beginning.schedule, content)
    schedule = start.schedule if position is None else start.schedule.anchored(step, position)
    schedule.start(step)  # Raises OrderError if the schedule has no such step.
    return start._replace(step=step, schedule=schedule, history=known)

  def without_history(
      self, start: state_lib.Start, step: int, position: int | None
  ) -> state_lib.Start:
    """Returns the start of a run that moves to a step, where it begins a new history.

    Args:
      start: The current start of the run.
      step: The next step.
      position: The position of that step; by default, where the schedule puts it.
    """
    schedule = start.schedule
    if position is not None and schedule.anchored(step, position) is not schedule:
      return self._begin_at(start, step, position)
    position = schedule.position(step)
    schedule = dataclasses.replace(schedule, anchor_step=step, anchor_position=position)
    return start._replace(step=step, schedule=schedule, history=None)

  def _begin_at(self, start: state_lib.Start, step: int, position: int) -> state_lib.Start:
    """Returns the start of a new run at a position; skips and stages apply from there on."""
    stream = self.first_stream(start)
    schedule = dataclasses.replace(
        start.schedule,
        anchor_step=step,
        anchor_position=position,
        epochs=getattr(stream, "batch_epochs", None),
        skips=skips_lib.Skips(),
    )
    entered = () if self.stages is None else self.stages.beginning
    begun = state_lib.Start(step, schedule, stream)
    return state_lib.steered(begun, self.skips, self.stages, entered, position)
