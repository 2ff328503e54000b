"""Tests of mixtures of the labels of a corpus."""

import collections
import fractions

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import mixture
from tests import corpora

# label-0 has files 0 and 2, label-1 has files 1 and 3; instances of 8 tokens.
_TOKENS = (400, 160, 80, 320)


class MixtureTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    path, self.rows = corpora.write_corpus(self.create_tempdir().full_path, tokens_per_file=_TOKENS)
    self.index = index_lib.load_index(path)
    path, _ = corpora.write_corpus(
        self.create_tempdir().full_path, tokens_per_file=_TOKENS, max_target_sequence_length=16
    )
    self.chunked = index_lib.load_index(path)
    ids = np.arange(self.index.total_instances)
    files, _ = self.index.locate(ids)
    self.label_of = [self.index.files[f].label for f in files]

  def stream(self, values, unit="epochs", **kwargs):
    return mixture.mixture_stream(
        self.index, values, unit, **{"order": "feistel", "seed": 5, **kwargs}
    )

  def seen(self, stream, positions):
    ids = stream.instance_ids(np.asarray(positions))
    return collections.Counter(ids.tolist())

  def test_epochs_give_each_label_that_many_passes(self):
    stream = self.stream({"label-0": 2.0, "label-1": 0.5}, num_epochs=1)
    self.assertEqual(stream.num_positions, 2 * 60 + 60 // 2)
    seen = self.seen(stream, range(stream.num_positions))
    for instance, label in enumerate(self.label_of):
      self.assertIn(seen[instance], [2] if label == "label-0" else [0, 1])

  def test_two_passes_that_take_half_of_a_label_take_all_of_it(self):
    stream = self.stream({"label-0": 1.0, "label-1": 0.5}, num_epochs=2)
    seen = self.seen(stream, range(stream.num_positions))
    for instance, label in enumerate(self.label_of):
      self.assertEqual(seen[instance], 2 if label == "label-0" else 1)

  def test_weights_are_shares_of_every_long_range(self):
    stream = self.stream({"label-0": 3, "label-1": 1}, "weights")
    labels = np.array([self.label_of[i] for i in stream.instance_ids(np.arange(4000))])
    for start in (0, 17, 1001):
      share = (labels[start : start + 400] == "label-0").mean()
      self.assertAlmostEqual(share, 0.75, delta=2 / 400)
    # A pass lasts until the slower label, 60 instances at a quarter, has been seen once.
    self.assertEqual(stream.order.num_instances, 240)

  def test_tokens_are_budgets_of_a_pass(self):
    stream = self.stream({"label-0": 8 * 30, "label-1": 8 * 90}, "tokens", num_epochs=1)
    self.assertEqual(stream.num_positions, 120)
    counts = collections.Counter(self.label_of[i] for i in stream.instance_ids(np.arange(120)))
    self.assertEqual(counts, {"label-0": 30, "label-1": 90})

  def test_an_unused_label_never_occurs(self):
    stream = self.stream({"label-1": 1.0}, num_epochs=1)
    self.assertEqual(stream.num_positions, 60)
    self.assertEqual(set(self.seen(stream, range(60)).values()), {1})

  def test_held_out_instances_never_occur(self):
    plain = self.stream({"*": 1.0}, num_epochs=1, held_out_instances=11)
    held_out = set(plain.split.eval_ids(np.arange(11)).tolist())
    mixed = self.stream({"label-0": 3.0, "label-1": 1.0}, held_out_instances=11)
    seen = self.seen(mixed, range(2000))
    self.assertEmpty(held_out & set(seen))
    self.assertLen(seen, 120 - 11)

  def test_a_shorter_sequence_length_reads_the_same_tokens_in_the_same_order(self):
    path, _ = corpora.write_corpus(
        self.create_tempdir().full_path,
        tokens_per_file=_TOKENS,
        sequence_length=8,
        max_target_sequence_length=16,
    )
    index = index_lib.load_index(path)
    args = ({"label-0": 2.0, "label-1": 0.5}, "epochs")
    at_8 = mixture.mixture_stream(index, *args, order="feistel", seed=1)
    at_16 = mixture.mixture_stream(index.with_sequence_length(16), *args, order="feistel", seed=1)
    long = at_16.instance_ids(np.arange(100))
    short = at_8.instance_ids(np.arange(200))
    np.testing.assert_array_equal(short.reshape(-1, 2), np.stack([long * 2, long * 2 + 1], axis=1))

  @settings(deadline=None, max_examples=60)
  @given(
      values=st.fixed_dictionaries(
          {}, optional={"label-0": st.floats(0.02, 3.5), "label-1": st.floats(0.02, 3.5)}
      ).filter(bool),
      unit=st.sampled_from(["epochs", "weights", "tokens"]),
      order=st.sampled_from(["feistel", "sequential"]),
      held_out=st.integers(0, 40),
      chunk_size=st.sampled_from([1, 2]),
      epoch=st.integers(0, 3),
  )
  def test_visits_are_all_positions_of_an_instance(
      self, values, unit, order, held_out, chunk_size, epoch
  ):
    values = {label: round(value, 2) for label, value in values.items()}
    if unit == "tokens":
      values = {label: value * 400 for label, value in values.items()}
    index = self.index if chunk_size == 1 else self.chunked
    stream = mixture.mixture_stream(
        index, values, unit, order=order, seed=3, held_out_instances=held_out
    )
    start, length = stream.epochs.start(epoch), stream.order.num_instances
    positions = start + np.arange(length)
    ids = stream.instance_ids(positions)
    wanted = np.arange(-1, index.total_instances + 2)
    which, found = stream.visits(epoch, wanted)
    np.testing.assert_array_equal(np.sort(found), positions)
    np.testing.assert_array_equal(wanted[which], ids[found - start])
    self.assertTrue((np.diff(which) >= 0).all())
    first = np.full(len(wanted), -1)
    for position, instance in zip(positions[::-1], ids[::-1]):
      first[instance + 1] = position
    np.testing.assert_array_equal(stream.positions(epoch, wanted), first)

  def test_order_seed_and_shares_are_part_of_the_identity(self):
    one = self.stream({"label-0": 2.0, "label-1": 0.5})
    same = self.stream({"label-1": 0.5, "label-0": 2.0})
    self.assertEqual(one.identity(), same.identity())
    for other in (
        self.stream({"label-0": 2.0, "label-1": 0.25}),
        self.stream({"label-0": 2.0, "label-1": 0.5}, "weights"),
        self.stream({"label-0": 2.0, "label-1": 0.5}, seed=6),
    ):
      self.assertNotEqual(one.identity(), other.identity())

  def test_two_labels_of_the_same_size_are_shuffled_differently(self):
    stream = self.stream({"*": 1.0}, num_epochs=1)
    ids = stream.instance_ids(np.arange(120))
    ranks = {label: [] for label in ("label-0", "label-1")}
    for instance in ids:
      label = self.label_of[instance]
      ranks[label].append(
          [i for i, name in enumerate(self.label_of) if name == label].index(instance)
      )
    self.assertNotEqual(ranks["label-0"], ranks["label-1"])

  def test_names_take_precedence_over_patterns_and_longer_over_shorter(self):
    labels = dict.fromkeys(["wiki", "stack-a", "stack-b", "web"], 10)
    found = mixture.labels_of({"*": 1, "stack-*": 2, "stack-b": 3}, labels)
    self.assertEqual(found, {"*": ["wiki", "web"], "stack-*": ["stack-a"], "stack-b": ["stack-b"]})

  def test_a_patterns_weight_is_divided_by_size(self):
    values = mixture.share_values({"s*": 1, "w": 1}, {"s1": 10, "s2": 30, "w": 5}, "weights")
    expected = {"s1": fractions.Fraction(1, 4), "s2": fractions.Fraction(3, 4), "w": 1}
    self.assertEqual(values, expected)

  @parameterized.parameters(
      ({"label-2": 1.0}, "epochs", "'label-2' matches no label.*label-0, label-1"),
      ({"label-0": 0.0}, "epochs", "above 0"),
      ({"label-0": 1.0}, "passes", "olmo_mixture_unit='passes' is unknown"),
      ({}, "epochs", "above 0"),
  )
  def test_an_impossible_mixture_says_why(self, values, unit, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      self.stream(values, unit)

  def test_orders_of_the_whole_corpus_cannot_be_mixed(self):
    with self.assertRaisesRegex(errors.ConfigError, "order of the whole corpus"):
      self.stream({"label-0": 1.0}, order="olmo_core")


if __name__ == "__main__":
  absltest.main()
