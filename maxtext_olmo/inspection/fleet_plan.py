"""The plan of a fleet: what each host needs, what all hosts together need, and what breaks first.

The figures come from a simulated fleet (`fleet`), which computes the parts of real steps for some
of the hosts, and from the code that sizes buffers, caches and the spool. Nothing is read but the
index and, for packed documents, what the run itself opens.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tracemalloc
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import in_flight
from maxtext_olmo.corpus.storage import spool_file
from maxtext_olmo.corpus.storage import spool_index
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import simulated
from maxtext_olmo.inspection import fleet as fleet_lib
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.loader import wiring
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stored
from maxtext_olmo.rows import read_ahead
from maxtext_olmo.rows import spool_filler

_SAMPLED_HOSTS = 16
_SAMPLED_STEPS = 64
_BYTES_PER_SPOOLED_RANGE = 16  # In the table of a spool, in memory.


@dataclasses.dataclass(frozen=True)
class Fleet:
  """The hosts to plan for.

  Attributes:
    hosts: Number of hosts, each with one process.
    devices_per_host: Number of devices of each host.
    tokens_per_second: Tokens per second that the whole run trains on.
    axes: Name and size of each mesh axis; by default one axis over all devices.
    latency: Seconds that a request to the store takes.
    outage: Seconds without the store that the spool should bridge.
  """

  hosts: int
  tokens_per_second: float
  devices_per_host: int = 4
  axes: Mapping[str, int] | None = None
  latency: float = 0.05
  outage: float = 600.0


@dataclasses.dataclass(frozen=True)
class Figures:
  """What a run needs. Rates are for the largest batch size, figures per host for the busiest one.

  Attributes:
    hosts: Number of hosts.
    devices: Number of devices.
    batch_rows: Rows of a global batch.
    loaded_rows: Rows of a global batch with the padding rows that the trainer loads.
    row_tokens: Tokens per row.
    rows_per_host: Rows of a step that a host reads.
    copies: How many hosts read each row, on average.
    steps_per_second: Steps per second.
    steps: Number of steps of the run, or of an epoch; None if its end is not known.
    files: Number of token files, loss masks included.
    remote_files: How many of them are in object stores.
    store_scheme: Scheme of the URLs of the first of these, such as "gs"; "" if there are none.
    reads_per_step: Reads of local files per step and host.
    requests_per_step: Requests to stores per step and host.
    bytes_per_step: Bytes read per step and host.
    fleet_reads_per_step: Reads of local files per step, all hosts together.
    fleet_requests_per_step: Requests to stores per step, all hosts together.
    fleet_bytes_per_step: Bytes read per step, all hosts together.
    files_per_step: Largest number of files that a step of a host reads from.
    step_seconds: Time to find the parts of a step, measured on this machine.
    batch_bytes: Memory for the tokens of one step on a host.
    table_bytes: Memory of index, order and tables of parts, measured.
    batches_in_memory: Batches that are ready, being made or being sent.
    steps_ahead: Steps that the read-ahead may hold in memory.
    wanted_steps_ahead: Steps that it should hold at this latency.
    order_bytes: Size of the file of a stored order, which each host needs; 0 if it is computed.
    spool_bytes: Size of a spool that bridges the outage; 0 without object stores.
    spool_limit: Size of the spool in the config; 0 without one.
    spool_steps: Steps that the configured spool holds.
    sizes_asked: `stat` calls or HEAD requests of a host at the start.
    index_requests: Requests of a host for the index.
    versions_asked: Requests of a host for ETags that the index lacks; 0 without a spool.
  """

  hosts: int
  devices: int
  batch_rows: int
  loaded_rows: int
  row_tokens: int
  rows_per_host: int
  copies: float
  steps_per_second: float
  steps: int | None
  files: int
  remote_files: int
  store_scheme: str
  reads_per_step: float
  requests_per_step: float
  bytes_per_step: float
  fleet_reads_per_step: float
  fleet_requests_per_step: float
  fleet_bytes_per_step: float
  files_per_step: int
  step_seconds: float
  batch_bytes: int
  table_bytes: int
  batches_in_memory: int
  steps_ahead: int
  wanted_steps_ahead: int
  order_bytes: int
  spool_bytes: float
  spool_limit: float
  spool_steps: float
  sizes_asked: int
  index_requests: int
  versions_asked: int

  @property
  def memory_bytes(self) -> float:
    """Memory of the data path on a host, without Python and JAX themselves."""
    ranges_in_spool = self.spool_steps * self.requests_per_step
    batches = (self.batches_in_memory + self.steps_held_ahead) * self.batch_bytes
    return self.table_bytes + batches + ranges_in_spool * _BYTES_PER_SPOOLED_RANGE

  @property
  def steps_held_ahead(self) -> int:
    """Steps that are read ahead of the trainer; 0 for local files, which are read in time."""
    return min(self.steps_ahead, self.wanted_steps_ahead) if self.remote_files else 0

  @property
  def descriptors(self) -> int:
    """Open descriptors of a host: its local token files, connections and spool files."""
    local = self.files - self.remote_files
    if not self.remote_files:
      return local
    spool = spool_index.MAX_OPEN if self.spool_limit else 0
    return local + min(in_flight.MOST_THREADS, self.connections) + spool

  @property
  def connections(self) -> int:
    """Requests that a host may have in flight at once: those of the steps that are read ahead."""
    return math.ceil(max(1, self.steps_held_ahead) * self.requests_per_step)

  @property
  def requests_per_second(self) -> float:
    """Requests per second of a host."""
    return self.requests_per_step * self.steps_per_second

  @property
  def fleet_requests_per_second(self) -> float:
    """Requests per second of all hosts."""
    return self.fleet_requests_per_step * self.steps_per_second

  @property
  def requests(self) -> float | None:
    """Requests of all hosts in all steps; None if the number of steps is not known."""
    return None if self.steps is None else self.fleet_requests_per_step * self.steps


def make_figures(options: config_lib.Options, fleet: Fleet, steps: int | None = None) -> Figures:
  """Returns what a run needs on a fleet.

  Args:
    options: The data keys of the run.
    fleet: The hosts.
    steps: The number of steps of the run; by default, those of an epoch.

  Raises:
    ConfigError: The batch cannot be divided over the mesh, or the rows have no positions.
  """
  for name in ("hosts", "devices_per_host", "tokens_per_second"):
    if not getattr(fleet, name) > 0:
      raise errors.ConfigError(f"--{name.replace('_', '-')} must be positive.")
  mesh = simulated.make_mesh(_axes(options, fleet), fleet.hosts)
  opened, table_bytes = _open_measured(options, mesh)
  schedule, row_tokens = opened.run.start.schedule, opened.rows.row_length
  size = max(schedule.sizes)
  loaded = size if options.has_batch_schedule else options.global_batch_size_to_load
  rows = [len(opened.rows_of(process)[size]) for process in range(fleet.hosts)]
  found = _sample_hosts(opened, fleet.hosts, _first_step_of_size(schedule, size))

  def most(name: str) -> float:
    return float(max(getattr(sample, name) for sample in found))

  def total(name: str) -> float:
    return float(np.mean([getattr(sample, name) for sample in found])) * fleet.hosts

  files = opened.steps_of(0).files
  paths = [path for some in files for path in some.paths]
  remote = [path for path in paths if urls.is_url(path)]
  batch_bytes = max(rows) * row_tokens * sum(some.dtype.itemsize for some in files)
  steps_per_second = fleet.tokens_per_second / (size * row_tokens)
  spooled = most("bytes") + most("requests") * spool_file.RANGE_OVERHEAD
  spool_limit = options.olmo_spool_gib * 2**30 if options.olmo_spool_dir and remote else 0.0
  most_steps = spool_filler.max_depth_steps(1 / steps_per_second)
  return Figures(
      hosts=fleet.hosts,
      devices=mesh.size,
      batch_rows=size,
      loaded_rows=loaded,
      row_tokens=row_tokens,
      rows_per_host=max(rows),
      copies=sum(rows) / loaded,
      steps_per_second=steps_per_second,
      steps=steps or _steps_per_epoch(opened, size),
      files=len(paths),
      remote_files=len(remote),
      store_scheme=remote[0].partition("://")[0] if remote else "",
      reads_per_step=most("reads"),
      requests_per_step=most("requests"),
      bytes_per_step=most("bytes"),
      fleet_reads_per_step=total("reads"),
      fleet_requests_per_step=total("requests"),
      fleet_bytes_per_step=total("bytes"),
      files_per_step=int(most("files")),
      step_seconds=float(np.median([sample.seconds for sample in found])),
      batch_bytes=batch_bytes,
      table_bytes=table_bytes,
      batches_in_memory=wiring.prefetch_of(options).batches_in_memory,
      steps_ahead=read_ahead.max_steps_ahead(batch_bytes),
      wanted_steps_ahead=read_ahead.wanted_steps_ahead(fleet.latency, 1 / steps_per_second),
      order_bytes=_order_bytes(opened.run.start.stream),
      spool_bytes=fleet.outage * steps_per_second * spooled if remote else 0.0,
      spool_limit=spool_limit,
      spool_steps=min(spool_limit / max(1.0, spooled), most_steps),
      sizes_asked=opened.check_files(),
      index_requests=_index_requests(options),
      versions_asked=len(opened.storage.unversioned) if spool_limit else 0,
  )


def _sample_hosts(
    opened: fleet_lib.SimulatedFleet, hosts: int, first_step: int
) -> list[fleet_lib.HostSteps]:
  """Returns what some hosts, the first and the last among them, do in some steps."""
  chosen = np.unique(np.linspace(0, hosts - 1, _SAMPLED_HOSTS).astype(int)).tolist()
  dataset = opened.steps_of(0)
  steps = [s for s in range(first_step, first_step + _SAMPLED_STEPS) if dataset.has(s)]
  if not steps:
    raise errors.ConfigError(
        "The run ends before it reaches its largest batch size, so there is no step to plan for."
    )
  return [opened.sample(process, steps) for process in chosen]


def _axes(options: config_lib.Options, fleet: Fleet) -> dict[str, int]:
  """Returns the mesh axes: those of the fleet, or one axis that has all devices."""
  devices = fleet.hosts * fleet.devices_per_host
  if fleet.axes:
    if math.prod(fleet.axes.values()) != devices:
      raise errors.ConfigError(
          f"--mesh {dict(fleet.axes)} has {math.prod(fleet.axes.values())} devices, but"
          f" {fleet.hosts} hosts with {fleet.devices_per_host} devices have {devices}."
      )
    return dict(fleet.axes)
  names = layout_lib.axis_names(options.data_sharding) or ("data",)
  return {name: devices if number == 0 else 1 for number, name in enumerate(names)}


def _open_measured(
    options: config_lib.Options, mesh: jax.sharding.Mesh
) -> tuple[fleet_lib.SimulatedFleet, int]:
  """Opens the run on host 0 up to its first step; returns it, and the memory that this takes."""
  tracing = tracemalloc.is_tracing()
  if not tracing:
    tracemalloc.start()
  try:
    before, _ = tracemalloc.get_traced_memory()
    run = run_plan.open_run(options)
    opened = fleet_lib.SimulatedFleet.of_run(options, mesh, run)
    run.start.stream.prepare(run.start.schedule.start(0))
    steps = opened.steps_of(0)
    steps.parts(0)
    after, _ = tracemalloc.get_traced_memory()
    return opened, after - before
  finally:
    if not tracing:
      tracemalloc.stop()


def _first_step_of_size(schedule: schedule_lib.BatchSchedule, size: int) -> int:
  """Returns the first step of a stage with a batch size."""
  boundary = next(first for first, rows in schedule.stages if rows == size)
  if not schedule.by_position:
    return boundary
  step = schedule.step_at(boundary)
  return step + (schedule.size(step) != size)  # The step that reaches the boundary is smaller.


def _steps_per_epoch(opened: fleet_lib.SimulatedFleet, size: int) -> int | None:
  order = getattr(opened.run.start.stream, "order", None)
  rows = opened.rows.num_rows(0) if order is None else order.num_instances
  return None if rows is None else -(-rows // size)


def _order_bytes(stream: Any) -> int:
  """Returns the size of the file that a stored order keeps for an epoch."""
  order = getattr(stream, "order", None)
  return os.path.getsize(order.file(0).path) if isinstance(order, stored.StoredOrder) else 0


def _index_requests(options: config_lib.Options) -> int:
  """Returns how many requests it takes to read the index."""
  if not urls.is_url(options.olmo_index_path):
    return 0
  storage = storage_lib.open_storage(options.store_options)
  storage.read(urls.without_secrets(options.olmo_index_path))
  return int(storage.remote.traffic.counts()["requests"])
