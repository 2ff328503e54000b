"""The plan of a run: its stretches, from the first known step to the last step.

A stretch is a range of steps with one stream and one schedule. The history of a run records which
schedule was in force at which step; its last entry applies to all future steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from maxtext_olmo import english
from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import sources
from maxtext_olmo.order import timeline as timeline_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """The stretches of a run, and the step it has reached.

  Attributes:
    stretches: The stretches, from the first known step to the last step of the run.
    history: The history, which records what changed at restarts.
    step: The number of steps done.
    names: Maps the digest of an exclusion list to its file, for lists whose files are known.
  """

  stretches: tuple[changes_lib.Stretch, ...]
  history: timeline_lib.Timeline | None = None
  step: int = 0
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def identity(self) -> dict[str, Any]:
    """The identity of the stream at the end of the run; it determines the row at each position."""
    last = self.stretches[-1]
    return {**last.stream.identity(), "sequence_length": last.stream.sequence_length}

  def count_sources(self, **settings: Any) -> sources.Sources:
    """Counts the tokens of each label that the run has seen and will see."""
    return sources.count_sources(self.stretches, **settings)

  def find_changes(self) -> tuple[changes_lib.Change, ...]:
    """Returns the changes during the run, in the order of steps."""
    changes = changes_lib.find_changes(self.stretches, self.history, self.names)
    found = [*changes, *self._masked()]
    return tuple(sorted(dict.fromkeys(found)))

  def _masked(self) -> Iterator[changes_lib.Change]:
    """Yields a change for each range of samples that the run delivers without loss."""
    if self.history is None:
      return
    entry = self.history.present
    for skip in entry.skips:
      if skip.mode == "mask" and skip.first >= entry.schedule.anchor_position:
        step = entry.schedule.step_at(skip.first)
        samples = english.count(skip.end - skip.first, "sample")
        yield changes_lib.Change(step, f"takes no loss on {samples}")
