"""Notes that MaxText has stopped because of SIGTERM, so that its process asks to be started again.

MaxText saves a checkpoint when JAX reports a preemption, and then exits with code 0, as after its
last step. Schedulers would take the run for finished.
"""

from __future__ import annotations

from typing import Any

_reached: list[int] = []  # The steps at which JAX has reported a preemption.


def watch() -> None:
  """Notes from now on what JAX tells MaxText and Orbax; a second call changes nothing."""
  from jax.experimental import multihost_utils

  original = multihost_utils.reached_preemption_sync_point
  if hasattr(original, "noted_by_maxtext_olmo"):
    return

  def reached_preemption_sync_point(step_id: int) -> bool:
    reached = original(step_id)
    if reached:
      _reached.append(step_id)
    return reached

  wrapper: Any = reached_preemption_sync_point
  wrapper.noted_by_maxtext_olmo = True
  multihost_utils.reached_preemption_sync_point = wrapper


def is_preempted() -> bool:
  """Returns whether JAX has reported a preemption since `watch`."""
  return bool(_reached)
