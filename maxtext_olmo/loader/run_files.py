"""Reads and writes the small files in a run's directory: states, history, config, index copies.

All of it goes through `epath`, because the directory may be in an object store.
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
    largest: Size limit in bytes. This package writes no larger files, so they are refused.

  Raises:
    OSError: The file is missing, too large, or not a regular file. (Reading a pipe might never
      end.)
  """
  path = epath.Path(path)
  # `epath` treats a pipe as a file and, in some versions, a broken link too.
  local = "://" not in os.fspath(path)
  if not (os.path.isfile(path) if local else path.is_file()):
    raise OSError("it is missing, or not a regular file")
  size = path.stat().length
  if size > largest:
    raise OSError(f"it has {size:,} bytes, expected at most {largest:,}")
  return path.read_bytes()


def write(path: epath.Path, text: str) -> None:
  """Writes a file atomically, and creates missing directories; raises WriteError on failure."""
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
