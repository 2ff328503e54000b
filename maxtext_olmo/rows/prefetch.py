"""Elements prepared ahead by threads or processes, with a state that knows nothing of them.

Grain's own state of several workers restores only into as many workers. Here the state is how many elements were taken,
and a restore opens the dataset there anew, so a run may change its workers, and the elements are the same for any number.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import grain

from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import ResumeError
from maxtext_olmo.rows import workers


class PrefetchedDataset(grain.IterDataset[Any]):
  """The elements of a `MapDataset` in order, those that are None left out; {} ends it early.

  Args:
    dataset: Any element must be the same whoever asks for it.
    workers: Processes that prepare elements; 0 leaves it to threads.
    ahead: Elements that each process, or the threads, prepare ahead; 0 threads make each when it is asked for.
  """

  def __init__(self, dataset: grain.MapDataset, *, workers: int = 0, ahead: int = 1):
    super().__init__(dataset)
    if workers < 0 or ahead < 0 or (workers and not ahead):
      raise ConfigError(
          f"worker_count={workers} and worker_buffer_size={ahead} must not be negative, and workers need a buffer."
      )
    self._workers = workers
    self._ahead = ahead

  def __iter__(self) -> grain.DatasetIterator:
    return _PrefetchedIterator(self._parent, self._workers, self._ahead)


class _PrefetchedIterator(grain.DatasetIterator[Any]):

  def __init__(self, dataset: grain.MapDataset, workers: int, ahead: int):
    super().__init__()
    self._dataset = dataset
    self._workers = workers
    self._ahead = ahead
    self._taken = 0
    self._opened: grain.DatasetIterator | None = None

  def __next__(self) -> Any:
    self._assert_not_closed()
    if self._opened is None:
      self._opened = self._open()
    while True:
      element = next(self._opened).value
      if isinstance(element, dict) and not element:
        raise StopIteration
      self._taken += 1
      if element is not None:
        return element

  def get_state(self) -> dict[str, Any]:
    return {"next_index": self._taken}

  def set_state(self, state: dict[str, Any]) -> None:
    taken = state.get("next_index") if isinstance(state, dict) else None
    if not isinstance(taken, int) or taken < 0:
      raise ResumeError(
          f"Expected the state of a prefetched dataset, {{'next_index': n}}, found {state!r}."
      )
    self._stop()
    self._taken = taken

  def close(self) -> None:
    self._stop()
    super().close()

  def _stop(self) -> None:
    if self._opened is not None:
      self._opened.close()
      self._opened = None

  def _open(self) -> grain.DatasetIterator:
    elements = _From(self._dataset, self._taken)
    if self._workers:
      dataset = workers.in_workers(
          elements.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)),
          workers=self._workers,
          ahead=self._ahead,
      )
    else:
      dataset = workers.in_threads(elements, ahead=self._ahead)
    return iter(dataset)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wrapped:
  """An element that Grain does not look into.

  One that is None it would pass over, and lose count. Arrays of a worker it would put into shared memory, and those on
  their way when the iterator is closed would stay there until the interpreter exits and complains of them.
  """

  value: Any


class _From(grain.MapDataset[_Wrapped]):
  """A dataset from some element on."""

  def __init__(self, dataset: grain.MapDataset, first: int):
    super().__init__(dataset)
    self._first = first

  def __len__(self) -> int:
    return max(0, len(self._parent) - self._first)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    return _Wrapped(self._parent[self._first + index])
