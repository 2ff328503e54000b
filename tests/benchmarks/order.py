"""Time to the first id, ids per second and memory of each order.

Each order runs in fresh processes. "first id, built" includes building what an order stores; "first
id" finds it in its cache directory. Rates are per second of CPU time.
"""

import argparse
import json
import tempfile
import time

import numpy as np

from tests.benchmarks import figures

_ORDERS = ("feistel", "olmo_core", "maxtext")
_BLOCKS = (64, 1024, 8192)


def measure_here(name: str, n: int, cache: str, seconds: float) -> dict[str, float]:
  """Measures one order in this process."""
  from maxtext_olmo.order import permutations

  memory = figures.memory("RssAnon")
  began = time.perf_counter()
  order = permutations.make_order(name, num_instances=n, seed=0, cache_dir=cache)
  order.ids(0, np.zeros(1, np.int64))
  found = {"first": time.perf_counter() - began}
  for block in _BLOCKS:
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
      order.ids(0, (np.arange(block) + count) % n)
      count += block
    found[str(block)] = count / spent
  if name == "feistel":  # The others scan the whole epoch, once for any number of ids.
    ids = np.random.default_rng(0).integers(0, n, 1 << 16)
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < seconds:
      order.places(0, ids)
      count += len(ids)
    found["inverse"] = spent / count
  else:
    began = time.process_time()
    order.places(0, np.arange(min(n, 1000)))
    found["inverse"] = time.process_time() - began
  return {**found, "memory": max(0, figures.memory("RssAnon") - memory)}


def main() -> None:
  """Measures all orders at each size and prints tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  sizes = [1_000_000, 50_000_000, 724_000_000]
  add("--instances", type=int, nargs="+", default=sizes, metavar="N", help="(default: %(default)s)")
  add("--seconds", type=float, default=0.5, help="CPU time of each rate (default: %(default)s)")
  add("--here", nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.here:
    name, n, cache = args.here
    print(json.dumps(measure_here(name, int(n), cache, args.seconds)))
    return
  print(f"{figures.machine()}, NumPy {np.__version__}.\n")
  for n in args.instances:
    columns = []
    for name in _ORDERS:
      with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as cache:
        here = (__file__, "--seconds", args.seconds, "--here", name, n, cache)
        built, found = figures.fresh_process(*here), figures.fresh_process(*here)
      times = [f"{1e3 * run['first']:,.2f} ms" for run in (built, found)]
      rates = [f"{found[str(block)] / 1e6:.2f} M/s" for block in _BLOCKS]
      inverse = found["inverse"]
      spent = f"{1e9 * inverse:.0f} ns/id" if name == "feistel" else f"{inverse:.2f} s/scan"
      columns.append([*times, *rates, spent, f"{found['memory'] / 1e6:.1f} MB"])
    rates = [f"blocks of {block}" for block in _BLOCKS]
    labels = ["first id, built", "first id", *rates, "inverse", "private memory"]
    rows = [(label, *cells) for label, *cells in zip(labels, *columns)]
    print(figures.table((f"{n:,} instances", *_ORDERS), rows), flush=True)


if __name__ == "__main__":
  main()
