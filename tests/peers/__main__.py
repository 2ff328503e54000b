"""Compares fresh random cases with the real OLMo-core, and prints what was compared.

`make test-peers` runs this where the extra `[peers]` is installed; it is no part of `make test`.
Each check also runs alone. `PEER_SEED` repeats a run, and `PEER_CASES` sets the number of cases.
"""

import os
import sys
import unittest

from absl import logging

from tests.benchmarks import figures
from tests.peers import evaluation_check
from tests.peers import olmo_core_check
from tests.peers import olmo_core_run_check
from tests.peers import packed_check
from tests.peers import tally

_CHECKS = (olmo_core_check, packed_check, olmo_core_run_check, evaluation_check)
_LEAST = 200


def main() -> None:
  """Runs all checks; exits with 1 if anything differs, or if too little was compared."""
  print(f"PEER_SEED={tally.SEED}", flush=True)
  logging.set_verbosity(logging.ERROR)
  load = unittest.defaultTestLoader.loadTestsFromModule
  # JAX warns about the processes that OLMo-core starts to pack documents.
  runner = unittest.TextTestRunner(stream=sys.stdout, warnings="ignore")
  result = runner.run(unittest.TestSuite(map(load, _CHECKS)))
  print(figures.table(tally.HEAD, tally.rows()))
  enough = tally.total("cases") >= _LEAST or "PEER_CASES" in os.environ
  if not enough:
    print(f"Fewer than {_LEAST} cases were compared.")
  sys.exit(not (result.wasSuccessful() and enough))


if __name__ == "__main__":
  main()
