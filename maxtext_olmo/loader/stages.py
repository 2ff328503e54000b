"""The policy for the stages of a run: those it has entered, and those that lie ahead.

The history of a run records which stages it has entered, and where; these cannot change. The config
lists the stages that lie ahead, which may change at any restart:

    A run resumes at step 150:

    config        from_step 100               from_step 200
    history       entered at position 6400    not entered yet
    rule          must not have changed       may be new or different
    begins at     position 6400               the position of step 200

The positions of stages that lie ahead are computed in order, each with the schedule that results
from the stages before it. If batches do not span epochs, a stage moves all later steps to other
positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import seen as seen_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import staged_windows
from maxtext_olmo.order import stages as stages_lib
from maxtext_olmo.order import timeline as timeline_lib

Stages = tuple[stages_lib.Stage, ...]


@dataclasses.dataclass(frozen=True)
class Request:
  """A stage that the config asks for.

  Attributes:
    unit: 'step' or 'tokens'.
    first: The step at which the stage begins, or the number of tokens trained on before it.
    settings: The corpus, order, seed and mixture of the stage.
  """

  unit: str
  first: int
  settings: stages_lib.Settings

  @property
  def text(self) -> str:
    """The request in the form that the history records."""
    return f"{self.unit} {self.first}"

  def first_step(
      self, schedule: schedule_lib.BatchSchedule, sequence_length: int, least: int
  ) -> int:
    """Returns the first step of the stage; if the unit is tokens, it is never before `least`."""
    if self.unit == "step":
      return self.first
    position = -(-self.first // sequence_length)
    if position <= schedule.position(least):
      return least
    step = schedule.step_at(position)
    return step if schedule.position(step) >= position else step + 1


@dataclasses.dataclass(frozen=True)
class StagePolicy:
  """Decides which stages a run has.

  Attributes:
    base: The settings with which a run begins, from the config's keys other than `olmo_stages`.
    requests: The stages that the config asks for, in order.
    corpora: The indexes of the stages.
    num_epochs: Epochs of the last stage; None for a run without end.
    allow_mixture_change: Whether a restart may change the mixture. The change begins a new stage.
    make_stream: Makes a stream from stages, their corpora and the number of epochs.
  """

  base: stages_lib.Settings
  requests: tuple[Request, ...]
  corpora: corpora_lib.Corpora
  num_epochs: int | None = None
  allow_mixture_change: bool = False
  make_stream: Callable[..., staged_stream.StagedStream] = staged_windows.StagedWindows

  @property
  def beginning(self) -> Stages:
    """The stages of a run that has not begun: only the first stage."""
    return (stages_lib.Stage(0, "", self.base),)

  def stream(self, stages: Stages) -> Any:
    """Returns the stream of the given stages."""
    staged = self.make_stream(stages, self.corpora, self.num_epochs)
    return staged if len(stages) > 1 else staged.stream(0)

  def recorded(self, stages: Stages) -> Stages:
    """Returns the stages to record in the history; none if the stream's identity describes them."""
    return stages if len(stages) > 1 or stages[0].settings.mixture else ()

  def first_stream(self, entry: timeline_lib.Entry, step: int, stream: Any) -> Any:
    """Returns the stream that a run began with: the config's, unless its mixture has changed."""
    if not entry.stages:
      is_mixed = mixture_lib.is_mixture(str(entry.identity.get("order")))
      same_corpus = entry.identity.get("fingerprint") == self.base.fingerprint
      if self.base.mixture and not is_mixed and same_corpus:
        raise errors.ResumeError(self._no_mixture(step))
      return stream
    was = entry.stages[0].settings
    if was == self.base or was.fingerprint != self.base.fingerprint:
      return stream
    return _checked(lambda: self.stream(entry.stages[:1]))

  def entered(
      self, history: timeline_lib.Timeline, step: int, position: int, convert: Callable[[int], int]
  ) -> Stages:
    """Returns the stages that a run has entered; raises ResumeError if the config contradicts them.

    Args:
      history: The history of the run when the state was saved.
      step: The next step.
      position: The position of that step.
      convert: Converts a position from samples of the saved sequence length to samples of this
        run's sequence length.
    """
    entry = history.present
    recorded = entry.stages or self.beginning
    self._check_places(recorded, entry)
    recorded = tuple(dataclasses.replace(s, position=convert(s.position)) for s in recorded)
    passed = {request.text for request in self.requests if _has_passed(request, history, step)}
    # A stage whose first step has passed may have no sample yet: the stage before it completes its
    # chunk first.
    kept = (recorded[0], *(s for s in recorded[1:] if s.position < position or s.request in passed))
    names = {stage.request for stage in kept}
    wanted = self.base
    for request in self.requests:
      if request.text in names:
        wanted = request.settings
      elif request.text in passed:
        raise errors.ResumeError(
            f"olmo_stages: the stage from {request.text} on can no longer begin: this run has"
            f" reached step {step} without it. Resume from an earlier checkpoint, or let the stage"
            f" begin later, such as at from_step={step}."
        )
    self._check_streams(kept)
    self._check_shared(kept)
    was = kept[-1]
    if wanted == was.settings:
      return kept
    mixed = dataclasses.replace(was.settings, mixture=wanted.mixture, unit=wanted.unit)
    if self.allow_mixture_change and mixed == wanted and was.settings.mixture and wanted.mixture:
      if position <= was.position:
        return (*kept[:-1], dataclasses.replace(was, settings=wanted))
      restart = f"the restart at step {step}"
      return (*kept, self._stage(kept, position, restart, wanted))
    if mixed == wanted and not was.request and not was.settings.mixture:
      raise errors.ResumeError(self._no_mixture(step))
    differences = "\n".join(f"  {line}" for line in was.settings.differences(wanted))
    may_change = mixed == wanted and was.settings.mixture and wanted.mixture
    raise errors.ResumeError(
        "The checkpoint's data state belongs to another stream, so resuming would repeat and skip"
        f" data. The run is in {was.name}, and this config differs from it:\n{differences}\nSet"
        " these keys back. To continue with other data from here on, set them in a new stage:"
        f" olmo_stages=({{'from_step': {step}, …}},)"
        + (" or set olmo_allow_mixture_change=True." if may_change else ".")
    )

  def _no_mixture(self, step: int) -> str:
    """Returns the error message for a config that adds a mixture at a restart."""
    return (
        "olmo_mixture is set, but this run has had no mixture so far, so resuming would repeat and"
        " skip data. olmo_allow_mixture_change does not apply: it is for a run that has a mixture."
        " Remove olmo_mixture again, and set it in a new stage:"
        f" olmo_stages=({{'from_step': {step}, 'olmo_mixture': {dict(self.base.mixture)}}},)"
    )

  def ahead(
      self, entered: Stages, schedule: schedule_lib.BatchSchedule, step: int
  ) -> tuple[Stages, Any, schedule_lib.BatchSchedule]:
    """Computes the positions at which the stages that lie ahead begin.

    Args:
      entered: The stages that the run has entered.
      schedule: Maps steps to positions.
      step: The first step at which a stage may begin.

    Returns:
      All stages of the run, their stream, and the schedule adapted to them.
    """
    stages, stream = entered, self.stream(entered)
    schedule = schedule.within(stream.batch_epochs)
    names = {stage.request for stage in entered}
    for request in self.requests:
      if request.text in names:
        continue
      try:
        first = request.first_step(schedule, stream.sequence_length, step)
        position = schedule.position(first)
      except errors.OrderError as error:
        raise errors.ConfigError(
            f"olmo_stages: the stage from {request.text} on begins before this run: {error} Remove"
            " it, and set its values in the config itself."
        ) from error
      stage = self._stage(stages, position, request.text, request.settings)
      by_tokens = request.text.startswith("tokens") and stages[-1].request.startswith("tokens")
      if stage.position == stages[-1].position and by_tokens and len(stages) > len(entered):
        # This is not an error: with a different batch size, or after a restart, the two may begin
        # at different steps.
        logging.warning(
            "olmo_stages: with this batch size, %s and %s begin at the same step, so the first of"
            " them is empty.",
            stages[-1].name,
            stage.name,
        )
        stages = stages[:-1]
        stage = self._stage(stages, position, request.text, request.settings)
      if stage.position <= stages[-1].position:
        raise errors.ConfigError(
            f"olmo_stages: {stage.name} begins at position {stage.position}, where"
            f" {stages[-1].name} has no sample yet. Each stage must begin after the one before it,"
            " and the first one after step 0."
        )
      stages = (*stages, stage)
      stream = self.stream(stages)
      try:
        schedule = schedule.within(stream.batch_epochs)
      except errors.ConfigError as error:
        raise errors.ConfigError(f"olmo_stages: {stages[-1].name}: {error}") from error
    return stages, stream, schedule

  def _stage(
      self, before: Stages, position: int, request: str, settings: stages_lib.Settings
  ) -> stages_lib.Stage:
    """Returns a stage that begins at a position, or after the chunk that is in progress there."""
    stage = stages_lib.Stage(self._rounded(before, position, settings), request, settings)
    # These stages decide which rows to leave out: held-out rows are those of the first index only,
    # but rows may have been seen in any earlier index.
    deciding = before if settings.leave_out_seen else before[:1]
    if not (settings.leave_out_seen or self.corpora.held_out_instances):
      deciding = ()
    earlier = {one.settings.fingerprint: one for one in reversed(deciding)}
    earlier.pop(settings.fingerprint, None)
    shared = tuple((name, self._digest(one, stage)) for name, one in sorted(earlier.items()))
    return dataclasses.replace(stage, shared=shared)

  def _digest(self, earlier: stages_lib.Stage, stage: stages_lib.Stage) -> str:
    """Returns the digest of the files that the indexes of two stages share."""
    return seen_lib.SharedFiles(self.corpora.index(earlier), self.corpora.index(stage)).digest

  def _rounded(self, stages: Stages, position: int, wanted: stages_lib.Settings) -> int:
    """Returns the position where a stage begins: after the chunk that is in progress.

    If batches do not span epochs, they do not span stages either. Then the stage begins at once,
    and the rest of the chunk is dropped.
    """
    last = stages[-1]
    if any(settings.drops_tails for settings in (last.settings, wanted)):
      return position
    size = self.corpora.chunk_size(last, self.corpora.base.sequence_length)
    return last.position + -(-(position - last.position) // size) * size

  def _check_places(self, stages: Stages, entry: timeline_lib.Entry) -> None:
    """Raises ResumeError if a stage does not begin where the entry's schedule puts its first step.

    Only stages that were requested by step are checked.
    """
    known = {self.base.fingerprint, *self.corpora.others}
    for before, stage in zip(stages, stages[1:]):
      unit, _, first = stage.request.partition(" ")
      # The entry's schedule determined only the positions of stages that were then still ahead.
      if unit != "step" or not first.isdecimal() or int(first) < entry.step:
        continue
      least = entry.schedule.position(int(first))
      # The previous stage may complete its chunk first. Without its index, the size of the chunk is
      # unknown, so there is no upper limit.
      most = stage.position
      if before.settings.fingerprint in known:
        most = least + self.corpora.chunk_size(before, entry.sequence_length)
      if not least <= stage.position <= most:
        raise schema.damaged(
            f"{stage.name} begins at position {stage.position}, but the schedule in its history"
            f" puts that step at position {least}"
        )

  def _check_shared(self, stages: Stages) -> None:
    """Raises ResumeError if two stages' indexes no longer share the files that the state records.

    An index that no longer exists is not compared: reading rows that need it raises an error.
    """
    for number, stage in enumerate(stages):
      earlier = {one.settings.fingerprint: one for one in reversed(stages[:number])}
      for fingerprint, digest in stage.shared:
        if fingerprint not in earlier:
          raise schema.damaged(f"{stage.name} shares files with an index that no earlier stage has")
        one = earlier[fingerprint]
        with contextlib.suppress(errors.CorpusError):
          if self._digest(one, stage) != digest:
            raise errors.ResumeError(self._moved(one, stage))

  def _moved(self, one: stages_lib.Stage, stage: stages_lib.Stage) -> str:
    """Returns the error message for two indexes that no longer share the same files as before."""
    now = {
        settings.fingerprint: settings.index_path
        for settings in (*(request.settings for request in self.requests), self.base)
    }
    lines = []
    for settings in (one.settings, stage.settings):
      line = f"  {settings.index_path}"
      path = now.get(settings.fingerprint, settings.index_path)
      lines.append(line if path == settings.index_path else f"{line} then, {path} now")
    return (
        f"olmo_stages: {stage.name} leaves out rows (held out, or seen before) of files that two"
        " indexes share, and the set of shared files has changed since the state was saved, so"
        " resuming would repeat and skip data:\n"
        + "\n".join(lines)
        + "\nA file is shared if its full path and size are the same in both, so an index or its"
        " base directory has moved. Restore the old paths in the index (olmo_path_remap_from lets"
        " the files themselves be elsewhere), or resume from a checkpoint before this stage."
    )

  def _check_streams(self, stages: Stages) -> None:
    """Raises ResumeError if a stage that a state records is impossible with this corpus."""
    for stage in stages:
      if stage.settings.fingerprint == self.base.fingerprint:
        _checked(lambda stage=stage: self.stream_alone(stage.settings))  # type: ignore[misc]

  def stream_alone(self, settings: stages_lib.Settings) -> Any:
    """Returns the stream that a stage would have if it were the first one."""
    alone = stages_lib.Stage(0, "", dataclasses.replace(settings, leave_out_seen=False))
    corpora = dataclasses.replace(self.corpora, consumed_path="")
    return self.make_stream((alone,), corpora, None).stream(0)


def _has_passed(request: Request, history: timeline_lib.Timeline, step: int) -> bool:
  """Returns whether a run has already taken the first step of a requested stage."""
  if request.unit == "step":
    return request.first < step
  if history.entries[0].step < step:
    entry = history.at(step - 1)
    return request.first <= entry.schedule.position(step - 1) * entry.sequence_length
  # The history does not reach back to earlier steps.
  entry = history.present
  return request.first < entry.schedule.position(step) * entry.sequence_length


def _checked(make: Callable[[], Any]) -> Any:
  try:
    return make()
  except (errors.ConfigError, errors.OrderError, OverflowError) as error:
    raise schema.damaged(f"its stages are not those of this corpus ({error})") from error
