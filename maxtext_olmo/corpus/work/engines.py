"""Engines: pools of workers that process items, submitted as in `concurrent.futures.Executor`.

threads      the default on one machine; no start-up, nothing is pickled
processes    spawned, never forked; a pool that breaks is replaced
Dask, Ray    clusters (`dask_engine`, `ray_engine`), imported only on request
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any, Protocol

from absl import logging

from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import ConfigError

_CONNECT_SECONDS = 30


class Engine(Protocol):
  """A pool of workers.

  Attributes:
    in_process: Whether workers are threads of this process.
  """

  in_process: bool

  def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Calls a function in a worker."""

  def parallelism(self) -> int:
    """Returns how many tasks can currently run at the same time; the number may change."""

  def restart(self) -> None:
    """Replaces workers after a `BrokenExecutor` error."""


@contextlib.contextmanager
def open_engine(options: WorkOptions, num_items: int) -> Iterator[Engine]:
  """Yields the engine that the options name, and stops it at the end.

  Args:
    options: How the work is done.
    num_items: Number of items to process; no more workers than this are started.
  """
  workers = available_cores() if options.workers is None else options.workers
  workers = max(1, min(workers, num_items))
  if options.dask:
    from maxtext_olmo.corpus.work import dask_engine

    with dask_engine.open_dask(options.dask, workers) as dask:
      yield dask
  elif options.ray:
    from maxtext_olmo.corpus.work import ray_engine

    with ray_engine.open_ray(options.ray) as ray:
      yield ray
  else:
    pool = _Processes(workers) if options.processes else _Threads(workers)
    try:
      yield pool
    except BaseException:  # Including Ctrl-C.
      pool.abandon()
      raise
    finally:
      pool.close()


def check_reachable(address: str, what: str, advice: str) -> None:
  """Raises ConfigError if nothing listens at host:port; the clusters' own clients try for minutes.

  Args:
    address: host:port, optionally with a scheme. Anything else, such as "auto", is not checked.
    what: What should be there.
    advice: How to find the address.
  """
  found = re.fullmatch(r"(?:(?:ray|tcp|tls|wss?)://)?\[?([^/\[\]]+)\]?:(\d+)", address)
  if found is None:
    return
  logging.info("Connecting to %s at %s.", what, address)
  try:
    socket.create_connection((found[1], int(found[2])), _CONNECT_SECONDS).close()
  except (OSError, OverflowError) as error:
    raise ConfigError(
        f"Cannot reach {what} at {address!r}: {error}. Check the address: {advice}"
    ) from error


class _Threads:
  """Threads of this process."""

  in_process = True

  def __init__(self, workers: int):
    self._workers = workers
    self._pool = concurrent.futures.ThreadPoolExecutor(workers, "work")

  def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    return self._pool.submit(function, *args)

  def parallelism(self) -> int:
    return self._workers

  def restart(self) -> None:
    raise RuntimeError("Threads do not break.")

  def abandon(self) -> None:
    """Does nothing: the caller tells threads to stop."""

  def close(self) -> None:
    self._pool.shutdown(cancel_futures=True)


class _Processes:
  """Processes on this machine, which end when this process dies."""

  in_process = False

  def __init__(self, workers: int):
    self._workers = workers
    self._pool = self._start()

  def _start(self) -> concurrent.futures.ProcessPoolExecutor:
    # Not forked: after a fork, threads of obstore, JAX and numba are gone, but their locks remain.
    context = multiprocessing.get_context("spawn")
    reader, self._writer = context.Pipe(duplex=False)
    return concurrent.futures.ProcessPoolExecutor(
        self._workers, context, initializer=_start_worker, initargs=(reader,)
    )

  def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    with interrupts_blocked():  # The pool starts its processes here.
      return self._pool.submit(function, *args)

  def parallelism(self) -> int:
    return self._workers

  def restart(self) -> None:
    self._pool.shutdown(wait=True, cancel_futures=True)
    self._pool = self._start()

  def abandon(self) -> None:
    """Ends the workers now: an item may take hours, and a result appears whole or not at all."""
    self._writer.close()

  def close(self) -> None:
    self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
  """Permanently blocks Ctrl-C in processes that are started in the block: their parent handles it.

  If Ctrl-C is pressed during the block, this process receives it afterwards.
  """
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(reader: connection.Connection) -> None:
  """Ends this process when its parent exits, is killed, or closes the other end of a pipe."""
  parent = multiprocessing.parent_process()

  def wait() -> None:
    if parent is not None:
      connection.wait([parent.sentinel, reader])
      os._exit(1)

  threading.Thread(target=wait, name="wait for parent", daemon=True).start()
