"""A trainer that also records what it was fed: a digest of every row of every batch, per process.

`python -m maxtext_olmo.trainers.tiny.ledger --config=…` is the tiny trainer with this record. The
digests go into the directory `MAXTEXT_OLMO_DEMO_LEDGER`. With `MAXTEXT_OLMO_DEMO_PAUSE` set to a
step, the trainer pauses there, so that it can be killed in the middle of a run.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import xxhash

from maxtext_olmo.trainers.tiny import trainer

LEDGER_VARIABLE = "MAXTEXT_OLMO_DEMO_LEDGER"
PAUSE_VARIABLE = "MAXTEXT_OLMO_DEMO_PAUSE"


def main(argv: Sequence[str]) -> int:
  """Trains as the command line says, and keeps the ledger."""
  pause_at = int(os.environ.get(PAUSE_VARIABLE, "-1"))
  path = pathlib.Path(os.environ[LEDGER_VARIABLE]) / f"{os.getpid()}.jsonl"
  with open(path, "w", encoding="utf-8") as ledger:

    def note(step: int, batch: dict[str, jax.Array]) -> None:
      rows = {}
      for shard in batch["inputs"].addressable_shards:
        first = shard.index[0].indices(batch["inputs"].shape[0])[0]
        for i, row in enumerate(np.asarray(shard.data)):
          rows[first + i] = xxhash.xxh3_64_hexdigest(row.tobytes())
      ledger.write(json.dumps({"step": step, "rows": rows}) + "\n")
      ledger.flush()
      while step == pause_at:
        time.sleep(0.1)

    return trainer.main_from_argv(argv, on_batch=note)


def read_ledger(directory: pathlib.Path) -> dict[int, dict[int, str]]:
  """Returns step → row → digest over all processes of a directory; a row's last writer counts."""
  steps: dict[int, dict[int, str]] = {}
  for path in sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
    for line in path.read_text().splitlines():
      try:
        entry = json.loads(line)
      except ValueError:  # The line that a killed process was at.
        continue
      rows = {int(row): digest for row, digest in entry["rows"].items()}
      steps.setdefault(entry["step"], {}).update(rows)
  return steps


if __name__ == "__main__":
  sys.exit(main(sys.argv))
