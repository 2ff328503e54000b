"""A server of objects on loopback: ranges, ETags, If-Match, and enough of S3 to list and write.

Real requests over real sockets, with faults on demand: a test sets `faults` to a function that gets
the number of a request and its path, and returns what to do with it.
"""

import collections
import hashlib
import http.server
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


class ObjectServer:
  """Serves `objects`, by path without the leading slash; use it as a context manager.

  Args:
    objects: path → content, as in {"bucket/tokens/part.npy": b"..."}.

  Attributes:
    objects: The objects, which may be changed at any time.
    url: Address of the server, without a slash at the end.
    sends_etags: Whether answers have an ETag.
    checks_if_match: Whether If-Match is obeyed.
    faults: Function (number of the request, path) → "" or what goes wrong: an HTTP status such as
      "503", "cut" (half of the body), "stall", "hang" (no answer), "ignore_range", "reset".
    requests: (method, path, range) of each request.
    headers: Headers of each request.
    in_flight, most_in_flight: Number of requests being answered, and the largest number so far.
    latency: Seconds before each answer.
  """

  def __init__(self, objects: dict[str, bytes] | None = None):
    self.objects = dict(objects or {})
    self.sends_etags = self.checks_if_match = True
    self.faults: Callable[[int, str], str] = lambda number, path: ""
    self.error_body = b"<Error><Code>Broken</Code><Message>on purpose</Message></Error>"
    self.requests: list[tuple[str, str, str]] = []
    self.headers: list[dict[str, str]] = []
    self.latency = 0.0
    self.in_flight = self.most_in_flight = 0
    self.lock = threading.Lock()
    self.stopping = threading.Event()
    self._server = _Server(("127.0.0.1", 0), _Handler)
    self._server.owner = self
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

  def __enter__(self) -> "ObjectServer":
    threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self.stopping.set()
    self._server.shutdown()
    self._server.server_close()

  def count(self, method: str = "GET") -> int:
    """Returns the number of requests with a method."""
    with self.lock:
      return collections.Counter(request[0] for request in self.requests)[method]

  def etag(self, path: str) -> str:
    """Returns the ETag of an object."""
    return f'"{hashlib.md5(self.objects[path]).hexdigest()}"'


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 512
  owner: ObjectServer

  def handle_error(self, request: object, client_address: object) -> None:
    """Stays silent: clients hang up as they like."""


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True
  wbufsize = 1 << 16
  server: _Server

  def log_message(self, *_: object) -> None:
    """Logs nothing."""

  def do_GET(self) -> None:
    self._serve()

  def do_HEAD(self) -> None:
    self._serve()

  def do_POST(self) -> None:
    self.do_PUT()

  def do_PUT(self) -> None:
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    self._serve(body)

  def _serve(self, body: bytes = b"") -> None:
    owner = self.server.owner
    address = urllib.parse.urlsplit(self.path)
    path = urllib.parse.unquote(address.path).lstrip("/")
    with owner.lock:
      number = len(owner.requests)
      owner.requests.append((self.command, self.path, self.headers.get("Range", "")))
      owner.headers.append({name.lower(): value for name, value in self.headers.items()})
      owner.in_flight += 1
      owner.most_in_flight = max(owner.most_in_flight, owner.in_flight)
    try:
      if owner.latency:
        time.sleep(owner.latency)
      query = urllib.parse.parse_qs(address.query)
      self._answer(path, query, owner.faults(number, path), body)
      self.wfile.flush()
    finally:
      with owner.lock:
        owner.in_flight -= 1

  def _answer(self, path: str, query: dict[str, list[str]], fault: str, body: bytes) -> None:
    owner = self.server.owner
    if fault.isdigit():
      return self._send(int(fault), owner.error_body)
    if fault == "reset":
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
      self.close_connection = True
      return self.connection.close()
    if fault == "hang":
      self.close_connection = True
      owner.stopping.wait(60)
      return None
    if self.command == "PUT":
      owner.objects[path] = body
      return self._send(200, b"", {"ETag": owner.etag(path)})
    if self.command == "POST" and "delete" in self.path:
      keys = re.findall(rb"<Key>.*?</Key>", body)
      for key in keys:
        owner.objects.pop(f"{path.strip('/')}/{key[5:-6].decode()}", None)
      deleted = b"".join(b"<Deleted>%s</Deleted>" % key for key in keys)
      return self._send(200, b"<DeleteResult>%s</DeleteResult>" % deleted)
    if "list-type" in query:
      return self._list(path.strip("/"), query)
    if path not in owner.objects:
      return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
    return self._object(path, fault)

  def _object(self, path: str, fault: str) -> None:
    owner = self.server.owner
    data, headers = owner.objects[path], {"Last-Modified": _DATE, "Accept-Ranges": "bytes"}
    if owner.sends_etags:
      headers["ETag"] = owner.etag(path)
    wanted = self.headers.get("If-Match")
    if wanted and owner.checks_if_match and wanted != headers.get("ETag"):
      return self._send(412, b"")
    start, end, status = 0, len(data), 200
    span = self.headers.get("Range")
    if span and fault != "ignore_range":
      first, last = span.removeprefix("bytes=").split("-")
      start, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
      if start >= len(data):
        return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
      headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
      status = 206
    return self._send(status, data[start:end], headers, fault)

  def _send(
      self, status: int, body: bytes, headers: dict[str, str] | None = None, fault: str = ""
  ) -> None:
    self.send_response(status)
    for name, value in (headers or {}).items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    if self.command == "HEAD":
      return
    if fault in ("cut", "stall"):
      self.wfile.write(body[: len(body) // 2])
      self.wfile.flush()
      self.close_connection = True
      if fault == "stall":
        self.server.owner.stopping.wait(60)
      return
    self.wfile.write(body)

  def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
    owner = self.server.owner
    prefix = query.get("prefix", [""])[0]
    after = query.get("continuation-token", [""])[0]
    keys = sorted(
        path[len(bucket) + 1 :] for path in owner.objects if path.startswith(bucket + "/")
    )
    keys = [key for key in keys if key.startswith(prefix) and key > after]
    page, more = keys[:1000], len(keys) > 1000
    lines = [
        f"<Contents><Key>{key}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
        f"<ETag>{owner.etag(f'{bucket}/{key}').replace(chr(34), '&quot;')}</ETag>"
        f"<Size>{len(owner.objects[f'{bucket}/{key}'])}</Size></Contents>"
        for key in page
    ]
    token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
    text = (
        f"<ListBucketResult><Name>{bucket}</Name><Prefix>{prefix}</Prefix>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(lines)}"
        "</ListBucketResult>"
    )
    self._send(200, text.encode(), {"Content-Type": "application/xml"})
