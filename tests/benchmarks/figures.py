"""Medians of alternating rounds, goals for them, and the refusal of figures that cannot be true.

round 1    limit   ours   peer A   peer B
round 2    peer B   peer A   ours   limit      other load on the machine affects all of them alike
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_ATTEMPTS = 3
_NOISE = 1.05  # noise alone may lift a median this far above its bound

GOALS_HEAD = ("goal", "wanted", "found", "")

Run = dict[str, float]


class ImpossibleFigureError(RuntimeError):
  """A figure contradicts another one: the measurement is wrong, and nothing is reported."""


def alternate(
    names: Sequence[str],
    rounds: int,
    run: Callable[[str], Run | None],
    counts: Callable[[], bool] = lambda: True,
) -> dict[str, list[Run]]:
  """Runs candidates in turn, forwards and backwards, and returns their runs.

  Args:
    names: The candidates.
    rounds: The number of runs of each.
    run: Runs one. None drops it.
    counts: Asked after each round whether it counts. A round that does not is repeated.
  """
  found: dict[str, list[Run]] = {name: [] for name in names}
  for number in range(rounds):
    for _ in range(_ATTEMPTS):
      runs = {name: run(name) for name in list(found)[:: -1 if number % 2 else 1]}
      if counts():
        break
    else:
      raise ImpossibleFigureError(f"None of {_ATTEMPTS} attempts at a round counts. Free memory?")
    for name, values in runs.items():
      if values is None:
        del found[name]
      else:
        found[name].append(values)
  return found


def median(runs: Iterable[Run], counter: str, unit: str) -> float:
  """Returns the median of a counter per unit, such as `tokens` per `seconds`."""
  return statistics.median(run[counter] / run[unit] for run in runs)


def refuse_impossible(found: dict[str, list[Run]], sizes: dict[str, int], limit: str) -> None:
  """Raises if batches held fewer tokens than their size, or came faster than all cores can copy."""
  for name, runs in found.items():
    for run in runs:
      if run["tokens"] != run["batches"] * sizes[name]:
        raise ImpossibleFigureError(
            f"{name}: {run['batches']:.0f} batches of {sizes[name]:,} tokens held"
            f" {run['tokens']:,.0f} tokens."
        )
  cores = os.cpu_count() or 1
  bound = cores * median(found[limit], "tokens", "seconds") if limit in found else float("inf")
  for name, runs in found.items():
    rate = median(runs, "tokens", "seconds")
    if rate > bound * _NOISE:
      raise ImpossibleFigureError(
          f"{name}: {rate / 1e6:,.0f} Mtok/s, but {cores} cores copy {bound / 1e6:,.0f} Mtok/s."
          " Some batches were counted that were not made in that time. Measure again."
      )


def goal(name: str, found: float | None, sign: str, bound: float, unit: str) -> tuple[str, ...]:
  """Returns a row of `GOALS_HEAD`; `sign` is ≥ or ≤, and `found` is None if it was not measured."""
  wanted = f"{sign} {bound:g} {unit}"
  if found is None:
    return name, wanted, "–", "not measured"
  reached = found >= bound if sign == "≥" else found <= bound
  return name, wanted, f"{found:.3g} {unit}", "reached" if reached else "**not reached**"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a Markdown table; all columns but the first are aligned to the right."""
  lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
  return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def machine() -> str:
  """Returns what figures have to be read with: cores, architecture and Python version."""
  return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def fresh_process(script: str, *arguments: object) -> dict[str, Any]:
  """Runs a script in a process of its own and returns the JSON object that it prints last."""
  command = [sys.executable, script, *map(str, arguments)]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(done.stdout.splitlines()[-1])


def memory(field: str) -> int:
  """Returns a size of this process in bytes: `VmHWM` (peak) or `RssAnon` (private)."""
  with open("/proc/self/status", encoding="ascii") as file:
    found = re.search(rf"{field}:\s+(\d+) kB", file.read())
  return int(found[1]) * 1024 if found else 0
