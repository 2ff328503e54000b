"""The small files in the directory of a run: states, history, config, copies of indexes.

They go through `epath`, because the directory may be in an object store.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid

from etils import epath

from maxtext_olmo import atomic

_LARGEST = 1 << 30


def read(path: epath.Path, largest: int = _LARGEST) -> bytes:
  """Returns the content of a regular file; raises OSError for anything else, which may never end.

  Args:
    path: Local, or in an object store.
    largest: The number of bytes from which on it cannot be such a file.
  """
  path = epath.Path(path)
  # For `epath`, everything that is no directory is a file.
  local = "://" not in os.fspath(path)
  if not path.is_file() or (local and not stat.S_ISREG(os.stat(path).st_mode)):
    raise OSError("it is missing, or not a regular file")
  size = path.stat().length
  if size > largest:
    raise OSError(f"it has {size:,} bytes, far more than such a file has")
  return path.read_bytes()


def write(path: epath.Path, text: str) -> None:
  """Writes a whole file, or leaves it as it was; raises WriteError. Directories are made."""
  temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
  with atomic.write_errors(path):
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      temporary.write_text(text)
      temporary.replace(path)
    except BaseException:
      with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
      raise
