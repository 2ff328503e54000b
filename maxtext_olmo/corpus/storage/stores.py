"""Opens obstore's stores lazily: one per bucket and set of credentials in a process.

Opening a store takes about 100 ms, and its connections are shared by all threads. obstore must not
be used in a forked child after its parent has used it: the child would wait forever for threads
that exist only in the parent. The function `obstore` raises an error in such a child.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import dataclasses
import datetime
import os
import threading
import types
import urllib.parse
from collections.abc import Iterator
from typing import Any

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import credentials
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_CONNECT_TIMEOUT = "5s"
# The read timeout limits the gap between two pieces of a response, so slow connections survive.
_READ_TIMEOUTS = {"read_timeout": "5s", "timeout": "180s"}
# A read timeout would include sending the body, so a write has only a timeout for the whole
# request. On a link of 0.6 MB/s, it suffices for the parts that `corpus copy` sends at once.
_WRITE_TIMEOUT = "240s"
# Stores reject a signature after 15 minutes, and obstore retries a request with its original
# signature. A token may expire even sooner; see `RETRIED_TOKEN_SECONDS`.
_WRITE_RETRIES = {
    "max_retries": 10_000,  # Never reached: the time is the limit.
    "backoff": {"max_backoff": datetime.timedelta(seconds=5)},
    "retry_timeout": datetime.timedelta(minutes=12),
}
# For objects of a few bytes, such as a lease, which must be renewed within minutes.
_SMALL_TIMEOUT = "10s"
_SMALL_RETRIES = {**_WRITE_RETRIES, "retry_timeout": datetime.timedelta(minutes=1)}
# A token is valid for at least this long when obstore first sends a request with it.
RETRIED_TOKEN_SECONDS = 180.0
# Parts of an object to send at the same time.
UPLOADS_AT_ONCE = 2


@dataclasses.dataclass(frozen=True)
class StoreOptions:
  """Options for connecting to object stores.

  All other settings come from the environment, as in the providers' own tools.

  Attributes:
    endpoint: URL of a server that is compatible with S3, GCS or Azure; "" uses the provider's own.
    region: Region of S3 buckets; "" uses AWS_REGION, or us-east-1.
    anonymous: Whether to send requests without credentials, as for public buckets.
    patience: Seconds of silence after which to give up on a store that has answered before. For one
      that has answered only to the process that recorded the object's ETag, at most 600.
    first_patience: Seconds after which to give up on a store that has never answered, because its
      address may be wrong.
    slow_start: Whether to start at a low request rate and raise it gradually; measurements turn
      this off.
  """

  endpoint: str = ""
  region: str = ""
  anonymous: bool = False
  patience: float = 3600.0
  first_patience: float = 30.0
  slow_start: bool = True


_lock = threading.Lock()
_default = StoreOptions()
_in_this_block: contextvars.ContextVar[StoreOptions | None] = contextvars.ContextVar(
    "store options of this block", default=None
)
_stores: dict[Any, Any] = {}
_obstore: types.ModuleType | None = None  # None before the first use, and in a forked child.
_process: int | None = None  # The process that first used obstore; a forked child inherits it.


def default_options() -> StoreOptions:
  """Returns the options for storages that are opened without options."""
  return _in_this_block.get() or _default


def use_by_default(options: StoreOptions) -> None:
  """Sets the options for storages that this process opens without options.

  A config or a command line sets them once. Indexes, manifests and other small files are then read
  with the same options as the tokens.
  """
  global _default
  _default = options


@contextlib.contextmanager
def use_in_block(options: StoreOptions) -> Iterator[None]:
  """Replaces the default options within a `with` block, in this thread only.

  A cluster worker may run tasks of several drivers at the same time, each with its own store.
  """
  token = _in_this_block.set(options)
  try:
    yield
  finally:
    _in_this_block.reset(token)


def obstore() -> types.ModuleType:
  """Returns obstore; raises ConfigError if it is missing, CorpusError in a forked child."""
  global _obstore, _process
  if _obstore is not None:
    return _obstore
  if _process is not None:
    raise CorpusError(
        f"Process {os.getpid()} cannot read from object stores: it was forked from process"
        f" {_process}, which had already read from one, and the threads that send requests do not"
        " survive a fork. Start processes with the 'spawn' method"
        " (multiprocessing.set_start_method), or fork before anything is read."
    )
  try:
    import obstore as module
  except ImportError as error:
    raise ConfigError(
        "Reading from object stores needs obstore, which is not installed. In the checkout of"
        " this project, run `pip install -e '.[cloud]'`."
    ) from error
  _obstore, _process = module, os.getpid()
  return module


def _forget_obstore() -> None:
  global _obstore
  _obstore = None


# A fork is detected by this hook, which is cheaper than comparing process ids at each request.
os.register_at_fork(after_in_child=_forget_obstore)


def open_store(
    url: str, options: StoreOptions, *, writing: bool = False, small: bool = False
) -> Any:
  """Returns the store of a URL. All objects of a bucket share one store.

  Args:
    url: URL without credentials; credentials that the user gave in this URL are looked up.
    options: Options for connecting to the store.
    writing: Whether the store is for writing. obstore retries failed writes itself. The caller
      retries failed reads, to count and report them.
    small: With `writing`, whether objects have only a few bytes, so that a request that takes more
      than seconds is sent again, for a minute at most.
  """
  obstore()
  location, secrets = urls.split(url), urls.credentials_of(url)
  key = (location.scheme, location.host, secrets, options, writing, small)
  with _lock:
    if key not in _stores:
      _stores[key] = _open(location, secrets, options, writing, small)
    return _stores[key]


def _open(
    location: urls.Location,
    secrets: urls.Secrets,
    options: StoreOptions,
    writing: bool,
    small: bool,
) -> Any:
  import obstore.store

  store_lib: Any = obstore.store  # Any, because its options are typed dicts that cannot be merged.
  address = options.endpoint or f"{location.scheme}://"
  client: dict[str, Any] = {
      "connect_timeout": _CONNECT_TIMEOUT,
      **_READ_TIMEOUTS,
  }
  retries: dict[str, Any] = {"max_retries": 0}
  if writing:
    del client["read_timeout"]
    client["timeout"] = _SMALL_TIMEOUT if small else _WRITE_TIMEOUT
    retries = _SMALL_RETRIES if small else _WRITE_RETRIES
  if address.startswith("http://"):
    client["allow_http"] = True
  common = {"client_options": client, "retry_config": retries}
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
    config = _azure(account, secrets, options)
    return store_lib.AzureStore(container, config=config, **common, **_microsoft(secrets, options))
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


def _microsoft(secrets: urls.Secrets, options: StoreOptions) -> dict[str, Any]:
  unneeded = options.anonymous or bool(secrets.query)
  provider = None if unneeded else credentials.azure_provider()
  return {} if provider is None else {"credential_provider": provider}
