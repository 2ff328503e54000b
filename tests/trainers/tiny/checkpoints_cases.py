"""Functions that the processes of the checkpoint tests run."""

import jax

from maxtext_olmo.trainers.tiny import checkpoints


def open_directories(directories):
  """Opens a different directory on each process."""
  with checkpoints.Checkpoints(directories[jax.process_index()]) as opened:
    return opened.latest
