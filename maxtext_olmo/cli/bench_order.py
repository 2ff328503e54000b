"""What each order costs: time to the first id, ids per second in batches, and memory, at several sizes.

Each figure comes from a fresh process; the orders take turns. Rates are per second of one core (CPU time, which other work
on the machine disturbs less), the first id and building by the clock. `olmo_core` is measured with its file there already, and the
building of that file is measured beside NumPy's bare shuffle of an array of the same size.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_ORDERS = ("feistel", "olmo_core", "maxtext", "index_shuffle")
_BATCHES = (64, 256, 1024, 4096)
_FIRSTS = 20
_PIPELINE_BLOCK = 2048


def measure(sizes: Sequence[int], *, seconds: float) -> Iterator[str]:
  """Measures all orders, each rate for so many seconds; gives a table for each size as soon as it is there."""
  yield (
      f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__};"
      " fresh processes that take turns.\n"
  )
  for n in sizes:
    with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as cache:
      table = [f"{n:,} instances", "", *_table(n, cache, seconds), "", *_building(n, cache)]
    yield "\n" + "\n".join(table) + "\n"


def _table(n: int, cache: str, seconds: float) -> list[str]:
  found = {}
  for name in _ORDERS:
    if name in ("olmo_core", "maxtext"):
      _child("build", name, n, cache)
    found[name] = _child("serve", name, n, cache, seconds)
    if name in ("olmo_core", "maxtext"):
      for file in os.listdir(cache):
        os.unlink(os.path.join(cache, file))
  columns = [f"`{name}`" for name in _ORDERS]
  lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]

  def row(label: str, cell: Callable[[dict], str]) -> None:
    lines.append(f"| {label} | " + " | ".join(cell(found[name]) for name in _ORDERS) + " |")

  row("first id", lambda f: f"{f['first'] * 1e3:.2f} ms")
  for size in _BATCHES:
    row(f"ids/s, batches of {size}", _rate_cell(str(size)))
  row(
      f"ids/s, blocks of {_PIPELINE_BLOCK}, from which the pipeline serves small batches",
      _rate_cell("block"),
  )
  row("memory for it, private", lambda f: f"{f['memory'] / 1e6:.1f} MB")
  return lines


def _rate_cell(which: str) -> Callable[[dict], str]:
  return lambda found: f"{found['rates'][which] / 1e6:.2f} M"


def _building(n: int, cache: str) -> list[str]:
  built, bare = _child("build", "olmo_core", n, cache), _child("shuffle", "", n, cache)
  return [
      f"Building `olmo_core`'s file: {built['seconds']:.2f} s, {built['seconds'] / bare['seconds']:.2f} times NumPy's bare"
      f" shuffle ({bare['seconds']:.2f} s), {built['cpu'] / bare['cpu']:.2f} times its CPU time; peak {built['peak'] / bare['peak']:.2f} times the memory of that"
      f" ({bare['peak'] / 1e6:.0f} MB)."
  ]


def _child(what: str, name: str, n: int, cache: str, seconds: float = 0.0) -> dict:
  done = subprocess.run(
      [
          sys.executable,
          "-m",
          "maxtext_olmo.cli.bench_order",
          what,
          name,
          str(n),
          cache,
          str(seconds),
      ],
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


def _serve(name: str, n: int, cache: str, seconds: float) -> dict:
  make = _maker(name, n, cache)
  before = _memory("RssAnon")
  firsts: list[float] = []
  while len(firsts) < _FIRSTS and sum(firsts) < seconds:
    began = time.perf_counter()
    ids = make()
    ids(np.zeros(1, np.int64))
    firsts.append(time.perf_counter() - began)
  rates = {str(size): _rate(ids, n, size, seconds) for size in _BATCHES}
  rates["block"] = _rate(ids, n, _PIPELINE_BLOCK, seconds)
  return {
      "first": statistics.median(firsts),
      "rates": rates,
      "memory": max(0, _memory("RssAnon") - before),
  }


def _maker(name: str, n: int, cache: str) -> Callable[[], Callable[[np.ndarray], np.ndarray]]:
  if name == "index_shuffle":
    from maxtext_olmo.order import statistics as statistics_lib

    statistics_lib.grain_shuffle(2, 0)  # Its import is not what is measured.
    return lambda: statistics_lib.grain_shuffle(n, 0)
  from maxtext_olmo.order import permutations

  def make() -> Callable[[np.ndarray], np.ndarray]:
    order = permutations.make_order(name, num_instances=n, seed=0, cache_dir=cache)
    return lambda places: order.ids(0, places)

  return make


def _rate(ids: Callable[[np.ndarray], np.ndarray], n: int, size: int, seconds: float) -> float:
  places, served, start = np.arange(min(size, n)), 0, 0
  began = time.process_time()
  while (spent := time.process_time() - began) < seconds:
    ids(places + start)
    served += len(places)
    start = (start + len(places)) % max(1, n - len(places))
  return served / spent


def _build(name: str, n: int, cache: str) -> dict:
  from maxtext_olmo.order import order_files

  file = order_files.OrderFile(name, n, 0, 0, 1, cache)
  began = time.perf_counter()
  began_cpu = time.process_time()
  file.open()
  return _spent(began, began_cpu)


def _shuffle(n: int) -> dict:
  began, began_cpu = time.perf_counter(), time.process_time()
  numbers = np.arange(n, dtype=np.uint32)
  np.random.Generator(np.random.PCG64(1)).shuffle(numbers)
  return _spent(began, began_cpu)


def _spent(began: float, began_cpu: float) -> dict:
  return {
      "seconds": time.perf_counter() - began,
      "cpu": time.process_time() - began_cpu,
      "peak": _memory("VmHWM"),
  }


def _memory(field: str) -> int:
  with open("/proc/self/status", encoding="ascii") as file:
    found = re.search(rf"{field}:\s+(\d+) kB", file.read())
  return int(found[1]) * 1024 if found else 0


def main(argv: Sequence[str]) -> int:
  """Measures one thing in this process."""
  what, name, n, cache, seconds = argv[1:]
  if what == "serve":
    result = _serve(name, int(n), cache, float(seconds))
  elif what == "build":
    result = _build(name, int(n), cache)
  else:
    result = _shuffle(int(n))
  print(json.dumps(result))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
