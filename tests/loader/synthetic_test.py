import jax
import ml_collections
import numpy as np
from absl.testing import absltest

from maxtext_olmo import config as config_lib
from maxtext_olmo.loader import registry
from maxtext_olmo.loader import synthetic
from tests import workers as workers_lib

STARTS_PROCESSES = True


def _config(**values) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({**config_lib.defaults(), "checkpoint_dir": "", **values})


class SyntheticTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

  def test_a_record_depends_on_the_seed_and_its_number_alone(self):
    one, other = (synthetic.SyntheticRecords(6, 10**6, seed) for seed in (0, 1))
    record = one[2**40]["inputs"]
    np.testing.assert_array_equal(synthetic.SyntheticRecords(6, 10**6, 0)[2**40]["inputs"], record)
    self.assertFalse(np.array_equal(one[0]["inputs"], record))
    self.assertFalse(np.array_equal(other[2**40]["inputs"], record))

  def test_batches_are_deterministic_and_resume(self):
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

  def test_batches_are_as_large_as_is_loaded(self):
    config = _config(
        dataset_type="synthetic",
        max_target_length=16,
        global_batch_size_to_load=8,
        global_batch_size_to_train_on=4,
        grain_worker_count=1,
    )
    with workers_lib.started_quickly():
      train, _ = registry.create_data_iterator(config, self.mesh)
      inputs = next(train)["inputs"]
      train.close()
    self.assertEqual(inputs.shape, (8, 16))
    self.assertFalse(np.asarray(inputs)[4:].any())


if __name__ == "__main__":
  absltest.main()
