"""A lease on a checkpoint directory, so that two runs never write to the same directory.

The lease is a small file (or object) in the directory that names the host, process and start time
of its holder, process 0 of a run. A thread of the holder renews it every minute. A second run is
refused while the holder is alive. It takes over immediately if the holder ran on this machine and
has ended. If the holder ran elsewhere, the second run watches the lease: it is refused at the next
renewal, and takes over after five minutes without one.

Before each save, the holder checks that the lease still contains its own text, and creates it again
if it is gone. Nothing but the lease decides this, so at most one run passes the check, even if
processes were paused and resumed. See `lease_places` for how leases are stored.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.devices import collectives
from maxtext_olmo.trainers import failure
from maxtext_olmo.trainers import lease_places

RENEW_SECONDS = 60.0
STALE_SECONDS = 300.0
# Other processes wait in a collective while process 0 watches a lease, and must not time out there.
_LOOK_SECONDS = 5.0
# A store that does not answer must not keep a process from exiting.
_RELEASE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Holder:
  """The process that holds a lease, as described in the lease file."""

  host: str
  pid: int
  started: str  # When the process took the lease, in UTC.
  machine: str  # Id of the boot and of the namespace in which `pid` is valid; empty if unknown.
  process_start: int  # Start in clock ticks since boot; tells apart processes with the same pid.
  id: str

  @classmethod
  def this_process(cls) -> Holder:
    """Returns a new holder that describes this process."""
    return cls(
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        machine=_machine(),
        process_start=_process_start(os.getpid()) or 0,
        id=uuid.uuid4().hex,
    )

  def __str__(self) -> str:
    return f"process {self.pid} on {self.host}, started {self.started}"

  @classmethod
  def parse(cls, text: str) -> Holder | None:
    """Returns the process that the text of a lease names; None if it cannot be parsed."""
    try:
      return cls(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
      return None

  @property
  def is_on_this_machine(self) -> bool:
    """Whether the process runs, or ran, where this process can see it."""
    return bool(self.machine) and self.machine == _machine()

  @property
  def is_gone(self) -> bool:
    """Whether the process is known to have ended; False if it cannot be checked from here."""
    if not self.is_on_this_machine:
      return False
    try:
      os.kill(self.pid, 0)
    except ProcessLookupError:
      return True
    except OSError:
      pass  # The process exists, but belongs to another user.
    start = _process_start(self.pid)
    return start is not None and start != self.process_start


class Lease:
  """The lease of a run; all processes of the run create and check it together.

  Args:
    directory: The checkpoint directory, which is created if needed, or its URL. If its file system
      has no hard links, or its bucket cannot be reached with obstore, there is no lease, and a
      warning says so.
    renew_seconds: The time between renewals.
    options: Options for connecting to the store of a URL; by default, those of the environment.

  Raises:
    ConfigError: Another run holds the lease, or the directory cannot be written to.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      renew_seconds: float = RENEW_SECONDS,
      options: stores.StoreOptions | None = None,
  ):
    text = os.fspath(directory)
    self._directory = text if "://" in text else os.path.abspath(text)
    self._place = lease_places.open_place(self._directory, options)
    self._seconds = renew_seconds
    self._watched: lease_places.Found | None = None  # Another run's lease, when it was first seen.
    self._lost = ""  # Why this run no longer holds the lease; empty if it does.
    self._thread: threading.Thread | None = None  # Set only while this process holds the lease.
    self._released = threading.Event()
    self._pid = os.getpid()
    self._text = ""
    self._checked = time.time()  # By a clock that also counts while the machine is suspended.
    while not collectives.from_process_0(self._take, "taking the lease of checkpoint_dir"):
      pass

  def check(self) -> None:
    """Raises ConfigError unless this run still holds the lease; call it before each save."""

    def check() -> None:
      try:
        self._check()
      except OSError as error:
        path = self._place.path
        raise errors.ConfigError(f"The lease {path} cannot be read: {error}.") from error

    collectives.from_process_0(check, "checking the lease of checkpoint_dir")

  def require_held(self) -> None:
    """Raises ConfigError if another run has taken over.

    Involves no other process, so it may be called at any time. An unreadable file is ignored,
    because a short storage failure need not end a run. A lease in a bucket is read only if the
    thread that renews it has not done so in time, for example because this process was suspended:
    reading it each time would delay each step.
    """
    is_late = time.time() - self._checked > 2 * self._seconds
    if self._lost or self._place.is_fast or is_late:
      self._checked = time.time()  # First, so that an outage does not delay the next step too.
      with contextlib.suppress(OSError):
        self._check()

  def release(self) -> None:
    """Releases the lease; idempotent. Does nothing in a forked child."""
    if self._thread is None or os.getpid() != self._pid:
      return
    atexit.unregister(self.release)
    failure.remove_cleanup(self.release)
    self._released.set()  # The thread removes the lease.
    self._thread.join(_RELEASE_SECONDS)
    self._thread = None

  def __enter__(self) -> Lease:
    return self

  def __exit__(self, *error: Any) -> None:
    self.release()

  def _take(self) -> bool:
    """Takes the lease, if the directory can have one; returns False if it has to be watched."""
    self._text = json.dumps(dataclasses.asdict(Holder.this_process()))
    try:
      self._place.prepare()
      while not self._place.create(self._text):
        found = self._place.read()
        if found is None:
          continue
        if found.text == self._text:  # An earlier attempt at the request had succeeded.
          break
        if not self._is_abandoned(found):
          return False
        if self._place.take_over(found, self._text):
          break
    except lease_places.NoLeaseError as error:
      logging.warning(
          "There is no lease for checkpoint_dir=%s (%s): nothing prevents a second run from writing"
          " there, resuming from this run's checkpoints or deleting them. Make sure that only one"
          " run uses it.",
          self._directory,
          error,
      )
      return True
    except (OSError, ValueError) as error:
      if isinstance(error, errors.ConfigError):
        raise
      raise errors.ConfigError(
          f"checkpoint_dir={self._directory!r} cannot be written to: {error}. Choose a directory"
          " with free space that this process may write to, or set enable_checkpointing=False."
      ) from error
    self._thread = threading.Thread(target=self._renew, name="olmo-lease", daemon=True)
    self._thread.start()
    atexit.register(self.release)
    failure.add_cleanup(self.release)
    return True

  def _is_abandoned(self, found: lease_places.Found) -> bool:
    """Returns whether a lease may be taken over; if that is not known yet, waits and returns False.

    Raises:
      ConfigError: The holder is alive.
    """
    path, holder = self._place.path, Holder.parse(found.text)
    if holder is not None and holder.is_gone:
      logging.info("The lease %s belongs to %s, which has ended; taking over.", path, holder)
      return True
    age = self._place.now() - found.renewed
    left = STALE_SECONDS - age
    who = holder or "an unknown process"
    if left < 0:
      logging.info(
          "The lease %s of %s has not been renewed for %.0f s; taking over.", path, who, age
      )
      return True
    is_visible = holder is None or holder.is_on_this_machine
    if is_visible or self._watched not in (None, found):
      raise errors.ConfigError(
          f"checkpoint_dir={self._directory!r} is in use by {who} (lease"
          f" renewed {max(0.0, age):.0f} s ago). Two runs must not write to the same directory:"
          " stop the other run, or choose another checkpoint_dir. If the processes belong to one"
          " run, connect them with coordinator_address, num_processes and process_id. If no run"
          f" uses the directory, delete {path}."
      )
    if self._watched is None:
      self._watched = found
      logging.warning(
          "checkpoint_dir=%s belongs to %s. Waiting %.0f s for a renewal of the lease; without one,"
          " this run takes over. To take over now, delete %s.",
          self._directory,
          who,
          left,
          path,
      )
    time.sleep(min(_LOOK_SECONDS, left + 0.01))
    return False

  def _renew(self) -> None:
    while not self._released.wait(self._seconds):
      try:
        self._check()
        self._place.renew(self._text)
        self._checked = time.time()
      except errors.ConfigError as error:
        self._lost = str(error)
        logging.error("%s", error)
        return
      except OSError as error:
        logging.warning("The lease %s could not be renewed: %s", self._place.path, error)
    with contextlib.suppress(OSError):
      self._place.remove(self._text)

  def _check(self) -> None:
    if self._lost:  # Nothing would renew a lease that is taken again.
      raise errors.ConfigError(self._lost)
    if self._thread is None:
      return
    while True:
      found = self._place.read()
      if found is None:
        # The lease was deleted, or another run mistook it for an abandoned one and renamed it for a
        # moment.
        if self._place.create(self._text):
          return
      elif found.text == self._text:
        return
      else:
        holder = Holder.parse(found.text) or "another run"
        raise errors.ConfigError(
            f"checkpoint_dir={self._directory!r} now belongs to {holder}, which took over the lease"
            " because this run did not renew it in time. This run stops here and writes no further"
            " checkpoints; you can resume it once the other run has ended."
        )


def find_holder(directory: str) -> str:
  """Returns which process holds the lease of a directory; empty if none does, or not any more."""
  place = lease_places.open_place(directory)
  found = place.read()
  if found is None or place.now() - found.renewed > STALE_SECONDS:
    return ""
  holder = Holder.parse(found.text)
  return "" if holder is not None and holder.is_gone else str(holder or "an unknown process")


def _machine() -> str:
  """Returns an id of this machine, its current boot and its pid namespace; empty if unknown."""
  try:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
      return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return ""


def _process_start(pid: int) -> int | None:
  """Returns when a process started, in ticks since boot; 0 if it has ended, None if unknown."""
  try:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
      fields = file.read().rpartition(")")[2].split()
  except OSError:
    return None
  return 0 if fields[0] in "ZX" else int(fields[19])
