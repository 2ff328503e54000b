"""Functions that the tests of collectives run in each process."""

import jax

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives


def act(failing):
  """Runs a function that fails on some processes."""

  def work():
    if jax.process_index() in failing:
      raise errors.CorpusError(f"the mount is missing on {jax.process_index()}")
    return jax.process_index()

  return collectives.run_on_all_processes(work, "opening the index")


def decide(fail):
  """Runs a function that only process 0 may call."""

  def work():
    if jax.process_index() != 0:
      raise AssertionError("only process 0 decides")
    if fail:
      raise OSError("checkpoint_dir is gone")
    return {"step": 7, "text": "ä" * 100}

  return collectives.from_process_0(work, "looking for checkpoints")


def compare(values):
  """Compares the values of each process."""
  collectives.check_equal(values[jax.process_index()])
  return "equal"


def gather(texts):
  """Gathers the text of each process."""
  return collectives.gather(texts[jax.process_index()])
