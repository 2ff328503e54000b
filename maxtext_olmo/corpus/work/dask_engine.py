"""Dask as an engine: a scheduler that is already running, or a cluster on this machine.

This is the only module that imports Dask (extra `[fleet]`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from maxtext_olmo.corpus.work import engines
from maxtext_olmo.errors import ConfigError

_CONNECT_SECONDS = 60


class DaskEngine:
  """A client of a Dask scheduler.

  The scheduler gives a task to another worker if its worker dies. It gives up on a task whose
  workers have died several times (`distributed.scheduler.allowed-failures`).
  """

  in_process = False

  def __init__(self, client: Any):
    self._client = client
    # Tasks write files, so equal tasks must not share a result, as calls of a pure function could.
    self._executor = client.get_executor(pure=False)

  def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Calls a function in a worker of the cluster."""
    found: concurrent.futures.Future[Any] = self._executor.submit(function, *args)
    return found

  def parallelism(self) -> int:
    """Returns the current number of threads of all workers in the cluster."""
    return sum(self._client.nthreads().values())

  def restart(self) -> None:
    """Raises: the cluster replaces its workers itself."""
    raise RuntimeError("Dask replaces its workers itself.")

  def close(self) -> None:
    """Cancels the tasks that have not begun."""
    self._executor.shutdown(wait=False)


@contextlib.contextmanager
def open_dask(address: str, workers: int) -> Iterator[DaskEngine]:
  """Yields an engine on a Dask scheduler.

  Args:
    address: Address of the scheduler, such as `tcp://10.0.0.1:8786`, or "local".
    workers: Number of processes of a local cluster.
  """
  try:
    import distributed
  except ImportError as error:
    raise ConfigError(
        "--dask needs Dask, which is not installed. On all machines, run"
        " `pip install -e '.[fleet]'` in the checkout of this project."
    ) from error
  with contextlib.ExitStack() as stack:
    if address == "local":
      cluster = distributed.LocalCluster(
          n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
      )
      stack.enter_context(cluster)
      client = distributed.Client(cluster)
    else:
      engines.check_reachable(
          address, "the Dask scheduler", "the scheduler prints it when it starts."
      )
      try:
        client = distributed.Client(address, timeout=_CONNECT_SECONDS)
      except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot reach the Dask scheduler at {address} ({error}). Check the address: the"
            " scheduler prints it when it starts."
        ) from error
    stack.enter_context(client)
    engine = DaskEngine(client)
    stack.callback(engine.close)
    yield engine
