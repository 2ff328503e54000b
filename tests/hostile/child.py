"""An interpreter that tries cases: a name and a folder per line of stdin, a verdict per line.

What the cases themselves print goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
# So that a size from a spoiled header ends in a MemoryError, not in the machine's death.
_MEMORY = 12 << 30


def main() -> None:
  """Answers until stdin ends."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # A case that hangs must end too.
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
  import jax

  from tests.hostile import cases
  from tests.hostile import catalogue

  jax.config.update("jax_disable_most_optimizations", True)
  by_name = {case.name: case for case in catalogue.all_cases()}
  for line in sys.stdin:
    request = json.loads(line)
    verdict, detail = cases.judge(by_name[request["name"]], pathlib.Path(request["folder"]))
    print(json.dumps({"verdict": verdict, "detail": detail[:1000]}), file=answers, flush=True)
  os._exit(0)  # Threads that a case has left running must not keep this process alive.


if __name__ == "__main__":
  main()
