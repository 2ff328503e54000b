"""Reports the progress of a run: metrics in the log, and the metrics of every step in a file.

    step 19  loss 5.42  grad 0.92  lr 9.8e-04  41,200 tokens/s  data wait 2%  position 152  epoch 0

Steps count from 0, like checkpoints. The position is that of the step's first sample. In a run with
stages, the line also has the stage, which counts its own epochs. `data wait` is the share of time
that the loop spent waiting for the next batch.
"""

from __future__ import annotations

import contextlib
import json
import logging as python_logging
import os
import sys
import time
from collections.abc import Iterator

from absl import logging

import maxtext_olmo
from maxtext_olmo import atomic
from maxtext_olmo import errors

_LINE = '{"step": '  # The beginning of each line of a metrics file.
_PLACE = ("position", "stage", "epoch")
_PACKAGE = os.path.dirname(os.path.abspath(maxtext_olmo.__file__))


class Report:
  """Collects metrics step by step, and writes them to the log and to a file.

  Args:
    metrics_file: File that gets a JSON line for each step. On resume, earlier steps are kept, and
      steps that will run again are dropped.
    first_step: The step at which the run begins.
    log_interval: Steps between log lines.
    enabled: Whether to write anything; only process 0 does.
  """

  def __init__(self, metrics_file: str, first_step: int, log_interval: int, *, enabled: bool):
    self._interval = log_interval
    self._enabled = enabled
    self._file = _open_from(metrics_file, first_step) if enabled and metrics_file else None
    self._since = time.monotonic()
    self._tokens = 0
    self._waited = 0.0

  def restart_clock(self) -> None:
    """Excludes the time so far, such as compilation, from the rates."""
    self._since, self._tokens, self._waited = time.monotonic(), 0, 0.0

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Excludes the time inside the context, such as an evaluation, from the rates."""
    began = time.monotonic()
    yield
    self._since += time.monotonic() - began

  def add_wait(self, seconds: float) -> None:
    """Records that the trainer has just waited for a batch."""
    self._waited += seconds

  def step(self, step: int, metrics: dict[str, float], *, tokens: int, last: bool) -> None:
    """Records the metrics of a finished step.

    Args:
      tokens: Number of tokens in the step's batch.
      last: Whether this is the last step, which is always logged.
    """
    self._tokens += tokens
    if self._file is not None:
      self._file.write(json.dumps({"step": step, **metrics}))
    if self._enabled and ((step + 1) % self._interval == 0 or last):
      self._line(step, metrics)
    if self._enabled and "eval_loss" in metrics:
      logging.info("step %5d  eval loss %.4f", step, metrics["eval_loss"])
    for name in metrics if self._enabled else ():
      if name.startswith("eval/"):
        logging.info("step %5d  %s %.4f", step, name, metrics[name])

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      # A failed write has been reported already, and would fail again.
      with contextlib.suppress(OSError):
        self._file.close()

  def _line(self, step: int, metrics: dict[str, float]) -> None:
    seconds = max(time.monotonic() - self._since, 1e-9)
    logging.info(
        "step %5d  loss %.4f  grad %.2f  lr %.1e  %9s tokens/s  data wait %.0f%%%s",
        step,
        metrics["loss"],
        metrics["grad_norm"],
        metrics["learning_rate"],
        f"{self._tokens / seconds:,.0f}" if self._tokens else "-",
        100 * self._waited / seconds,
        "".join(f"  {name} {metrics[name]}" for name in _PLACE if name in metrics),
    )
    self.restart_clock()


def show_on_stderr(process: int) -> None:
  """Shows the log of this package as plain lines, and only warnings of other packages.

  Args:
    process: The index of this process; processes other than 0 log only warnings.
  """
  handler = python_logging.StreamHandler(sys.stderr)
  handler.setFormatter(_PlainFormatter())
  handler.addFilter(_is_wanted)
  logger = logging.get_absl_logger()
  logger.handlers = [handler]
  logger.propagate = False
  logging.set_verbosity(logging.INFO if process == 0 else logging.WARNING)


def _is_wanted(record: python_logging.LogRecord) -> bool:
  return record.levelno >= python_logging.WARNING or record.pathname.startswith(_PACKAGE)


class _PlainFormatter(python_logging.Formatter):

  def format(self, record: python_logging.LogRecord) -> str:
    text = super().format(record)
    return text if record.levelno < python_logging.WARNING else f"{record.levelname}: {text}"


def _open_from(path: str, first_step: int) -> atomic.LineWriter:
  """Opens a metrics file for appending, and keeps only the lines of steps before `first_step`."""
  atomic.LineWriter(path).close()  # Raises unless it is a file that can be written.
  with open(path, encoding="utf-8", errors="replace") as file:
    lines = list(file)
  # A killed run may have left an incomplete first line.
  if lines and not lines[0].startswith(_LINE) and not _LINE.startswith(lines[0]):
    raise errors.WriteError(
        f"Cannot write metrics_file={path}: it exists and holds something other than metrics."
        " Choose another file."
    )
  atomic.write_atomically(path, "".join(line for line in lines if _step_of(line) < first_step))
  return atomic.LineWriter(path)


def _step_of(line: str) -> float:
  try:
    return json.loads(line)["step"]
  except (ValueError, KeyError, TypeError, RecursionError):
    # A killed run may have left an incomplete line.
    return float("inf")
