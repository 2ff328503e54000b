"""A local single-user HTTP server that shows what a run has seen and will see.

It listens on 127.0.0.1 only and writes nothing. Every URL path begins with a random token, which
other users of the machine do not know. Requests for any other host name are refused, because a
malicious web site can make its own name point to 127.0.0.1 (DNS rebinding). Pages have no scripts,
and the content security policy allows none. A request looks like this:

    GET /2Nf…Q/row?step=5&row=3      Host: 127.0.0.1:40123
         token  page                 127.0.0.1 or localhost; any port, since a tunnel may change it
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import secrets
import urllib.parse
from http import HTTPStatus
from typing import Any

from absl import logging

from maxtext_olmo import errors
from maxtext_olmo.inspection import markup
from maxtext_olmo.inspection import views

_HOSTS = ("127.0.0.1", "localhost")
_SECONDS = 30  # A connection that sends nothing is closed after this time.


def _headers() -> dict[str, str]:
  """Returns the headers of every response."""
  digest = base64.b64encode(hashlib.sha256(markup.style().encode()).digest()).decode()
  return {
      "Content-Type": "text/html; charset=utf-8",
      "Content-Security-Policy": (
          f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self';"
          " frame-ancestors 'none'"
      ),
      "Cache-Control": "no-store",
      "Cross-Origin-Opener-Policy": "same-origin",
      "Cross-Origin-Resource-Policy": "same-origin",
      "Referrer-Policy": "no-referrer",
      "X-Content-Type-Options": "nosniff",
  }


class Server(http.server.ThreadingHTTPServer):
  """Serves pages on a free port of 127.0.0.1; `serve_forever` runs it.

  Args:
    pages: The pages of a run.
  """

  daemon_threads = True

  def __init__(self, pages: views.Views):
    self.views = pages
    self.token = secrets.token_urlsafe(24)
    super().__init__(("127.0.0.1", 0), _Handler)

  @property
  def address(self) -> str:
    """The address to open."""
    return f"http://127.0.0.1:{self.server_port}/{self.token}/"

  def server_close(self) -> None:
    """Closes the socket and stops the running search."""
    self.views.searches.close()
    super().server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  """Handles one connection."""

  server: Server
  timeout = _SECONDS
  server_version, sys_version = "maxtext-olmo", ""

  def do_GET(self) -> None:
    hosts = self.headers.get_all("Host") or []
    if len(hosts) != 1 or hosts[0].rpartition(":")[0] not in _HOSTS:
      self._refuse(HTTPStatus.FORBIDDEN, "This server answers only to 127.0.0.1 and localhost.")
      return
    address = urllib.parse.urlsplit(self.path)
    _, token, *names = address.path.split("/", 2) if "/" in address.path else ("", "")
    if not secrets.compare_digest(token.encode(), self.server.token.encode()) or not names:
      self._refuse(HTTPStatus.NOT_FOUND, "Open the address that the command printed.")
      return
    try:
      query = dict(urllib.parse.parse_qsl(address.query, max_num_fields=20))
      page = self.server.views.page(names[0], query)
    except Exception as error:  # A failing request must not end the server.
      self._explain(error)
    else:
      self._send(HTTPStatus.OK, page)

  def _explain(self, error: Exception) -> None:
    """Sends a page that explains an error."""
    status, text = HTTPStatus.BAD_REQUEST, str(error)
    if isinstance(error, views.NotFoundError):
      status = HTTPStatus.NOT_FOUND
    elif not isinstance(error, (errors.MaxtextOlmoError, ValueError)):
      logging.exception("A page could not be made.")
      status, text = HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
    self._send(status, markup.make_message(f"{status.value} {status.phrase}", text))

  def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
    """Refuses a request that is malformed, or that has a method other than GET."""
    del explain
    self.close_connection = True
    if code == HTTPStatus.NOT_IMPLEMENTED:
      self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is served.")
    else:
      self._refuse(HTTPStatus(code), message or "")

  def log_message(self, format: str, *args: Any) -> None:
    """Logs nothing, because URLs contain the token."""

  def _refuse(self, status: HTTPStatus, text: str) -> None:
    """Refuses a request by sending a page without forms."""
    page = markup.make_message(f"{status.value} {status.phrase}", text, forms=False)
    self._send(status, page)

  def _send(self, status: HTTPStatus, page: str) -> None:
    content = page.encode("utf-8", "replace")
    self.send_response(status)
    for name, value in {**_headers(), "Content-Length": str(len(content))}.items():
      self.send_header(name, value)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
      self.send_header("Allow", "GET")
    self.end_headers()
    try:
      if self.command != "HEAD":
        self.wfile.write(content)
    except ConnectionError:  # The browser has left the page.
      self.close_connection = True
