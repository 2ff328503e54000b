"""Reads from an object store on loopback with this package and with others, side by side.

Prints ratios to a plain obstore loop with the largest parallelism of this package, at no latency
(straight from nginx) and at a round trip of 50 ms (through `delay.c`, a relay that takes a few
percent of a core; a proxy in Python would be the bottleneck). At no latency, this package uses
fewer threads, so a plain loop with 32 is measured too. Readers take turns for several rounds, each
in a process of its own, and the median counts. Then: the first batch in round trips, and how long a
trainer waits.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

import maxtext_olmo
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import stores
from tests import distributed
from tests.cloud import servers

_LENGTH = 8192
_BATCH = 64
_PARALLELISM = 256  # Of this package's reader, and so of the others.
_ROUND_TRIP = 0.05
_FILES, _ROWS_PER_FILE = 8, 512
_TRAINED_TOKENS_PER_SECOND = 2_000_000


@contextlib.contextmanager
def _relay(directory: str, port: int, seconds: float) -> Iterator[str]:
  """Starts the relay in front of a port; yields its address."""
  binary = os.path.join(directory, "delay")
  if not os.path.exists(binary):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
      sys.exit("bench-cloud: needs a C compiler.")
    source = pathlib.Path(__file__).with_name("delay.c")
    subprocess.run([compiler, "-O2", str(source), "-o", binary], check=True)
  process = subprocess.Popen(
      [binary, str(port), str(round(1e6 * seconds))],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  )
  assert process.stdin is not None and process.stdout is not None
  try:
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
  finally:
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _write_corpus(directory: str) -> list[str]:
  """Writes token files below the folder of the bucket; returns their names in it."""
  folder = pathlib.Path(directory, "bucket", "data")
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for number in range(_FILES):
    rng.integers(0, 100_000, _ROWS_PER_FILE * _LENGTH, np.uint32).tofile(
        folder / f"part-{number:03d}.npy"
    )
  return [f"data/part-{number:03d}.npy" for number in range(_FILES)]


def _build_index(directory: str, paths: list[str], endpoint: str) -> str:
  index = maxtext_olmo.build_index(
      [(f"s3://bucket/{path}", "web") for path in paths],
      _LENGTH,
      tokenizer="none",
      base="s3://bucket/data",
      storage=open_storage(stores.StoreOptions(endpoint=endpoint, anonymous=True)),
  )
  path = os.path.join(directory, "index.json")
  index.save(path)
  return path


def _run(python: str, job: dict[str, Any], module: str = "cloud_readers") -> dict[str, float]:
  done = subprocess.run(
      [python, "-m", f"tests.benchmarks.{module}", json.dumps(job)],
      env=distributed.child_environment(servers.NO_METADATA),
      capture_output=True,
      text=True,
      check=False,
  )
  if done.returncode:
    raise RuntimeError(f"{job['reader']} failed:\n{done.stderr[-3000:]}")
  lines = done.stdout.strip().splitlines()
  return json.loads(lines[-1]) if lines else {}


def _compare(
    readers: dict[str, str], job: dict[str, Any], rounds: int
) -> dict[str, list[dict[str, float]]]:
  """Lets the readers take turns; returns what each took in each round."""
  found: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
  for number in range(rounds):
    # Every other round is in reverse order, so that no reader always follows the same one.
    for name in list(readers)[:: -1 if number % 2 else 1]:
      found[name].append(_run(readers[name], {**job, "reader": name}))
  return found


def _print_comparison(title: str, found: dict[str, list[dict[str, float]]]) -> None:
  print(f"\n{title}")
  print(f"{'reader':14} {'reads/s':>9} {'of obstore':>11} {'CPU µs/read':>12}")
  speeds = {
      name: [one["rows"] / one["seconds"] for one in rounds] for name, rounds in found.items()
  }
  for name, rounds in found.items():
    # The ratio of each round: the machine may be busier in one than in another.
    ratios = [mine / plain for mine, plain in zip(speeds[name], speeds["obstore"])]
    cpu = statistics.median(1e6 * one["cpu"] / one["rows"] for one in rounds)
    print(
        f"{name:14} {statistics.median(speeds[name]):9,.0f} {statistics.median(ratios):11.2f}"
        f" {cpu:12,.0f}",
        flush=True,
    )


def _parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--peers", default=".venv-peers", help="environment with MosaicML Streaming")
  parser.add_argument("--only", default="", help="readers to compare, such as ours,obstore")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--seconds", type=float, default=3.0, help="of each reader in each round")
  return parser.parse_args()


def main() -> None:
  """Runs all comparisons."""
  args = _parse_args()
  if (reason := servers.missing("nginx")) is not None:
    sys.exit(f"bench-cloud: {reason}")
  readers = dict.fromkeys(("ours", "obstore", "tensorstore", "s3fs"), sys.executable)
  mosaic = os.path.join(args.peers, "bin", "python")
  with contextlib.ExitStack() as stack:
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_cloud_"))
    paths = _write_corpus(directory)
    files = [os.path.join(directory, "bucket", path) for path in paths]
    check = [mosaic, "-c", "import importlib.util; 1 / bool(importlib.util.find_spec('streaming'))"]
    if os.path.exists(mosaic) and not subprocess.run(check, capture_output=True).returncode:
      readers["mosaic"] = mosaic
      output = os.path.join(directory, "bucket", "mosaic")
      job = {"reader": "write_mosaic", "length": _LENGTH, "output": output, "files": files}
      _run(mosaic, job)
    else:
      print("MosaicML Streaming is left out: `make bench-peers` installs it.")
    if args.only:
      readers = {name: readers[name] for name in args.only.split(",")}
    nginx = stack.enter_context(servers.start_nginx(directory))
    job = {
        "paths": paths,
        "sizes": [os.path.getsize(path) for path in files],
        "index": _build_index(directory, paths, nginx.url),
        "length": _LENGTH,
        "batch": _BATCH,
        "rows": 20_000,
        "parallelism": _PARALLELISM,
        "seconds": args.seconds,
        "warm_up": 14.0,  # This package begins with 1,000 requests per second, and adds 1,000 each.
    }
    print(
        f"rows of {4 * _LENGTH:,} bytes, batches of {_BATCH}, {_PARALLELISM} reads in flight,"
        f" {args.rounds} rounds of {args.seconds:g} s"
    )
    few = {} if args.only else {"obstore, 32": sys.executable}
    found = _compare(readers | few, {**job, "endpoint": nginx.url}, args.rounds)
    _print_comparison("no latency", found)
    relay = stack.enter_context(_relay(directory, nginx.port, _ROUND_TRIP))
    found = _compare(readers, {**job, "endpoint": relay}, args.rounds)
    _print_comparison(f"round trip {1e3 * _ROUND_TRIP:.0f} ms", found)
    # Long enough that processor time hardly counts.
    far = stack.enter_context(_relay(directory, nginx.port, 4 * _ROUND_TRIP))
    first = [
        _run(sys.executable, {**job, "endpoint": far, "reader": "ours", "seconds": 0.0})["first"]
        for _ in range(args.rounds)
    ]
    trips = statistics.median(first) / (4 * _ROUND_TRIP)
    print(f"\nfirst batch after opening: {trips:.1f} round trips (of which one connects)")
    wait = [
        _run(
            sys.executable,
            {
                **job,
                "endpoint": relay,
                "reader": "trainer",
                "tokens_per_second": _TRAINED_TOKENS_PER_SECOND,
                "steps": 60,
            },
            "cloud_trainer",
        )
        for _ in range(min(3, args.rounds))
    ]
    share = statistics.median(one["waited"] / one["seconds"] for one in wait)
    cpu = statistics.median(one["cpu"] / one["seconds"] for one in wait)
    print(
        f"a trainer at {_TRAINED_TOKENS_PER_SECOND:,} tokens/s and {1e3 * _ROUND_TRIP:.0f} ms waits"
        f" {share:.2%} of the time; its process uses {cpu:.0%} of a core"
    )


if __name__ == "__main__":
  main()
