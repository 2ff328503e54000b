"""Tests of the rest of an epoch that another loader began."""

import os
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import remainder
from maxtext_olmo.order import stream as stream_lib
from tests import corpora


class RemainderOrderTest(parameterized.TestCase):

  def _order(
      self, flags: np.ndarray, *, seed: int = 3, plain: str = "feistel", chunk_size: int = 1
  ) -> remainder.RemainderOrder:
    path = os.path.join(self.create_tempdir().full_path, "seen.bits")
    consumed_lib.write_consumed(path, flags, "sha256:a")
    bitmap = consumed_lib.Consumed(path, fingerprint="sha256:a", num_instances=len(flags))
    order = permutations.make_order(
        plain, num_instances=len(flags), seed=seed, chunk_size=chunk_size
    )
    return remainder.RemainderOrder(bitmap, order)

  @parameterized.parameters((50, 0.3), (1000, 0.9), (1000, 0.0), (777, 0.5))
  def test_what_was_not_consumed_comes_once_then_whole_epochs(self, count, share):
    flags = np.random.default_rng(count).random(count) < share
    order = self._order(flags)
    left = int((~flags).sum())
    ids = order.at(np.arange(left + 2 * count))
    self.assertCountEqual(ids[:left], np.flatnonzero(~flags))
    for epoch in (0, 1):
      part = ids[left + epoch * count : left + (epoch + 1) * count]
      np.testing.assert_array_equal(np.sort(part), np.arange(count))

  def test_the_epochs_to_come_are_those_of_the_plain_order(self):
    flags = np.random.default_rng(1).random(100) < 0.5
    order = self._order(flags)
    plain = permutations.make_order("feistel", num_instances=100, seed=3)
    np.testing.assert_array_equal(order.ids(1, np.arange(100)), plain.ids(1, np.arange(100)))

  def test_the_rest_is_shuffled(self):
    order = self._order(np.zeros(1000, bool))
    ids = order.at(np.arange(1000))
    self.assertLess(np.mean(np.diff(ids) == 1), 0.02)

  def test_nothing_left_begins_with_the_next_epoch(self):
    order = self._order(np.ones(10, bool))
    plain = permutations.make_order("feistel", num_instances=10, seed=3)
    np.testing.assert_array_equal(order.at(np.arange(10)), plain.ids(1, np.arange(10)))
    np.testing.assert_array_equal(order.at(np.arange(10, 20)), plain.ids(2, np.arange(10)))

  def test_a_place_behind_the_rest_is_an_error(self):
    order = self._order(np.array([True, False, False, True]))
    with self.assertRaisesRegex(errors.OrderError, r"lie in \[0, 2\)"):
      order.ids(0, np.array([2]))

  def test_it_stays_itself_in_a_corpus_that_did_not_grow_and_refuses_one_that_did(self):
    order = self._order(np.array([True, False, False, True]))
    self.assertIs(order.with_epochs(epochs_lib.Epochs.constant(4)), order)
    with self.assertRaisesRegex(errors.ConfigError, "cannot be extended"):
      order.with_epochs(epochs_lib.Epochs(((0, 4), (2, 6))))

  def test_an_order_whose_batches_do_not_span_epochs_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "lets no batch span epochs"):
      self._order(np.zeros(10, bool), plain="olmo_core")

  def test_its_name_tells_bitmaps_apart(self):
    names = {self._order(np.arange(10) < k).name for k in (2, 3)}
    self.assertLen(names, 2)
    self.assertEqual(self._order(np.arange(10) < 2).name, self._order(np.arange(10) < 2).name)

  def test_it_travels_to_a_worker(self):
    order = self._order(np.random.default_rng(1).random(5000) < 0.5)
    positions = np.arange(6000)
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(order)).at(positions), order.at(positions)
    )

  def test_chunks_are_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "chunks of 2"):
      self._order(np.zeros(10, bool), chunk_size=2)

  def test_a_stream_ends_after_the_rest_and_its_epochs(self):
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    from maxtext_olmo.corpus import index_builder as index_lib

    index = index_lib.load_index(path)
    flags = np.arange(len(rows)) % 3 == 0
    bits = path + ".bits"
    consumed_lib.write_consumed(bits, flags, index.fingerprint)
    stream = stream_lib.train_stream(
        index, order="feistel", seed=1, num_epochs=2, consumed_path=bits
    )
    left = int((~flags).sum())
    self.assertEqual(stream.num_positions, left + len(rows))
    ids = stream.instance_ids(np.arange(left + len(rows)))
    self.assertCountEqual(ids[:left], np.flatnonzero(~flags))
    self.assertIn("bitmap", stream.identity()["order"])


if __name__ == "__main__":
  absltest.main()
