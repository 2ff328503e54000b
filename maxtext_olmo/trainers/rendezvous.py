"""Checks the coordinator address of a run, and limits how long its processes wait to connect."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

from absl import logging

from maxtext_olmo import errors

# Seconds until a waiting process first logs the reason, and between later messages.
_FIRST_REMINDER, _REMINDERS = 15.0, 30.0
# The process that had the port before may still be exiting.
_PORT_SECONDS = 10.0


def check_address(address: str, *, is_ours: bool) -> None:
  """Raises ConfigError if no process can listen at an address.

  Args:
    address: host:port of process 0.
    is_ours: Whether this process will listen there. JAX would crash if the port were in use.
  """
  host, _, port = address.rpartition(":")
  if not host or not _is_port(port):
    raise errors.ConfigError(
        f"coordinator_address (or JAX_COORDINATOR_ADDRESS) is {address!r}, but must be HOST:PORT,"
        " such as 10.0.0.1:1234."
    )
  if not is_ours:
    return
  bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[2]
  port = bound if _is_port(bound) else port
  deadline = time.monotonic() + _PORT_SECONDS
  while _is_in_use(int(port)):
    if time.monotonic() > deadline:
      raise errors.ConfigError(
          f"Process 0 cannot listen at coordinator_address={address}, because port {port} of this"
          " host is in use. Choose another port for all processes, or stop the process that uses"
          f" it (`ss -ltnp sport = :{port}` names it)."
      )
    time.sleep(0.5)


def _is_port(text: str) -> bool:
  return text.isdecimal() and 0 < int(text) < 1 << 16


def _is_in_use(port: int) -> bool:
  """Returns whether a process of this host listens on a port."""
  for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
    try:
      with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
          probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((everywhere, port))
    except OSError as error:
      if error.errno == errno.EADDRINUSE:
        return True
  return False


@contextlib.contextmanager
def limit(
    count: int,
    seconds: int,
    address: Callable[[], str],
    give_up: Callable[[errors.ConfigError], None] | None,
) -> Iterator[None]:
  """Logs periodically what the block is waiting for, and ends the process after `seconds`.

  Both happen in a thread, because the JAX call inside the block does not return.

  Args:
    count: Number of processes.
    seconds: How long the block may take.
    address: Returns the host:port of process 0, once it is known.
    give_up: Called before the process ends; by default, the error is logged.
  """

  def end() -> None:
    error = errors.ConfigError(
        f"This process, one of {count}, stopped after waiting {seconds} s for the others:"
        f" {_describe_coordinator(address())}. Check coordinator_address, num_processes and"
        " process_id, the network between the hosts, and that all tasks have started."
    )
    if give_up is None:
      logging.error("ConfigError: %s", error)
    else:
      give_up(error)
    logging.flush()
    # Not 2, which means that a restart does not help: a host may only be slow to come back.
    os._exit(1)

  def watch() -> None:
    began, due = time.monotonic(), _FIRST_REMINDER
    while not connected.wait(min(due, seconds) - (time.monotonic() - began)):
      if due >= seconds:
        end()
      logging.warning("still waiting after %.0f s: %s", due, _describe_coordinator(address()))
      due += _REMINDERS

  connected = threading.Event()
  threading.Thread(target=watch, name="olmo-connect", daemon=True).start()
  try:
    yield
  finally:
    connected.set()


def _describe_coordinator(address: str) -> str:
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
  except (OSError, ValueError) as error:
    return f"process 0 does not answer at {address} ({error})"
  return f"process 0 answers at {address}, but not all processes have connected"
