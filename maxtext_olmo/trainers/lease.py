"""A lease on a checkpoint directory, so that two runs never write to the same directory.

The lease is a small file in the directory that names the host, process and start time of its
holder, process 0 of a run. A thread of the holder renews the file's modification time every minute.
A second run is refused while the holder is alive. It takes over immediately if the holder ran on
this machine and has ended. If the holder ran elsewhere, the second run watches the lease: it is
refused at the next renewal, and takes over after five minutes without one.

    take       hard-link a complete file to the lease's name; fails if the lease exists
    take over  rename the abandoned lease, put it back if it is in fact a new one, then take
    check      require that the file still has this run's text; if the file is gone, take it again

Only the file counts, so at most one run passes `check`, even if processes were paused and resumed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import json
import os
import socket
import tempfile
import threading
import time
import uuid
from typing import Any, NamedTuple

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives
from maxtext_olmo.trainers import failure

FILE_NAME = ".lease"
RENEW_SECONDS = 60.0
STALE_SECONDS = 300.0
# Other processes wait in a collective while process 0 watches a lease, and must not time out there.
_LOOK_SECONDS = 5.0
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


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
    directory: The checkpoint directory, which is created if needed. If it is a URL, or its file
      system has no hard links, there is no lease, and a warning says so.
    renew_seconds: The time between renewals.

  Raises:
    ConfigError: Another run holds the lease, or the directory cannot be written to.
  """

  def __init__(self, directory: str | os.PathLike[str], *, renew_seconds: float = RENEW_SECONDS):
    text = os.fspath(directory)
    self._directory = text if "://" in text else os.path.abspath(text)
    self._path = os.path.join(self._directory, FILE_NAME)
    self._seconds = renew_seconds
    self._watched: _Found | None = None  # The lease of another run, when it was first seen.
    self._thread: threading.Thread | None = None  # Set only while this process holds the lease.
    self._released = threading.Event()
    self._pid = os.getpid()
    self._text = ""
    while not collectives.from_process_0(self._take, "taking the lease of checkpoint_dir"):
      pass

  def check(self) -> None:
    """Raises ConfigError unless this run still holds the lease; call it before each save."""

    def check() -> None:
      try:
        self._check()
      except OSError as error:
        raise errors.ConfigError(f"The lease {self._path} cannot be read: {error}.") from error

    collectives.from_process_0(check, "checking the lease of checkpoint_dir")

  def require_held(self) -> None:
    """Raises ConfigError if another run has taken over.

    Involves no other process, so it may be called at any time. An unreadable file is ignored,
    because a short storage failure need not end a run.
    """
    with contextlib.suppress(OSError):
      self._check()

  def release(self) -> None:
    """Releases the lease; idempotent. Does nothing in a forked child."""
    if self._thread is None or os.getpid() != self._pid:
      return
    atexit.unregister(self.release)
    failure.remove_cleanup(self.release)
    self._released.set()
    self._thread.join(self._seconds)
    self._thread = None
    with contextlib.suppress(OSError):
      found = _read(self._path)
      if found is not None and found.text == self._text:
        os.unlink(self._path)

  def __enter__(self) -> Lease:
    return self

  def __exit__(self, *error: Any) -> None:
    self.release()

  def _take(self) -> bool:
    """Takes the lease, if the directory can have one; returns False if it has to be watched."""
    if "://" in self._directory:
      logging.warning(
          "checkpoint_dir=%s is a URL, so there is no lease: nothing prevents a second run from"
          " writing there, resuming from this run's checkpoints or deleting them. Make sure that"
          " only one run uses it.",
          self._directory,
      )
      return True
    self._text = json.dumps(dataclasses.asdict(Holder.this_process()))
    try:
      os.makedirs(self._directory, exist_ok=True)
      while not _create(self._path, self._text):
        found = _read(self._path)
        if found is not None:
          if not self._is_abandoned(found):
            return False
          _remove(self._path, found.text)
    except _NoHardLinksError:
      logging.warning(
          "The file system of checkpoint_dir=%s has no hard links, so there is no lease: nothing"
          " prevents a second run from writing there, resuming from this run's checkpoints or"
          " deleting them. Make sure that only one run uses it.",
          self._directory,
      )
      return True
    except (OSError, ValueError) as error:
      if isinstance(error, errors.MaxtextOlmoError):
        raise
      raise errors.ConfigError(
          f"checkpoint_dir={self._directory!r} cannot be written to: {error}. Make it a directory"
          " that this process may write to, with free space, or set enable_checkpointing=False."
      ) from error
    self._thread = threading.Thread(target=self._renew, name="olmo-lease", daemon=True)
    self._thread.start()
    atexit.register(self.release)
    failure.add_cleanup(self.release)
    return True

  def _is_abandoned(self, found: _Found) -> bool:
    """Returns whether a lease may be taken over, after a wait if that is not known.

    Raises:
      ConfigError: The holder is alive.
    """
    holder = found.holder
    if holder is not None and holder.is_gone:
      logging.info("The lease %s belongs to %s, which has ended; taking over.", self._path, holder)
      return True
    # Use the clock of the storage, which both runs see, rather than the clock of a host.
    with tempfile.TemporaryFile(dir=self._directory) as probe:
      age = os.fstat(probe.fileno()).st_mtime - found.renewed
    left = STALE_SECONDS - age
    who = holder or "an unknown process"
    if left < 0:
      logging.info(
          "The lease %s of %s has not been renewed for %.0f s; taking over.", self._path, who, age
      )
      return True
    is_visible = holder is None or holder.is_on_this_machine
    if is_visible or self._watched not in (None, found):
      raise errors.ConfigError(
          f"checkpoint_dir={self._directory!r} is in use by {who} (lease"
          f" renewed {max(0.0, age):.0f} s ago). Two runs must not write to one directory: stop the"
          " other run, or choose another checkpoint_dir. If the processes belong to one run,"
          " connect them with coordinator_address, num_processes and process_id. If no run uses the"
          f" directory, delete {self._path}."
      )
    if self._watched is None:
      self._watched = found
      logging.warning(
          "checkpoint_dir=%s belongs to %s. Waiting %.0f s for a sign of life; without one, this"
          " run takes over. To take over now, delete %s.",
          self._directory,
          who,
          left,
          self._path,
      )
    time.sleep(min(_LOOK_SECONDS, left + 0.01))
    return False

  def _renew(self) -> None:
    while not self._released.wait(self._seconds):
      try:
        self._check()
        os.utime(self._path)
      except errors.ConfigError as error:
        logging.error("%s", error)
        return
      except OSError as error:
        logging.warning("The lease %s could not be renewed: %s", self._path, error)

  def _check(self) -> None:
    if self._thread is None:
      return
    while True:
      found = _read(self._path)
      if found is None:
        # The lease was deleted, or another run mistook it for an abandoned one and renamed it for a
        # moment.
        if _create(self._path, self._text):
          return
      elif found.text == self._text:
        return
      else:
        raise errors.ConfigError(
            f"checkpoint_dir={self._directory!r} now belongs to {found.holder or 'another run'},"
            " which took over the lease because this run did not renew it in time. This run stops"
            " here and writes no further checkpoint; it may resume once the other run has ended."
        )


class _Found(NamedTuple):
  """The text of a lease file, and when it was last renewed."""

  text: str
  renewed: float  # The file's modification time, by the clock of the storage.

  @property
  def holder(self) -> Holder | None:
    """The process that holds the lease; None if the file cannot be parsed."""
    try:
      return Holder(**json.loads(self.text))
    except (ValueError, TypeError, RecursionError):
      return None


class _NoHardLinksError(Exception):
  """The file system has no hard links, so it cannot hold a lease."""


def _read(path: str) -> _Found | None:
  """Returns the lease, or None if there is none."""
  try:
    # Opening also refreshes the attributes that NFS caches. O_NONBLOCK keeps a FIFO from blocking.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  except FileNotFoundError:
    if os.path.islink(path):  # Creating the lease would always fail, because the link exists.
      raise OSError(errno.ELOOP, "It is a dangling symbolic link", path) from None
    return None
  with open(descriptor, "rb") as file:
    text = file.read(65_536).decode(errors="replace")
    return _Found(text, os.fstat(descriptor).st_mtime)


def _create(path: str, text: str) -> bool:
  """Atomically creates a file with a text; returns False if the file already exists."""
  temporary = f"{path}.{uuid.uuid4().hex}.tmp"
  try:
    with open(temporary, "x", encoding="utf-8") as file:
      file.write(text)
    try:
      os.link(temporary, path)
    except FileExistsError:
      return False
    except OSError as error:
      if error.errno in _NO_HARD_LINKS:
        raise _NoHardLinksError from error
      raise
    return True
  finally:
    with contextlib.suppress(OSError, ValueError):
      os.unlink(temporary)


def _remove(path: str, text: str) -> None:
  """Removes an abandoned lease, unless another run has just replaced it."""
  aside = f"{path}.{uuid.uuid4().hex}.tmp"
  try:
    os.rename(path, aside)
  except FileNotFoundError:
    return
  found = _read(aside)
  if found is not None and found.text != text:
    with contextlib.suppress(FileExistsError):
      os.link(aside, path)
  os.unlink(aside)


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
