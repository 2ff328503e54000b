"""What the processes of the agreement tests do."""

import jax

from maxtext_olmo import errors
from maxtext_olmo.devices import collectives


def act(failing):
  """Each process does something that fails on some."""

  def work():
    if jax.process_index() in failing:
      raise errors.CorpusError(f"the mount is missing on {jax.process_index()}")
    return jax.process_index()

  return collectives.run_on_all_processes(work, "opening the index")


def decide(fail):
  """Process 0 decides; the others must not be asked."""

  def work():
    if jax.process_index() != 0:
      raise AssertionError("only process 0 decides")
    if fail:
      raise OSError("checkpoint_dir is gone")
    return {"step": 7, "text": "ä" * 100}

  return collectives.from_process_0(work, "looking for checkpoints")


def compare(values):
  """Each process has values of its own."""
  collectives.check_equal(values[jax.process_index()])
  return "equal"


def gather(texts):
  """Each process has a text of its own."""
  return collectives.gather(texts[jax.process_index()])
