"""Tests of dataset types."""

import pathlib
import sys

import jax
import ml_collections
import numpy as np
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import pace
from maxtext_olmo.loader import registry

STARTS_PROCESSES = True


def _config(**values) -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({**config_lib.defaults(), "checkpoint_dir": "", **values})


class _Iterator:
  """A `DataIterator` over counts."""

  def __init__(self):
    self.step = 0
    self.closed = False

  def __iter__(self):
    return self

  def __next__(self):
    self.step += 1
    return {"inputs": jax.numpy.full((8, 4), self.step - 1)}

  @property
  def position(self):
    return self.step * 8

  @property
  def local_iterator(self):
    return self

  def get_state(self):
    return {"step": self.step}

  def set_state(self, state):
    self.step = state["step"]

  def reset(self):
    self.step = 0

  def metrics(self):
    return {}

  def describe(self):
    return maxtext_olmo.RunStatus(self.step, self.position, self.position * 4, 0, {})

  def explain(self, step):
    raise errors.OrderError(f"Step {step} holds counts, not tokens.")

  def close(self):
    self.closed = True


class _NoState(_Iterator):
  """Can be closed, but neither saved nor restored."""

  get_state = property()
  set_state = property()


# A package whose dataset type makes iterators of different kinds, as its config says.
_THIRD_PARTY = """
import maxtext_olmo
from tests.loader import registry_test

def make(config, mesh):
  return getattr(registry_test, config.kind)()

TYPE = maxtext_olmo.DatasetType(make, make, reads=("olmo_order",))
"""


class RegistryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

  def install_third_party(self) -> None:
    """Puts a package with an entry point on the path, as an installation does."""
    site = pathlib.Path(self.create_tempdir().full_path)
    (site / "third_party_data.py").write_text(_THIRD_PARTY)
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
    self.addCleanup(sys.modules.pop, "third_party_data", None)

  def test_the_types_of_this_package_are_those_of_the_table(self):
    for name in config_lib.DATASET_TYPES:
      with self.subTest(name), self.assertRaisesRegex(errors.ConfigError, "max_target_length=0"):
        registry.create_data_iterator(_config(dataset_type=name, max_target_length=0), self.mesh)

  def test_an_unknown_type_is_an_error_that_lists_the_known_ones(self):
    with self.assertRaisesRegex(
        errors.ConfigError, "dataset_type='olmo' is unknown. Known types: .*olmo_grain.*synthetic"
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

  def test_eval_is_made_only_if_it_is_asked_for(self):
    registry.register_dataset_type("train_only", lambda c, m: _Iterator())
    train, evaluation = registry.create_data_iterator(_config(dataset_type="train_only"), self.mesh)
    self.assertIsInstance(train, _Iterator)
    self.assertIsNone(evaluation)

  def test_eval_of_a_type_without_it_is_a_config_error(self):
    made = []
    registry.register_dataset_type("train_only", lambda c, m: made.append(1))
    with self.assertRaisesRegex(errors.ConfigError, "'train_only' has no evaluation"):
      registry.create_data_iterator(_config(dataset_type="train_only", eval_interval=1), self.mesh)
    self.assertEmpty(made)

  def test_train_is_closed_if_eval_cannot_be_made(self):
    train = _Iterator()
    registry.register_dataset_type("no_eval", lambda c, m: train, lambda c, m: 1 // 0)
    with self.assertRaises(ZeroDivisionError):
      registry.create_data_iterator(_config(dataset_type="no_eval", eval_interval=1), self.mesh)
    self.assertTrue(train.closed)

  def test_another_package_registers_through_an_entry_point(self):
    self.install_third_party()
    self.assertIn("third_party", registry.dataset_types())
    config = _config(dataset_type="third_party", kind="_Iterator", olmo_order="sequential")
    train, _ = registry.create_data_iterator(config, self.mesh)
    self.assertIsInstance(train, maxtext_olmo.DataIterator)
    self.assertEqual(next(train)["inputs"].shape, (8, 4))

  def test_a_key_that_another_package_does_not_declare_is_refused_before_its_iterator_is_made(self):
    self.install_third_party()
    config = _config(dataset_type="third_party", kind="not made", olmo_shift="right")
    with self.assertRaisesRegex(
        errors.ConfigError, "olmo_shift='right' would have no effect.*'third_party'"
    ):
      registry.create_data_iterator(config, self.mesh)

  def test_an_iterator_that_lacks_members_is_refused_when_it_is_made(self):
    self.install_third_party()
    with self.assertRaisesRegex(
        errors.ConfigError,
        "The train iterator of dataset_type='third_party', _NoState, is not a"
        " maxtext_olmo.DataIterator; it lacks get_state, set_state.",
    ):
      config = _config(dataset_type="third_party", kind="_NoState")
      registry.create_data_iterator(config, self.mesh)

  def test_both_iterators_are_closed_if_one_lacks_members(self):
    train, evaluation = _Iterator(), _NoState()
    registry.register_dataset_type("half", lambda c, m: train, lambda c, m: evaluation)
    with self.assertRaisesRegex(errors.ConfigError, "The eval iterator .*_NoState"):
      registry.create_data_iterator(_config(dataset_type="half", eval_interval=1), self.mesh)
    self.assertTrue(train.closed and evaluation.closed)

  def test_an_object_that_is_not_an_iterator_is_refused(self):
    registry.register_dataset_type("text", lambda c, m: "batches")
    with self.assertRaisesRegex(errors.ConfigError, "train iterator .* str, .*lacks __next__, get"):
      registry.create_data_iterator(_config(dataset_type="text"), self.mesh)

  def test_worker_processes_share_the_requests_to_a_store(self):
    self.addCleanup(pace.share_with, pace.sharing())
    for workers, expected in ((0, 1), (3, 3)):
      config = _config(dataset_type="synthetic", max_target_length=16, grain_worker_count=workers)
      registry.create_data_iterator(config, self.mesh)[0].close()
      self.assertEqual(pace.sharing(), expected)

  def test_iterators_of_this_package_meet_the_protocol(self):
    config = _config(dataset_type="synthetic", max_target_length=16, eval_interval=1)
    for iterator in registry.create_data_iterator(config, self.mesh):
      self.assertIsInstance(iterator, maxtext_olmo.DataIterator)
      iterator.close()


if __name__ == "__main__":
  absltest.main()
