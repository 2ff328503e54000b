"""Opens obstore's stores lazily, one for each bucket and credentials in a process.

Opening a store takes about 100 ms, and its connections are shared by all threads. obstore must not
be used in a forked child after its parent has used it: the child would wait forever for threads
that exist in the parent only. That is refused here.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import threading
import types
import urllib.parse
from typing import Any

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import credentials
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_CONNECT_TIMEOUT = "5s"
_READ_TIMEOUT = "5s"  # Between two pieces of an answer; a slow connection is not a dead one.
_TIMEOUT = "180s"
_WRITE_RETRIES = 10


@dataclasses.dataclass(frozen=True)
class StoreOptions:
  """How to reach stores; the rest is taken from the environment, as the stores' own tools do.

  Attributes:
    endpoint: URL of a server that speaks the protocol of S3, GCS or Azure; "" uses the provider's.
    region: Region of S3 buckets; "" uses AWS_REGION, or us-east-1.
    anonymous: Whether requests are sent without credentials, as for public buckets.
    patience: Seconds after which a store that has answered before is given up.
    first_patience: Seconds after which a store that has never answered is given up; the address
      may be wrong.
  """

  endpoint: str = ""
  region: str = ""
  anonymous: bool = False
  patience: float = 3600.0
  first_patience: float = 30.0


_lock = threading.Lock()
_default = StoreOptions()
_stores: dict[Any, Any] = {}
_process: int | None = None


def default_options() -> StoreOptions:
  """Returns the options of storages that are opened without any."""
  return _default


def use_by_default(options: StoreOptions) -> None:
  """Sets the options of storages that are opened without any, in this process.

  A config or a command line says once how stores are reached; indexes, manifests and other small
  files are read the same way as the tokens.
  """
  global _default
  _default = options


def obstore() -> types.ModuleType:
  """Returns obstore; raises ConfigError if it is missing, CorpusError in a forked child."""
  global _process
  if _process is None:
    try:
      import obstore as imported  # noqa: F401
    except ImportError as error:
      raise ConfigError(
          "Reading from object stores needs obstore, which is not installed. In the checkout of"
          " this project, run `pip install -e '.[cloud]'`."
      ) from error
    _process = os.getpid()
  if _process != os.getpid():
    raise CorpusError(
        f"Process {os.getpid()} was forked from process {_process} after that one had read from an"
        " object store, and cannot read from it: the threads that send requests are not copied by a"
        " fork. Start processes with the 'spawn' method (multiprocessing.set_start_method), or fork"
        " before anything is read."
    )
  import obstore as module

  return module


def open_store(url: str, options: StoreOptions, *, writing: bool = False) -> Any:
  """Returns the store of a URL; the same one for all objects of a bucket.

  Args:
    url: URL without credentials; those it was given with are used.
    options: How the store is reached.
    writing: Whether failed requests are repeated by obstore. Reads are repeated by their caller,
      which counts them and says so.
  """
  obstore()
  location, secrets = urls.split(url), urls.credentials_of(url)
  key = (location.scheme, location.host, secrets, options, writing)
  with _lock:
    if key not in _stores:
      _stores[key] = _open(location, secrets, options, writing)
    return _stores[key]


def _open(
    location: urls.Location, secrets: urls.Secrets, options: StoreOptions, writing: bool
) -> Any:
  import obstore.store

  store_lib: Any = obstore.store  # Its options are typed dicts, which cannot be composed.
  address = options.endpoint or f"{location.scheme}://"
  client: dict[str, Any] = {
      "connect_timeout": _CONNECT_TIMEOUT,
      "read_timeout": _READ_TIMEOUT,
      "timeout": _TIMEOUT,
  }
  if address.startswith("http://"):
    client["allow_http"] = True
  common = {
      "client_options": client,
      "retry_config": {"max_retries": _WRITE_RETRIES if writing else 0},
  }
  try:
    if location.scheme in urls.HTTP:
      query = f"?{secrets.query}" if secrets.query else ""
      if secrets.user:
        client["default_headers"] = {"authorization": _basic(secrets.user)}
      return store_lib.HTTPStore(f"{location.scheme}://{location.host}/{query}", **common)
    if location.scheme in urls.GCS:
      return store_lib.GCSStore(location.host, config=_gcs(options), **common, **_google(options))
    if location.scheme in urls.S3:
      return store_lib.S3Store(location.host, config=_s3(options), **common, **_aws(options))
    container, _, account = location.host.partition("@")
    return store_lib.AzureStore(container, config=_azure(account, secrets, options), **common)
  except ConfigError:
    raise
  except Exception as error:
    why = urls.redact(str(error)).split("\n")[0].rstrip(".")
  raise ConfigError(
      f"Cannot open {location.scheme}://{location.host}: {why}. Check the credentials in the"
      " environment, and olmo_storage_endpoint, olmo_storage_region and olmo_storage_anonymous."
  )


def _basic(user: str) -> str:
  pair = urllib.parse.unquote(user).encode()
  return f"Basic {base64.b64encode(pair).decode()}"


def _gcs(options: StoreOptions) -> dict[str, Any]:
  config: dict[str, Any] = {}
  if options.endpoint:
    config["base_url"] = options.endpoint
  if options.anonymous:
    config["skip_signature"] = True
  return config


def _google(options: StoreOptions) -> dict[str, Any]:
  provider = None if options.anonymous else credentials.google_provider()
  return {} if provider is None else {"credential_provider": provider}


def _s3(options: StoreOptions) -> dict[str, Any]:
  config: dict[str, Any] = {}
  if options.endpoint:
    config["endpoint"] = options.endpoint
  if options.region:
    config["region"] = options.region
  if options.anonymous:
    config["skip_signature"] = True
  return config


def _aws(options: StoreOptions) -> dict[str, Any]:
  provider = None if options.anonymous else credentials.aws_provider()
  return {} if provider is None else {"credential_provider": provider}


def _azure(account: str, secrets: urls.Secrets, options: StoreOptions) -> dict[str, Any]:
  config: dict[str, Any] = {}
  if account:
    config["account_name"] = account.split(".")[0]
  if options.endpoint:
    config["endpoint"] = options.endpoint
  if secrets.query:
    config["sas_key"] = secrets.query
  if options.anonymous:
    config["skip_signature"] = True
  return config
