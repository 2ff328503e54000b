"""A proxy that injects faults between a reader and an object store, and counts requests.

    with servers.start_nginx(directory) as nginx, proxy.start(nginx.port) as between:
      between.set(latency=0.05, status={503: 0.01})
      ...                                # Read from between.url.
      between.counts().objects           # {"/bucket/part.npy": 12}

It runs in a process of its own, so that it does not share the interpreter lock with the reader, and
is told what to do by lines of JSON on its standard input. It ends with the test.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tests import distributed

_PIECE = 1 << 14
_STATUS_TEXT = {
    403: "Forbidden",
    404: "Not Found",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclasses.dataclass(frozen=True)
class Faults:
  """What the proxy does to requests; shares are between 0 and 1.

  Attributes:
    latency: Seconds that each request is held back.
    status: Share of the requests that are answered with this status and never forwarded.
    reset: Share of the connections that are reset (RST) instead of an answer.
    cut: Share of the bodies that end in the middle with the connection.
    stall: Share of the bodies that stop in the middle, while the connection stays open.
    silent: Share of the requests that are never answered.
    no_etag: Whether ETags are removed from the answers.
    whole: Whether `Range` is ignored, as by a server that does not support it.
    bandwidth: Bytes per second of all bodies together, in both directions; 0 for no limit.
    outage: "" for none; "refuse" resets every connection, "silent" answers nothing, "503" refuses.
    only: The faults concern requests whose path contains this text.
    seed: Seed of the random choices.
  """

  latency: float = 0.0
  status: dict[int, float] = dataclasses.field(default_factory=dict)
  reset: float = 0.0
  cut: float = 0.0
  stall: float = 0.0
  silent: float = 0.0
  no_etag: bool = False
  whole: bool = False
  bandwidth: float = 0.0
  outage: str = ""
  only: str = ""
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Counts:
  """The requests that have arrived, those that met a fault included.

  Attributes:
    ranges: Number of requests by `METHOD path range`; the range is "-" for a whole object.
    faults: Number of faults injected, by name.
    most_in_flight: Largest number of requests that were being answered at a time.
    signed: Number of requests with credentials.
    total: Number of requests.
  """

  ranges: dict[str, int]
  faults: dict[str, int]
  most_in_flight: int
  signed: int

  @property
  def total(self) -> int:
    """The number of requests."""
    return sum(self.ranges.values())

  @property
  def objects(self) -> dict[str, int]:
    """The number of requests of each object, without its query."""
    found: collections.Counter[str] = collections.Counter()
    for request, count in self.ranges.items():
      found[request.split()[1].partition("?")[0]] += count
    return dict(found)

  def reads(self, suffix: str = "") -> dict[str, int]:
    """Returns the GET requests for objects whose path ends with `suffix`."""
    return {
        request: count
        for request, count in self.ranges.items()
        if request.startswith("GET ") and request.split()[1].partition("?")[0].endswith(suffix)
    }


class Proxy:
  """The side of the test: sets faults and asks for counts."""

  def __init__(self, process: subprocess.Popen[str], port: int):
    self._process = process
    self._lock = threading.Lock()
    self._faults = Faults()
    self.port = port
    self.url = f"http://127.0.0.1:{port}"

  @property
  def faults(self) -> Faults:
    """The faults that are set now."""
    return self._faults

  def set(self, **changes: Any) -> None:
    """Changes some faults and keeps the others; takes effect before it returns."""
    self._faults = dataclasses.replace(self._faults, **changes)
    self._ask({"faults": dataclasses.asdict(self._faults)})

  def heal(self) -> None:
    """Removes all faults; requests that are stalled or unanswered stay so."""
    self._faults = Faults()
    self._ask({"faults": dataclasses.asdict(self._faults)})

  @contextlib.contextmanager
  def with_faults(self, **changes: Any) -> Iterator[None]:
    """Changes some faults within it."""
    before = self._faults
    self.set(**changes)
    try:
      yield
    finally:
      self.set(**dataclasses.asdict(before))

  def counts(self, *, reset: bool = False) -> Counts:
    """Returns what was counted; with `reset`, counting starts again."""
    return Counts(**self._ask({"counts": True, "reset": reset}))

  def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
    assert self._process.stdin is not None and self._process.stdout is not None
    with self._lock:
      print(json.dumps(request), file=self._process.stdin, flush=True)
      return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def start(upstream: int, host: str = "127.0.0.1") -> Iterator[Proxy]:
  """Starts a proxy in front of a server on a loopback port."""
  process = subprocess.Popen(
      [sys.executable, "-m", "tests.cloud.proxy", str(upstream), host],
      env=distributed.child_environment(),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )
  assert process.stdin is not None and process.stdout is not None
  try:
    yield Proxy(process, int(process.stdout.readline()))
  finally:
    process.stdin.close()  # Ends it.
    process.wait()
    process.stdout.close()


class _Message:
  """The head of a request or an answer, and its body if that is short."""

  def __init__(self, head: bytes):
    first, *lines = head.decode("latin-1").split("\r\n")
    self.first = first
    self.headers = [tuple(line.split(": ", 1)) for line in lines if ": " in line]

  def get(self, name: str) -> str:
    return next((value for key, value in self.headers if key.lower() == name), "")

  def without(self, *names: str) -> bytes:
    kept = [f"{key}: {value}" for key, value in self.headers if key.lower() not in names]
    return "\r\n".join([self.first, *kept, "", ""]).encode("latin-1")


class _Server:
  """The side of the proxy."""

  def __init__(self, upstream: tuple[str, int]):
    self._upstream = upstream
    self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    self._faults = Faults()
    self._random = random.Random(0)
    self._ranges: collections.Counter[str] = collections.Counter()
    self._found: collections.Counter[str] = collections.Counter()
    self._in_flight = self._most = self._signed = 0
    self._body_allowed = 0.0  # Loop time at which the next piece of a body may be sent.

  def command(self, request: dict[str, Any]) -> dict[str, Any]:
    """Does what the test asks for."""
    if "faults" in request:
      values = request["faults"]
      values["status"] = {int(status): share for status, share in values["status"].items()}
      faults = Faults(**values)
      if faults.seed != self._faults.seed:
        self._random.seed(faults.seed)
      self._faults = faults
      return {}
    answer = {
        "ranges": dict(self._ranges),
        "faults": dict(self._found),
        "most_in_flight": self._most,
        "signed": self._signed,
    }
    if request["reset"]:
      self._ranges.clear()
      self._found.clear()
      self._most, self._signed = self._in_flight, 0
    return answer

  async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of a connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
      while True:
        request = _Message(await reader.readuntil(b"\r\n\r\n"))
        body = await self._receive(reader, int(request.get("content-length") or 0))
        self._in_flight += 1
        self._most = max(self._most, self._in_flight)
        try:
          usable, held = await self._answer(request, body, writer)
          if held:
            await reader.read(1)  # Until the client gives up.
          if not usable:
            break
        finally:
          self._in_flight -= 1
    writer.close()

  async def _answer(
      self, request: _Message, body: bytes, writer: asyncio.StreamWriter
  ) -> tuple[bool, bool]:
    """Answers a request; returns whether its connection is usable, and whether it is held open."""
    method, path, _ = request.first.split(" ", 2)
    self._ranges[f"{method} {path} {request.get('range').removeprefix('bytes=') or '-'}"] += 1
    self._signed += bool(request.get("authorization")) or "sig=" in path.lower()
    faults = self._faults if self._faults.only in path else Faults()
    if faults.latency:
      await asyncio.sleep(faults.latency)
    fault = self._choose(faults)
    if fault:
      self._found[fault] += 1
    if fault == "reset":
      _reset(writer)
      return False, False
    if fault == "silent":
      return False, True
    if fault.isdigit():
      reason = _STATUS_TEXT.get(int(fault), "Error")
      writer.write(f"HTTP/1.1 {fault} {reason}\r\nContent-Length: 0\r\n\r\n".encode())
      await writer.drain()
      return True, False
    await self._forward(request, method, body, writer, faults, fault)
    return fault not in ("cut", "stall"), fault == "stall"

  def _choose(self, faults: Faults) -> str:
    if faults.outage:
      return {"refuse": "reset"}.get(faults.outage, faults.outage)
    shares = {str(status): share for status, share in faults.status.items()}
    shares |= {name: getattr(faults, name) for name in ("reset", "cut", "stall", "silent")}
    drawn = self._random.random()
    for name, share in shares.items():
      drawn -= share
      if drawn < 0:
        return name
    return ""

  async def _forward(
      self,
      request: _Message,
      method: str,
      body: bytes,
      writer: asyncio.StreamWriter,
      faults: Faults,
      fault: str,
  ) -> None:
    dropped = ("range",) if faults.whole else ()
    reader, upstream = self._idle.pop() if self._idle else await self._connect()
    upstream.write(request.without(*dropped) + body)
    try:
      answer = _Message(await reader.readuntil(b"\r\n\r\n"))
    except (asyncio.IncompleteReadError, ConnectionError):  # An idle connection had been closed.
      reader, upstream = await self._connect()
      upstream.write(request.without(*dropped) + body)
      answer = _Message(await reader.readuntil(b"\r\n\r\n"))
    status = int(answer.first.split()[1])
    length = answer.get("content-length")
    whole = await self._body(reader, answer, method, status)
    ends = bool(length) or method == "HEAD"
    if ends and answer.get("connection").lower() != "close":
      self._idle.append((reader, upstream))
    else:
      upstream.close()
    left_out = ["connection", *(["etag"] if faults.no_etag else [])]
    if not length and method != "HEAD":
      left_out.append("transfer-encoding")
      answer.headers.append(("Content-Length", str(len(whole))))
    writer.write(answer.without(*left_out))
    if fault in ("cut", "stall") and len(whole) > 1:
      whole = whole[: self._random.randrange(1, len(whole))]
    await self._send(writer, whole, faults.bandwidth)

  async def _body(
      self, reader: asyncio.StreamReader, answer: _Message, method: str, status: int
  ) -> bytes:
    if method == "HEAD" or status in (204, 304):
      return b""
    if answer.get("transfer-encoding").lower() == "chunked":
      pieces = []
      while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readline()
      await reader.readline()
      return b"".join(pieces)
    length = answer.get("content-length")
    return await (reader.readexactly(int(length)) if length else reader.read())

  async def _receive(self, reader: asyncio.StreamReader, size: int) -> bytes:
    bandwidth = self._faults.bandwidth
    if not bandwidth:
      return await reader.readexactly(size)
    pieces = []
    for first in range(0, size, _PIECE):
      pieces.append(await reader.readexactly(min(_PIECE, size - first)))
      await self._wait(len(pieces[-1]), bandwidth)
    return b"".join(pieces)

  async def _send(self, writer: asyncio.StreamWriter, body: bytes, bandwidth: float) -> None:
    if not bandwidth:
      writer.write(body)
      await writer.drain()
      return
    for first in range(0, len(body), _PIECE):
      piece = body[first : first + _PIECE]
      await self._wait(len(piece), bandwidth)
      writer.write(piece)
      await writer.drain()

  async def _wait(self, size: int, bandwidth: float) -> None:
    """Waits until a piece of a body may pass."""
    now = asyncio.get_running_loop().time()
    self._body_allowed = max(self._body_allowed, now) + size / bandwidth
    await asyncio.sleep(self._body_allowed - now)

  async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*self._upstream, limit=1 << 20)


def _reset(writer: asyncio.StreamWriter) -> None:
  """Closes a connection with RST."""
  connection = writer.get_extra_info("socket")
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  writer.transport.abort()


async def _main(host: str, port: int) -> None:
  server = _Server((host, port))
  listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=1 << 20, backlog=4096)
  print(listening.sockets[0].getsockname()[1], flush=True)
  commands = asyncio.StreamReader(limit=1 << 24)
  await asyncio.get_running_loop().connect_read_pipe(
      lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
  )
  while line := await commands.readline():
    print(json.dumps(server.command(json.loads(line))), flush=True)
  os._exit(0)  # Open connections are cut, without a word about each.


if __name__ == "__main__":
  asyncio.run(_main(sys.argv[2], int(sys.argv[1])))
