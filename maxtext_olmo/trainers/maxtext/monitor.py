"""Adds the position and the epoch of each step to MaxText's metrics and to the log.

Also makes a run fail if its data pipeline has failed.

MaxText's loop takes a batch, runs the step, and passes the step's metrics to its logger. The
position and the epoch are recorded when the batch is taken, so they always belong to that step. The
metrics get the scalars `data/position` and `data/epoch`, which MaxText writes wherever it writes
metrics (TensorBoard, metrics_file, …), and the log gets a line for each step. A run with stages
also has `data/stage`, and its epochs are counted within the stage.

MaxText treats an error in the data pipeline as the end of the data, so the run would end as if it
had succeeded. To prevent this, the error is raised again when the metrics are flushed, which
MaxText's trainers do last.
"""

from __future__ import annotations

import weakref
from typing import Any

from absl import logging

# The position and epoch of the batch that the train loop took last. A process has one such loop.
_taken: dict[str, int] = {}
# The iterators of the run that this process trains.
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()


def fail_with(*iterators: Any) -> None:
  """Makes the run fail at its end if one of these iterators has failed; ignores None."""
  _iterators.clear()
  _iterators.update(iterator for iterator in iterators if iterator is not None)


def watch(loader: Any, iterator: Any) -> Any:
  """Makes MaxText's data loader record the position of each batch, and returns the loader."""
  load = loader.load_next_batch
  _taken.clear()

  def load_next_batch(*args: Any, **kwargs: Any) -> Any:
    step = iterator.step
    where = getattr(iterator, "place", {"position": iterator.position})
    batch = load(*args, **kwargs)
    if iterator.step != step:  # MaxText can be configured to reuse a batch.
      _taken.clear()
      _taken.update({f"data/{name}": value for name, value in where.items()})
    return batch

  loader.load_next_batch = load_next_batch
  return loader


def add_to_metrics(logger: Any) -> Any:
  """Makes MaxText's metric logger add position and epoch to each step, and returns the logger."""
  write = logger.buffer_and_write_metrics

  def buffer_and_write_metrics(
      metrics: Any, step: int, step_time_delta: Any = None, is_training: bool = True
  ) -> None:
    if is_training and _taken:
      metrics["scalar"].update(_taken)
      place = ", ".join(f"{name.removeprefix('data/')} {value}" for name, value in _taken.items())
      logging.info("olmo_grain: step %d began at %s.", step, place)
    write(metrics, step, step_time_delta, is_training)

  flush = logger.flush_metrics_and_cleanup

  def flush_metrics_and_cleanup(*args: Any, **kwargs: Any) -> None:
    flush(*args, **kwargs)
    for iterator in _iterators:
      failure = getattr(iterator, "failure", None)  # Iterators of other packages need not have it.
      if failure is not None:
        raise failure

  logger.buffer_and_write_metrics = buffer_and_write_metrics
  logger.flush_metrics_and_cleanup = flush_metrics_and_cleanup
  return logger
