"""Plans of runs: of a config, for a run that has not begun, or of an iterator that resumed one."""

from __future__ import annotations

from typing import Any

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.config_key import DOCUMENTS
from maxtext_olmo.config_key import GRAIN
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.inspection import plan as plan_lib
from maxtext_olmo.inspection import sources
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.loader import olmo_documents
from maxtext_olmo.loader import olmo_grain
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.loader import state as state_lib
from maxtext_olmo.order import timeline as timeline_lib


def plan_of_options(options: config_lib.Options, steps: int) -> plan_lib.Plan:
  """Returns the plan of a run that has not begun; opens the index, but no token file of windows.

  Args:
    options: The data keys of the run.
    steps: How many steps it has.

  Raises:
    ConfigError: Its rows have no labels, or cannot be found by position.
  """
  index: index_lib.OlmoNpyIndex
  stream: Any
  policy = None
  if options.dataset_type == GRAIN:
    index = olmo_grain.load_index(options.olmo_index_path, options)
    policy = stages_lib.policy_of(options, index, lambda path: olmo_grain.load_index(path, options))
    stream = policy.stream(policy.beginning)
  elif options.dataset_type == DOCUMENTS and options.random_access_documents:
    source = olmo_documents.open_documents(
        options.olmo_index_path, options.olmo_documents_path, options
    )
    index, stream = source.index, olmo_documents.train_stream(options, source)
  else:
    raise errors.ConfigError(
        f"dataset_type={options.dataset_type!r} has no plan: its rows have no labels, or are packed"
        " as they stream. olmo_grain has one, and olmo_documents with olmo_packing='planned'."
    )
  schedule = options.schedule().within(stream.batch_epochs)
  start = state_lib.Start(0, schedule, stream)
  start = state_lib.steered(
      start, options.skips, policy, () if policy is None else policy.beginning, 0
  )
  return plan_lib.Plan((sources.Stretch(0, steps, start.schedule, start.stream, index),))


def plan_of_iterator(
    iterator: iterator_lib.BatchIterator, index: index_lib.OlmoNpyIndex, steps: int
) -> plan_lib.Plan:
  """Returns the plan of a run that an iterator has resumed.

  Steps that were taken from another stream than the iterator's are left out.

  Args:
    iterator: At the step that the run has reached.
    index: The corpus, in instances of the run's sequence length.
    steps: How many steps the run will have.
  """
  history, stream = iterator.history, iterator.stream
  stretches: list[sources.Stretch] = []
  ends = [*(entry.step for entry in history.entries[1:]), max(steps, iterator.step)]
  for entry, end in zip(history.entries, ends):
    if _is_of(entry, stream):
      stretches.append(sources.Stretch(entry.step, end, entry.schedule, stream, index))
    else:
      stretches.clear()
  if not stretches:
    raise errors.OrderError(
        f"Step {history.present.step} was taken from another stream, which this config does not"
        " describe. Use the config that was in force then."
    )
  return plan_lib.Plan(tuple(stretches), history, iterator.step)


def _is_of(entry: timeline_lib.Entry, stream: Any) -> bool:
  """Returns whether a stream says which rows came while an entry was in force."""
  known = {stream.identity()["fingerprint"], *(fingerprint for _, _, fingerprint in stream.history)}
  names = [name for name in stream.identity() if name != "fingerprint" and name in entry.identity]
  return (
      entry.identity.get("fingerprint") in known
      and not state_lib.stage_differences(entry, stream, entry.step)
      and entry.sequence_length == stream.sequence_length
      and all(entry.identity[name] == stream.identity()[name] for name in names)
  )
