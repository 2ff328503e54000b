"""What every dataset type derives from the options: layouts, content, prefetching, agreement."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.devices import collectives
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.loader import iterator as iterator_lib
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import steps


def train_layouts(
    options: config_lib.Options, mesh: jax.sharding.Mesh, schedule: schedule_lib.BatchSchedule
) -> dict[int, layout_lib.BatchLayout]:
  """Returns the layout of training batches on the mesh, for each batch size of the schedule."""
  spec = layout_lib.partition_spec(mesh, options.data_sharding)
  load = options.global_batch_size_to_load
  return {
      size: layout_lib.BatchLayout(
          mesh, spec, size if options.has_batch_schedule else load, options.max_target_length
      )
      for size in schedule.sizes
  }


def eval_layouts(
    options: config_lib.Options, mesh: jax.sharding.Mesh
) -> dict[int, layout_lib.BatchLayout]:
  """Returns the layout of evaluation batches, which have one size."""
  layout = layout_lib.BatchLayout(
      mesh,
      layout_lib.partition_spec(mesh, options.data_sharding),
      options.global_batch_size_to_load_eval,
      options.max_target_length,
  )
  return {options.global_batch_size_to_eval_on: layout}


def content(options: config_lib.Options) -> steps.Content:
  """Returns what is done with the tokens of a row."""
  return steps.Content(
      vocab_size=options.vocab_size,
      ngram_filter=options.olmo_apply_ngram_filter,
      shift=batch_lib.Shift(options.olmo_shift, max(0, options.olmo_eos_id)),
      extras=tuple(options.olmo_batch_extras),
  )


def labels(index: index_lib.OlmoNpyIndex) -> np.ndarray:
  """Returns for each file the number of its label, in the order in which labels first appear."""
  numbers: dict[str, int] = {}
  return np.array([numbers.setdefault(f.label, len(numbers)) for f in index.files], np.int32)


def prefetch(options: config_lib.Options) -> iterator_lib.Prefetch:
  """Who prepares batches ahead."""
  return iterator_lib.Prefetch(
      workers=max(0, options.grain_worker_count),
      per_worker=max(1, options.grain_per_worker_buffer_size),
      batches=options.olmo_prefetch_batches,
      on_device=options.olmo_device_prefetch,
  )


def check_agreement(options: config_lib.Options, stream: Any) -> None:
  """Raises on all processes where they were given different runs."""
  together: dict[str, Any] = {**options.run_options(), **stream.identity()}
  collectives.check_equal(together)
