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
_BARE_LONG, _BARE_SFT = "bare preads, packed 65,536-token rows", "bare preads, SFT rows"
_OLMO_LONG, _OLMO_SFT = "OLMo-core, packed 65,536-token rows", "OLMo-core, SFT rows"
_CACHED = 0.999
_TRAINERS = ("tiny", "trainer")

_ON, _OFF = {"olmo_apply_ngram_filter": True}, {"olmo_apply_ngram_filter": False}
_EOS = {"olmo_eos_id": corpus.EOS_ID}
_PLANNED = {"dataset_type": "olmo_documents", "olmo_packing": "planned", **_EOS, **_OFF}
_PACKED = {"dataset_type": "olmo_packed", "olmo_pad_id": corpus.PAD_ID, **_EOS, **_OFF}
_PACKED |= {"olmo_document_mask": True}  # OLMo 3 trains its last stages with it.

# Each has a directory: the mean length of its documents, and its share of --megabytes.
_CORPORA = {"web": (corpus.MEAN_DOCUMENT, 1.0), "long": (4000, 0.25), "sft": (1000, 0.25)}
_PLANNED_ROWS: dict[str, Any] = {"bare": _BARE_PLANNED}
# As in OLMo 3's long-context stage, and in its fine-tuning.
_LONG: dict[str, Any] = {"bare": _BARE_LONG, "corpus": "long", "group_size": 8}
_LONG |= {"length": 65_536, "batch": 8}
_SFT: dict[str, Any] = {"bare": _BARE_SFT, "corpus": "sft", "group_size": 1, "masks": True}
_SFT |= {"length": 32_768, "batch": 16}


def _ours(loader: str, keys: dict[str, Any], **values: Any) -> dict[str, Any]:
  if "group_size" in values:
    keys = {**keys, "olmo_source_group_size": values["group_size"]}
  return {"loader": loader, "keys": keys, "environment": "", **values}


def _peer(loader: str, workers: int, *, filter_: bool = False, **values: Any) -> dict[str, Any]:
  environment = "maxtext" if loader == "maxtext" else "peers"
  spec = {"loader": loader, "workers": workers, "filter": filter_, "environment": environment}
  return {**spec, **values}


def _in(workers: int) -> str:
  return f"{workers} worker{'s'[: workers > 1]}" if workers else "in process"


CANDIDATES = {
    _LIMIT: _ours("limit", {}),
    _BARE: _ours("bare", _OFF),
    _BARE_PLANNED: _ours("bare", _PLANNED, **_PLANNED_ROWS),
    _BARE_LONG: _ours("bare", _PACKED, **_LONG),
    _BARE_SFT: _ours("bare", _PACKED, **_SFT),
    "inline, filter on": _ours("inline", _ON),
    "inline, filter off": _ours("inline", _OFF),
    "threads ahead, filter on": _ours("ahead", _ON),
    "threads ahead, filter off": _ours("ahead", _OFF),
    "planned rows inline, filter on": _ours("inline", {**_PLANNED, **_ON}, **_PLANNED_ROWS),
    "planned rows inline, filter off": _ours("inline", _PLANNED, **_PLANNED_ROWS),
    "packed 65,536-token rows inline": _ours("inline", _PACKED, **_LONG),
    "packed 65,536-token rows inline, filter on": _ours("inline", {**_PACKED, **_ON}, **_LONG),
    "SFT rows inline": _ours("inline", _PACKED, **_SFT),
    "devices, windows": _ours("devices", _ON),
    "devices, document mask": _ours("devices", {"olmo_document_mask": True, **_EOS, **_ON}),
    "devices, segments and loss masks": _ours(
        "devices", {"olmo_document_mask": True, **_EOS, **_ON}, masks=True
    ),
    "devices, planned rows": _ours("devices", _PLANNED, **_PLANNED_ROWS),
    "MaxText, filter on, 2 workers": _peer("maxtext", 2, filter_=True),
    "MaxText, filter off, 2 workers": _peer("maxtext", 2),
    "OLMo-core, filter on, 2 workers": _peer("olmo_core", 2, filter_=True),
    "OLMo-core, filter off, 2 workers": _peer("olmo_core", 2),
    **{f"{_OLMO_LONG}, {_in(n)}": _peer("olmo_core", n, **_LONG) for n in range(3)},
    **{f"{_OLMO_SFT}, {_in(n)}": _peer("olmo_core", n, **_SFT) for n in range(3)},
    "torch DataLoader, in process": _peer("torch", 0),
    "torch DataLoader, 2 workers": _peer("torch", 2),
    "litdata, in process": _peer("litdata", 0),
    "litdata, 2 workers": _peer("litdata", 2),
    "mosaicml-streaming, 2 workers": _peer("streaming", 2),
    "Grain, in process": _peer("grain", 0),
    "trainer, windows": _ours("trainer", _ON),
    "trainer, planned rows": _ours("trainer", _PLANNED),
    "trainer, 65,536-token rows": _ours("trainer", _PLANNED, length=65_536, batch=8),
    "trainer, packed 65,536-token rows": _ours("trainer", _PACKED, **_LONG),
    "trainer, SFT rows": _ours("trainer", _PACKED, **_SFT),
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

  def best_other(bare: str) -> str:
    others = [n for n in found if CANDIDATES[n]["environment"]]
    others = [n for n in others if CANDIDATES[n].get("bare", _BARE) == bare]
    return max(others, key=lambda n: median(n, "tokens", "seconds") or 0, default="best other")

  return [
      ratio("inline, filter on", _BARE, 0.55),
      ratio("inline, filter off", _BARE, 0.7),
      ratio("inline, filter on", "MaxText, filter on, 2 workers", 100),
      ratio("threads ahead, filter on", best_other(_BARE), 1),
      ratio("planned rows inline, filter off", _BARE_PLANNED, 0.55),
      ratio("packed 65,536-token rows inline", _BARE_LONG, 0.55),
      ratio("packed 65,536-token rows inline", best_other(_BARE_LONG), 10),
      ratio("SFT rows inline", _BARE_SFT, 0.55),
      ratio("SFT rows inline", best_other(_BARE_SFT), 10),
      sent("devices, windows", 4.1),
      sent("devices, document mask", 4.3),
      sent("devices, segments and loss masks", 4.3),
      sent("devices, planned rows", 4.3),
      *(waits(name) for name, spec in CANDIDATES.items() if spec["loader"] in _TRAINERS),
  ]


def measure(
    directory: pathlib.Path, megabytes: int, names: list[str], rounds: int, seconds: float
) -> dict[str, list[figures.Run]]:
  """Makes the corpora, runs the candidates in turn, and refuses what cannot be true."""
  shared = {"batch": corpus.BATCH, "length": corpus.LENGTH, "group_size": 0, "masks": False}
  shared |= {"vocab_size": corpus.VOCAB_SIZE, "eos_id": corpus.EOS_ID, "pad_id": corpus.PAD_ID}
  specs = {}
  for part, (mean, share) in _CORPORA.items():
    users = [name for name in names if CANDIDATES[name].get("corpus", "web") == part]
    if users:
      here = directory / part
      made = corpus.make(here, int(share * megabytes), mean)
      own = {**shared, "directory": str(here), "files": made}
      specs |= {name: {**own, **CANDIDATES[name]} for name in users}
  children: dict[str, child.Child] = {}
  cached: dict[str, bool] = {}

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
    corpus.warm(pathlib.Path(specs[name]["directory"]))  # Its turns are minutes apart.
    found = ask(name, run={"seconds": seconds, "least": least})
    cached[name] = corpus.cached_share(specs[name]["files"]) >= _CACHED
    return found

  def counts() -> bool:
    if not all(cached.values()):
      print("The page cache lost pages during a run.", file=sys.stderr)
    return all(cached.values())

  try:
    opened = [name for name in names if ask(name, open=specs[name])]
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
  bare = found.get(spec.get("bare", _BARE))
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
    found = measure(directory, args.megabytes, names, args.rounds, args.seconds)
  size = f"{corpus.BATCH * corpus.LENGTH:,} tokens"
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
