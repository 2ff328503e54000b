"""What every iterator from `create_data_iterator` can do, whichever dataset type made it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class DataIterator(Protocol):
  """An iterator over global batches that can save its place and return to it.

  Dataset types of other packages implement this protocol; `create_data_iterator` refuses an
  iterator that lacks one of its members. A trainer uses it like this:

      train, _ = maxtext_olmo.create_data_iterator(config, mesh)
      for batch in train:
        state = train_step(state, batch)
        checkpoint(state, train.get_state())
      train.close()
  """

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    """Returns the iterator itself. An eval iterator starts again from the beginning."""

  def __next__(self) -> dict[str, jax.Array]:
    """Returns the global batch of the next step, as arrays on the mesh."""

  def get_state(self) -> dict[str, Any]:
    """Returns the state after the last batch that was taken, as a JSON value."""

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues after a saved state; raises ResumeError if it belongs to another stream."""

  def reset(self) -> None:
    """Returns to where the iterator started."""

  def close(self) -> None:
    """Stops threads and worker processes; a second call does nothing."""

  def metrics(self) -> dict[str, float]:
    """Returns what loading has cost so far, by name."""

  @property
  def step(self) -> int:
    """Steps done, which is also the number of the next step."""

  @property
  def position(self) -> int:
    """Samples consumed, over all hosts."""

  @property
  def local_iterator(self) -> Any:
    """The object whose state this process checkpoints; usually the iterator itself."""


_MEMBERS = tuple(
    name
    for name in vars(DataIterator)
    if name in ("__iter__", "__next__") or not name.startswith("_")
)


def missing_members(iterator: Any) -> list[str]:
  """Returns the names of the members of `DataIterator` that an object lacks."""
  return [name for name in _MEMBERS if not hasattr(iterator, name)]
