"""The limits that a fleet may reach, ordered by how much of each it uses.

used = needed / allowed        more than 1: it breaks; the largest breaks first
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from maxtext_olmo.corpus.storage import in_flight
from maxtext_olmo.corpus.storage import open_files
from maxtext_olmo.corpus.storage import pace
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.inspection import fleet_plan
from maxtext_olmo.rows import spool_filler

# Reads per second that a bucket, a prefix or an account serves before it has scaled up, as the
# providers document it.
STORE_READS_PER_SECOND = {"gs": pace.RUN_FIRST, "s3": 5_500, "az": 20_000}
_SCALING_MINUTES = 20  # A GCS bucket takes about this long to double its rate.


@dataclasses.dataclass(frozen=True)
class Limits:
  """What the hosts and the store allow.

  Attributes:
    latency: Seconds that a request to the store takes.
    descriptors: Limit on open descriptors of a process; None for that of this process.
    memory: Memory of a host for the data path, in bytes; None does not check it.
    store_reads_per_second: Requests per second that the store serves to all hosts; None does not
      check it.
  """

  latency: float = 0.05
  descriptors: int | None = None
  memory: float | None = None
  store_reads_per_second: float | None = None


@dataclasses.dataclass(frozen=True)
class Limit:
  """One limit.

  Attributes:
    name: What is limited.
    needed: How much the run needs.
    allowed: How much is allowed.
    unit: The unit of both: "bytes", "seconds", or "" for a count.
    remedy: What to do if the limit is exceeded.
  """

  name: str
  needed: float
  allowed: float
  unit: str
  remedy: str

  @property
  def used(self) -> float:
    """The share of the limit that is used; more than 1 breaks."""
    return self.needed / self.allowed if self.allowed else math.inf


def check_limits(figures: fleet_plan.Figures, limits: Limits) -> list[Limit]:
  """Returns the limits of a run, starting with the one that breaks first."""
  found = [*_host_limits(figures, limits)]
  if figures.remote_files:
    found += _store_limits(figures, limits)
  return sorted(found, key=lambda limit: -limit.used)


def _host_limits(figures: fleet_plan.Figures, limits: Limits) -> Iterator[Limit]:
  room = open_files.room(limits.descriptors)
  yield Limit(
      "open files per host",
      figures.descriptors,
      room,
      "",
      "Files are closed and opened again, which costs as much as a read. Raise the limit of the"
      f" trainer's process: `ulimit -n {2 * figures.descriptors}` (LimitNOFILE in systemd).",
  )
  yield Limit(
      "time to find the rows of a step (measured here)",
      figures.step_seconds,
      1 / figures.steps_per_second,
      "seconds",
      "Steps are shorter than the time to find their rows. Use larger batches.",
  )
  if limits.memory is not None:
    yield Limit(
        "memory per host",
        figures.memory_bytes,
        limits.memory,
        "bytes",
        "Lower olmo_prefetch_batches or grain_worker_count, or use more hosts for the same batch.",
    )


def _store_limits(figures: fleet_plan.Figures, limits: Limits) -> Iterator[Limit]:
  allowed = limits.store_reads_per_second
  if allowed is not None:
    needed = figures.fleet_requests_per_second
    first = figures.hosts * figures.index_requests + figures.fleet_requests_per_step
    yield Limit(
        "time to serve the first requests of all hosts",
        first / allowed,
        stores.StoreOptions().first_patience,
        "seconds",
        "Hosts that get no answer in this time give up. Start them in groups, or put the index on"
        " a local disk.",
    )
    doublings = max(0, math.ceil(math.log2(max(1.0, needed / allowed))))
    yield Limit(
        "requests per second to the store, all hosts",
        needed,
        allowed,
        "",
        "The store throttles the hosts (429, 503) until it has scaled up: a GCS bucket takes about"
        f" {doublings * _SCALING_MINUTES} minutes for this rate. Make rows cheaper (an index with"
        " --max-target-sequence-length reads the rows of a window in one request), use longer"
        " rows, spread the corpus over several buckets, or copy it to disks (`corpus copy`).",
    )
    if figures.spool_limit:
      rate = min(in_flight.MOST_PER_SECOND, spool_filler.MAX_RANGES / max(limits.latency, 1e-3))
      yield Limit(
          "requests per second while all hosts fill their spools",
          figures.hosts * rate,
          allowed,
          "",
          "Spools are filled as fast as the store answers. If it throttles, hosts send fewer"
          " requests, including those that the trainer waits for. Start the hosts in groups, or"
          " without a spool until the store has scaled up.",
      )
  in_flight_needed = figures.requests_per_second * limits.latency
  yield Limit(
      "requests in flight per host",
      in_flight_needed,
      in_flight.MOST_THREADS,
      "",
      "Reads wait for each other. Train closer to the bucket, or use more hosts for the same rate.",
  )
  yield Limit(
      "requests per second per host",
      figures.requests_per_second,
      in_flight.MOST_PER_SECOND,
      "",
      "A process cannot send more. Use more hosts for the same rate, or longer rows.",
  )
  yield Limit(
      "steps read ahead",
      figures.wanted_steps_ahead,
      max(1, figures.steps_ahead),
      "",
      "A step takes less time than a request, and memory for the read-ahead is bounded. Set"
      " olmo_spool_dir, so that the next steps are on a local disk, or train closer to the bucket.",
  )
  if figures.spool_limit:
    gib = math.ceil(figures.spool_bytes / 2**30)
    yield Limit(
        "spool, to bridge the outage",
        figures.spool_bytes,
        figures.spool_limit,
        "bytes",
        f"The spool runs out before the store answers again. Set olmo_spool_gib={gib}.",
    )
