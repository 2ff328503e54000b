"""`maxtext-olmo storage test`: measures how fast an object store can be read from this host."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from maxtext_olmo import cli
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import MissingFileError

if TYPE_CHECKING:
  from maxtext_olmo.corpus.storage.measure import Measurement

_DESCRIPTION = """\
Reads random ranges, each as long as a row, from a bucket or a web server: first one at a time, then
more and more at once, and finally large pieces. Prints whether the store is fast enough for a host
that trains on a given number of tokens per second, and what the requests of an epoch cost. Writes
nothing to the store. Makes at most --requests row-sized reads, within about --seconds seconds.
"""

_EPILOG = """\
exit codes: 0 the store is fast enough; 1 it is too slow; 2 it cannot be read

price: of rows of fixed length (olmo_grain), each of which is one request; with an index built with
--max-target-sequence-length, each chunk of rows is one request. For documents and packed rows, use
`maxtext-olmo plan --hosts N CONFIG`. The default is the list price of a million GET requests to
standard storage in S3 and GCS. Traffic that leaves the region is not included, and usually costs
far more: keep the bucket in the same region as the hosts.

examples:
  maxtext-olmo storage test gs://bucket/olmo-mix-0925.json --tokens-per-second 2e6
  maxtext-olmo storage test https://olmo-data.org/some/part-00-00000.npy
"""

# A store that is only just fast enough makes the host wait whenever a request is slow.
_MARGIN = 1.5
_MOST_FILES = 64
_GIVE_A_FILE = (
    "Give an index (.json), or the URL of one token file, such as gs://bucket/part-00000.npy."
)


class _Target(NamedTuple):
  paths: list[str]
  row_bytes: int
  row_tokens: int
  rows: int | None  # Rows per epoch; None for as many as the file holds.
  rows_per_request: int = 1


def add_parser(subparsers: Any) -> None:
  """Adds `storage test`."""
  group = subparsers.add_parser("storage", help="measure an object store")
  option = cli.add_command(
      group.add_subparsers(title="commands", metavar="COMMAND", required=True),
      "test",
      run_test,
      help="measure latency and throughput, and what the requests of an epoch cost",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("URL", "an index whose files are in a store, or the URL of one token file")
  option(
      "--tokens-per-second N",
      "tokens that this host trains on per second, such as 2e6",
      otherwise="print the highest rate that the store is fast enough for",
      type=float,
  )
  option(
      "--sequence-length S",
      "tokens per row",
      otherwise="that of the index, or 8192",
      type=int,
  )
  option("--bytes-per-token B", "size of a token", otherwise="that of the index, or 4", type=int)
  option(
      "--tokens N",
      "tokens in an epoch, to compute its price",
      otherwise="those of the index, or of the file",
      type=float,
  )
  option("--price-per-million DOLLARS", "price of a million GET requests", default=0.4, type=float)
  option("--requests N", "maximum number of row-sized reads", default=10_000)
  option("--seconds T", "seconds after which no new read is started", default=20.0, type=float)
  cli.add_storage_options(option)


def run_test(args: argparse.Namespace) -> int:
  """Measures a store and prints a table and a verdict."""
  from maxtext_olmo.corpus.storage import measure as measure_lib
  from maxtext_olmo.corpus.storage import open_storage
  from maxtext_olmo.corpus.storage import stores

  for name in ("requests", "seconds", "sequence_length", "bytes_per_token", "tokens_per_second"):
    if (value := getattr(args, name)) is not None and not value > 0:
      raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {value}.")
  storage = open_storage(dataclasses.replace(stores.default_options(), slow_start=False))
  target = _find_target(args, storage)
  try:
    found = measure_lib.measure(
        storage.remote,
        target.paths,
        read_bytes=target.row_bytes,
        max_requests=args.requests,
        max_seconds=args.seconds,
    )
  except MissingFileError as error:
    raise MissingFileError(f"{error} If it is a folder: {_GIVE_A_FILE}") from None
  _print_rates(found)
  feeds = _print_verdict(found, target, args.tokens_per_second)
  rows = target.rows
  if rows is None:
    rows = storage.size(target.paths[0]) // target.row_bytes
  requests = -(-rows // target.rows_per_request)
  dollars = requests / 1e6 * args.price_per_million
  print(
      f"an epoch of {rows:,} rows of fixed length: {requests:,} requests, ${dollars:,.2f} at"
      f" ${args.price_per_million:g} per million\nfor documents and packed rows, see `maxtext-olmo"
      " plan --hosts N CONFIG`"
  )
  return 0 if feeds else 1


def _find_target(args: argparse.Namespace, storage: Any) -> _Target:
  """Returns which objects to read, and how long a row is."""
  from maxtext_olmo.corpus import index_builder
  from maxtext_olmo.corpus import paths as paths_lib
  from maxtext_olmo.corpus import urls

  url = urls.without_secrets(args.url)
  if not url.endswith(".json"):
    if not paths_lib.is_url(url):
      raise ConfigError(f"{url} is not a URL. {_GIVE_A_FILE}")
    if url.endswith("/") or not urls.split(url).key:
      raise ConfigError(f"{url} is a bucket or a folder. {_GIVE_A_FILE}")
    tokens = args.sequence_length or 8192
    size = args.bytes_per_token or 4
    return _Target(
        [url], tokens * size, tokens, int(args.tokens // tokens) if args.tokens else None
    )
  index = index_builder.load_index(url, storage=storage)
  tokens = args.sequence_length or index.sequence_length
  # Choose files from all over the corpus, because a store may keep labels in different places.
  step = max(1, len(index.files) // _MOST_FILES)
  paths = [
      path
      for i in range(0, len(index.files), step)
      if paths_lib.is_url(path := index.resolve(i)) and index.files[i].n_tokens >= tokens
  ][:_MOST_FILES]
  if not paths:
    raise ConfigError(
        f"The files of {url} are not in a store: its base is {index.base}. Build an index with a"
        " URL as base."
    )
  size = args.bytes_per_token or index.token_dtype.itemsize
  whole = args.tokens or index.total_tokens
  # The order keeps the rows of a chunk together, and one request reads them all.
  return _Target(paths, tokens * size, tokens, int(whole // tokens), max(1, index.window // tokens))


def _print_rates(found: "Measurement") -> None:
  print(f"first request {1e3 * found.first:,.0f} ms; then reads of {found.read_bytes:,} bytes:")
  rows = [
      (
          f"{rate.parallelism:,}",
          f"{rate.reads:,}",
          f"{rate.reads_per_second:,.0f}",
          f"{rate.bytes_per_second / 1e6:,.1f}",
          f"{1e3 * rate.median:,.1f}",
          f"{1e3 * rate.slowest:,.1f}",
      )
      for rate in found.rates
  ]
  cli.print_table(("in flight", "reads", "reads/s", "MB/s", "median ms", "slowest ms"), rows)
  large = found.large
  print(
      f"large reads, {large.parallelism} in flight: {large.bytes_per_second / 1e6:,.0f} MB/s\n"
      f"{found.requests:,} requests were sent, including {found.retries:,} retries"
  )


def _print_verdict(found: "Measurement", target: _Target, wanted: float | None) -> bool:
  """Prints whether the store is fast enough, and returns the verdict."""
  best = found.best
  possible = best.reads_per_second * target.row_tokens
  if wanted is None:
    print(f"fast enough for {possible / _MARGIN:,.0f} tokens/s on this host, with a margin of 50%")
    return True
  reads = wanted / target.row_tokens
  in_flight = max(1, round(reads * found.rates[0].median))
  need = (
      f"{wanted:,.0f} tokens/s need {reads:,.0f} reads/s, about {in_flight:,} in flight; measured"
      f" {best.reads_per_second:,.0f} with {best.parallelism:,} in flight"
  )
  if possible >= _MARGIN * wanted:
    print(f"fast enough: {need}")
    return True
  if possible >= wanted:
    print(f"TOO SLOW: {need}; a margin of 50% is needed, because some requests are slow")
    return False
  print(f"TOO SLOW: {need}. Train closer to the bucket, or copy the corpus (`corpus copy`)")
  return False
