"""Tests that Tunix's own trainer, without MaxText, takes our iterator as it is."""

import importlib.util
import os
import pathlib
import signal

import numpy as np
from absl.testing import absltest

import maxtext_olmo
from tests.trainers.maxtext import recipe_runs
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_STEPS = 8
_KILLED_AT = 5


def setUpModule():
  os.environ["JAX_PLATFORMS"] = "cpu"


def _train(directory: pathlib.Path, kill: bool, name: str) -> dict[int, float]:
  """Fine-tunes a small model with `PeftTrainer`; returns the loss of each step of this start."""
  import jax
  import jax.numpy as jnp
  import optax
  import orbax.checkpoint as ocp
  from flax import nnx
  from tunix.sft import hooks
  from tunix.sft import peft_trainer

  class Model(nnx.Module):

    def __init__(self, rngs: nnx.Rngs):
      self.embed = nnx.Embed(runs.VOCABULARY, 16, rngs=rngs)
      self.out = nnx.Linear(16, runs.VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
      return self.out(self.embed(tokens))

  def loss(model, inputs, targets, targets_segmentation):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
    counts = targets_segmentation != 0
    return jnp.sum(losses * counts) / jnp.sum(counts)

  class Data(hooks.DataHooks):

    def __init__(self, train):
      self._train = train

    def load_next_train_batch(self, trainer):
      batch = next(self._train, None)
      if batch is not None:
        arrays = {key: np.asarray(value) for key, value in batch.items()}
        np.savez(directory / f"{name}-{trainer.train_steps}.npz", **arrays)
      return batch

    def load_next_eval_batch(self, trainer):
      return None

  losses: dict[int, float] = {}

  class Recorder(hooks.TrainingHooks):
    """Keeps the losses, and kills the process if asked to."""

    def on_train_step_end(self, trainer, train_step, train_loss):
      losses[train_step - 1] = float(train_loss)

    def on_train_step_start(self, trainer):
      if kill and trainer.train_steps == _KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)

    def _ignore(self, *args):
      pass

    on_train_start = on_train_end = on_eval_step_start = on_eval_step_end = _ignore

  trainer = peft_trainer.PeftTrainer(
      Model(nnx.Rngs(0)),
      optax.sgd(0.1),
      peft_trainer.TrainingConfig(
          eval_every_n_steps=1000,
          max_steps=_STEPS,
          checkpoint_root_directory=str(directory / name),
          checkpointing_options=ocp.CheckpointManagerOptions(
              save_interval_steps=2, enable_async_checkpointing=False
          ),
      ),
  )
  config = maxtext_olmo.get_config()
  config.update(
      dataset_type="olmo_packed",
      olmo_index_path=str(directory / "index.json"),
      olmo_label_masks=("labels_mask_part_*.npy",),
      olmo_eos_id=recipe_runs.EOS,
      olmo_pad_id=recipe_runs.PAD,
      olmo_document_mask=True,
      max_target_length=runs.LENGTH,
      vocab_size=runs.VOCABULARY,
      global_batch_size_to_load=4,
      initial_step=trainer.iter_steps,  # The batches that the restored model was trained on.
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
  train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  names = ("inputs", "targets", "targets_segmentation")
  trainer.with_gen_model_input_fn(lambda batch: {name: batch[name] for name in names})
  trainer.with_loss_fn(loss)
  trainer.with_data_hooks(Data(train))
  trainer.with_training_hooks(Recorder())
  with jax.set_mesh(mesh):
    trainer.train(train)
  train.close()
  return losses


@absltest.skipIf(importlib.util.find_spec("tunix") is None, "google-tunix is not installed.")
class PeftTrainerTest(absltest.TestCase):

  def test_masked_rows_train_once_each_and_resume_after_a_kill(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    corpus = recipe_runs.write_corpus(directory)
    reference = runs.in_child(_train, directory, False, "reference")
    with self.assertRaisesRegex(AssertionError, "ended without a result"):
      runs.in_child(_train, directory, True, "killed")
    resumed = runs.in_child(_train, directory, False, "killed")
    self.assertEqual(min(resumed), _KILLED_AT // 2 * 2)
    self.assertEqual(resumed, {step: reference[step] for step in resumed})
    documents = []
    for step in range(_STEPS):
      batches = [dict(np.load(directory / f"{run}-{step}.npz")) for run in ("reference", "killed")]
      for key, array in batches[0].items():
        np.testing.assert_array_equal(batches[1][key], array)
      documents += corpus.check_rows(batches[1], document_mask=True, label_masks=True)
    epoch = len(corpus.tokens)
    self.assertEqual(sorted(documents[:epoch]), list(range(epoch)))


if __name__ == "__main__":
  absltest.main()
