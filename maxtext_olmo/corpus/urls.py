"""URLs of objects: `gs://`, `s3://`, `az://`, `https://` and others.

A URL may carry credentials: a signature in its query, or a user and a password. `without_secrets`
removes them from every path in a config, on a command line or in a call of a public function, and
keeps them in this process. `credentials_of` returns them to the code that sends requests. All other
code sees paths without credentials, so no credentials can reach a log, an error, an index or a
state.

    https://host/tokens?sv=2024&sig=abc    as given
    https://host/tokens                    what paths, indexes and messages contain
    https://host/tokens/part.npy           read with the query `sv=2024&sig=abc`
"""

from __future__ import annotations

import os
import re
import threading
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from maxtext_olmo.errors import ConfigError

HTTP = ("http", "https")
GCS = ("gs",)
S3 = ("s3", "s3a")
AZURE = ("az", "azure", "abfs", "abfss")
SCHEMES = GCS + S3 + AZURE + HTTP

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_IN_TEXT = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
# An object key may contain a question mark. What follows is a query only if it has a signature.
_SIGNATURE = re.compile(r"(^|[&?])(sig|X-Amz-Signature|X-Goog-Signature|Signature)=", re.IGNORECASE)
_HIDDEN = "***"


class Secrets(NamedTuple):
  """The credentials of a URL.

  Attributes:
    query: Query of the URL, without the question mark.
    user: `user:password`, percent-encoded as in the URL.
  """

  query: str = ""
  user: str = ""


class Location(NamedTuple):
  """A URL, split into a store and the key of an object in it.

  Attributes:
    scheme: The scheme, in lower case.
    host: The bucket, the container (with `@account`, if given), or the host and port.
    key: The key, without a leading slash.
  """

  scheme: str
  host: str
  key: str


_secrets: dict[str, Secrets] = {}  # By the URL that carried them.
_lock = threading.Lock()


def is_url(path: str) -> bool:
  """Returns whether a path begins with a scheme, as in `gs://bucket/file`."""
  return "://" in path and _URL.match(path) is not None


def split(url: str) -> Location:
  """Splits a URL without credentials; raises ConfigError if its scheme is not supported."""
  scheme, rest = url.split("://", 1)
  scheme = scheme.lower()
  if scheme not in SCHEMES:
    raise ConfigError(
        f"{redact(url)}: the scheme {scheme}:// is not supported. Use a local path, or a URL that"
        f" begins with {', '.join(f'{name}://' for name in SCHEMES)}."
    )
  host, _, key = rest.partition("/")
  if not host:
    kind = "a host" if scheme in HTTP else "a bucket"
    raise ConfigError(f"{redact(url)} names no object: expected {kind} after {scheme}://.")
  return Location(scheme, host, key.strip("/"))


def store_key(location: Location) -> str:
  """Returns the key that a store expects; keys on web servers are percent-decoded."""
  return urllib.parse.unquote(location.key) if location.scheme in HTTP else location.key


def without_secrets(path: str | os.PathLike[str]) -> str:
  """Returns a path without credentials; keeps the credentials of a URL for later requests.

  >>> without_secrets("https://host/tokens?sig=abc")
  'https://host/tokens'
  >>> without_secrets("gs://bucket/what?.npy")  # A key may contain a question mark.
  'gs://bucket/what?.npy'
  """
  path = os.fspath(path)
  if not is_url(path):
    return path
  clean, secrets = _separate(path)
  if secrets == Secrets():
    return clean
  if secrets.user and not clean.startswith(("http://", "https://")):
    raise ConfigError(
        f"{redact(path)}: credentials are not read from URLs of this scheme. Set them in the"
        " environment, as for the store's own tools."
    )
  with _lock:
    _secrets[clean.rstrip("/")] = secrets
  return clean


def clean_text(text: str) -> str:
  """Applies `without_secrets` to each URL in a text, and returns the text."""
  return _URL_IN_TEXT.sub(lambda found: without_secrets(found[0]), text) if "://" in text else text


def credentials_of(url: str) -> Secrets:
  """Returns the credentials given for a URL or for the nearest directory above it."""
  with _lock:
    if not _secrets:
      return Secrets()
    while is_url(url):
      if url in _secrets:
        return _secrets[url]
      url = url.rpartition("/")[0]
  return Secrets()


def all_secrets() -> dict[str, Secrets]:
  """Returns all credentials that this process found in URLs, to pass them to another process."""
  with _lock:
    return dict(_secrets)


def remember(secrets: Mapping[str, Secrets]) -> None:
  """Adds the credentials that `all_secrets` returned in another process."""
  with _lock:
    for url, found in secrets.items():
      _secrets.setdefault(url, found)


def redact(text: str) -> str:
  """Returns a text in which credentials in URLs are replaced by asterisks.

  >>> redact("cannot read https://user:pass@host/x.npy?sig=abc: timeout")
  'cannot read https://***@host/x.npy?***: timeout'
  """

  def hide(found: re.Match[str]) -> str:
    clean, secrets = _separate(found[0])
    scheme, rest = clean.split("://", 1)
    user = f"{_HIDDEN}@" if secrets.user else ""
    return f"{scheme}://{user}{rest}" + (f"?{_HIDDEN}" if secrets.query else "")

  return _URL_IN_TEXT.sub(hide, text) if "://" in text else text


def _separate(url: str) -> tuple[str, Secrets]:
  """Returns a URL without its credentials, and the credentials."""
  scheme, rest = url.split("://", 1)
  scheme = scheme.lower()
  query = ""
  if "?" in rest:
    before, _, after = rest.partition("?")
    if scheme in HTTP or _SIGNATURE.search(after):
      rest, query = before, after
  host, slash, key = rest.partition("/")
  user = ""
  if "@" in host and scheme not in AZURE:  # abfs://container@account has no user.
    user, _, host = host.rpartition("@")
  return f"{scheme}://{host}{slash}{key}", Secrets(query, user)
