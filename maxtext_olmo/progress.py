"""A progress bar on stderr, for work that may take a long time."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None, *, enabled: bool, unit: str = "files"
) -> Iterator[Callable[[int], None]]:
  """Yields a function to call with the amount of work just done, from any thread.

  Shows a bar on a terminal, and otherwise prints a line every 10 seconds.

  Args:
    description: Text before the bar.
    total: Total amount of work, or None if it is unknown.
    enabled: Whether to show anything.
    unit: Unit of the work; "bytes" are shown as KB, MB, GB.
  """
  if not enabled:
    yield _ignore
  elif sys.stderr.isatty():
    with _bar(description, total, unit) as advance:
      yield advance
  else:
    yield _lines(description, total, unit, _SECONDS_BETWEEN_LINES)


def _ignore(amount: int) -> None:
  del amount


@contextlib.contextmanager
def _bar(description: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
  # Imported here, so that code that shows no bar does not pay for the import.
  import rich.console
  import rich.progress as bars

  counts: list[bars.ProgressColumn]
  if unit == "bytes":
    counts = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
  else:
    counts = [bars.MofNCompleteColumn(), bars.TextColumn(unit)]
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
  next_line = time.monotonic() + interval

  def advance(amount: int) -> None:
    nonlocal done, next_line
    with lock:
      done += amount
      if time.monotonic() < next_line:
        return
      next_line = time.monotonic() + interval
      share = f" of {total:,} {unit} ({done / total:.0%})" if total else f" {unit}"
      sys.stderr.write(f"{description}: {done:,}{share}\n")

  return advance
