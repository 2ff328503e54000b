"""The tiny trainer, with writes that begin to fail at a step of the run, in one of its processes.

`FAULT` in the environment says which: process, step, operations, error and pattern, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import jax

from maxtext_olmo.trainers.tiny import trainer

FAULT = "FAULT"
AT_START = -1  # The step of a fault that is there from the beginning.


def main(argv: list[str]) -> int:
  """Trains with the command line."""
  fault = json.loads(os.environ[FAULT])
  library = ctypes.CDLL(os.environ["LD_PRELOAD"])

  def begin() -> None:
    library.hostile_arm(fault["operations"], fault["error"], 1, fault["pattern"].encode())

  def on_batch(step: int, batch: dict[str, jax.Array]) -> None:
    del batch
    if step == fault["step"] and jax.process_index() == fault["process"]:
      begin()

  if fault["step"] == AT_START and int(os.environ["JAX_PROCESS_ID"]) == fault["process"]:
    begin()
  return trainer.main_from_argv(argv, on_batch=on_batch)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
