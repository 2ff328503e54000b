"""Tests of the stream."""

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import stream as stream_lib
from tests import corpora


class StreamTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_lib.load_index(path)
    self.num_instances = len(rows)

  @parameterized.parameters("feistel", "sequential")
  def test_train_never_sees_what_eval_sees_in_any_epoch(self, order):
    train = stream_lib.train_stream(self.index, order=order, seed=0, held_out_instances=20)
    evaluation = stream_lib.eval_stream(self.index, held_out_instances=20)
    held = evaluation.instance_ids(np.arange(20))
    per_epoch = self.num_instances - 20
    for epoch in range(3):
      seen = train.instance_ids(epoch * per_epoch + np.arange(per_epoch))
      self.assertCountEqual(np.concatenate([seen, held]).tolist(), range(self.num_instances))

  def test_identity_names_what_decides_the_order(self):
    stream = stream_lib.train_stream(self.index, order="feistel", seed=7)
    self.assertEqual(
        stream.identity(),
        {"fingerprint": self.index.fingerprint, "order": "feistel", "seed": 7, "split": "none"},
    )

  def test_a_stream_ends_after_its_epochs(self):
    endless = stream_lib.train_stream(self.index, order="feistel", seed=7)
    self.assertIsNone(endless.num_positions)
    self.assertTrue(endless.endless and endless.has(10**12))
    finite = stream_lib.train_stream(self.index, order="feistel", seed=7, num_epochs=3)
    end = 3 * self.num_instances
    self.assertEqual(finite.num_positions, end)
    self.assertFalse(finite.endless)
    self.assertEqual([finite.has(end - 1), finite.has(end)], [True, False])

  @parameterized.parameters(0, 20)
  def test_a_position_is_an_instance_of_an_epoch(self, held_out):
    stream = stream_lib.train_stream(
        self.index, order="feistel", seed=7, held_out_instances=held_out
    )
    positions = np.random.default_rng(0).integers(0, 3 * self.num_instances, 50)
    epochs, instances = stream.locate(positions)
    np.testing.assert_array_equal(epochs, positions // (self.num_instances - held_out))
    np.testing.assert_array_equal(instances, stream.instance_ids(positions))

  def test_evaluation_on_another_index_takes_all_of_it_once(self):
    stream = stream_lib.eval_stream(self.index)
    self.assertEqual(stream.num_positions, self.num_instances)
    np.testing.assert_array_equal(
        stream.instance_ids(np.arange(self.num_instances)), np.arange(self.num_instances)
    )


if __name__ == "__main__":
  absltest.main()
