"""Who makes elements ahead: threads, or worker processes for those who ask for them.

Worker processes start in a plain script, and end with their trainer.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

import grain
from absl import flags

from maxtext_olmo.rows import crew


def in_threads(dataset: grain.MapDataset, *, ahead: int) -> grain.IterDataset:
  """The dataset, made by threads of this process.

  Args:
    dataset: What they make.
    ahead: How many elements are ready or being made.
  """
  threads = making_threads(ahead)
  return dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))


def making_threads(ahead: int) -> int:
  """How many threads make so many elements ahead; none where there are none."""
  # Two, so that one reads while the other filters; but one core is the trainer's, and that of who sends to the devices.
  return min(2, ahead, max(1, crew.cores() - 1))


def in_workers(dataset: grain.IterDataset, *, workers: int, ahead: int) -> grain.IterDataset:
  """The dataset, made by processes of their own.

  Args:
    dataset: What they make; they share its elements in turn.
    workers: How many processes.
    ahead: How many elements each of them has ready.
  """
  let_grain_read_its_flags()
  options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
  return dataset.mp_prefetch(options, worker_init_fn=_end_with_parent)


def let_grain_read_its_flags() -> None:
  """Grain's worker processes read absl flags, which a script that never calls app.run has not parsed."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


def _end_with_parent(worker: int, count: int) -> None:
  """A trainer that is killed cannot end its workers, and one that waits for a place in its queue would wait for ever."""
  del worker, count
  parent = multiprocessing.parent_process()
  if parent is None:
    return

  def wait() -> None:
    parent.join()
    os._exit(1)

  threading.Thread(target=wait, name="olmo-parent", daemon=True).start()
