"""Ways to spoil a file: its bytes, what lies at its path, and the values in its JSON."""

from __future__ import annotations

import copy
import fnmatch
import functools
import json
import os
import pathlib
import random
import shutil
import socket
import stat
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tests.hostile import cases

_FLIPS = 16
DEEP = "[" * 100_000
_DEVICES = {"device-zero": (1, 5), "device-full": (1, 7)}


def flip(data: bytes, place: int) -> bytes:
  """Returns the bytes with one bit flipped."""
  return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def _flip_part(data: bytes, part: int) -> bytes:
  return flip(data, part * (len(data) - 1) // (_FLIPS - 1))


_CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut-to-1-byte": lambda data: data[:1],
    "cut-to-5-bytes": lambda data: data[:5],
    "cut-to-half": lambda data: data[: len(data) // 2],
    "cut-by-1-byte": lambda data: data[:-1],
    "longer-by-1-byte": lambda data: data + b"\x01",
    "longer-by-a-page": lambda data: data + bytes(4096),
    "twice": lambda data: data + data,
    "bom": lambda data: b"\xef\xbb\xbf" + data,
    "web-page": lambda data: b"<html><body>404 Not Found</body></html>\n",
    "utf-16": lambda data: "the wrong text".encode("utf-16"),
    "deep": lambda data: DEEP.encode(),
    # These, and the flips, keep the size.
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "noise": lambda data: random.Random(len(data)).randbytes(len(data)),
    **{f"flip-{i}": functools.partial(_flip_part, part=i) for i in range(_FLIPS)},
}
IN_PLACE = ("missing", "directory", "fifo", "loop", "dangling", "socket", "sparse", *_DEVICES)
DAMAGES = (*_CONTENT, *IN_PLACE)
# Enough where a case takes long.
SHORT_LIST = (*(name for name in DAMAGES if not name.startswith("flip-")), "flip-3", "flip-12")
SAME_SIZE = ("zeros", "ones", "noise", "flip-*")


def damage(path: pathlib.Path, name: str) -> None:
  """Spoils a file in one of the ways of `DAMAGES`."""
  if name in _CONTENT:
    path.write_bytes(_CONTENT[name](path.read_bytes()))
  else:
    put_in_place(path, name)


def put_in_place(path: pathlib.Path, name: str) -> None:
  """Puts something else at a path, whatever was there before."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  path.unlink(missing_ok=True)
  if name == "directory":
    path.mkdir()
  elif name == "fifo":
    os.mkfifo(path)
  elif name in ("loop", "dangling"):
    path.symlink_to(path.name if name == "loop" else "nowhere")
  elif name == "socket":
    with socket.socket(socket.AF_UNIX) as bound:
      bound.bind(str(path))
  elif name == "sparse":
    with open(path, "wb") as file:
      file.truncate(1 << 40)
  elif name in _DEVICES:
    # A device node of its own: nothing here may ever write to one in /dev.
    try:
      os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*_DEVICES[name]))
    except PermissionError as error:
      raise cases.SkippedError("device nodes need root") from error


Accepts = Mapping[str, str]  # Pattern of names → why such a case may be accepted.
_NOTHING: Accepts = types.MappingProxyType({})
_REMOVED = object()
_VALUES: dict[str, Any] = {
    "removed": _REMOVED,
    "null": None,
    "true": True,
    "text": "x",
    "nul": "a\0b",
    "negative": -1,
    "zero": 0,
    "one": 1,
    "huge": 2**70,
    "fraction": 1.5,
    "nan": float("nan"),
    "list": [],
    "object": {},
}


def file_cases(
    kind: str,
    attempt: Callable[..., object],
    accepts: Accepts = _NOTHING,
    names: Iterable[str] = DAMAGES,
) -> Iterator[cases.Case]:
  """Yields a case for each damage; `attempt(folder, spoil)` calls `spoil` with the file's path."""
  for name in names:
    spoil = functools.partial(damage, name=name)
    yield make_case(kind, name, functools.partial(attempt, spoil=spoil), accepts)


def field_cases(
    kind: str, attempt: Callable[..., object], fields: Iterable[str], accepts: Accepts = _NOTHING
) -> Iterator[cases.Case]:
  """Yields a case for each bad value of each field; `spoil` is called with the JSON value."""
  for field in fields:
    for name, value in _VALUES.items():
      spoil = functools.partial(_set_field, field=field, value=value)
      spoiled = functools.partial(attempt, spoil=spoil)
      yield make_case(kind, f"{field}={name}", spoiled, accepts)


def make_case(kind: str, name: str, attempt: cases.Attempt, accepts: Accepts) -> cases.Case:
  """Returns a case that may be accepted if a pattern fits its name."""
  reasons = [reason for pattern, reason in accepts.items() if fnmatch.fnmatchcase(name, pattern)]
  return cases.Case(f"{kind}/{name}", attempt, accept="; ".join(reasons))


def _set_field(document: Any, field: str, value: Any) -> Any:
  """Returns a copy of a JSON value in which one field, as in `files.0.path`, has another value."""
  document = copy.deepcopy(document)
  parent = document
  *parents, last = [int(part) if part.isdigit() else part for part in field.split(".")]
  for part in parents:
    parent = parent[part]
  if value is _REMOVED:
    del parent[last]
  elif type(parent[last]) is type(value) and parent[last] == value:
    raise cases.SkippedError("some of the bad values are the good ones")
  else:
    parent[last] = copy.copy(value)
  return document


def edit_json(path: pathlib.Path, spoil: Callable[[Any], Any]) -> None:
  """Changes the value in a JSON file."""
  path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
