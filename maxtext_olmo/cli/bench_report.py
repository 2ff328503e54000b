"""The results of `maxtext-olmo bench throughput`, as JSON, as Markdown and as a picture, and into the guide."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.cli import bench_cold
from maxtext_olmo.cli import bench_figures
from maxtext_olmo.cli import bench_goals
from maxtext_olmo.cli import bench_growth
from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_start
from maxtext_olmo.cli import bench_svg

_BEGIN = "<!-- measured: written by `maxtext-olmo bench throughput --write-docs` -->"
_END = "<!-- /measured -->"


def machine() -> str:
  """What it was measured on, in one line."""
  model = "unknown processor"
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  if cpuinfo.exists():
    found = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
    model = found.group(1) if found else model
  pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  return (
      f"{os.cpu_count()} cores of an {model}, {pages / 2**30:.0f} GiB of memory, {platform.system()}"
      f" {platform.release().split('-')[0]}, Python {platform.python_version()}"
  )


def to_json(results: Mapping[str, Any]) -> str:
  """Everything that was measured."""
  values = {
      "machine": results["machine"],
      "when": results["when"],
      "load_before": results["load_before"],
      "megabytes": results["megabytes"],
      "compare": [figure.to_json() for figure in results.get("compare", ())],
      "sizes": [figure.to_json() for figure in results.get("sizes", ())],
      "largest_allocation": results.get("allocated"),
      "startup": [bench_start.to_json(start) for start in results.get("startup", ())],
      "growth": [bench_growth.to_json(growth) for growth in results.get("growth", ())],
      "cold": [bench_cold.to_json(cold) for cold in results.get("cold", ())],
      "trainer": results.get("trainer"),
      "goals": [vars(goal) for goal in bench_goals.judge(results)],
      "profile": bench_goals.profile(results.get("compare", ())),
      "device_profile": bench_goals.device_profile(results.get("compare", ())),
  }
  return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def to_markdown(results: Mapping[str, Any]) -> str:
  """Tables of everything that was measured."""
  how = "read back from the disk" if results.get("reread") else "as it was written"
  parts = [
      f"Measured on {results['machine']}, on {results['when']}, with a load average of"
      f" {results['load_before']:.1f} at the beginning (each measurement adds up to"
      f" {os.cpu_count()}). Corpus: {results['megabytes']:,} MB of uint32 tokens, in the page cache {how}, which was checked."
  ]
  if results.get("compare"):
    batch, length = bench_plan.MAIN
    parts += ["### Goals", _goals(results)]
    parts += [f"### Batch {batch} × {length}", _compared(results["compare"])]
    parts += ["What each delivers:", _deliveries(results["compare"])]
  if results.get("sizes"):
    parts += ["### Other sizes, million tokens per second", _sizes(results)]
  if results.get("startup"):
    parts += ["### From the start of the process to the first batch", _starts(results["startup"])]
  if results.get("growth"):
    parts += ["### What a batch costs as things grow", _growths(results["growth"])]
  if results.get("cold"):
    parts += ["### Slow sources", _colds(results["cold"])]
  return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
  lines = ["| " + " | ".join(head) + " |"]
  lines.append("|" + "|".join(["---"] * left + ["---:"] * (len(head) - left)) + "|")
  lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
  return "\n".join(lines)


def _goals(results: Mapping[str, Any]) -> str:
  goals = bench_goals.judge(results)
  verdict = {True: "reached", False: "**not reached**", None: "–"}
  rows = [(goal.what, goal.goal, goal.text, verdict[goal.reached]) for goal in goals]
  text = _table(("goal", "wanted", "found", ""), rows, left=4)
  profiles = {
      "Where the time of an inline batch goes, in µs, since not every goal is reached:": bench_goals.profile,
      "And that of a batch on devices, which threads make beside each other:": bench_goals.device_profile,
  }
  if any(goal.reached is False for goal in goals):
    for title, make in profiles.items():
      if parts := make(results["compare"]):
        lines = [(name, f"{value:.0f}") for name, value in parts.items()]
        text += f"\n\n{title}\n\n{_table(('part', 'µs'), lines)}"
  return text


def _start_parts(starts: Sequence[bench_start.Start]) -> str:
  """Where this library's time to the first batch goes."""
  ours = [start for start in starts if start.parts]
  names = {
      "imports": "imports",
      "index": "building and saving the index, which a trainer finds ready",
      "iterator": "create_data_iterator",
      "first_batch": "first batch",
  }
  rows = [
      (title, *(f"{start.parts[name]:.2f} s" for start in ours)) for name, title in names.items()
  ]
  return _table(("this library", *(f"{start.instances:,} instances" for start in ours)), rows)


def _compared(figures: Sequence[bench_figures.Figure]) -> str:
  limit = next((f.rate for f in figures if f.name == bench_plan.LIMIT.name and f.runs), None)
  head = ("loader", "setting", "filter", "Mtok/s", "range", "of the limit", "CPU ns/token", "delivered B/token", "sent B/token", "faults/batch", "peak MB")  # fmt: skip
  rows = []
  for figure in figures:
    title = figure.name + (", document mask" if figure.documents else "")
    words = (title, figure.setting or "–", "on" if figure.filter else "off")
    if not figure.runs:
      rows.append((*words, f"not measured: {figure.missing}", *[""] * 7))
      continue
    rows.append(
        (
            *words,
            _mega(figure.rate),
            f"{_mega(min(figure.rates))} to {_mega(max(figure.rates))}",
            f"{figure.rate / limit:.2g}" if limit else "–",
            f"{figure.cpu_ns_per_token:.2f}",
            f"{figure.bytes_per_token:.1f}",
            f"{figure.device_bytes_per_token:.2f}" if figure.device else "–",
            f"{figure.faults_per_batch:.0f}",
            f"{figure.peak_bytes / 1e6:.0f}",
        )
    )
  return _table(head, rows, left=3)


def _deliveries(figures: Sequence[bench_figures.Figure]) -> str:
  said: dict[str, str] = {}
  for figure in figures:
    if figure.delivers and figure.group != "limit":
      said.setdefault(figure.name, figure.delivers)
  return "\n".join(f"- {name}: {what}" for name, what in said.items())


def _sizes(results: Mapping[str, Any]) -> str:
  figures = [*results["compare"], *results["sizes"]]
  keys = {(f.name, f.filter, f.documents): f.name for f in results["sizes"]}
  head = ("loader", "filter", "documents", *(f"{b} × {n}" for b, n in bench_plan.SIZES))
  rows = []
  for key in keys:
    cells = []
    for size in bench_plan.SIZES:
      found = next(
          (
              f
              for f in figures
              if (f.name, f.filter, f.documents) == key and (f.batch, f.length) == size
          ),
          None,
      )
      cells.append(_mega(found.rate) if found and found.runs else "–")
    rows.append((key[0], *("on" if part else "off" for part in key[1:]), *cells))
  return _table(head, rows, left=3)


def _starts(starts: Sequence[bench_start.Start]) -> str:
  head = ("loader", *(f"{n:,} instances" for n in bench_start.INSTANCES))
  rows = []
  for name in dict.fromkeys(start.name for start in starts):
    cells = []
    for n in bench_start.INSTANCES:
      start = next((s for s in starts if (s.name, s.instances) == (name, n)), None)
      if start is None or start.seconds is None:
        cells.append(start.missing if start else "–")
      else:
        cells.append(f"{start.seconds:.1f} s, {(start.peak_bytes or 0) / 1e6:,.0f} MB")
    rows.append((name, *cells))
  note = (
      "\n\nImports included. mosaicml-streaming and litdata need the corpus in their own format, which nobody makes of"
      " 24 TB for a measurement."
  )
  return _table(head, rows) + note + "\n\n" + _start_parts(starts)


def _growths(growths: Sequence[bench_growth.Growth]) -> str:
  rows = []
  for growth in growths:
    sizes = ", ".join(f"{size:,.10g}" for size in growth.sizes)
    costs = ", ".join(f"{cost:.0f}" for cost in growth.microseconds)
    rows.append((growth.what, sizes, costs, f"{growth.ratio:.2f}"))
  return _table(
      ("what grows", "from … to", "µs of one core per batch", "dearest / first"), rows, left=3
  )


def _colds(colds: Sequence[bench_cold.Cold]) -> str:
  rows = []
  for cold in colds:
    plain = cold.rate / cold.ratio
    rows.append(
        (
            cold.what,
            cold.note,
            f"{cold.rate / 1e6:,.0f} MB/s",
            f"{plain / 1e6:,.1f} MB/s",
            f"{cold.ratio:.3g} ×",
        )
    )
  return _table(("source", "", "this library", "one read after the other", "ratio"), rows, left=2)


def _mega(rate: float) -> str:
  return f"{rate / 1e6:,.0f}" if rate >= 1e7 else f"{rate / 1e6:.1f}"


def to_svg(results: Mapping[str, Any]) -> str:
  """The main comparison as a picture."""
  batch, length = bench_plan.MAIN
  measured = [f for f in results["compare"] if f.runs and not f.documents]
  sections = [
      (
          "To NumPy or torch, repetition filter on",
          [f for f in measured if f.filter and not f.device],
      ),
      ("To NumPy or torch, filter off", [f for f in measured if not f.filter and not f.device]),
      ("To arrays on devices, filter on", [f for f in measured if f.filter and f.device]),
  ]
  limits = [f for f in measured if f.name == bench_plan.LIMIT.name]
  drawn = []
  for heading, figures in sections:
    figures = [f for f in figures if f.group != "limit"]
    if figures:
      ordered = sorted(figures, key=lambda f: -f.rate)
      drawn.append((heading, [_bar(f) for f in [*limits, *ordered]]))
  if not drawn:
    raise errors.ConfigError("There is nothing to draw: no loader was measured.")
  title = "Batches from OLMo token files, in memory already"
  return bench_svg.bar_chart(title, f"batch {batch} × {length}; {results['machine']}", drawn)


def _bar(figure: bench_figures.Figure) -> bench_svg.Bar:
  rates = [rate / 1e6 for rate in figure.rates]
  return bench_svg.Bar(figure.name, figure.group, figure.rate / 1e6, min(rates), max(rates))


def write(results: Mapping[str, Any], directory: pathlib.Path) -> list[str]:
  """Writes JSON, Markdown and picture into a directory, and returns their paths."""
  directory.mkdir(parents=True, exist_ok=True)
  texts = {"bench.json": to_json(results), "bench.md": to_markdown(results)}
  if any(figure.runs for figure in results.get("compare", ())):
    texts["performance.svg"] = to_svg(results)
  for name, text in texts.items():
    atomic.write_atomically(str(directory / name), text)
  return [str(directory / name) for name in texts]


def write_docs(results: Mapping[str, Any], guides: pathlib.Path) -> list[str]:
  """Puts the tables and the picture into the guide."""
  page = guides / "performance.md"
  text = page.read_text() if page.exists() else ""
  if _BEGIN not in text or _END not in text:
    raise errors.ConfigError(
        f"{page} does not have the lines {_BEGIN!r} and {_END!r} between which the measured part goes;"
        " run this from the root of the repository."
    )
  before, rest = text.split(_BEGIN, 1)
  after = rest.split(_END, 1)[1]
  atomic.write_atomically(str(page), f"{before}{_BEGIN}\n\n{to_markdown(results)}\n{_END}{after}")
  atomic.write_atomically(str(guides / "performance.svg"), to_svg(results))
  return [str(page), str(guides / "performance.svg")]
