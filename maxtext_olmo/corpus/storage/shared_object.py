"""A small object that several processes read and replace without overwriting each other's changes.

Every change names the version that it replaces, and fails if another process was faster:

    process 0                      process 1
    read       version 1           read       version 1
    replace 1  version 2
                                   replace 1  False: read it again
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.storage import writing


class Version(NamedTuple):
  """The content of the object at a point in time.

  Attributes:
    data: The bytes.
    modified: When they were written, in seconds since 1970 by the clock of the store.
    id: The store's identifier of this version.
  """

  data: bytes
  modified: float
  id: Mapping[str, str]


class SharedObject:
  """An object in a bucket (`gs://`, `s3://` or `az://`).

  All methods raise WriteError if the store refuses the request, or does not answer for a minute.

  Args:
    url: URL of the object.
    options: Options for connecting to the store; by default, those of the environment.
  """

  def __init__(self, url: str, options: stores.StoreOptions | None = None):
    self.url = url
    self._options = options or stores.StoreOptions()

  def read(self) -> Version | None:
    """Returns the current version; None if the object does not exist."""
    with self._request() as (obstore, store, key):
      try:
        found = obstore.get(store, key)
      except FileNotFoundError:
        return None
      ids = {name: found.meta[name] for name in ("e_tag", "version") if found.meta.get(name)}
      return Version(bytes(found.bytes()), found.meta["last_modified"].timestamp(), ids)

  def create(self, data: bytes) -> bool:
    """Writes the object if it does not exist; returns False if it does."""
    with self._request() as (obstore, store, key):
      try:
        obstore.put(store, key, data, mode="create", use_multipart=False)
      except obstore.exceptions.AlreadyExistsError:
        return False
      return True

  def replace(self, version: Version, data: bytes) -> bool:
    """Writes the object if `version` is still current; returns False if it has been replaced."""
    with self._request() as (obstore, store, key):
      try:
        obstore.put(store, key, data, mode=dict(version.id), use_multipart=False)
      except (obstore.exceptions.PreconditionError, FileNotFoundError):
        return False
      return True

  def remove(self) -> None:
    """Removes the object, if it exists."""
    with stores.use_in_block(self._options):
      writing.remove(self.url)

  def now(self) -> float:
    """Returns the time by the clock of the store, to compare with `modified`."""
    probe = SharedObject(f"{self.url}.{uuid.uuid4().hex}.tmp", self._options)
    probe.create(b"")
    found = probe.read()
    probe.remove()
    if found is None:
      raise FileNotFoundError(f"{probe.url} was removed by another process.")
    return found.modified

  @contextlib.contextmanager
  def _request(self) -> Iterator[tuple[Any, Any, str]]:
    with stores.use_in_block(self._options), writing.write_errors(self.url, small=True) as target:
      yield target
