"""`maxtext-olmo plan --hosts`: what the data path needs on many hosts, and what breaks first."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo.errors import ConfigError

if TYPE_CHECKING:
  from maxtext_olmo.inspection import fleet_limits
  from maxtext_olmo.inspection import fleet_plan

_MOST_DEVICES = 2**20


def add_options(option: Callable[..., None]) -> None:
  """Adds the options that describe the hosts."""
  option("--hosts N", "plan for this many hosts", otherwise="plan the labels", type=int)
  option(
      "--tokens-per-second N",
      "tokens per second that all hosts together train on, such as 2e8",
      otherwise="required with --hosts",
      type=float,
  )
  option("--devices-per-host N", "devices of each host", default=4)
  option(
      "--mesh AXIS=SIZE",
      "axes of the mesh, slowest first, such as data=512 tensor=8; rows are split over those in"
      " data_sharding (over all of them, if it is not set)",
      otherwise="one axis with all devices",
      nargs="+",
      default=[],
  )
  option("--latency-ms T", "time that a request to the store takes", default=50.0, type=float)
  option("--outage-minutes T", "outage that the spool should bridge", default=10.0, type=float)
  option(
      "--open-files N",
      "limit on open files of a process on the hosts",
      otherwise="that of this shell, `ulimit -n`",
      type=int,
  )
  option(
      "--host-memory-gib GIB",
      "memory of a host that the data path may use",
      otherwise="not checked",
      type=float,
  )
  option(
      "--store-reads-per-second N",
      "requests per second that the store serves",
      otherwise="what a new bucket serves: 5,000 for gs://, 5,500 for s3://, 20,000 for az://",
      type=float,
  )
  option("--price-per-million DOLLARS", "price of a million GET requests", default=0.4, type=float)


def run(args: argparse.Namespace, options: Any, steps: int | None) -> int:
  """Prints the plan of a fleet; returns 1 if a limit breaks."""
  from maxtext_olmo.inspection import fleet_limits
  from maxtext_olmo.inspection import fleet_plan

  if args.svg or args.html:
    raise ConfigError("--svg and --html draw the shares of labels; leave out --hosts.")
  if args.tokens_per_second is None:
    raise ConfigError("--hosts needs --tokens-per-second, the total of all hosts.")
  for name in ("latency_ms", "outage_minutes"):
    if not getattr(args, name) >= 0:
      raise ConfigError(f"--{name.replace('_', '-')} must not be negative.")
  if not 1 <= args.hosts * args.devices_per_host <= _MOST_DEVICES:
    raise ConfigError(f"--hosts × --devices-per-host must be from 1 to {_MOST_DEVICES:,}.")
  fleet = fleet_plan.Fleet(
      args.hosts,
      args.tokens_per_second,
      args.devices_per_host,
      dict(map(_axis, args.mesh)),
      args.latency_ms / 1e3,
      args.outage_minutes * 60,
  )
  figures = fleet_plan.make_figures(options, fleet, steps)
  limits = fleet_limits.check_limits(
      figures,
      fleet_limits.Limits(
          fleet.latency,
          args.open_files,
          None if args.host_memory_gib is None else args.host_memory_gib * 2**30,
          args.store_reads_per_second
          or fleet_limits.STORE_READS_PER_SECOND.get(figures.store_scheme),
      ),
  )
  if args.json:
    _print_json(figures, limits, args.price_per_million)
  else:
    _print_tables(figures, limits, fleet, args.price_per_million)
  return 1 if limits[0].used > 1 else 0


def _axis(text: str) -> tuple[str, int]:
  name, equals, size = text.partition("=")
  if not (name and equals and size.isdecimal() and int(size)):
    raise ConfigError(f"--mesh {text!r} is not AXIS=SIZE, such as data=512.")
  return name, int(size)


def _print_json(
    figures: fleet_plan.Figures, limits: list[fleet_limits.Limit], price_per_million: float
) -> None:
  found = dataclasses.asdict(figures)
  for name in (
      "memory_bytes",
      "descriptors",
      "requests_per_second",
      "fleet_requests_per_second",
      "requests",
  ):
    found[name] = getattr(figures, name)
  if figures.requests is not None:
    found["dollars"] = figures.requests / 1e6 * price_per_million
  checked = [{**dataclasses.asdict(limit), "used": limit.used} for limit in limits]
  print(json.dumps({"figures": found, "limits": checked}, indent=2))


def _print_tables(
    figures: fleet_plan.Figures,
    limits: list[fleet_limits.Limit],
    fleet: fleet_plan.Fleet,
    price_per_million: float,
) -> None:
  print(
      f"{figures.hosts:,} hosts with {figures.devices:,} devices;"
      f" steps of {figures.batch_rows:,} × {figures.row_tokens:,} tokens,"
      f" {figures.steps_per_second:,.3g} per second"
  )
  rows = [*_rates(figures), *_memory(figures), *_store(figures, fleet, price_per_million)]
  cli.print_table(("figure", "per host", "all hosts"), rows)
  cells = [
      (limit.name, _show(limit.needed, limit.unit), _show(limit.allowed, limit.unit), _used(limit))
      for limit in limits
  ]
  cli.print_table(("limit", "needed", "allowed", "used"), cells)
  first = limits[0]
  if first.used > 1:
    print(f"First to break: {first.name}. {first.remedy}")
    for limit in limits[1:]:
      if limit.used > 1:
        print(f"Also breaks: {limit.name}. {limit.remedy}")
  else:
    print(f"Nothing breaks. The closest limit: {first.name}, {_used(first)} used.")


_Row = tuple[str, str, str]


def _rates(figures: fleet_plan.Figures) -> Iterator[_Row]:
  hosts, pace = figures.hosts, figures.steps_per_second
  rows = figures.rows_per_host
  yield "rows per step", f"{rows:,}", f"{round(figures.copies * figures.loaded_rows):,}"
  if figures.copies > 1:
    yield "hosts that read each row", "", f"{figures.copies:,.1f}"
  tokens = rows * figures.row_tokens * pace
  yield "tokens read per second", _count(tokens), _count(
      figures.copies * figures.loaded_rows * figures.row_tokens * pace
  )
  if figures.reads_per_step:
    yield "reads per second", _count(figures.reads_per_step * pace), _count(
        figures.fleet_reads_per_step * pace
    )
  if figures.remote_files:
    yield "requests per second", _count(figures.requests_per_second), _count(
        figures.fleet_requests_per_second
    )
  yield "bytes per second", _bytes(figures.bytes_per_step * pace), _bytes(
      figures.fleet_bytes_per_step * pace
  )
  yield "open files and connections", f"{figures.descriptors:,}", ""
  sizes = figures.sizes_asked
  if sizes:
    yield "start: sizes of files", f"{sizes:,}", f"{sizes * hosts:,}"
  if figures.remote_files:
    index, first = figures.index_requests, round(figures.requests_per_step)
    yield "start: requests for index and first step", f"{index + first:,}", (
        f"{round(index * hosts + figures.fleet_requests_per_step):,}"
    )
  if figures.versions_asked:
    asked = figures.versions_asked
    yield "start: ETags that the index lacks", f"{asked:,}", f"{asked * hosts:,}"


def _memory(figures: fleet_plan.Figures) -> Iterator[_Row]:
  hosts = figures.hosts
  yield "memory of the data path", _bytes(figures.memory_bytes), _bytes(
      figures.memory_bytes * hosts
  )
  yield "  index, order and tables", _bytes(figures.table_bytes), ""
  batch = _bytes(figures.batch_bytes)
  yield f"  {figures.batches_in_memory} batches of {batch}", _bytes(
      figures.batches_in_memory * figures.batch_bytes
  ), ""
  if figures.remote_files:
    ahead = figures.steps_held_ahead
    yield f"  {ahead} steps read ahead", _bytes(ahead * figures.batch_bytes), ""
  if figures.order_bytes:
    yield "file of the order, per epoch", _bytes(figures.order_bytes), _bytes(
        figures.order_bytes * hosts
    )


def _store(
    figures: fleet_plan.Figures, fleet: fleet_plan.Fleet, price_per_million: float
) -> Iterator[_Row]:
  if not figures.remote_files:
    return
  minutes = f"{fleet.outage / 60:g}"
  yield f"spool to bridge {minutes} minutes", _bytes(figures.spool_bytes), _bytes(
      figures.spool_bytes * figures.hosts
  )
  if figures.spool_limit:
    lasts = figures.spool_steps / figures.steps_per_second / 60
    yield "configured spool lasts", f"{lasts:,.1f} minutes", ""
  if figures.requests is not None:
    dollars = figures.requests / 1e6 * price_per_million
    yield f"requests in {figures.steps:,} steps", _count(figures.requests / figures.hosts), _count(
        figures.requests
    )
    yield f"their price at ${price_per_million:g} per million", "", f"${dollars:,.2f}"


def _show(value: float, unit: str) -> str:
  if unit == "bytes":
    return _bytes(value)
  if unit == "seconds":
    return f"{1e3 * value:,.2f} ms" if value < 0.1 else f"{value:,.2f} s"
  return _count(value)


def _used(limit: fleet_limits.Limit) -> str:
  return f"{limit.used:.1%}" if limit.used < 10 else f"{limit.used:,.0f} ×"


def _count(value: float) -> str:
  return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:,.1f}"


def _bytes(value: float) -> str:
  for unit in ("B", "KB", "MB", "GB", "TB"):
    if value < 1000 or unit == "TB":
      break
    value /= 1000
  return f"{value:,.1f} {unit}" if unit != "B" else f"{value:,.0f} B"
