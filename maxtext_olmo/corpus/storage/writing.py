"""Writes files by path or URL, so that a reader never sees a partly written file.

An object is first written to a local temporary file and then sent, in parts if it is large. A store
makes an object visible only once the upload is complete.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from maxtext_olmo import atomic
from maxtext_olmo.corpus import urls
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import StoreUnavailableError
from maxtext_olmo.errors import WriteError

_PART_BYTES = 16 << 20
_answered: set[Any] = set()  # The stores that have answered this process.


@contextlib.contextmanager
def open_output(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """Opens a temporary file, which becomes `path` if the block ends without an error.

  >>> with tempfile.TemporaryDirectory() as folder:
  ...   with open_output(f"{folder}/a") as file:
  ...     _ = file.write(b"0123")
  ...   os.listdir(folder)
  ['a']
  """
  path = urls.without_secrets(path)
  if not urls.is_url(path):
    with atomic.atomic_writer(path) as file:
      yield file
    return
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_") as folder:
    local = os.path.join(folder, "object")
    with atomic.write_errors(local), open(local, "w+b") as opened:
      yield cast(BinaryIO, opened)
    upload(local, path)


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
  """Writes a whole file or object; text is encoded as UTF-8."""
  with open_output(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


def upload(source: str | os.PathLike[str], url: str) -> None:
  """Sends a local file to a store, in parts if it is large."""
  from maxtext_olmo.corpus.storage import stores

  with write_errors(url) as (obstore, store, key):
    obstore.put(
        store,
        key,
        pathlib.Path(source),
        chunk_size=_PART_BYTES,
        max_concurrency=stores.UPLOADS_AT_ONCE,
    )


def remove(url: str) -> None:
  """Removes an object, if it exists."""
  with write_errors(url) as (obstore, store, key), contextlib.suppress(FileNotFoundError):
    obstore.delete(store, key)


def open_target(url: str, *, small: bool = False) -> tuple[Any, str]:
  """Returns the store to write to, and the key of a URL in it.

  obstore silently retries failed writes for minutes. So the first call for each store sends a read
  request, which detects a wrong address within `first_patience` seconds.

  Args:
    url: URL of the object.
    small: As for `stores.open_store`.

  Raises:
    CorpusError: The store does not answer.
  """
  from maxtext_olmo.corpus.storage import remote
  from maxtext_olmo.corpus.storage import stores

  url = urls.without_secrets(url)
  location, options = urls.split(url), stores.default_options()
  if options.anonymous and location.scheme in urls.GCS:
    # obstore would ask for credentials all the same, silently and for minutes.
    raise ConfigError(
        f"Cannot write {url} without credentials: olmo_storage_anonymous (--anonymous) is only for"
        " reading from gs:// buckets. Leave it out, or write to a local path."
    )
  name = (location.scheme, location.host, options)
  if name not in _answered:
    reader = remote.RemoteStorage(options)
    try:
      reader.exists(url)
    except CorpusError:
      if reader.traffic.outage:  # A refusal is an answer: credentials may permit only writing.
        raise
    _answered.add(name)
  store = stores.open_store(url, options, writing=True, small=small)
  return store, urls.store_key(location)


@contextlib.contextmanager
def write_errors(url: str, *, small: bool = False) -> Iterator[tuple[Any, Any, str]]:
  """Yields obstore, the store to write to, and the key of a URL; turns errors into WriteErrors."""
  from maxtext_olmo.corpus.storage import failures
  from maxtext_olmo.corpus.storage import stores

  url = urls.without_secrets(url)
  obstore = stores.obstore()
  try:
    store, key = open_target(url, small=small)
  except CorpusError as error:
    raise WriteError(str(error)) from error
  began = time.monotonic()
  try:
    yield obstore, store, key
  except Exception as error:
    # Not "from error", so that no traceback shows the original error, which may contain signatures.
    failure = failures.explain(error, f"write {url}", time.monotonic() - began)
    text = str(failure.error)
    raise WriteError(text) from (StoreUnavailableError(text) if failure.repeat else None)
