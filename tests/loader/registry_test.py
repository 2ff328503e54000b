"""Tests of dataset types."""

import pathlib
import sys

import jax
import ml_collections
import numpy as np
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.loader import options
from maxtext_olmo.loader import registry

STARTS_PROCESSES = True


def _config(**values) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({**options.defaults(), "checkpoint_dir": "", **values})


class _Iterator:

  def __init__(self):
    self.closed = False

  def close(self):
    self.closed = True


class RegistryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

  def test_an_unknown_type_is_an_error_that_lists_the_known_ones(self):
    with self.assertRaisesRegex(
        errors.ConfigError, "dataset_type='olmo' is unknown; known are .*olmo_grain.*synthetic"
    ):
      registry.create_data_iterator(_config(dataset_type="olmo"), self.mesh)

  def test_a_registered_type_is_used(self):
    made = []

    def make(config, mesh):
      made.append((config, mesh))
      return _Iterator()

    maxtext_olmo.register_dataset_type("mine", make, make)
    self.assertIn("mine", registry.dataset_types())
    config = _config(dataset_type="mine", eval_interval=5)
    train, evaluation = maxtext_olmo.create_data_iterator(config, self.mesh)
    self.assertIsNot(train, evaluation)
    self.assertEqual(made, [(config, self.mesh)] * 2)

  def test_eval_is_made_only_where_it_is_asked_for(self):
    registry.register_dataset_type("train_only", lambda c, m: _Iterator())
    train, evaluation = registry.create_data_iterator(_config(dataset_type="train_only"), self.mesh)
    self.assertIsInstance(train, _Iterator)
    self.assertIsNone(evaluation)

  def test_eval_of_a_type_without_it_is_a_config_error_and_closes_train(self):
    train = _Iterator()
    registry.register_dataset_type("train_only", lambda c, m: train)
    with self.assertRaisesRegex(errors.ConfigError, "'train_only' has no evaluation"):
      registry.create_data_iterator(_config(dataset_type="train_only", eval_interval=1), self.mesh)
    self.assertTrue(train.closed)

  def test_another_package_registers_through_an_entry_point(self):
    site = pathlib.Path(self.create_tempdir().full_path)
    (site / "third_party_data.py").write_text(
        "from maxtext_olmo.loader import registry\n"
        "TYPE = registry.DatasetType(lambda config, mesh: 'third party iterator')\n"
    )
    metadata = site / "third_party_data-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: third_party_data\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[maxtext_olmo.dataset_types]\nthird_party = third_party_data:TYPE\n"
    )
    sys.path.insert(0, str(site))
    self.addCleanup(sys.path.remove, str(site))
    self.assertIn("third_party", registry.dataset_types())
    train, _ = registry.create_data_iterator(_config(dataset_type="third_party"), self.mesh)
    self.assertEqual(train, "third party iterator")

  def test_synthetic_batches_are_deterministic_and_resume(self):
    config = _config(dataset_type="synthetic", max_target_length=16, vocab_size=50, eval_interval=1)
    train, evaluation = registry.create_data_iterator(config, self.mesh)
    first = [np.asarray(next(train)["inputs"]) for _ in range(4)]
    self.assertEqual(first[0].shape, (8, 16))
    self.assertLess(max(batch.max() for batch in first), 50)
    self.assertFalse(np.array_equal(first[0], first[1]))
    state = train.get_state()
    following = np.asarray(next(train)["inputs"])
    train.set_state(state)
    np.testing.assert_array_equal(np.asarray(next(train)["inputs"]), following)
    config.initial_step = 2
    again, _ = registry.create_data_iterator(config, self.mesh)
    np.testing.assert_array_equal(np.asarray(next(again)["inputs"]), first[2])
    self.assertLen([batch["inputs"].shape for batch in evaluation], 4)
    for iterator in (train, evaluation, again):
      iterator.close()

  def test_synthetic_batches_are_as_large_as_is_loaded(self):
    config = _config(
        dataset_type="synthetic",
        max_target_length=16,
        global_batch_size_to_load=8,
        global_batch_size_to_train_on=4,
        grain_worker_count=1,
    )
    train, _ = registry.create_data_iterator(config, self.mesh)
    inputs = next(train)["inputs"]
    train.close()
    self.assertEqual(inputs.shape, (8, 16))
    self.assertFalse(np.asarray(inputs)[4:].any())


if __name__ == "__main__":
  absltest.main()
