"""Result files: what is known about each item of a `Work`, in a directory or below a URL.

    INDEX.work/verify-1-3f2a9c01b7de-77e0aa41c39b/0-0-67108864@5b1c0d3e9f20.ok
               │      │ │            │            │            │            └ or `.failed`
               │      │ │            │            │            └ identity of the input files
               │      │ │            │            └ key of the item
               │      │ │            └ digest of the settings
               │      │ └ fingerprint of the corpus
               └ name └ version of the work

A listing of the directory therefore shows which items are done. A file is never visible
half-written, because it is renamed or uploaded as a whole. It begins with its checksum, and a
damaged file counts as missing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from maxtext_olmo.errors import WriteError

Result = Mapping[str, Any]  # JSON values, and NumPy arrays.

_NAME = re.compile(r"([A-Za-z0-9._-]+)@([0-9a-z]+)\.(ok|failed)")
_KEY = re.compile(r"[A-Za-z0-9._-]{1,100}")
_ARRAYS = "arrays"
_DIGEST_BYTES = 32
_READS_AT_ONCE = 32
_MOST_ATTEMPTS = 100
# Suffix of the directories that this library creates for results, and removes.
OWN_SUFFIX = ".work"


def check_key(key: str) -> None:
  """Raises ValueError unless a key can be part of a file name."""
  if not _KEY.fullmatch(key):
    raise ValueError(f"The key of an item must match {_KEY.pattern}, got {key!r}.")


def result_name(key: str, identity: str, *, failed: bool = False) -> str:
  """Returns the name of a result file."""
  return f"{key}@{identity}.{'failed' if failed else 'ok'}"


def work_folder(fingerprint: str, name: str, version: int, settings: Mapping[str, Any]) -> str:
  """Returns the name of the directory that holds the results of a `Work` over a corpus."""
  corpus = hashlib.sha256(fingerprint.encode()).hexdigest()[:12]
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
  return f"{name}-{version}-{corpus}-{digest}"


def encode(result: Result) -> list[bytes | memoryview]:
  """Returns a result as consecutive buffers: a checksum, a line of JSON, and the arrays' data."""
  arrays = {name: value for name, value in result.items() if isinstance(value, np.ndarray)}
  values = {name: value for name, value in result.items() if name not in arrays}
  header = {
      "values": values,
      _ARRAYS: [[name, value.dtype.str, list(value.shape)] for name, value in arrays.items()],
  }
  buffers: list[bytes | memoryview] = [json.dumps(header, default=_plain).encode() + b"\n"]
  for value in arrays.values():
    if value.size:  # An empty memory view cannot be cast.
      buffers.append(np.ascontiguousarray(value).data.cast("B"))
  digest = xxhash.xxh3_128()
  for buffer in buffers:
    digest.update(buffer)
  return [digest.hexdigest().encode() + b"\n", *buffers]


def decode(data: bytes | mmap.mmap) -> dict[str, Any]:
  """Returns the result that `encode` turned into buffers; its arrays are views of the data.

  Raises:
    ValueError: The data is damaged.
  """
  begin = _DIGEST_BYTES + 1
  with memoryview(data) as view:
    digest = xxhash.xxh3_128_hexdigest(view[begin:]).encode()
  if data[:begin] != digest + b"\n":
    raise ValueError("its checksum does not match")
  end = data.find(b"\n", begin)
  header = json.loads(data[begin:end])
  found, place = dict(header["values"]), end + 1
  for name, dtype, shape in header[_ARRAYS]:
    count = int(np.prod(shape, dtype=np.int64))
    # NumPy does not accept the end of a buffer as the place of an empty array.
    flat = np.frombuffer(data, dtype, count, place) if count else np.zeros(0, dtype)
    found[name] = flat.reshape(shape)
    place += flat.nbytes
  return found


def _plain(value: Any) -> Any:
  if isinstance(value, np.generic):
    return value.item()
  raise TypeError(f"A result holds JSON values and arrays, got {type(value).__name__}: {value!r}.")


class Results(Protocol):
  """A place for the results of one `Work` over one corpus, by name."""

  def names(self) -> set[str]:
    """Returns the names of all results."""

  def write(self, name: str, result: Result) -> None:
    """Stores a result; raises WriteError if that is impossible."""

  def read_all(self, names: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Yields the results with these names, in order; None for a missing or damaged one."""

  def remove(self, names: Iterable[str]) -> None:
    """Removes results, if they exist."""

  def discard(self) -> None:
    """Removes all results and the place itself."""


class MemoryResults:
  """Results in the memory of this process."""

  def __init__(self) -> None:
    self._results: dict[str, dict[str, Any]] = {}

  def names(self) -> set[str]:
    """Returns the names of all results."""
    return set(self._results)

  def write(self, name: str, result: Result) -> None:
    """Stores a result."""
    self._results[name] = dict(result)

  def read_all(self, names: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Yields the results with these names, in order."""
    return (self._results.get(name) for name in names)

  def remove(self, names: Iterable[str]) -> None:
    """Removes results, if they exist."""
    for name in names:
      self._results.pop(name, None)

  def discard(self) -> None:
    """Removes all results."""
    self._results.clear()


@dataclasses.dataclass(frozen=True)
class ResultFiles:
  """Results in files below a directory or a URL; can be pickled and shared.

  Attributes:
    root: Directory or URL that the results of many kinds of work share.
    folder: Name of the directory of this work, from `work_folder`.
  """

  root: str
  folder: str

  @property
  def place(self) -> str:
    """Directory or URL of the result files."""
    return f"{self.root.rstrip('/')}/{self.folder}"

  @property
  def _is_remote(self) -> bool:
    return urls.is_url(self.root)

  def names(self) -> set[str]:
    """Returns the names of all results, from one listing."""
    if not self._is_remote:
      try:
        found = os.listdir(self.place)
      except FileNotFoundError:
        return set()
      except OSError as error:
        raise CorpusError(f"Cannot list the results in {self.place}: {error.strerror}.") from error
    else:
      if urls.split(self.root).scheme in urls.HTTP:
        raise ConfigError(
            f"Results cannot be kept at {self.root}: a web server cannot list its files. Use a"
            " directory, or a gs://, s3:// or az:// URL (--results)."
        )
      try:
        found = [url.rpartition("/")[2] for url in open_storage().remote.list_folder(self.place)]
      except MissingFileError:
        return set()
    return {name for name in found if _NAME.fullmatch(name)}

  def write(self, name: str, result: Result) -> None:
    """Stores a result in a file that is never visible half-written."""
    buffers = encode(result)
    if self._is_remote:
      with writing.open_output(f"{self.place}/{name}") as file:
        file.writelines(buffers)
      return
    path = os.path.join(self.place, name)
    with atomic.write_errors(path):
      for _ in range(_MOST_ATTEMPTS - 1):
        # Another command that did the same work may discard the directory at any time.
        with contextlib.suppress(FileNotFoundError, FileExistsError):
          return self._write_file(path, buffers)
      self._write_file(path, buffers)

  def _write_file(self, path: str, buffers: Iterable[bytes | memoryview]) -> None:
    temporary = os.path.join(self.place, f".{uuid.uuid4().hex}.tmp")
    try:
      os.makedirs(self.place, exist_ok=True)
      # Not synced to disk: after a power cut, a file without its data has a wrong checksum.
      with open(temporary, "xb") as file:
        file.writelines(buffers)
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        os.unlink(temporary)
      raise

  def read_all(self, names: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Yields the results with these names, in order; None for a missing or damaged one."""
    if not self._is_remote:
      yield from map(self._read, names)
      return
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as pool:
      for start in range(0, len(names), _READS_AT_ONCE):
        yield from pool.map(self._read, names[start : start + _READS_AT_ONCE])

  def _read(self, name: str) -> dict[str, Any] | None:
    path = f"{self.place}/{name}"
    try:
      if self._is_remote:
        return decode(open_storage().read(path))
      with open(path, "rb") as file:  # Mapped, because results with names of documents are large.
        return decode(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
      return None
    except CorpusError:
      raise
    except OSError as error:
      raise CorpusError(f"Cannot read the result {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, IndexError):
      self.remove([name])
      return None

  def remove(self, names: Iterable[str]) -> None:
    """Removes results, if they exist."""
    if self._is_remote:
      with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        list(pool.map(writing.remove, [f"{self.place}/{name}" for name in names]))
      return
    for name in names:
      path = os.path.join(self.place, name)
      with atomic.write_errors(path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)

  def discard(self) -> None:
    """Removes all results, and directories that become empty; ignores what cannot be removed."""
    with contextlib.suppress(WriteError):
      self.remove(self.names())
    if self._is_remote:
      return
    with contextlib.suppress(OSError):
      for name in os.listdir(self.place):  # Left behind by writers that were killed.
        if name.startswith(".") and name.endswith(".tmp"):
          os.unlink(os.path.join(self.place, name))
    own = self.root.rstrip("/").endswith(OWN_SUFFIX)
    for directory in (self.place, self.root) if own else (self.place,):
      with contextlib.suppress(OSError):
        os.rmdir(directory)
