"""What the figures are held against: each goal, what was found, and whether it is reached."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_olmo.cli import bench_figures
from maxtext_olmo.cli import bench_plan
from maxtext_olmo.cli import bench_start

_LARGE_ALLOCATION = 1 << 20


@dataclasses.dataclass(frozen=True)
class Goal:
  """One line of the table of goals; `found` is None where it was not measured."""

  what: str
  goal: str
  found: float | None
  text: str
  reached: bool | None


def judge(results: Mapping[str, Any]) -> list[Goal]:
  """The goals that can be judged by these results, and those that cannot."""
  figures: Sequence[bench_figures.Figure] = results.get("compare", ())
  find = _Finder(figures)
  limit = find(bench_plan.LIMIT)
  on, off = find(bench_plan.INLINE, filter=True), find(bench_plan.INLINE)
  alone = {True: find(bench_plan.ALONE, filter=True), False: find(bench_plan.ALONE)}
  others = [f for f in figures if f.group == "peer" and f.runs and not f.filter and not f.device]
  by_hand = find(bench_plan.BY_HAND)
  best = max((f for f in others if f is not by_hand), key=lambda f: f.rate, default=None)
  device = find(bench_plan.DEVICE, filter=True)
  goals = [
      _ratio("filter on, inline, against the copy limit", on, limit, 0.6, alone[True]),
      _ratio("filter on, inline, against MaxText's loader", on, find(bench_plan.MAXTEXT, filter=True), 100),
      _ratio("filter on, inline, against OLMo-core's loader", on, find(bench_plan.OLMO_CORE, filter=True), 60),
      _ratio("filter off, inline, against the copy limit", off, limit, 0.8, alone[False]),
      _within(limit, best, _ratio(f"filter off, inline, against the best peer as it comes ({best.name if best else 'none'})", off, best, 3, alone[False])),
      _within(limit, by_hand, _ratio("filter off, inline, against a loop over a memory map, by hand", off, by_hand, 3, alone[False])),
      _ratio("threads ahead, filter on, against the copy limit", find(bench_plan.PREFETCH, filter=True), limit, 0.5),
      _ratio("on devices, against MaxText's way of forming arrays", device, find(bench_plan.FORMED, filter=True), 5),
      _most("bytes per token from host to devices", device.device_bytes_per_token if device else None, 4.1, "{:.2f}"),
      *_start_goals(results.get("startup", ())),
      _most("page faults per batch, inline, filter on", on.faults_per_batch if on else None, 20, "{:.0f}"),
      _most("fresh buffers per batch, inline", on.per_batch("buffers_made") if on else None, 0, "{:.0f}"),
      _most(
          "bytes allocated while a batch is made, at most",
          results.get("allocated") if on else None,
          _LARGE_ALLOCATION,
          "{:,.0f}",
      ),
      _most("share of time that the tiny trainer waits", (results.get("trainer") or {}).get("wait_share"), 0.01, "{:.2%}"),
  ]  # fmt: skip
  return goals


class _Finder:

  def __init__(self, figures: Sequence[bench_figures.Figure]):
    self._figures = figures

  def __call__(
      self, candidate: bench_plan.Candidate, *, filter: bool = False
  ) -> bench_figures.Figure | None:
    for figure in self._figures:
      same = figure.name == candidate.name and figure.filter == filter and not figure.documents
      if same and figure.runs:
        return figure
    return None


def _ratio(
    what: str,
    figure: bench_figures.Figure | None,
    other: bench_figures.Figure | None,
    goal: float,
    alone: bench_figures.Figure | None = None,
) -> Goal:
  if figure is None or other is None:
    return Goal(what, f"≥ {goal:g} ×", None, "not measured", None)
  found = figure.rate / other.rate
  by_cpu = other.cpu_ns_per_token / figure.cpu_ns_per_token
  by_one = f", by one thread {alone.rate / other.rate:.3g} ×" if alone else ""
  text = f"{found:.3g} × (by processor time {by_cpu:.3g} ×{by_one})"
  return Goal(what, f"≥ {goal:g} ×", found, text, found >= goal)


def _within(
    limit: bench_figures.Figure | None, other: bench_figures.Figure | None, goal: Goal
) -> Goal:
  """The goal with what the limit would make of it, where not even a plain copy would reach it."""
  if limit is None or other is None or goal.reached:
    return goal
  return dataclasses.replace(
      goal, text=f"{goal.text}; a plain copy is {limit.rate / other.rate:.3g} × it"
  )


def _most(what: str, found: float | None, goal: float, form: str) -> Goal:
  if found is None:
    return Goal(what, f"≤ {form.format(goal)}", None, "not measured", None)
  return Goal(what, f"≤ {form.format(goal)}", found, form.format(found), found <= goal)


def _start_goals(starts: Sequence[bench_start.Start]) -> list[Goal]:
  ours = {start.instances: start for start in starts if start.after_imports is not None}
  small, large = (ours.get(n) for n in (bench_start.INSTANCES[0], bench_start.INSTANCES[-1]))
  seconds = large.after_imports if large else None
  ratio = None
  if small and large and small.after_imports and large.after_imports:
    ratio = large.after_imports / small.after_imports
  peak = large.peak_bytes / 1e6 if large and large.peak_bytes else None
  return [
      _most("first batch at 724M instances, against 1M; indices are there", ratio, 1.3, "{:.2f} ×"),
      _most("first batch at 724M instances, after imports", seconds, 1.0, "{:.2f} s"),
      _most("peak memory at 724M instances", peak, 600, "{:.0f} MB"),
  ]


def device_profile(figures: Sequence[bench_figures.Figure]) -> dict[str, float]:
  """The same of a batch on devices; two threads work on it, one after the other, and each on another batch meanwhile."""
  find = _Finder(figures)
  inline, device = find(bench_plan.ALONE, filter=True), find(bench_plan.DEVICE, filter=True)
  if inline is None or device is None:
    return {}
  made = statistics.median(run["reads"] / device.batch / run["batches"] for run in device.runs)
  return {
      "a thread reads and looks at tokens": 1e6 * device.per_batch("read_seconds") / made,
      "the same inline, with nothing beside it": 1e6
      * (inline.per_batch("read_seconds") + inline.per_batch("check_seconds")),
      "another sends them and starts the targets": 1e6
      * device.per_batch("transfer_seconds")
      / made,
      "processor time of the two and of what they start": device.cpu_ns_per_token
      * device.tokens
      / 1e3,
      "a batch on devices, filter on": 1e6 * device.per_batch("seconds"),
  }


def profile(figures: Sequence[bench_figures.Figure]) -> dict[str, float]:
  """Where the time of a batch of the inline path goes, in microseconds: what the two runs with and without filter say.

  Of one thread, since what several do beside each other does not add up; the last line says what sharing makes of it.
  """
  find = _Finder(figures)
  on, off = find(bench_plan.ALONE, filter=True), find(bench_plan.ALONE)
  limit, shared = find(bench_plan.LIMIT), find(bench_plan.INLINE, filter=True)
  if on is None or off is None or limit is None or shared is None:
    return {}

  def micro(figure: bench_figures.Figure, name: str) -> float:
    return 1e6 * figure.per_batch(name)

  def rest(run: Mapping[str, Any]) -> float:
    counted = sum(run[f"{part}_seconds"] for part in ("order", "read", "check"))
    return 1e6 * (run["seconds"] - counted) / run["batches"]

  def looked(figure: bench_figures.Figure) -> float:
    # Rows are looked at as they are read, so the two have one clock; what the filter takes is the difference.
    return micro(figure, "read_seconds") + micro(figure, "check_seconds")

  copy = 1e6 * limit.per_batch("seconds")
  return {
      "the copy itself, as the limit does it": copy,
      "reading beyond the copy, and the vocabulary check": looked(off) - copy,
      "repetition filter": looked(on) - looked(off),
      "order": micro(on, "order_seconds"),
      "Python around it": statistics.median(map(rest, on.runs)),
      "a batch by one thread, filter on": micro(on, "seconds"),
      "a batch that threads share, filter on": micro(shared, "seconds"),
  }
