"""Tests of the parts of the config that all dataset types treat in the same way."""

import gc
import multiprocessing
import os

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.loader import wiring
from tests import workers as workers_lib
from tests.loader import cases

STARTS_PROCESSES = True

_TYPES = (
    {},
    {**cases.DOCUMENTS, "max_target_length": 8},
    {"dataset_type": "synthetic", "olmo_index_path": ""},
)


def setUpModule():
  cases.compile_fast()


class WiringTest(cases.LoaderCase):

  @parameterized.product(values=_TYPES, workers=(-1, 0, 2))
  def test_less_than_no_workers_are_threads(self, values, workers):
    with workers_lib.started_quickly():
      iterator = self.train(**values, grain_worker_count=workers)
      next(iterator)
      self.assertLen(multiprocessing.active_children(), max(0, workers))
      iterator.close()
    self.assertEmpty(multiprocessing.active_children())

  @parameterized.parameters(*_TYPES)
  def test_batches_have_the_rows_that_are_loaded(self, **values):
    sizes = {"global_batch_size_to_load": 6, "global_batch_size_to_train_on": 4}
    batch = next(self.train(**{**values, **sizes}))
    self.assertEqual(batch["inputs"].shape, (6, 8))
    real = np.asarray(batch["inputs_segmentation"]).any(axis=1)
    self.assertEqual(real.tolist(), [True] * 4 + [False] * 2)

  @parameterized.parameters(*_TYPES)
  def test_a_sharding_that_the_mesh_does_not_have_is_refused(self, **values):
    with self.assertRaisesRegex(errors.ConfigError, "names the mesh axes .'model'."):
      self.train(**values, data_sharding=(("model",),))

  @parameterized.parameters({"olmo_order": "olmo_core"}, *_TYPES)
  def test_closing_closes_the_files_before_any_garbage_collection(self, **values):
    if "olmo_order" in values:
      values["olmo_order_cache_dir"] = self.create_tempdir().full_path
    gc.disable()
    self.addCleanup(gc.enable)
    held = []
    for _ in range(4):
      iterator = self.train(**values)
      next(iterator)
      iterator.close()
      held.append(iterator)  # Closed, and still referenced.
      held.append(len(os.listdir("/proc/self/fd")))
    self.assertEqual(held[-1], held[1])

  def test_a_small_corpus_builds_the_orders_of_two_epochs_and_not_of_many(self):
    cache = self.create_tempdir().full_path
    iterator = self.train(olmo_order="olmo_core", olmo_order_cache_dir=cache)
    next(iterator)
    iterator.close()
    built = [name for name in os.listdir(cache) if name.endswith(".order")]
    self.assertLessEqual(len(built), 2, built)

  @parameterized.parameters(*_TYPES)
  def test_a_directory_that_cannot_be_made_is_refused(self, **values):
    with self.assertRaisesRegex(errors.WriteError, "Cannot write /proc/nowhere"):
      self.train(**values, checkpoint_dir="/proc/nowhere")

  def test_labels_are_numbered_as_they_first_appear(self):
    index = maxtext_olmo.load_index(self.index_path)
    self.assertEqual(wiring.labels(index).tolist(), [0, 1, 0, 1])


if __name__ == "__main__":
  absltest.main()
