"""Metrics of the object store that an iterator reads from, and of the spool on the local disk."""

from __future__ import annotations

import numpy as np

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import spooled


def storage_metrics(storage: storage_lib.Storage | None) -> dict[str, float]:
  """Returns the counters of a storage, keyed by name; an empty dict for local files."""
  found: dict[str, float] = {}
  traffic = getattr(storage, "traffic", None)
  if traffic is not None:
    found |= {f"store_{name}": value for name, value in traffic.counts().items()}
  if isinstance(storage, spooled.SpooledStorage):
    found |= {f"spool_{name}": value for name, value in storage.counts().items()}
  return found


def add_traffic(storage: storage_lib.Storage | None, counted: np.ndarray) -> None:
  """Adds what a worker process has counted to the counters of the trainer's storage."""
  traffic = getattr(storage, "traffic", None)
  if traffic is not None:
    traffic.add(counted.tolist())


def describe_store(storage: storage_lib.Storage | None) -> str:
  """Returns a sentence that helps the watchdog explain a slow store; empty for local files."""
  traffic = getattr(storage, "traffic", None)
  if traffic is None:
    return ""
  if traffic.outage:
    return f"{traffic.outage}."
  counts = traffic.counts()
  if not counts["requests"]:
    return ""
  return (
      f"Requests to the store take {1e3 * counts['latency_p50']:.0f} ms (median) and"
      f" {1e3 * counts['latency_p99']:.0f} ms (99th percentile);"
      f" {100 * counts['retries'] / counts['requests']:.1f} % of {counts['requests']:,} requests"
      f" were retried, and {counts['in_flight']} are in flight."
  )
