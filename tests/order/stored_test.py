"""Tests of the stored orders, against outputs of the real OLMo-core."""

import hashlib
import json
import os
import pathlib
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stored

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
_CASES = {case["name"]: case for case in json.loads((_TESTDATA / "fsl_order.json").read_text())}


class StoredOrderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.cache = self.create_tempdir().full_path

  def make(self, name="olmo_core", **kwargs):
    return permutations.make_order(name, cache_dir=self.cache, **kwargs)

  def of_case(self, case):
    shuffle = case.get("shuffle", True)
    return self.make(
        "olmo_core" if shuffle else "sequential",
        num_instances=case["n_instances"],
        seed=case["seed"],
        chunk_size=case["chunk_size"],
    )

  @parameterized.named_parameters((name, case) for name, case in _CASES.items())
  def test_the_order_is_olmo_cores(self, case):
    ids = self.of_case(case).ids(case["epoch"] - 1, np.arange(case["n_instances"]))
    self.assertLen(ids, case["global_indices_len"])
    digest = hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
    self.assertEqual(digest, case["global_indices_sha256"])

  @parameterized.named_parameters((name, case) for name, case in _CASES.items())
  def test_batches_and_the_dropped_tail_are_olmo_cores(self, case):
    order = self.of_case(case)
    size = case["global_batch_size"] // case["sequence_length"]
    schedule = schedule_lib.BatchSchedule.constant(size).within(order.epochs)
    first = (case["epoch"] - 1) * case["total_batches"]
    for rank in case["ranks"]:
      self.assertEqual(rank["n_batches"], case["total_batches"])
      for step, expected in enumerate(rank["steps"]):
        ids = order.at(schedule.start(first + step) + np.arange(size))
        self.assertEqual(ids[rank["rank"] :: rank["world"]].tolist(), expected)
    self.assertEqual(schedule.start(first + case["total_batches"]) % case["n_instances"], 0)

  def test_the_maxtext_order_is_the_documented_one(self):
    order = self.make("maxtext", num_instances=12, seed=7)
    # The formula is default_rng(first 8 bytes, little endian, of
    # sha256("olmo-shuffle:7:2")).permutation(12).
    np.testing.assert_array_equal(
        order.ids(2, np.arange(12)), np.random.default_rng(5869221157303042828).permutation(12)
    )

  def test_a_worker_reads_the_same_and_trusts_what_its_parent_verified(self):
    order = self.make(num_instances=100, seed=1)
    order.prepare(150)
    text = pickle.dumps(order)
    self.assertLess(len(text), 1000)
    copy = pickle.loads(text)
    self.assertEqual(list(copy._trusted), [1])
    np.testing.assert_array_equal(copy.ids(1, np.arange(100)), order.ids(1, np.arange(100)))
    self.assertEqual(repr(copy), repr(order))

  def test_only_two_epochs_stay_open(self):
    order = self.make(num_instances=10, seed=1)
    order.at(np.arange(50))
    self.assertEqual(list(order._arrays), [3, 4])

  def test_the_file_of_an_epoch_is_built_when_it_is_first_needed(self):
    order = self.make(num_instances=10, seed=1)
    order.ids(0, np.arange(10))
    self.assertTrue(os.path.exists(order.file(0).path))
    self.assertFalse(os.path.exists(order.file(1).path))
    order.prepare(10)
    before = os.stat(order.file(1).path)
    order.at(np.arange(10, 20))
    after = os.stat(order.file(1).path)
    self.assertEqual((before.st_ino, before.st_mtime_ns), (after.st_ino, after.st_mtime_ns))

  def test_a_negative_seed_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "seed of 0 or more, got -1"):
      self.make(num_instances=10, seed=-1)

  def test_the_files_of_two_orders_do_not_meet(self):
    makes = dict(num_instances=12, seed=1)
    orders = [self.make(**makes), self.make(**makes, chunk_size=2), self.make("maxtext", **makes)]
    self.assertLen({order.file(0).path for order in orders}, 3)
    self.assertIsInstance(orders[2], stored.MaxTextOrder)


if __name__ == "__main__":
  absltest.main()
