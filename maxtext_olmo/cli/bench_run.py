"""All parts of `maxtext-olmo bench throughput`, one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from maxtext_olmo.cli import bench_cold
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.cli import bench_growth
from maxtext_olmo.cli import bench_report
from maxtext_olmo.cli import bench_start
from maxtext_olmo.cli import bench_throughput

_GROWTH_BATCHES = 100


def run(
    *,
    quick: bool,
    full: bool,
    parts: Sequence[str],
    directory: str | None,
    megabytes: int | None,
    reread: bool,
) -> dict[str, Any]:
  """Measures some parts; the keys of the result are theirs, with `machine`, `when`, `load_before` and `megabytes`."""
  effort = bench_throughput.DEFAULT
  if quick or full:
    effort = bench_throughput.QUICK if quick else bench_throughput.FULL
  if megabytes is not None:
    effort = dataclasses.replace(effort, megabytes=megabytes)
  say = bench_throughput.say_on_stderr()
  results: dict[str, Any] = {
      "machine": bench_report.machine(),
      "when": time.strftime("%Y-%m-%d"),
      "load_before": os.getloadavg()[0],
  }
  with _place(directory) as place:
    corpus = bench_throughput.prepare(place, effort, say)
    results["megabytes"] = corpus.bytes // 1_000_000
    results["reread"] = reread
    if reread:
      bench_corpus.drop(corpus.files)
      bench_corpus.warm(corpus.files)
    if "compare" in parts or "sizes" in parts:
      results |= bench_throughput.compare(corpus, effort, say, sizes="sizes" in parts)
    if "startup" in parts:
      results["startup"] = bench_start.measure(
          repeats=effort.repeats, patience=effort.patience, say=say
      )
    if "growth" in parts:
      results["growth"] = bench_growth.measure(
          corpus, rounds=effort.repeats, batches=_GROWTH_BATCHES, say=say
      )
    if "cold" in parts:
      results["cold"] = bench_cold.measure(corpus, repeats=effort.repeats, say=say)
    if "trainer" in parts:
      results["trainer"] = bench_start.trainer_wait(say)
  say("done")
  return results


@contextlib.contextmanager
def _place(directory: str | None) -> Iterator[pathlib.Path]:
  if directory is not None:
    yield pathlib.Path(directory)
    return
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    yield pathlib.Path(temporary)
