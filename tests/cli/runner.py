"""Runs the command line in this process."""

import contextlib
import io

from maxtext_olmo.cli import main as main_lib


def run(*argv: str) -> tuple[int, str, str]:
  """Returns the exit code, stdout and stderr of `maxtext-olmo argv…`."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      code = main_lib.main([str(word) for word in argv])
    except SystemExit as exit_:  # argparse leaves so, for --help and for usage errors.
      code = int(exit_.code or 0)
  return code, out.getvalue(), err.getvalue()
