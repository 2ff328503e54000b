"""Mixtures over the labels of a corpus."""

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

  def test_weights_are_shares_of_every_long_stretch(self):
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

  def test_a_label_left_out_never_comes(self):
    stream = self.stream({"label-1": 1.0}, num_epochs=1)
    self.assertEqual(stream.num_positions, 60)
    self.assertEqual(set(self.seen(stream, range(60)).values()), {1})

  def test_held_out_instances_never_come(self):
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

  def test_two_labels_of_one_size_are_not_shuffled_alike(self):
    stream = self.stream({"*": 1.0}, num_epochs=1)
    ids = stream.instance_ids(np.arange(120))
    ranks = {label: [] for label in ("label-0", "label-1")}
    for instance in ids:
      label = self.label_of[instance]
      ranks[label].append(
          [i for i, name in enumerate(self.label_of) if name == label].index(instance)
      )
    self.assertNotEqual(ranks["label-0"], ranks["label-1"])

  def test_a_labels_own_name_beats_patterns_and_a_longer_pattern_a_shorter(self):
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
  def test_a_mixture_that_cannot_be_says_why(self, values, unit, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      self.stream(values, unit)

  def test_orders_of_the_whole_corpus_cannot_be_mixed(self):
    with self.assertRaisesRegex(errors.ConfigError, "order of the whole corpus"):
      self.stream({"label-0": 1.0}, order="olmo_core")


_COUNTS = st.lists(st.integers(1, 50), min_size=1, max_size=9)


class InterleaveTest(parameterized.TestCase):

  def test_the_example_of_the_module(self):
    members, indices = mixture.Interleave([3, 1]).locate(np.arange(8))
    self.assertEqual(members.tolist(), [0, 0, 1, 0, 0, 0, 1, 0])
    self.assertEqual(indices.tolist(), [0, 1, 0, 2, 3, 4, 1, 5])

  @settings(deadline=None, max_examples=60)
  @given(_COUNTS)
  def test_each_member_comes_in_its_own_order_and_in_its_exact_share(self, counts):
    mix = mixture.Interleave(counts)
    members, indices = mix.locate(np.arange(3 * mix.period))
    for number, count in enumerate(counts):
      self.assertEqual(indices[members == number].tolist(), list(range(3 * count)))
      for period in range(3):
        here = members[period * mix.period : (period + 1) * mix.period]
        self.assertEqual((here == number).sum(), count)

  @settings(deadline=None, max_examples=60)
  @given(_COUNTS, st.integers(0, 300), st.integers(1, 300))
  def test_over_any_stretch_no_member_is_far_from_its_share(self, counts, start, length):
    mix = mixture.Interleave(counts)
    members, _ = mix.locate(np.arange(start, start + length))
    for number, count in enumerate(counts):
      ideal = length * count / mix.period
      self.assertLess(
          abs((members == number).sum() - ideal), 2 * (len(counts) - 1).bit_length() + 1
      )

  @settings(deadline=None, max_examples=40)
  @given(_COUNTS, st.integers(0, 400))
  def test_taken_and_position_of_agree_with_locate(self, counts, position):
    mix = mixture.Interleave(counts)
    members, indices = mix.locate(np.arange(position + 1))
    taken = [int((members[:position] == number).sum()) for number in range(len(counts))]
    self.assertEqual(mix.taken(position), taken)
    self.assertEqual(mix.position_of(int(members[-1]), int(indices[-1])), position)

  def test_a_period_beyond_int64_products_is_as_exact(self):
    small = mixture.Interleave([3, 2, 1])
    large = mixture.Interleave([3 << 33, 2 << 33, 1 << 33])
    starts = np.arange(1000)
    # The fractions are the same, so the same member comes at the same place of a period of six.
    np.testing.assert_array_equal(small.locate(starts)[0], large.locate(starts)[0])
    members, indices = large.locate(np.array([large.period, 5 * large.period]))
    self.assertEqual(members.tolist(), [0, 0])
    self.assertEqual(indices.tolist(), [3 << 33, 15 << 33])

  @parameterized.parameters(
      ([0.7, 0.3], [7, 3]),
      ([1, 1, 1], [1, 1, 1]),
      ([0.1, 0.25], [2, 5]),
      ([fractions.Fraction(1, 3), fractions.Fraction(2, 3)], [1, 2]),
  )
  def test_weights_are_taken_as_the_decimals_they_are_written_as(self, weights, counts):
    self.assertEqual(mixture.counts_of_weights(weights), counts)

  def test_weights_too_fine_to_come_out_even_are_rounded(self):
    counts = mixture.counts_of_weights([1 / 3, 2 / 3 + 1e-16, 1e-9])
    self.assertLessEqual(sum(counts), mixture.MAX_PERIOD)
    self.assertAlmostEqual(counts[0] / sum(counts), 1 / 3, delta=1e-8)
    mixture.Interleave(counts)

  def test_a_share_of_nothing_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "share above 0"):
      mixture.Interleave([1, 0])
    with self.assertRaisesRegex(errors.ConfigError, "positive and finite"):
      mixture.counts_of_weights([1, -1])
    with self.assertRaisesRegex(errors.ConfigError, "at most"):
      mixture.Interleave([mixture.MAX_PERIOD, 1])


if __name__ == "__main__":
  absltest.main()
