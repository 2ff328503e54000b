"""Windows of a corpus over the stages of a run.

A stage may leave out the samples that the run has seen. This needs a bitmap, which may take a while
to build, so `look_ahead` builds it in the background before the stage begins.

Mixtures with the same corpus, order and seed share one stream per label: in a later mixture, the
stream of a label continues where the earlier mixture left it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import seen as seen_lib
from maxtext_olmo.order import staged_epochs
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import stages as stages_lib
from maxtext_olmo.order import stored
from maxtext_olmo.order import stream as stream_lib

# The bitmap of a stage is built when this fraction of the positions before the stage remains.
_AHEAD = 0.1


class StagedWindows(staged_stream.StagedStream):
  """Maps positions to instance ids, over the stages of a run; see `StagedStream`."""

  def __init__(
      self,
      stages: Sequence[stages_lib.Stage],
      corpora: corpora_lib.Corpora,
      num_epochs: int | None = None,
  ):
    self._unprepared: set[int] = set()
    super().__init__(stages, corpora, num_epochs)

  def _connect(self) -> None:
    super()._connect()
    self._stop = threading.Event()
    self._thread: threading.Thread | None = None

  def __getstate__(self) -> dict[str, Any]:
    left_out = ("_stop", "_thread")
    return {name: value for name, value in super().__getstate__().items() if name not in left_out}

  @property
  def sequence_length(self) -> int:
    """Tokens per instance."""
    return self.corpora.base.sequence_length

  @property
  def split(self) -> stream_lib.Split:
    """The split of the corpus that the run began with."""
    return self.stream(0).split

  @property
  def num_positions(self) -> int | None:
    """The number of samples until the end; None if there is no end or it is not known yet."""
    last = len(self.stages) - 1
    if self._bitmap_of(last) is not None and last not in self._streams:
      return None
    return super().num_positions

  @property
  def drops_tails(self) -> bool:
    """True if any stage has batches that may not span epochs."""
    return any(stage.settings.drops_tails for stage in self.stages)

  @property
  def batch_epochs(self) -> epochs_lib.Epochs | None:
    """The epochs whose ends no batch crosses; None if batches may span epochs in all stages."""
    return staged_epochs.batch_epochs(self.stages, self.corpora)

  def _make(self, number: int) -> stream_lib.Stream:
    settings = self.stages[number].settings
    index = self.index(number)
    last = number + 1 == len(self.stages)
    how: dict[str, Any] = {
        "order": settings.order,
        "seed": settings.seed,
        "split": self.corpora.split(index),
        "num_epochs": self.num_epochs if last else None,
        "seen": None,
    }
    bitmap = self._bitmap_of(number)
    if bitmap is not None:
      how["seen"] = self._seen(bitmap).open(self._stop)
    try:
      if settings.mixture:
        return mixture_lib.mixture_stream(
            index,
            dict(settings.mixture),
            settings.unit,
            taken=self._taken_before(number),
            **how,
        )
      consumed = "" if number else self.corpora.consumed_path
      return stream_lib.train_stream(
          index, cache_dir=self.corpora.cache_dir or None, consumed_path=consumed, **how
      )
    except errors.ConfigError as error:
      if not number:
        raise
      raise errors.ConfigError(f"{self.stages[number].name}: {error}") from error

  def _continued(self, number: int) -> list[int]:
    """Returns the earlier stages whose label streams a stage continues.

    If some of them have a bitmap, the result begins with the last that has one.
    """
    mine = self.stages[number].settings
    if not mine.mixture or mine.leave_out_seen:
      return []
    found: list[int] = []
    for earlier in range(number):
      settings = self.stages[earlier].settings
      if settings.mixture and settings.shares_labels == mine.shares_labels:
        # A stage's bitmap covers the samples of all stages before it, so these are not needed.
        found = [earlier] if settings.leave_out_seen else [*found, earlier]
    return found

  def _taken_before(self, number: int) -> dict[str, int]:
    """Returns, for each label of a stage, the number of chunks that earlier mixtures have taken."""
    taken: dict[str, int] = {}
    for earlier in self._continued(number):
      order = self.stream(earlier).order
      taken |= order.taken(-(-self.length(earlier) // order.chunk_size))  # type: ignore[operator]
    return taken

  def _bitmap_of(self, number: int) -> int | None:
    """Returns the stage (the same or an earlier one) whose bitmap a stage uses; None for none."""
    for candidate in (number, *self._continued(number)[:1]):
      if self.stages[candidate].settings.leave_out_seen:
        return candidate
    return None

  def _seen(self, number: int) -> seen_lib.SeenFile:
    """Returns the bitmap of the chunks that were seen before a stage."""
    index = self.index(number)
    split = self.corpora.split(index)
    directory = self.corpora.cache_dir or stored.default_cache_dir()

    def parts() -> list[seen_lib.Part]:
      return [
          seen_lib.Part(
              self.index(earlier),
              self.stream(earlier),
              self.length(earlier),  # type: ignore[arg-type]
              "" if earlier else self.corpora.consumed_path,
              directory,
          )
          for earlier in range(number)
      ]

    described = [
        dataclasses.replace(stage, shared=()).to_json() | {"index_path": ""}
        for stage in self.stages[: number + 1]
    ]
    consumed = self.stream(0).order.name if self.corpora.consumed_path else ""
    key = {
        "stages": described,
        "sequence_length": self.sequence_length,
        "split": self.stream(0).split.identity(),
        "consumed": consumed,
        # Moving files changes which files two indexes share, but not the fingerprints, so the
        # shared files are part of the key.
        "shared": [
            seen_lib.SharedFiles(self.index(earlier), index).digest
            for earlier in range(number)
            if self.stages[earlier].settings.fingerprint != index.fingerprint
        ],
    }
    return seen_lib.SeenFile(directory, key, index, split, parts)

  def look_ahead(self, position: int) -> None:
    """Builds the bitmap of a stage that begins soon, in the background."""
    number = self.number_at(position) + 1
    if number >= len(self.stages) or number in self._streams or number in self._unprepared:
      return
    if self._thread is not None:
      return
    if self._bitmap_of(number) is not None and position >= self._firsts[number] * (1 - _AHEAD):
      self._thread = threading.Thread(
          target=self._build, args=(number,), name="olmo_stage", daemon=True
      )
      self._thread.start()

  def _build(self, number: int) -> None:
    try:
      # The earlier streams are opened first, because taking the lock of this stream while holding
      # the lock of the file would deadlock.
      for earlier in range(number):
        self.stream(earlier)
      # The bitmap is built without the lock of this stream, which other threads need meanwhile.
      self._seen(self._bitmap_of(number)).open(self._stop)  # type: ignore[arg-type]
      self.stream(number)
    except InterruptedError:
      pass
    except errors.MaxtextOlmoError as error:  # The error is raised again when the stage begins.
      self._unprepared.add(number)
      logging.warning("%s cannot be prepared: %s", self.stages[number].name, error)
    finally:
      self._thread = None

  def close(self) -> None:
    """Closes the files of the orders and stops background work; the stream remains usable."""
    thread = self._thread
    if thread is not None:
      self._stop.set()
      thread.join()
      self._stop.clear()
    super().close()
