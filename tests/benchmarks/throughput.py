"""Throughput of this library compared with its yardsticks and with other loaders.

Every candidate runs in its own process over the same tokens in the page cache. The candidates take
turns, forwards and backwards, and medians over the rounds are printed. Only ratios within one run
mean anything. `make bench-peers` installs the other loaders; those that are missing are skipped.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

from tests.benchmarks import child
from tests.benchmarks import corpus
from tests.benchmarks import figures

_LIMIT = "copy limit"
_BARE, _BARE_PLANNED = "bare preads, windows", "bare preads, planned rows"
_CACHED = 0.999
_TRAINERS = ("tiny", "trainer")

_ON, _OFF = {"olmo_apply_ngram_filter": True}, {"olmo_apply_ngram_filter": False}
_EOS = {"olmo_eos_id": corpus.EOS_ID}
_PLANNED = {"dataset_type": "olmo_documents", "olmo_packing": "planned", **_EOS, **_OFF}


def _ours(loader: str, keys: dict[str, Any], **sizes: int) -> dict[str, Any]:
  return {"loader": loader, "keys": keys, "environment": "", **sizes}


def _peer(loader: str, workers: int, *, filter_: bool = False) -> dict[str, Any]:
  environment = "maxtext" if loader == "maxtext" else "peers"
  return {"loader": loader, "workers": workers, "filter": filter_, "environment": environment}


CANDIDATES = {
    _LIMIT: _ours("limit", {}),
    _BARE: _ours("bare", _OFF),
    _BARE_PLANNED: _ours("bare", _PLANNED),
    "inline, filter on": _ours("inline", _ON),
    "inline, filter off": _ours("inline", _OFF),
    "threads ahead, filter on": _ours("ahead", _ON),
    "threads ahead, filter off": _ours("ahead", _OFF),
    "planned rows inline, filter on": _ours("inline", {**_PLANNED, **_ON}),
    "planned rows inline, filter off": _ours("inline", _PLANNED),
    "devices, windows": _ours("devices", _ON),
    "devices, document mask": _ours("devices", {"olmo_document_mask": True, **_EOS, **_ON}),
    "devices, segments and loss masks": _ours("devices", _ON, masks=True),
    "devices, planned rows": _ours("devices", _PLANNED),
    "MaxText, filter on, 2 workers": _peer("maxtext", 2, filter_=True),
    "MaxText, filter off, 2 workers": _peer("maxtext", 2),
    "OLMo-core, filter on, 2 workers": _peer("olmo_core", 2, filter_=True),
    "OLMo-core, filter off, 2 workers": _peer("olmo_core", 2),
    "torch DataLoader, in process": _peer("torch", 0),
    "torch DataLoader, 2 workers": _peer("torch", 2),
    "litdata, in process": _peer("litdata", 0),
    "litdata, 2 workers": _peer("litdata", 2),
    "mosaicml-streaming, 2 workers": _peer("streaming", 2),
    "Grain, in process": _peer("grain", 0),
    "trainer, windows": _ours("trainer", _ON),
    "trainer, planned rows": _ours("trainer", _PLANNED),
    "trainer, 65,536-token rows": _ours("trainer", _PLANNED, length=65_536, batch=8),
    "tiny trainer": _ours("tiny", {}, length=128, batch=8),
}


def goals(found: dict[str, list[figures.Run]]) -> list[tuple[str, ...]]:
  """Returns what the figures should reach, as rows of a table."""

  def median(name: str, counter: str, unit: str) -> float | None:
    return figures.median(found[name], counter, unit) if name in found else None

  def ratio(name: str, other: str, bound: float) -> tuple[str, ...]:
    rates = [median(candidate, "tokens", "seconds") for candidate in (name, other)]
    value = rates[0] / rates[1] if rates[0] and rates[1] else None
    return figures.goal(f"{name} / {other}", value, "≥", bound, "×")

  def sent(name: str, bound: float) -> tuple[str, ...]:
    return figures.goal(name, median(name, "bytes_to_device", "tokens"), "≤", bound, "bytes/token")

  def waits(name: str) -> tuple[str, ...]:
    share = median(name, "wait_seconds", "seconds")
    return figures.goal(f"{name} waits", share and 100 * share, "≤", 1, "%")

  others = [name for name in found if CANDIDATES[name]["environment"]]
  best = max(others, key=lambda name: median(name, "tokens", "seconds") or 0, default="others")
  return [
      ratio("inline, filter on", _BARE, 0.55),
      ratio("inline, filter off", _BARE, 0.7),
      ratio("inline, filter on", "MaxText, filter on, 2 workers", 100),
      ratio("threads ahead, filter on", best, 1),
      ratio("planned rows inline, filter off", _BARE_PLANNED, 0.55),
      sent("devices, windows", 4.1),
      sent("devices, document mask", 4.3),
      sent("devices, segments and loss masks", 4.3),
      sent("devices, planned rows", 4.3),
      *(waits(name) for name, spec in CANDIDATES.items() if spec["loader"] in _TRAINERS),
  ]


def measure(
    directory: pathlib.Path, files: list[str], names: list[str], rounds: int, seconds: float
) -> dict[str, list[figures.Run]]:
  """Opens the candidates, runs them in turn, and refuses what cannot be true."""
  sizes = {"batch": corpus.BATCH, "length": corpus.LENGTH, "vocab_size": corpus.VOCAB_SIZE}
  shared = {"directory": str(directory), "files": files, "eos_id": corpus.EOS_ID, **sizes}
  specs = {name: {**shared, **CANDIDATES[name]} for name in names}
  children: dict[str, child.Child] = {}

  def ask(name: str, **request: Any) -> dict[str, Any] | None:
    try:
      if name not in children:
        children[name] = child.Child(specs[name]["environment"])
      return children[name].ask(**request)
    except child.Unavailable as reason:
      print(f"{name}: skipped: {reason}", file=sys.stderr)
      return None

  def run(name: str) -> figures.Run | None:
    least = 20 if specs[name]["loader"] in _TRAINERS else 4
    return ask(name, run={"seconds": seconds, "least": least})

  def counts() -> bool:
    cached = corpus.cached_share(files) >= _CACHED
    if not cached:
      print("The page cache lost pages: reading them in again.", file=sys.stderr)
      corpus.warm(directory)
    return cached

  try:
    opened = [name for name in names if ask(name, open=specs[name])]
    corpus.warm(directory)
    found = figures.alternate(opened, rounds, run, counts)
  finally:
    for process in children.values():
      process.close()
  tokens = {name: spec["batch"] * spec["length"] for name, spec in specs.items()}
  figures.refuse_impossible(found, tokens, _LIMIT)
  return found


def _row(name: str, found: dict[str, list[figures.Run]]) -> tuple[str, ...]:
  spec, runs = CANDIDATES[name], found[name]
  times = [1e3 * run["seconds"] / run["batches"] for run in runs]
  rate = figures.median(runs, "tokens", "seconds")
  bare = found.get(_BARE_PLANNED if spec.get("keys", {}).get("olmo_packing") else _BARE)
  ratio = f"{rate / figures.median(bare, 'tokens', 'seconds'):.3g}" if bare else "–"
  # The workers of other loaders are not in their processes' CPU time.
  cpu = 1e3 * figures.median(runs, "cpu_seconds", "batches")
  return (
      name,
      f"{1e3 * figures.median(runs, 'seconds', 'batches'):.3g}",
      f"{min(times):.3g} to {max(times):.3g}",
      "–" if spec["environment"] else f"{cpu:.3g}",
      ratio,
      f"{rate / 1e6:,.0f}",
  )


def main() -> None:
  """Measures and prints tables."""
  summary, *details = (__doc__ or "").split("\n\n")
  parser = argparse.ArgumentParser(
      description=summary,
      epilog="\n".join([*details, "candidates:", *(f"  {name}" for name in CANDIDATES)]),
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--only", default="", metavar="NAME,NAME", help="names or parts of names (default: all)")
  add("--rounds", type=int, default=5, help="runs of each candidate (default: %(default)s)")
  add("--seconds", type=float, default=1.0, help="length of a run (default: %(default)s)")
  add("--corpus", metavar="DIR", help="make or reuse the corpus here (default: a temporary one)")
  add("--megabytes", type=int, default=1000, help="size of a new corpus (default: %(default)s)")
  add("--output", metavar="FILE", help="write all runs and goals as JSON (default: no file)")
  args = parser.parse_args()
  words = [word.strip().lower() for word in args.only.split(",")]
  names = [name for name in CANDIDATES if any(word in name.lower() for word in words)]
  if not names:
    parser.error(f"--only={args.only!r} matches no candidate")
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_bench_") as temporary:
    directory = pathlib.Path(args.corpus or temporary).resolve()
    files = corpus.make(directory, args.megabytes)
    found = measure(directory, files, names, args.rounds, args.seconds)
  size = f"{corpus.BATCH} × {corpus.LENGTH}"
  print(
      f"Batches of {size}, page cache warm, medians of {args.rounds} runs; {figures.machine()}.\n"
  )
  head = ("loader", "ms per batch", "range", "CPU ms", "÷ bare preads", "Mtok/s")
  loaders = [name for name in found if CANDIDATES[name]["loader"] not in _TRAINERS]
  print(figures.table(head, [_row(name, found) for name in loaders]))
  print(figures.table(figures.GOALS_HEAD, goals(found)))
  if args.output:
    values = {"machine": figures.machine(), "runs": found, "goals": goals(found)}
    pathlib.Path(args.output).write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
  main()
