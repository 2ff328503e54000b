"""Ray as an engine, on a cluster that is already running or on this machine.

This is the only module that imports Ray, which is not a dependency: a cluster has its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from maxtext_olmo.corpus.work import engines
from maxtext_olmo.errors import ConfigError

_RETRIES = 3  # Of a task whose worker or machine died.


class RayEngine:
  """A driver of a Ray cluster, which reassigns the tasks of dead workers."""

  in_process = False

  def __init__(self, ray: Any):
    self._ray = ray
    self._tasks: dict[Callable[..., Any], Any] = {}

  def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Calls a function in a worker of the cluster."""
    if function not in self._tasks:
      self._tasks[function] = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(function)
    found: concurrent.futures.Future[Any] = self._tasks[function].remote(*args).future()
    return found

  def parallelism(self) -> int:
    """Returns the current number of CPUs in the cluster."""
    return int(self._ray.cluster_resources().get("CPU", 0))

  def restart(self) -> None:
    """Raises: the cluster replaces its workers itself."""
    raise RuntimeError("Ray replaces its workers itself.")


@contextlib.contextmanager
def open_ray(address: str) -> Iterator[RayEngine]:
  """Yields an engine on a Ray cluster.

  Args:
    address: Address of a cluster, "auto" for the one that this machine belongs to, or "local" for a
      new one on this machine.
  """
  try:
    import ray
  except ImportError as error:
    raise ConfigError(
        "--ray needs Ray, which is not installed. Install the release that your cluster runs, for"
        " example with `pip install ray`."
    ) from error
  engines.check_reachable(
      address,
      "a Ray cluster",
      "`ray start --head` prints it. On a machine of the cluster, --ray auto finds it.",
  )
  try:
    ray.init(address=address, log_to_driver=False)
  except (ConnectionError, ValueError) as error:
    raise ConfigError(f"Cannot reach a Ray cluster at {address!r}: {error}") from error
  try:
    yield RayEngine(ray)
  finally:
    ray.shutdown()
