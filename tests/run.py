"""Runs test files under the absl test runner, a process each, some at a time.

python tests/run.py                     all of them
python tests/run.py tests/order -j 4    those below a folder, four at a time
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def _run(path: pathlib.Path) -> tuple[pathlib.Path, int, str, float]:
  began = time.monotonic()
  environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
      [sys.executable, str(path)],
      cwd=_ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
      check=False,
  )
  return path, done.returncode, done.stdout, time.monotonic() - began


def _counts(output: str) -> tuple[int, int, int]:
  """Tests that ran, that failed, and that were skipped."""
  ran = re.findall(r"^Ran (\d+) tests?", output, re.MULTILINE)
  summary = re.findall(r"^(?:OK|FAILED)(?: \((.*)\))?$", output, re.MULTILINE)
  numbers = dict(re.findall(r"(\w+)=(\d+)", summary[-1] if summary else ""))
  failed = sum(int(numbers.get(kind, 0)) for kind in ("failures", "errors"))
  return int(ran[-1]) if ran else 0, failed, int(numbers.get("skipped", 0))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("paths", nargs="*", default=["tests"], help="test files or folders")
  parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="files at a time")
  args = parser.parse_args()
  files: list[pathlib.Path] = []
  for path in map(pathlib.Path, args.paths):
    files += sorted(path.rglob("*_test.py")) if path.is_dir() else [path]
  passed = failed = skipped = 0
  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    for done in concurrent.futures.as_completed([pool.submit(_run, path) for path in files]):
      path, code, output, seconds = done.result()
      ran, bad, skips = _counts(output)
      # A file that dies, or runs nothing, has failed even where no test says so.
      bad = bad or int(code != 0 or ran == 0)
      passed += max(0, ran - bad - skips)
      failed += bad
      skipped += skips
      print(f"{'FAILED' if bad else 'ok':>6}  {ran:4d} tests {seconds:6.1f} s  {path}", flush=True)
      if bad:
        print(output, flush=True)
  print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
  return 1 if failed or not passed else 0


if __name__ == "__main__":
  sys.exit(main())
