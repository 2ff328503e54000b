"""Runs test files one after another in one interpreter, for `tests/run.py --fast`.

It prints a line once it has started. Then it reads a request per line from standard input and
answers each with a line on standard output, all as JSON:

    → {}
    ← {"path": "tests/order/stream_test.py", "output": "/tmp/…/output"}
    → {"ran": 6, "failed": 0, "skipped": 0}

What the tests print goes to the file `output`. These test files must not start processes (see
`tests/run.py`): an attempt raises an error, and fails the file even if the error is caught.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import multiprocessing.util
import os
import pathlib
import sys
import tempfile
import traceback
import types
import unittest
from collections.abc import Iterator
from typing import Any

import jax

# NumPy 2.0 runs lscpu at this import, which the guard would refuse.
import numpy.testing  # noqa: F401
from absl import flags
from absl import logging as absl_logging
from absl.testing import absltest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_STARTS = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pty.spawn",
        "subprocess.Popen",
        "tests.multiprocessing",
    }
)
_REMEDY = "Set STARTS_PROCESSES = True in the test file, which leaves it to `make test`."


class _ProcessGuard:
  """Refuses to start processes, and keeps what was refused."""

  def __init__(self) -> None:
    self.refused: list[str] = []
    sys.addaudithook(self._audit)
    # Python has no audit event for the processes that multiprocessing spawns.
    spawn = multiprocessing.util.spawnv_passfds

    def audited_spawn(path: str, args: Any, passfds: Any) -> int:
      sys.audit("tests.multiprocessing", path, args)
      return spawn(path, args, passfds)

    multiprocessing.util.spawnv_passfds = audited_spawn  # type: ignore[attr-defined]

  def _audit(self, event: str, args: tuple[Any, ...]) -> None:
    if event in _STARTS:
      stack = traceback.extract_stack(sys._getframe(1))
      ours = [f for f in stack if f.filename.startswith(f"{_ROOT}{os.sep}")]
      ours = [f for f in ours if f.filename != __file__]
      where = "".join(traceback.format_list((ours or stack)[-2:]))
      self.refused.append(f"{event} {str(args[:2])[:200]}, called from\n{where}")
      raise RuntimeError(f"This test file starts a process ({event}). {_REMEDY}")


def main() -> None:
  """Serves requests until standard input ends."""
  # Tests may print to standard output, so the answers have a descriptor of their own.
  answers = os.fdopen(os.dup(1), "w")
  flags.FLAGS(sys.argv[:1])  # Absl's test cases read flags.
  loader = absltest.TestLoader()
  _allow_same_number_of_devices()
  guard = _ProcessGuard()
  print("{}", file=answers, flush=True)
  for line in sys.stdin:
    request = json.loads(line)
    with _output_to(request["output"]), _isolated():
      answer = _run(pathlib.Path(request["path"]), loader, guard)
    print(json.dumps(answer), file=answers, flush=True)


def _allow_same_number_of_devices() -> None:
  """Lets each test file set the number of devices that its interpreter has already.

  The oldest supported JAX refuses this once a backend is initialized, newer ones do not.
  """
  update = jax.config.update

  def update_if_changed(name: str, value: Any) -> None:
    if name != "jax_num_cpu_devices" or getattr(jax.config, name) != value:
      update(name, value)

  jax.config.update = update_if_changed


def _run(path: pathlib.Path, loader: unittest.TestLoader, guard: _ProcessGuard) -> dict[str, int]:
  guard.refused.clear()
  ran = failed = skipped = 0
  try:
    suite = loader.loadTestsFromModule(_import(path))
  except unittest.SkipTest as skip:
    print(f"{path} skips itself: {skip}")
    ran = skipped = 1
  except BaseException:  # Whatever stops an import fails that file alone.
    traceback.print_exc()
    failed = 1
  else:
    result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    ran = max(result.testsRun, skipped)  # Python 3.12.1 does not count skipped tests as run.
  if guard.refused:
    print(f"{path} starts a process. {_REMEDY}\n", *guard.refused, sep="\n")
    failed = max(failed, 1)
  return {"ran": ran, "failed": failed, "skipped": skipped}


def _import(path: pathlib.Path) -> types.ModuleType:
  """Imports a file below the root by its dotted name, so that its classes can be pickled."""
  path = path.resolve()
  if path.is_relative_to(_ROOT):
    return importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))
  spec = importlib.util.spec_from_file_location(path.stem, path)
  if spec is None or spec.loader is None:
    raise ImportError(f"{path} cannot be imported.")
  module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def _output_to(path: str) -> Iterator[None]:
  """Sends descriptors 1 and 2 to a file."""
  sys.stdout.flush()
  sys.stderr.flush()
  file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
  os.dup2(file, 1)
  os.dup2(file, 2)
  os.close(file)
  yield
  sys.stdout.flush()
  sys.stderr.flush()


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
  """Gives a test file a temporary directory of its own, and restores what it may have changed."""
  environment, directory, arguments = dict(os.environ), os.getcwd(), list(sys.argv)
  with tempfile.TemporaryDirectory(prefix="test_", ignore_cleanup_errors=True) as temporary:
    flags.FLAGS.test_tmpdir = temporary
    with _same_logging():
      yield
  os.environ.clear()
  os.environ.update(environment)
  os.chdir(directory)
  sys.argv[:] = arguments


@contextlib.contextmanager
def _same_logging() -> Iterator[None]:
  loggers = [
      (logger, dict(vars(logger))) for logger in (logging.root, absl_logging.get_absl_logger())
  ]
  handlers = list(logging.root.handlers)
  disabled = logging.root.manager.disable
  verbosity = absl_logging.get_verbosity()
  yield
  absl_logging.set_verbosity(verbosity)
  for logger, attributes in loggers:
    for name in ("disabled", "level", "propagate"):
      setattr(logger, name, attributes[name])
  logging.root.handlers[:] = handlers
  logging.disable(disabled)  # Also forgets the levels that loggers have cached.


if __name__ == "__main__":
  main()
