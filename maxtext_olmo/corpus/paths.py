"""Paths of token files: local paths or URLs, relative to a base, so that a corpus can be moved."""

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.urls import is_url as is_url


def is_valid(path: str) -> bool:
  """Returns whether a file can have this path: it has no NUL and can be encoded."""
  try:
    return b"\0" not in os.fsencode(path)
  except UnicodeEncodeError:
    return False


def absolute(path: str | os.PathLike[str]) -> str:
  """Returns the absolute path, without a trailing slash."""
  path = urls.without_secrets(path)
  return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def join(base: str, path: str) -> str:
  """Returns the full path of `path`, which is relative to `base` unless it is absolute."""
  if not base or path.startswith("/") or is_url(path):
    return path
  return base + path if base.endswith("/") else f"{base}/{path}"


def relative_to(base: str, path: str) -> str:
  """Returns the path as an index stores it: relative to `base` if it is below the base.

  A path that leaves the base (`../other/x.npy`) becomes absolute, so that each file has one name.
  """
  if not is_url(path):
    path = posixpath.normpath(join(base, path) if base and not is_url(base) else path)
  prefix = base if base.endswith("/") else base + "/"
  return path[len(prefix) :] if base and path.startswith(prefix) else path


def leaves(base: str, path: str) -> bool:
  """Returns whether a path is outside its base; does not follow symbolic links."""
  relative = relative_to(base, path)
  return relative.startswith("/") or is_url(relative) or ".." in relative.split("/")


def find(paths: Sequence[str], name: str) -> list[int]:
  """Returns the indices of the paths equal to `name` or, if none is, of those that end with it."""
  suffix = "/" + name.lstrip("/")
  exact = [number for number, path in enumerate(paths) if path == name]
  return exact or [number for number, path in enumerate(paths) if path.endswith(suffix)]


def common_base(paths: Iterable[str]) -> str:
  """Returns the deepest directory that contains all the paths, or "" if there is none."""
  common: list[str] | None = None
  for path in paths:
    parts = path.split("/")[:-1]
    if common is None:
      common = parts
    elif parts[: len(common)] != common:
      shared = 0
      while shared < min(len(common), len(parts)) and common[shared] == parts[shared]:
        shared += 1
      common = common[:shared]
  if not common:
    return ""
  if common == [""]:
    return "/"
  # "gs:" and the empty part after it are a scheme without a bucket, which cannot be a base.
  return "" if common[0].endswith(":") and len(common) < 3 else "/".join(common)


def shorten(paths: Iterable[str], shown: Iterable[str]) -> tuple[str, dict[str, str]]:
  """Returns the directory that contains all paths, and a short name for some of them.

  A short name is the part of the path below that directory. If another path also ends with this
  part, the name is the whole path, so that a name always identifies one file.

  Args:
    paths: The paths of all files.
    shown: The paths to find short names for.
  """
  paths = sorted(set(paths))
  base = common_base(paths)
  names = {path: relative_to(base, path) for path in shown}
  endings = dict.fromkeys(names.values(), 0)
  for path in paths:
    start = 0
    while start >= 0:
      ending = path[start:].removeprefix("/")
      if ending in endings:
        endings[ending] += 1
      start = path.find("/", start + 1)
  return base, {path: name if endings[name] == 1 else path for path, name in names.items()}


def remap(path: str, path_remap: Mapping[str, str] | None) -> str:
  """Returns the path with its longest matching prefix replaced."""
  prefix = max((p for p in path_remap or () if path.startswith(p)), key=len, default=None)
  return path if prefix is None or not path_remap else path_remap[prefix] + path[len(prefix) :]
