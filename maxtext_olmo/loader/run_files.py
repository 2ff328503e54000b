"""The small files in the directory of a run: states, history, config, copies of indexes.

They go through `epath`, because the directory may be in an object store.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from etils import epath

from maxtext_olmo import atomic

_LARGEST = 1 << 30


def read(path: epath.Path, largest: int = _LARGEST) -> bytes:
  """Returns the content of a regular file.

  Args:
    path: Path on a local file system or in an object store.
    largest: Size limit in bytes; a larger file cannot be a file of a run.

  Raises:
    OSError: The file is missing, too large, or not a regular file (a pipe may never end).
  """
  path = epath.Path(path)
  # For `epath`, a pipe is a file, and in some versions so is a broken link.
  local = "://" not in os.fspath(path)
  if not (os.path.isfile(path) if local else path.is_file()):
    raise OSError("it is missing, or not a regular file")
  size = path.stat().length
  if size > largest:
    raise OSError(f"it has {size:,} bytes, expected at most {largest:,}")
  return path.read_bytes()


def write(path: epath.Path, text: str) -> None:
  """Replaces a file atomically and creates its directories; raises WriteError if that fails."""
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
