"""Makes the plan of a run: from its config before it begins, or from a resumed iterator."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.config_key import DOCUMENTS
from maxtext_olmo.config_key import GRAIN
from maxtext_olmo.config_key import PACKED
from maxtext_olmo.config_key import PADDED
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import joined as joined_lib
from maxtext_olmo.inspection import changes as changes_lib
from maxtext_olmo.inspection import plan as plan_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import olmo_documents
from maxtext_olmo.loader import olmo_grain
from maxtext_olmo.loader import olmo_packed
from maxtext_olmo.loader import olmo_padded
from maxtext_olmo.loader import stage_config
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import timeline as timeline_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import staged
from maxtext_olmo.rows import steps as steps_lib


@contextlib.contextmanager
def open_plan(run: run_lib.Run, steps: int | None = None) -> Iterator[plan_lib.Plan]:
  """Yields the plan of a run. Its sources can be counted until the context ends.

  Args:
    run: The run. If it has a checkpoint, its history and token files are opened, otherwise its
      index.
    steps: The number of steps of the run; by default from its config, or up to the end of the
      current epoch.

  Raises:
    ConfigError: The run has no plan, or its end is unknown.
  """
  steps = steps or run.steps
  if run.config is not None and run.label is None:
    values = types.SimpleNamespace(**{**run.config, "eval_interval": -1})
    plan = plan_of_options(config_lib.Options.read(values), steps or 1)
    yield plan if steps else _until_end_of_epoch(plan)
    return
  with run_lib.open_iterator(run) as iterator:
    if iterator.provenance is None:
      raise errors.ConfigError(f"{run.path} has no plan: its rows are not read from files.")
    plan = plan_of_iterator(iterator, iterator.provenance.index, steps or iterator.step + 1)
    plan = dataclasses.replace(plan, names=run_lib.exclusion_names(run, iterator))
    yield _cut_at_present(plan if steps else _until_end_of_epoch(plan))


def _until_end_of_epoch(plan: plan_lib.Plan) -> plan_lib.Plan:
  """Extends a plan to the end of the stream, or to the end of the epoch of the next step."""
  last = plan.stretches[-1]
  end = last.stream.num_positions
  if end is None:
    position = last.schedule.position(max(plan.step, last.first))
    number, own, first = staged_stream.stage_at(last.stream, position)
    epochs = own.epochs
    if epochs is None:
      raise errors.ConfigError(
          "The length of an epoch of packed documents is unknown until they are packed. Give the"
          " number of steps with --steps."
      )
    end = first + epochs.start(epochs.epoch(position - first) + 1)
    if number is not None and (length := last.stream.length(number)) is not None:
      end = min(end, first + length)
  step = max(plan.step, last.first + 1, steps_lib.end_step(last.schedule, end))
  return dataclasses.replace(
      plan, stretches=(*plan.stretches[:-1], dataclasses.replace(last, end=step))
  )


def _cut_at_present(plan: plan_lib.Plan) -> plan_lib.Plan:
  """Splits a stretch at the next step, so that past steps are counted separately."""
  last = plan.stretches[-1]
  if not last.first < plan.step < last.end:
    return plan
  past = dataclasses.replace(last, end=plan.step)
  to_come = dataclasses.replace(last, first=plan.step)
  return dataclasses.replace(plan, stretches=(*plan.stretches[:-1], past, to_come))


def plan_of_options(options: config_lib.Options, steps: int) -> plan_lib.Plan:
  """Returns the plan of a run that has not begun; with olmo_grain, no token file is opened.

  Args:
    options: The data keys of the run.
    steps: The number of steps of the run.

  Raises:
    ConfigError: The rows have no labels, or cannot be addressed by position.
  """
  opened = open_run(options)
  start = opened.start
  return plan_lib.Plan((changes_lib.Stretch(0, steps, start.schedule, start.stream, opened.index),))


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRun:
  """A run that has not begun: its corpus, and which rows each step takes.

  Attributes:
    index: The corpus that the run begins with.
    start: The schedule, which maps steps to positions, and the stream, which maps these to rows.
    files: The index of the files that parts refer to: those of all stages.
    make_rows: Returns the row source, which maps rows to parts.
  """

  index: index_lib.OlmoNpyIndex
  start: state_lib.Start
  files: index_lib.OlmoNpyIndex
  make_rows: Callable[[], row_source.RowSource]


def open_run(options: config_lib.Options) -> OpenedRun:
  """Opens a run as its trainer does, from its beginning; with olmo_grain, opens no token file.

  Raises:
    ConfigError: The rows have no labels, or cannot be addressed by position.
  """
  index: index_lib.OlmoNpyIndex
  stream: Any
  policy: stages_lib.StagePolicy | None = None
  make_rows: Callable[[], row_source.RowSource]
  if options.dataset_type == GRAIN:
    index = olmo_grain.load_index(options.olmo_index_path, options)
    policy = stage_config.policy_of(
        options, index, lambda path: olmo_grain.load_index(path, options)
    )
    stream = policy.stream(policy.beginning)
    make_rows = lambda: olmo_grain.window_rows(index, options)  # noqa: E731
  elif options.dataset_type == DOCUMENTS and options.random_access_documents:
    source = olmo_documents.open_documents(
        options.olmo_index_path, options.olmo_documents_path, options
    )
    index, policy = source.index, olmo_documents.stage_policy(options, source)
    stream = policy.stream(policy.beginning)
    make_rows = lambda: stream.source  # noqa: E731
  elif options.dataset_type == PACKED:
    packed = olmo_packed.open_rows(options, options.olmo_index_path)
    index, stream = packed.index, olmo_packed.train_stream(options, packed.rows)
    make_rows = lambda: packed.rows  # noqa: E731
  elif options.dataset_type == PADDED:
    rows, _, index = olmo_padded.open_rows(options.olmo_index_path, options)
    stream = olmo_padded.train_stream(options, rows)
    make_rows = lambda: rows  # noqa: E731
  else:
    raise errors.ConfigError(
        f"dataset_type={options.dataset_type!r} has no plan: its rows have no labels, or are packed"
        " as they stream. olmo_grain, olmo_packed and olmo_padded have one, and olmo_documents with"
        " olmo_packing='planned'."
    )
  schedule = options.schedule().within(stream.batch_epochs)
  start = state_lib.Start(0, schedule, stream)
  start = state_lib.steered(
      start, options.skips, policy, () if policy is None else policy.beginning, 0
  )
  joined = joined_lib.join([index, *(policy.corpora.others.values() if policy else ())])
  if len(joined.indexes) == 1 and options.dataset_type != DOCUMENTS:
    return OpenedRun(index, start, index, make_rows)

  def make_staged() -> row_source.RowSource:
    rows = make_rows()
    return staged.StagedRows(rows, joined, rows.segment_rule).for_stream(start.stream)

  return OpenedRun(index, start, joined.index, make_staged)


def plan_of_iterator(
    iterator: iterator_lib.BatchIterator, index: index_lib.OlmoNpyIndex, steps: int
) -> plan_lib.Plan:
  """Returns the plan of a run that an iterator has resumed.

  The plan omits steps whose stream differs from the iterator's.

  Args:
    iterator: An iterator at the step that the run has reached.
    index: The corpus, in instances of the run's sequence length.
    steps: The number of steps of the run.
  """
  history, stream = iterator.history, iterator.stream
  stretches: list[changes_lib.Stretch] = []
  ends = [*(entry.step for entry in history.entries[1:]), max(steps, iterator.step)]
  for entry, end in zip(history.entries, ends):
    if _is_of(entry, stream):
      stretches.append(changes_lib.Stretch(entry.step, end, entry.schedule, stream, index))
    else:
      stretches.clear()
  if not stretches:
    raise errors.OrderError(
        f"Step {history.present.step} belongs to another stream, which this config does not"
        " describe. Use the config that was in force then."
    )
  return plan_lib.Plan(tuple(stretches), history, iterator.step)


def _is_of(entry: timeline_lib.Entry, stream: Any) -> bool:
  """Returns whether a stream is the one that was in force during a history entry."""
  known = {stream.identity()["fingerprint"], *(fingerprint for _, _, fingerprint in stream.history)}
  names = [name for name in stream.identity() if name != "fingerprint" and name in entry.identity]
  return (
      entry.identity.get("fingerprint") in known
      and not state_lib.stage_differences(entry, stream, entry.step)
      and entry.sequence_length == stream.sequence_length
      and all(entry.identity[name] == stream.identity()[name] for name in names)
  )
