"""Iterates over the data of all hosts as global batches.

`MultiHostDataLoadIterator` takes any iterable of pytrees of arrays, turns each host's batches into
global arrays (`global_batch`), divides an endless stream into epochs, and saves and restores its
place.

With `iterator_length`, `pad_shapes` or `tail`, the hosts compare their status before each step, by
a small all-gather (`collectives`). If one host fails, all hosts stop together. They also stop if
one host ends early without `tail`, or delivers a different shape without `pad_shapes`. Without this
exchange, a host that ends early leaves the others waiting, so all streams must be endless or
equally long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
from absl import logging
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from maxtext_olmo import errors
from maxtext_olmo.devices import global_batch
from maxtext_olmo.devices import grain_state
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.rows import prefetch

LOGGER = logging.get_absl_logger()

PyTree = Any


class MultiHostDataLoadIterator(grain.DatasetIterator[PyTree]):
  """Iterates over the data of all hosts as global batches.

  `iter()` starts a new epoch, unless a state was just set. Without `reset_after_epoch`, a new epoch
  continues in the data where the last one stopped, which suits an endless, shuffled stream. Threads
  may share the iterator: each batch goes to one thread, and a state is always between two steps.

  >>> import jax
  >>> import numpy as np
  >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  >>> batches = [{"inputs": np.full((2, 4), number)} for number in range(3)]
  >>> [int(batch["inputs"][0, 0]) for batch in MultiHostDataLoadIterator(batches, mesh)]
  [0, 1, 2]

  Args:
    dataloader: This host's batches, as pytrees of arrays with the batch on axis 0.
    global_mesh: Mesh to shard over.
    iterator_length: Number of steps per epoch; None lets an epoch last as long as the data.
    dataset_size: Value that `get_dataset_size` returns.
    reset_after_epoch: Whether each epoch starts again at the beginning of `dataloader`.
    pad_shapes: Whether each array is padded at its end to the largest shape on any host.
    pad_value: Value to pad with.
    data_sharding: Layout of a batch on the mesh; by default axis 0 is split over all mesh axes.
      Hosts whose devices hold the same rows of the batch must deliver identical data for them.
    tail: Function that makes a batch for a host whose data has ended while another host still has
      data. Without `tail`, all hosts must end at the same step.
  """

  def __init__(
      self,
      dataloader: Iterable[PyTree],
      global_mesh: Mesh,
      iterator_length: int | None = None,
      dataset_size: int | None = None,
      reset_after_epoch: bool = False,
      pad_shapes: bool = False,
      pad_value: int | float = 0,
      *,
      data_sharding: PartitionSpec | None = None,
      tail: Callable[[], PyTree] | None = None,
  ):
    super().__init__()
    self._lock = threading.RLock()
    self._pid = os.getpid()
    if not isinstance(dataloader, Iterable):
      raise errors.ConfigError(
          f"A dataloader must be iterable, but {type(dataloader).__name__} is not; pass a dataset,"
          " a list of batches or an iterator."
      )
    if iterator_length is not None and iterator_length < 0:
      raise errors.ConfigError(
          f"iterator_length={iterator_length} is negative; use None for an endless stream."
      )
    self.global_mesh = global_mesh
    self.dataloader = dataloader
    self.iterator_length = iterator_length
    self.dataset_size = dataset_size
    self.reset_after_epoch = reset_after_epoch
    self.pad_shapes = pad_shapes
    self.pad_value = pad_value
    self.data_sharding = data_sharding
    self.tail = tail
    # This raises an error for an impossible layout now instead of at the first batch.
    layout_lib.row_shards(global_mesh, data_sharding)
    self.state_set = False
    self.step_counter = 0
    self._epoch_start = 0
    self._epochs_started = 0
    self.local_iterator: Iterator[PyTree] = iter(dataloader)
    if reset_after_epoch and self.local_iterator is dataloader and not hasattr(dataloader, "reset"):
      raise errors.ConfigError(
          "reset_after_epoch needs a dataloader that can be iterated again, but"
          f" {type(dataloader).__name__} is an iterator that cannot be restarted; pass the dataset"
          " it came from."
      )

  def __iter__(self) -> MultiHostDataLoadIterator:
    with self._lock:
      if not self.state_set or self.step_counter == self.iterator_length:
        self.reset()
      self.state_set = False
      self._epochs_started += 1
      return self

  def __next__(self) -> PyTree:
    prefetch.check_process(self._pid)
    with self._lock:
      return self._next()

  def _next(self) -> PyTree:
    if self.iterator_length is not None and self.step_counter >= self.iterator_length:
      raise StopIteration
    length = "" if self.iterator_length is None else f" of {self.iterator_length}"
    try:
      batch = global_batch.next_global_batch(
          self.local_iterator,
          self.global_mesh,
          data_sharding=self.data_sharding,
          compare=self.iterator_length is not None or self.pad_shapes or self.tail is not None,
          pad=self.pad_shapes,
          pad_value=self.pad_value,
          when=f"step {self.step_counter}{length}",
          tail=self.tail,
      )
    except StopIteration:
      if self.step_counter == 0 and self._epochs_started > 1:
        LOGGER.warning(
            "Epoch %d has no batches: the data ended in an earlier epoch. Set reset_after_epoch, or"
            " repeat the data.",
            self._epochs_started,
        )
      raise
    self.step_counter += 1
    return batch

  def __len__(self) -> int:
    if self.iterator_length is None:
      raise TypeError(
          "This iterator has no length: it was created without iterator_length, and ends when its"
          " data does."
      )
    return self.iterator_length

  @property
  def step(self) -> int:
    """The number of steps done in all epochs."""
    return self._epoch_start + self.step_counter

  @property
  def position(self) -> int:
    """The number of batches read; the number of samples per batch is not known here."""
    return self.step

  def get_dataset_size(self) -> int | None:
    """Returns the size of the dataset, as given at construction."""
    return self.dataset_size

  def reset(self) -> None:
    """Starts an epoch at the next batch or, with `reset_after_epoch`, at the first batch."""
    with self._lock:
      self._epoch_start = 0 if self.reset_after_epoch else self.step
      self.step_counter = 0
      if not self.reset_after_epoch:
        return
      if self.local_iterator is self.dataloader:
        self.dataloader.reset()  # type: ignore[attr-defined]
      else:
        self.local_iterator = iter(self.dataloader)

  def get_state(self) -> dict[str, Any]:
    """Returns the state of all processes as a JSON-able dict (`grain_state`).

    If there are several processes, the states of their data iterators are gathered, so all
    processes must call this together.
    """
    with self._lock:
      return self._state().write(own_iterator=self._own_iterator)

  def set_state(self, state: dict[str, Any]) -> None:
    """Moves to the step of a saved state. Only warns if the data iterator has no `set_state`."""
    saved = grain_state.read(state)
    with self._lock:
      self._check(saved)
      self._move_to(saved)

  def start_prefetch(self) -> None:
    """Starts preparing batches in advance, if the data iterator supports it."""
    prefetch.check_process(self._pid)
    with self._lock:
      if hasattr(self.local_iterator, "start_prefetch"):
        self.local_iterator.start_prefetch()

  def close(self) -> None:
    """Stops the background work of the data iterator, such as worker processes."""
    if os.getpid() == self._pid:  # A forked child must not stop its parent's work.
      with self._lock:
        self._close()

  def _close(self) -> None:
    if hasattr(self.local_iterator, "close"):
      self.local_iterator.close()

  def __del__(self) -> None:
    """Leaves the data iterator open, because the caller that passed it may still use it."""

  @property
  def _own_iterator(self) -> bool:
    """True if the state of the data iterator may differ between processes."""
    return True

  def _state(self) -> grain_state.GrainState:
    get_state = getattr(self.local_iterator, "get_state", None)
    return grain_state.GrainState(
        step=self.step,
        epoch_start=self._epoch_start,
        iterator_length=self.iterator_length,
        position=self.position,
        identity={},
        iterator=None if get_state is None else get_state(),
    )

  def _check(self, saved: grain_state.GrainState) -> None:
    length = self.iterator_length
    if saved.iterator_length != length:
      raise errors.ResumeError(
          f"The state was saved with iterator_length={saved.iterator_length}, but this iterator has"
          f" iterator_length={length}. Use the saved value. To continue in the same data with"
          " epochs of a different length, change 'iterator_length' in the state, set its"
          " 'epoch_start' to its 'step', and remove its 'checksum'."
      )
    step = saved.step - saved.epoch_start
    if length is not None and step > length:
      raise errors.ResumeError(
          f"The state is at step {step}, outside an epoch of {length} steps. Create the iterator as"
          " it was when the state was saved."
      )

  def _move_to(self, saved: grain_state.GrainState) -> None:
    restorable = hasattr(self.local_iterator, "set_state")
    has_state = saved.iterator is not None
    if restorable != has_state:
      raise errors.ResumeError(
          f"The state {'has' if has_state else 'lacks'} the state of a data iterator, but"
          f" {type(self.local_iterator).__name__} {'needs one' if restorable else 'takes none'}. It"
          " was saved with a different kind of dataloader: resume with that dataloader."
      )
    if not restorable:
      LOGGER.warning(
          "%s has no set_state, so its data cannot be moved to step %d of the state: it continues"
          " at its current batch.",
          type(self.local_iterator).__name__,
          saved.step,
      )
      self.state_set = False
      return
    try:
      self.local_iterator.set_state(saved.iterator)  # type: ignore[attr-defined]
    except errors.ResumeError:
      raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
      raise errors.ResumeError(
          f"{type(self.local_iterator).__name__} cannot restore its part of the data state"
          f" ({type(error).__name__}: {error}): the state is damaged, or was saved with a different"
          " dataloader. Restore a different checkpoint."
      ) from error
    self._epoch_start = saved.epoch_start
    self.step_counter = saved.step - saved.epoch_start
    self.state_set = True
