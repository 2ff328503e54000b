"""The tiny trainer, which also records every batch that its steps take, in the directory `TAP`."""

import os
import sys

import jax

from maxtext_olmo.trainers.tiny import trainer
from tests.trainers import proof

VARIABLE = "TAP"


def _on_batch(step: int, batch: dict[str, jax.Array]) -> None:
  proof.save_batch(os.environ[VARIABLE], step, jax.process_index(), batch)


if __name__ == "__main__":
  sys.exit(trainer.main_from_argv(sys.argv, on_batch=_on_batch))
