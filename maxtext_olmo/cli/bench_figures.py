"""What was measured, as figures: medians and ranges, and the refusal to publish one that cannot be true."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any

from maxtext_olmo import errors

# How far above a bound a figure may lie before noise no longer explains it.
_NOISE = 1.05
# A first half that is so much quicker than the second was made before the clock started.
_MOST_UNEVEN = 2.5
_MANY_TIMES = 8


class ImpossibleFigureError(errors.MaxtextOlmoError, ArithmeticError):
  """A measurement contradicts another one; something is wrong with it, so it is not published."""


@dataclasses.dataclass(frozen=True)
class Figure:
  """One loader at one size, measured several times.

  Attributes:
    name: The loader.
    group: Whose it is: `limit`, `ours` or `peer`.
    setting: Which of its settings was used.
    delivers: The arrays of a batch.
    batch: Rows of a batch.
    length: Tokens of a row.
    runs: What each measurement took, as the measured process says it.
    bytes_per_token: Of the arrays that are delivered.
    missing: Why there are no runs.
  """

  name: str
  group: str
  setting: str = ""
  delivers: str = ""
  batch: int = 0
  length: int = 0
  filter: bool = False
  documents: bool = False
  device: bool = False
  threads: int = 1
  runs: tuple[dict[str, Any], ...] = ()
  bytes_per_token: float = 0.0
  missing: str = ""

  @property
  def tokens(self) -> int:
    """Of a batch."""
    return self.batch * self.length

  @property
  def rates(self) -> list[float]:
    """Tokens per second, run by run."""
    return [run["batches"] * self.tokens / run["seconds"] for run in self.runs]

  @property
  def rate(self) -> float:
    """Tokens per second, the median."""
    return statistics.median(self.rates)

  @property
  def cpu_ns_per_token(self) -> float:
    """Processor time of the process and those below it, the median."""
    return self._median("cpu_seconds") * 1e9 / self.tokens

  @property
  def faults_per_batch(self) -> float:
    """Minor page faults, the median."""
    return self._median("faults")

  @property
  def peak_bytes(self) -> int:
    """The most memory that one of its processes has held."""
    return max(run["peak_bytes"] for run in self.runs)

  @property
  def device_bytes_per_token(self) -> float:
    """Bytes that went from the host to devices."""
    return statistics.median(
        run.get("bytes_to_device", 0)
        / (run.get("reads", run["batches"] * self.batch) * self.length)
        for run in self.runs
    )

  def per_batch(self, name: str) -> float:
    """The median of a counter, per batch; 0 where the loader does not have it."""
    return self._median(name)

  def _median(self, name: str) -> float:
    return statistics.median(run.get(name, 0) / run["batches"] for run in self.runs)

  def to_json(self) -> dict[str, Any]:
    """All of it, with the figures that follow from the runs."""
    values = dataclasses.asdict(self)
    if self.runs:
      values["tokens_per_second"] = {
          "median": self.rate,
          "low": min(self.rates),
          "high": max(self.rates),
      }
      values["cpu_ns_per_token"] = self.cpu_ns_per_token
      values["faults_per_batch"] = self.faults_per_batch
      values["device_bytes_per_token"] = self.device_bytes_per_token
    return values


def check(figures: Sequence[Figure]) -> None:
  """Raises where the figures of one size contradict each other."""
  measured = [figure for figure in figures if figure.runs]
  for figure in measured:
    _check_even(figure)
  limits = [figure for figure in measured if figure.group == "limit"]
  if limits:
    limit = max(limits, key=lambda figure: figure.rate)
    for figure in measured:
      if figure.group != "limit":
        _check_below(figure, limit)
  for on in measured:
    for off in measured:
      if on.filter and not off.filter and _same_but_filter(on, off):
        _check_filter_costs(on, off)


def _check_even(figure: Figure) -> None:
  """Batches that lay ready must not be counted as made: the first half may not be much quicker than the second."""
  uneven = statistics.median(_unevenness(run) for run in figure.runs)
  if uneven > _MOST_UNEVEN:
    raise ImpossibleFigureError(
        f"{_title(figure)}: the first half of each measurement took 1/{uneven:.1f} of the time of the"
        " second, so its buffers were not empty when the clock started. Measure more batches."
    )


def _unevenness(run: dict[str, Any]) -> float:
  half = run["batches"] // 2
  if run["batches"] > _MANY_TIMES * run["buffered"]:
    return 1.0  # What may have lain ready would not matter.
  if half == 0 or run.get("halfway_seconds", 0) <= 0:
    return 1.0
  first = run["halfway_seconds"] / half
  second = (run["seconds"] - run["halfway_seconds"]) / (run["batches"] - half)
  return second / first


def _check_below(figure: Figure, limit: Figure) -> None:
  cores = min(os.cpu_count() or 1, figure.threads)
  bound = max(limit.rates) * cores * _NOISE
  if figure.rate > bound:
    raise ImpossibleFigureError(
        f"{_title(figure)}: {figure.rate / 1e6:.0f} Mtok/s, but copying alone reaches"
        f" {max(limit.rates) / 1e6:.0f} Mtok/s on each of {cores} cores. No loader beats a copy, so one of"
        " the two is wrong; nothing is published. Was the machine busy? Measure again."
    )
  least = min(run["cpu_seconds"] / run["batches"] for run in limit.runs) * 1e9 / limit.tokens
  if figure.cpu_ns_per_token * _NOISE < least:
    raise ImpossibleFigureError(
        f"{_title(figure)}: {figure.cpu_ns_per_token:.2f} ns of processor time per token, less than the"
        f" {least:.2f} ns of a copy. Some of its work was not counted; nothing is published."
    )


def _same_but_filter(a: Figure, b: Figure) -> bool:
  fields = ("name", "setting", "batch", "length", "documents", "device")
  return all(getattr(a, field) == getattr(b, field) for field in fields)


def _check_filter_costs(on: Figure, off: Figure) -> None:
  if min(on.rates) > max(off.rates) * _NOISE:
    raise ImpossibleFigureError(
        f"{_title(on)}: faster with the filter ({min(on.rates) / 1e6:.0f} Mtok/s or more) than without it"
        f" ({max(off.rates) / 1e6:.0f} Mtok/s or less). The filter is work, so one of the two is wrong;"
        " nothing is published. Was the machine busy? Measure again."
    )


def _title(figure: Figure) -> str:
  return f"{figure.name} ({figure.setting or 'as it is'}) at {figure.batch} × {figure.length}"
