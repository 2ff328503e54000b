"""Keeps a lease in a file, or in an object of a bucket.

|            | file                                            | object                        |
|------------|-------------------------------------------------|-------------------------------|
| create     | hard-link a complete file to the lease's name   | write, if there is none       |
| renew      | set the modification time                       | write, if it has not changed  |
| take over  | rename the abandoned file, put it back if it is | write, if it has not changed  |
|            | in fact a new one, then create                  |                               |

Each operation is atomic: if several processes attempt it at the same time, only one succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from typing import NamedTuple, Protocol

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import shared_object
from maxtext_olmo.corpus.storage import stores

FILE_NAME = ".lease"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class NoLeaseError(Exception):
  """This place cannot hold a lease; the message says why."""


class Found(NamedTuple):
  """A lease that was found.

  Attributes:
    text: Its text.
    renewed: When it was last renewed, in seconds since 1970 by the clock of the storage.
  """

  text: str
  renewed: float


class Place(Protocol):
  """Holds one lease; its methods raise OSError if the storage fails.

  Attributes:
    path: Path or URL of the lease.
    is_fast: Whether the lease can be read before each step without slowing down training.
  """

  path: str
  is_fast: bool

  def prepare(self) -> None:
    """Creates the directory; raises NoLeaseError if it cannot hold a lease."""

  def read(self) -> Found | None:
    """Returns the lease; None if there is none."""

  def create(self, text: str) -> bool:
    """Creates the lease; returns False if there already is one."""

  def take_over(self, found: Found, text: str) -> bool:
    """Replaces an abandoned lease; returns False if another process was faster."""

  def renew(self, text: str) -> None:
    """Renews the lease if it has this text."""

  def remove(self, text: str) -> None:
    """Removes the lease if it has this text."""

  def now(self) -> float:
    """Returns the time by the clock of the storage."""


def open_place(directory: str, options: stores.StoreOptions | None = None) -> Place:
  """Returns the place for the lease of a directory or URL."""
  return LeaseObject(directory, options) if "://" in directory else LeaseFile(directory)


class LeaseFile:
  """A lease in a file of a local or shared file system."""

  is_fast = True

  def __init__(self, directory: str):
    self._directory = directory
    self.path = os.path.join(directory, FILE_NAME)

  def prepare(self) -> None:
    """Creates the directory."""
    os.makedirs(self._directory, exist_ok=True)

  def read(self) -> Found | None:
    """Returns the lease; None if there is none."""
    return _read(self.path)

  def create(self, text: str) -> bool:
    """Creates the lease; returns False if there already is one."""
    temporary = f"{self.path}.{uuid.uuid4().hex}.tmp"
    try:
      with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
      try:
        os.link(temporary, self.path)
      except FileExistsError:
        return False
      except OSError as error:
        if error.errno in _NO_HARD_LINKS:
          raise NoLeaseError("its file system has no hard links") from error
        raise
      return True
    finally:
      with contextlib.suppress(OSError, ValueError):
        os.unlink(temporary)

  def take_over(self, found: Found, text: str) -> bool:
    """Replaces an abandoned lease; returns False if another process was faster."""
    aside = f"{self.path}.{uuid.uuid4().hex}.tmp"
    try:
      os.rename(self.path, aside)
    except FileNotFoundError:
      return self.create(text)
    moved = _read(aside)
    if moved is not None and moved.text != found.text:  # Another process has just taken over.
      with contextlib.suppress(FileExistsError):
        os.link(aside, self.path)
    os.unlink(aside)
    return self.create(text)

  def renew(self, text: str) -> None:
    """Renews the lease if it has this text."""
    found = self.read()
    if found is not None and found.text == text:
      os.utime(self.path)

  def remove(self, text: str) -> None:
    """Removes the lease if it has this text."""
    found = self.read()
    if found is not None and found.text == text:
      os.unlink(self.path)

  def now(self) -> float:
    """Returns the time by the clock of the storage, which both runs see."""
    with tempfile.TemporaryFile(dir=self._directory) as probe:
      return os.fstat(probe.fileno()).st_mtime


class LeaseObject:
  """A lease in an object of a bucket.

  The text is followed by a line that each renewal changes, because a store may give equal contents
  the same version.
  """

  is_fast = False

  def __init__(self, directory: str, options: stores.StoreOptions | None = None):
    self.path = f"{directory.rstrip('/')}/{FILE_NAME}"
    self._object = shared_object.SharedObject(self.path, options)

  def prepare(self) -> None:
    """Requires that the bucket can be read and written with the environment's credentials."""
    try:
      self.now()
    except (errors.MaxtextOlmoError, OSError) as error:
      if errors.is_transient(error):  # Another run may hold the lease; a restart will tell.
        raise
      raise NoLeaseError(str(error).rstrip(".")) from error

  def read(self) -> Found | None:
    """Returns the lease; None if there is none."""
    found = self._object.read()
    return None if found is None else Found(_text(found), found.modified)

  def create(self, text: str) -> bool:
    """Creates the lease; returns False if there already is one."""
    return self._object.create(_data(text))

  def take_over(self, found: Found, text: str) -> bool:
    """Replaces an abandoned lease; returns False if another process was faster."""
    version = self._object.read()
    if version is None:
      return self.create(text)
    same = Found(_text(version), version.modified) == found
    return same and self._object.replace(version, _data(text))

  def renew(self, text: str) -> None:
    """Renews the lease if it has this text."""
    version = self._object.read()
    if version is not None and _text(version) == text:
      self._object.replace(version, _data(text))

  def remove(self, text: str) -> None:
    """Removes the lease if it has this text."""
    found = self.read()
    if found is not None and found.text == text:
      self._object.remove()

  def now(self) -> float:
    """Returns the time by the clock of the storage."""
    return self._object.now()


def _data(text: str) -> bytes:
  return f"{text}\n{uuid.uuid4().hex}\n".encode()


def _text(version: shared_object.Version) -> str:
  return version.data.decode(errors="replace").partition("\n")[0]


def _read(path: str) -> Found | None:
  """Returns the lease in a file; None if there is none."""
  try:
    # Opening also refreshes the attributes that NFS caches. O_NONBLOCK keeps a FIFO from blocking.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
  except FileNotFoundError:
    if os.path.islink(path):  # Creating the lease would always fail, because the link exists.
      raise OSError(errno.ELOOP, "It is a dangling symbolic link", path) from None
    return None
  with open(descriptor, "rb") as file:
    text = file.read(65_536).decode(errors="replace")
    return Found(text, os.fstat(descriptor).st_mtime)
