"""What a run says: a line of metrics now and then, and every step's metrics in a file.

    step 19  loss 5.42  grad 0.92  lr 9.8e-04  41,200 tokens/s  data wait 2%  position 152  epoch 0

Steps count from 0, as checkpoints do. The position is that of the step's first sample. `data wait`
is the share of the time that the loop spent in asking for the next batch.
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

_LINE = '{"step": '  # How each line of a metrics file begins.
_PACKAGE = os.path.dirname(os.path.abspath(maxtext_olmo.__file__))


class Report:
  """Collects metrics step by step; only process 0 has one that is `enabled`.

  Args:
    metrics_file: where each step becomes a JSON line; steps of a run that is being resumed stay,
      those that will run again are dropped.
    first_step: the step that the run begins with.
    log_interval: steps per line.
  """

  def __init__(self, metrics_file: str, first_step: int, log_interval: int, *, enabled: bool):
    self._interval = log_interval
    self._enabled = enabled
    self._file = _open_from(metrics_file, first_step) if enabled and metrics_file else None
    self._since = time.monotonic()
    self._tokens = 0
    self._waited = 0.0

  def restart_clock(self) -> None:
    """Leaves the time so far, such as that of compiling, out of the rates."""
    self._since, self._tokens, self._waited = time.monotonic(), 0, 0.0

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves what happens inside, such as an evaluation, out of the rates."""
    began = time.monotonic()
    yield
    self._since += time.monotonic() - began

  def step(
      self, step: int, metrics: dict[str, float], *, tokens: int, waited: float, last: bool
  ) -> None:
    """Takes the metrics of a step that is done.

    Args:
      tokens: how many tokens the step's batch has.
      waited: seconds until the batch was there.
      last: whether no step follows, so that a line is due.
    """
    self._tokens += tokens
    self._waited += waited
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
      # What could not be written has been reported by then, and cannot be written now either.
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
        "".join(f"  {name} {metrics[name]}" for name in ("position", "epoch") if name in metrics),
    )
    self.restart_clock()


def show_on_stderr(process: int) -> None:
  """Lets the log of this package through as plain lines, and only warnings of everybody else.

  Args:
    process: the number of this process; all but process 0 are silent unless something is wrong.
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
  """Opens a metrics file to append to, with the lines of the steps before `first_step` in it."""
  atomic.LineWriter(path).close()  # Raises unless it is a file that can be written.
  with open(path, encoding="utf-8", errors="replace") as file:
    lines = list(file)
  # A killed run may have left less than a line.
  if lines and not lines[0].startswith(_LINE) and not _LINE.startswith(lines[0]):
    raise errors.WriteError(
        f"Cannot write metrics_file={path}: it exists and holds something else than metrics."
        " Choose another file."
    )
  atomic.write_atomically(path, "".join(line for line in lines if _step_of(line) < first_step))
  return atomic.LineWriter(path)


def _step_of(line: str) -> float:
  try:
    return json.loads(line)["step"]
  except (ValueError, KeyError, TypeError, RecursionError):
    # A killed run may have left half a line.
    return float("inf")
