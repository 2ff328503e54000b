"""Object stores on loopback: real servers that the tests start and stop.

| server | is read as | signed | lists and writes |
|---|---|---|---|
| nginx | `https://`, `s3://`, `gs://`, `az://` | no | no |
| moto_server | `s3://` | yes | yes |
| azurite | `az://` | yes | yes |

`make test-cloud` installs them. Where one is missing, its tests are skipped and name it:

    with servers.start_nginx(directory) as nginx:
      read_from(nginx.url)

All credentials are explicit, and no server listens on anything but 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests import distributed

# An account that exists in azurite only; name and key are in its documentation.
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
# moto accepts any key; these are easy to find where they must not appear.
MOTO_KEY = "AKIAIOSFODNN7EXAMPLE"
MOTO_SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
# Nothing may ask these addresses for credentials, and none of the user's own may be found.
NO_METADATA = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_CONFIG_FILE": os.devnull,
    "CLOUDSDK_CONFIG": "/nonexistent",
    "GCE_METADATA_HOST": "127.0.0.1:1",
}
_START_SECONDS = 60.0
_ATTEMPTS = 5  # Another process may take a port between its choice and its use.


@dataclasses.dataclass(frozen=True)
class Server:
  """A running server.

  Attributes:
    url: Its address, such as `http://127.0.0.1:8080`.
    process: Its process.
  """

  url: str
  process: subprocess.Popen[bytes]

  @property
  def port(self) -> int:
    """The port it listens on."""
    return int(self.url.rpartition(":")[2])


def missing(name: str) -> str | None:
  """Returns why a server cannot be started here; None if it can."""
  return None if _COMMANDS[name]() else f"{name} is not installed; `make test-cloud` installs it."


def needs(name: str) -> Callable[[Any], Any]:
  """Skips a test, or all of a class, where a server is missing."""
  reason = missing(name)
  return unittest.skipIf(reason is not None, reason or "")


@contextlib.contextmanager
def start_nginx(directory: str | os.PathLike[str], workers: int = 0) -> Iterator[Server]:
  """Serves a directory: each folder in it is a bucket.

  Args:
    directory: The directory; may be changed while it is served.
    workers: Number of worker processes; 0 serves from one process without a master.
  """
  with tempfile.TemporaryDirectory(prefix="nginx_") as folder:
    config = pathlib.Path(folder, "nginx.conf")

    def command(port: int) -> Sequence[str]:
      config.write_text(_nginx_config(folder, os.fspath(directory), port, workers))
      return [*_COMMANDS["nginx"](), "-p", folder, "-c", str(config)]

    with _started("nginx", command) as server:
      yield server


@contextlib.contextmanager
def start_moto() -> Iterator[Server]:
  """Starts an S3 server that holds nothing yet; `create_s3_bucket` makes buckets."""
  with _started(
      "moto", lambda port: [*_COMMANDS["moto"](), "-H", "127.0.0.1", "-p", str(port)]
  ) as server:
    yield server


@contextlib.contextmanager
def start_azurite() -> Iterator[Server]:
  """Starts an Azure blob server that holds nothing yet."""
  with tempfile.TemporaryDirectory(prefix="azurite_") as folder:

    def command(port: int) -> Sequence[str]:
      options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", folder]
      address = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
      return [*_COMMANDS["azurite"](), *options, *address]

    with _started("azurite", command) as server:
      yield server


def moto_environment() -> dict[str, str]:
  """Returns the variables with which moto's S3 is reached."""
  return {
      **NO_METADATA,
      "AWS_ACCESS_KEY_ID": MOTO_KEY,
      "AWS_SECRET_ACCESS_KEY": MOTO_SECRET,
      "AWS_REGION": "us-east-1",
  }


def azurite_environment() -> dict[str, str]:
  """Returns the variables with which azurite is reached."""
  return {
      **NO_METADATA,
      "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
      "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
  }


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
  """Sets environment variables within it, and removes all others that select credentials."""
  before = dict(os.environ)
  try:
    for name in before:
      if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GCE_", "CLOUDSDK_")):
        del os.environ[name]
    os.environ.update(values)
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)


def create_s3_bucket(server: Server, bucket: str) -> None:
  """Makes a bucket in moto."""
  _request(server, "PUT", f"/{bucket}", {"Authorization": _S3_AUTHORIZATION}, (200,))


def create_azure_container(server: Server, container: str) -> None:
  """Makes a container in azurite, with a signed request."""
  import base64
  import email.utils
  import hashlib
  import hmac

  path = f"/{AZURITE_ACCOUNT}/{container}"
  headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
  lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
  text = "\n".join([*lines, f"/{AZURITE_ACCOUNT}{path}", "restype:container"])
  signature = hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()
  signed = base64.b64encode(signature).decode()
  headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{signed}"
  headers["Content-Length"] = "0"
  _request(server, "PUT", f"{path}?restype=container", headers, (201,))


# moto does not check signatures, but finds the service by the scope of the credentials.
_S3_AUTHORIZATION = (
    f"AWS4-HMAC-SHA256 Credential={MOTO_KEY}/20260101/us-east-1/s3/aws4_request,"
    " SignedHeaders=host, Signature=0"
)


def _request(
    server: Server, method: str, path: str, headers: Mapping[str, str], expected: Sequence[int]
) -> bytes:
  import http.client

  connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
  try:
    connection.request(method, path, headers=dict(headers))
    answer = connection.getresponse()
    body = answer.read()
  finally:
    connection.close()
  if answer.status not in expected:
    raise AssertionError(f"{method} {path}: {answer.status} {body.decode(errors='replace')}")
  return body


@contextlib.contextmanager
def _started(name: str, command: Callable[[int], Sequence[str]]) -> Iterator[Server]:
  if (reason := missing(name)) is not None:
    raise unittest.SkipTest(reason)
  with tempfile.TemporaryFile() as log:
    for attempt in range(_ATTEMPTS):
      port = distributed.free_port()
      process = subprocess.Popen(
          command(port), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
      )
      try:
        if _listens(process, port):
          yield Server(f"http://127.0.0.1:{port}", process)
          return
      finally:
        stop(process)
      if attempt == _ATTEMPTS - 1:
        log.seek(0)
        raise AssertionError(f"{name} did not start:\n{log.read().decode(errors='replace')}")


def stop(process: subprocess.Popen[bytes]) -> None:
  """Ends a process, and waits for it."""
  if process.poll() is None:
    process.terminate()
    try:
      process.wait(10)
    except subprocess.TimeoutExpired:
      process.kill()
  process.wait()


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
  deadline = time.monotonic() + _START_SECONDS
  while process.poll() is None and time.monotonic() < deadline:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
      return True
    time.sleep(0.05)
  return False


def _nginx_config(folder: str, directory: str, port: int, workers: int) -> str:
  paths = "\n".join(
      f"  {name}_temp_path {folder}/{name};"
      for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
  )
  # As root, a worker would give up its rights, and with them the temporary folders of tests.
  user = "user root;" if os.getuid() == 0 else ""
  processes = f"worker_processes {workers};" if workers else "master_process off;"
  return f"""\
daemon off;
{user}
{processes}
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
{paths}
  access_log off;
  default_type application/octet-stream;
  sendfile on;
  tcp_nodelay on;
  keepalive_timeout 300;
  keepalive_requests 1000000000;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    root {directory};
  }}
}}
"""


@functools.cache
def _nginx_command() -> list[str]:
  found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
  return [found] if found else []


@functools.cache
def _moto_command() -> list[str]:
  if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
    return []
  return [sys.executable, "-c", "import sys; from moto.server import main; main(sys.argv[1:])"]


@functools.cache
def _azurite_command() -> list[str]:
  local = pathlib.Path(sys.prefix, "npm", "node_modules", ".bin", "azurite-blob")
  found = str(local) if local.exists() else shutil.which("azurite-blob")
  return [found] if found and shutil.which("node") else []


_COMMANDS: dict[str, Callable[[], list[str]]] = {
    "nginx": _nginx_command,
    "moto": _moto_command,
    "azurite": _azurite_command,
}
