"""What the processes of the checkpoint tests do."""

import jax

from maxtext_olmo.trainers.tiny import checkpoints


def open_directories(directories):
  """Each process opens a directory of its own."""
  with checkpoints.Checkpoints(directories[jax.process_index()]) as opened:
    return opened.latest
