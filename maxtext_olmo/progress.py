"""A progress bar on stderr, for work that may take a long time."""

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress_bar(
    description: str,
    total: int | None,
    *,
    enabled: bool,
    unit: str = "files",
    interval: float = _SECONDS_BETWEEN_LINES,
) -> Iterator[Callable[[int], None]]:
  """Yields a function to call with the amount of work just done, from any thread.

  Shows a bar on a terminal, and otherwise prints lines. Both show the rate and the remaining time.

  Args:
    description: Text before the bar.
    total: Total amount of work, or None if it is unknown.
    enabled: Whether to show anything.
    unit: Unit of the work; "bytes" are shown as KB, MB, GB on a terminal.
    interval: Seconds between two lines, if stderr is not a terminal.
  """
  if not enabled:
    yield _ignore
  elif sys.stderr.isatty():
    with _bar(description, total, unit) as advance:
      yield advance
  else:
    yield _lines(description, total, unit, interval)


def _ignore(amount: int) -> None:
  del amount


@contextlib.contextmanager
def _bar(description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
  # Imported here, so that code that shows no bar does not pay for the import.
  import rich.console
  import rich.progress as bars
  import rich.text

  counts: list[bars.ProgressColumn]
  if unit == "bytes":
    counts = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
  else:

    class Rate(bars.ProgressColumn):

      def render(self, task: bars.Task) -> rich.text.Text:
        rate = task.finished_speed or task.speed
        return rich.text.Text("" if rate is None else f"{rate:,.0f} per second")

    counts = [bars.MofNCompleteColumn(), bars.TextColumn(unit), Rate()]
  columns = [bars.TextColumn("{task.description}"), bars.BarColumn(), *counts]
  columns.append(bars.TimeRemainingColumn(elapsed_when_finished=True))
  with bars.Progress(*columns, console=rich.console.Console(stderr=True)) as progress:
    task = progress.add_task(description, total=total)
    yield lambda amount: progress.advance(task, amount)


def _lines(
    description: str, total: int | None, unit: str, interval: float
) -> Callable[[int], None]:
  lock = threading.Lock()
  done = 0
  began = time.monotonic()
  next_line = began + interval

  def advance(amount: int) -> None:
    nonlocal done, next_line
    with lock:
      done += amount
      now = time.monotonic()
      if now < next_line:
        return
      next_line = now + interval
      rate = done / max(now - began, 1e-9)
      share = f" of {total:,} {unit} ({done / total:.0%})" if total else f" {unit}"
      left = f", {_duration((total - done) / rate)} left" if total and rate else ""
      sys.stderr.write(f"{description}: {done:,}{share}, {rate:,.0f} per second{left}\n")

  return advance


def _duration(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(max(0.0, seconds))))
