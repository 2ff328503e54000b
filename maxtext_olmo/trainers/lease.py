"""A lease on a checkpoint directory, so that two runs never write to the same directory.

The lease is a small file in the directory that names the host, process and start time of its
holder, process 0 of a run. A thread of the holder renews its modification time every minute.
Another run is refused while the holder is alive. It takes over at once if the holder ran on this
machine and has ended, and after five minutes without renewal if it ran elsewhere.

    take       link a complete file to the lease's name, which fails if there is one
    take over  rename the abandoned lease, put it back if it turns out to be another one, then take
    check      the file still holds this run's text; if it is gone, take it again

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

FILE_NAME = ".lease"
RENEW_SECONDS = 60.0
STALE_SECONDS = 300.0
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclasses.dataclass(frozen=True)
class Holder:
  """The process that holds a lease, as its file names it."""

  host: str
  pid: int
  started: str  # The time when it took the lease, in UTC.
  machine: str  # The boot and the namespace in which `pid` is valid; empty if unknown.
  process_start: int  # Start of the process in clock ticks since boot, because pids are reused.
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
  def is_gone(self) -> bool:
    """Whether this process is known to have ended; False if it cannot be seen from here."""
    if not self.machine or self.machine != _machine():
      return False
    try:
      os.kill(self.pid, 0)
    except ProcessLookupError:
      return True
    except OSError:
      pass  # It exists, and belongs to another user.
    start = _process_start(self.pid)
    return start is not None and start != self.process_start


class Lease:
  """The lease of a run; its processes create and check it together.

  Args:
    directory: The checkpoint directory, which is created if needed. If it is a URL, or its file
      system has no hard links, there is no lease, and a warning is logged.
    renew_seconds: The time between renewals.

  Raises:
    ConfigError: Another run holds the lease, or the directory cannot be written to.
  """

  def __init__(self, directory: str | os.PathLike[str], *, renew_seconds: float = RENEW_SECONDS):
    text = os.fspath(directory)
    self._directory = text if "://" in text else os.path.abspath(text)
    self._path = os.path.join(self._directory, FILE_NAME)
    self._seconds = renew_seconds
    self._thread: threading.Thread | None = None  # Only while this process holds the lease.
    self._released = threading.Event()
    self._pid = os.getpid()
    self._text = ""
    collectives.from_process_0(self._take, "taking the lease of checkpoint_dir")

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

    No other process takes part, so it may be called at any time. An unreadable file is ignored: a
    short failure of the storage need not end a run.
    """
    with contextlib.suppress(OSError):
      self._check()

  def release(self) -> None:
    """Releases the lease; idempotent. Does nothing in a forked child."""
    if self._thread is None or os.getpid() != self._pid:
      return
    atexit.unregister(self.release)
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

  def _take(self) -> None:
    if "://" in self._directory:
      logging.info(
          "checkpoint_dir=%s is not a local directory, so no lease keeps a second run from writing"
          " there.",
          self._directory,
      )
      return
    self._text = json.dumps(dataclasses.asdict(Holder.this_process()))
    try:
      os.makedirs(self._directory, exist_ok=True)
      while not _create(self._path, self._text):
        found = _read(self._path)
        if found is not None:
          self._require_abandoned(found)
          _remove(self._path, found.text)
    except _NoHardLinksError:
      logging.info(
          "The file system of checkpoint_dir=%s has no hard links, so no lease keeps a second run"
          " from writing there.",
          self._directory,
      )
      return
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

  def _require_abandoned(self, found: _Found) -> None:
    holder = found.holder
    if holder is not None and holder.is_gone:
      logging.info("The lease %s belongs to %s, which has ended; taking over.", self._path, holder)
      return
    # Use the clock of the storage, which both runs see, rather than that of either host.
    with tempfile.TemporaryFile(dir=self._directory) as probe:
      age = os.fstat(probe.fileno()).st_mtime - found.renewed
    if age > STALE_SECONDS:
      logging.info(
          "The lease %s of %s has not been renewed for %.0f s; taking over.",
          self._path,
          holder or "an unknown process",
          age,
      )
      return
    raise errors.ConfigError(
        f"checkpoint_dir={self._directory!r} is in use by {holder or 'an unknown process'} (lease"
        f" renewed {max(0.0, age):.0f} s ago). Two runs must not write to one directory: stop the"
        " other run, or choose another checkpoint_dir. If the processes belong to one run, connect"
        " them with coordinator_address, num_processes and process_id. The lease of a lost host"
        f" expires after {STALE_SECONDS:.0f} s; to end it now, delete {self._path}."
    )

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
        # Deleted, or renamed for a moment by a run that mistook it for an abandoned lease.
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
  """A lease as it was found."""

  text: str
  renewed: float  # By the clock of the storage.

  @property
  def holder(self) -> Holder | None:
    """The process that holds the lease; None if the file cannot be parsed."""
    try:
      return Holder(**json.loads(self.text))
    except (ValueError, TypeError, RecursionError):
      return None


class _NoHardLinksError(Exception):
  """The file system cannot hold a lease."""


def _read(path: str) -> _Found | None:
  """Returns the lease, or None if there is none."""
  try:
    # Opening also refreshes the attributes that NFS caches. A FIFO must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  except FileNotFoundError:
    if os.path.islink(path):  # Creating it would always fail, because the link exists.
      raise OSError(errno.ELOOP, "It is a dangling symbolic link", path) from None
    return None
  with open(descriptor, "rb") as file:
    text = file.read(65_536).decode(errors="replace")
    return _Found(text, os.fstat(descriptor).st_mtime)


def _create(path: str, text: str) -> bool:
  """Atomically creates a file with its text; returns False if it exists already."""
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
  """Returns an id of this boot of this machine and of the namespace of its process ids."""
  try:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
      return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return ""


def _process_start(pid: int) -> int | None:
  """Returns the start of a process in clock ticks since boot; 0 if ended, None if unknown."""
  try:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
      fields = file.read().rpartition(")")[2].split()
  except OSError:
    return None
  return 0 if fields[0] in "ZX" else int(fields[19])
