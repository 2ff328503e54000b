"""Tests of the progress bar."""

import contextlib
import io
import os
import pty
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import progress

STARTS_PROCESSES = True


class ProgressTest(parameterized.TestCase):

  def test_nothing_is_shown_unless_it_is_asked_for(self):
    stderr = io.StringIO()
    shown = contextlib.redirect_stderr(stderr)
    with shown, progress.progress_bar("Work", 2, enabled=False) as advance:
      advance(2)
    self.assertEqual(stderr.getvalue(), "")

  @parameterized.parameters(
      (4, r"Work: 3 of 4 files \(75%\), [0-9,]+ per second, 0:00:00 left\n"),
      (None, r"Work: 3 files, [0-9,]+ per second\n"),
  )
  def test_a_log_file_gets_lines_with_the_rate_and_the_remaining_time(self, total, line):
    stderr = io.StringIO()
    shown = contextlib.redirect_stderr(stderr)
    with shown, progress.progress_bar("Work", total, enabled=True, interval=0.0) as advance:
      advance(3)
    self.assertRegex(stderr.getvalue(), f"^{line}$")

  def test_a_log_file_gets_no_line_before_its_time(self):
    stderr = io.StringIO()
    shown = contextlib.redirect_stderr(stderr)
    with shown, progress.progress_bar("Work", 2, enabled=True) as advance:
      advance(2)
    self.assertEqual(stderr.getvalue(), "")

  @parameterized.parameters("files", "bytes")
  def test_a_terminal_gets_a_bar_with_the_rate(self, unit):
    parent, child = pty.openpty()
    code = (
        "from maxtext_olmo import progress\n"
        f"with progress.progress_bar('Work', 2000, enabled=True, unit={unit!r}) as advance:\n"
        "  advance(1000)\n"
        "  advance(1000)"
    )
    subprocess.run([sys.executable, "-c", code], stderr=child, check=True)
    os.close(child)
    output = b""
    with contextlib.suppress(OSError):  # Linux ends a closed terminal with an error.
      while piece := os.read(parent, 4096):
        output += piece
    os.close(parent)
    self.assertIn(b"Work", output)
    self.assertIn(b"2.0/2.0 kB" if unit == "bytes" else b"2000/2000", output)
    self.assertIn(b"B/s" if unit == "bytes" else b" per second", output)


if __name__ == "__main__":
  absltest.main()
