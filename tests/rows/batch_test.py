"""Tests of the arrays of a batch."""

import pickle

import grain
import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxtext_olmo import errors
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import segments as segments_lib

_NAMES = (
    "inputs",
    "targets",
    "inputs_position",
    "targets_position",
    "inputs_segmentation",
    "targets_segmentation",
)
_DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64)


def _slowly(tokens, keep, real, eos_id):
  """Returns the arrays of one row, computed one token at a time."""
  length = len(tokens)
  row = {name: [0] * length for name in _NAMES}
  if not real:
    return row
  segment, position = 1, 0
  for t, token in enumerate(tokens):
    row["inputs"][t] = token
    row["inputs_position"][t] = row["targets_position"][t] = position
    row["inputs_segmentation"][t] = segment
    if t > 0:
      row["targets"][t - 1] = token
      row["targets_segmentation"][t - 1] = segment if keep else 0
    position += 1
    if token == eos_id:
      segment, position = segment + 1, 0
  return row


def _tokens(dtype=st.sampled_from(_DTYPES)):
  shape = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=24)
  return hnp.arrays(dtype=dtype, shape=shape, elements=st.integers(0, 5))


def _arrays_slowly(tokens, used, trained, starts, loss, shift):
  """Returns the six arrays of one row of a compact batch, computed one token at a time."""
  length = len(tokens)
  row = {name: [0] * length for name in _NAMES}
  if not used:
    return row
  segments, positions, begun = [0] * length, [0] * length, 0
  for t in range(used):
    begun = t if t and starts[t] else begun
    segments[t] = 1 if t == 0 else segments[t - 1] + bool(starts[t])
    positions[t] = t - begun
  counted = [segments[t] if trained and loss[t] else 0 for t in range(length)]
  left = shift.direction == "left"
  row["inputs"] = list(tokens) if left else [shift.first_id, *tokens[:-1]]
  row["targets"] = [*tokens[1:], 0] if left else list(tokens)
  row["inputs_position"] = row["targets_position"] = positions
  row["inputs_segmentation"] = segments
  row["targets_segmentation"] = [*counted[1:], 0] if left else counted
  return row


class ToArraysTest(parameterized.TestCase):

  @parameterized.product(direction=("left", "right"), starts=(False, True), loss=(False, True))
  def test_arrays_equal_those_of_a_slow_implementation(self, direction, starts, loss):
    shift = batch_lib.Shift(direction, 7)

    @hypothesis.given(_tokens(), st.data())
    @hypothesis.settings(max_examples=20, deadline=None)
    def check(tokens, data):
      n, length = tokens.shape
      flags = hnp.arrays(np.bool_, (n, length))
      used = data.draw(hnp.arrays(np.int64, n, elements=st.sampled_from([0, length // 2, length])))
      trained = data.draw(hnp.arrays(np.bool_, n))
      batch = {"tokens": tokens, "used": used, "trained": trained}
      begins, counts = np.zeros((n, length), bool), np.ones((n, length), bool)
      if starts:
        begins = data.draw(flags)
        batch["starts"] = segments_lib.pack_bits(begins)
      if loss:
        counts = data.draw(flags)
        batch["loss"] = segments_lib.pack_bits(counts)
      arrays = batch_lib.to_arrays(batch, shift)
      self.assertCountEqual(arrays, _NAMES)
      for r in range(n):
        expected = _arrays_slowly(
            tokens[r].tolist(), used[r], trained[r], begins[r], counts[r], shift
        )
        for name in _NAMES:
          self.assertEqual(arrays[name][r].tolist(), expected[name], name)
          self.assertEqual(arrays[name].dtype, np.int32)

    check()

  def test_extras_come_along_and_the_cost_does_not(self):
    batch = {
        "tokens": np.ones((2, 4), np.uint32),
        "used": np.full(2, 4),
        "trained": np.ones(2, bool),
        "row_ids": np.array([5, -1], np.int32),
        "labels": np.array([1, -1], np.int32),
        "cost": np.zeros(5),
    }
    arrays = batch_lib.to_arrays(batch)
    self.assertCountEqual(arrays, [*batch_lib.NAMES, "row_ids", "labels"])
    self.assertEqual(arrays["row_ids"].tolist(), [5, -1])

  def test_padding_keeps_its_id_in_a_row_with_tokens_and_is_zero_in_a_row_without(self):
    batch = {
        "tokens": np.array([[5, 6, 9, 9], [9, 9, 9, 9]], np.uint16),
        "used": np.array([2, 0]),
        "trained": np.ones(2, bool),
    }
    arrays = batch_lib.to_arrays(batch)
    self.assertEqual(arrays["inputs"].tolist(), [[5, 6, 9, 9], [0, 0, 0, 0]])
    self.assertEqual(arrays["targets"].tolist(), [[6, 9, 9, 0], [0, 0, 0, 0]])
    self.assertEqual(arrays["targets_segmentation"].tolist(), [[1, 0, 0, 0], [0, 0, 0, 0]])


class TransformsTest(parameterized.TestCase):

  def test_a_row_keeps_its_length_and_masks_its_last_target(self):
    row = batch_lib.ShiftToInputsTargets().map({"tokens": np.array([5, 6, 0, 7, 8], np.uint32)})
    self.assertEqual(
        {name: values.tolist() for name, values in row.items()},
        {
            "inputs": [5, 6, 0, 7, 8],
            "targets": [6, 0, 7, 8, 0],
            "inputs_position": [0, 1, 2, 3, 4],
            "targets_position": [0, 1, 2, 3, 4],
            "inputs_segmentation": [1, 1, 1, 1, 1],
            "targets_segmentation": [1, 1, 1, 1, 0],
        },
    )

  def test_with_an_eos_segments_and_positions_follow_the_documents(self):
    transform = batch_lib.ShiftToInputsTargets(eos_id=0)
    row = transform.map({"tokens": np.array([5, 6, 0, 7, 8], np.uint32)})
    self.assertEqual(
        {name: values.tolist() for name, values in row.items()},
        {
            "inputs": [5, 6, 0, 7, 8],
            "targets": [6, 0, 7, 8, 0],
            "inputs_position": [0, 1, 2, 0, 1],
            "targets_position": [0, 1, 2, 0, 1],
            "inputs_segmentation": [1, 1, 1, 2, 2],
            "targets_segmentation": [1, 1, 2, 2, 0],
        },
    )

  @parameterized.parameters(None, 0)
  def test_a_rejected_record_only_loses_its_loss(self, eos_id):
    transform = batch_lib.ShiftToInputsTargets(eos_id=eos_id)
    tokens = np.array([5, 0, 6, 7], np.uint32)
    kept = transform.map({"tokens": tokens, "instance_mask": True})
    rejected = transform.map({"tokens": tokens, "instance_mask": np.bool_(False)})
    np.testing.assert_array_equal(rejected.pop("targets_segmentation"), [0, 0, 0, 0])
    self.assertGreater(kept.pop("targets_segmentation").sum(), 0)
    for name, values in kept.items():
      np.testing.assert_array_equal(rejected[name], values)

  @hypothesis.given(tokens=_tokens(), eos_id=st.sampled_from([None, 0, 3, 77]), data=st.data())
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_batch_and_record_agree_with_a_slow_implementation(self, tokens, eos_id, data):
    n = len(tokens)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    real = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    before = tokens.copy()
    rows = batch_lib.make_rows(tokens, keep, real=real, eos_id=eos_id)
    all_real = batch_lib.make_rows(tokens, keep, eos_id=eos_id)
    record = batch_lib.ShiftToInputsTargets(eos_id=eos_id)
    self.assertCountEqual(rows, _NAMES)
    for r in range(n):
      expected = _slowly(tokens[r].tolist(), keep[r], real[r], eos_id)
      single = record.map({"tokens": tokens[r], "instance_mask": keep[r]})
      self.assertCountEqual(single, _NAMES)
      for name in _NAMES:
        self.assertEqual(rows[name][r].tolist(), expected[name], name)
        np.testing.assert_array_equal(all_real[name][r], single[name], name)
    for name in _NAMES:
      self.assertEqual((rows[name].dtype, rows[name].shape), (np.int32, tokens.shape))
      self.assertEqual(all_real[name].dtype, np.int32)
    np.testing.assert_array_equal(tokens, before)

  def test_without_a_filter_result_every_row_is_kept(self):
    tokens = np.arange(12, dtype=np.uint16).reshape(3, 4)
    for eos_id in (None, 5):
      without = batch_lib.make_rows(tokens, None, eos_id=eos_id)
      kept = batch_lib.make_rows(tokens, np.ones(3, bool), eos_id=eos_id)
      for name in _NAMES:
        np.testing.assert_array_equal(without[name], kept[name])

  def test_a_batch_without_rows_has_none(self):
    rows = batch_lib.make_rows(np.zeros((0, 8), np.uint32), np.zeros(0, bool))
    self.assertEqual({values.shape for values in rows.values()}, {(0, 8)})

  def test_equal_rows_share_memory(self):
    tokens = np.arange(12, dtype=np.uint32).reshape(3, 4)
    rows = batch_lib.make_rows(tokens, np.ones(3, bool))
    self.assertTrue(np.shares_memory(rows["inputs"], tokens))
    for name in ("inputs_position", "targets_position", "inputs_segmentation"):
      self.assertEqual(rows[name].strides[0], 0)
      self.assertFalse(rows[name].flags.writeable)

  def test_a_record_shares_no_memory_with_its_row_and_is_not_changed(self):
    tokens = np.array([1, 2, 3], np.int32)
    record = {"tokens": tokens, "instance_mask": True, "instance_id": 7}
    row = batch_lib.ShiftToInputsTargets().map(record)
    for values in row.values():
      values[:] = 99
    np.testing.assert_array_equal(tokens, [1, 2, 3])
    self.assertCountEqual(record, ["tokens", "instance_mask", "instance_id"])

  @parameterized.parameters(np.uint32, np.uint64, np.int64)
  def test_an_id_that_does_not_fit_int32_is_an_error_that_says_where(self, dtype):
    tokens = np.array([[1, 2, 3], [4, 2**31, 5]], dtype)
    with self.assertRaisesRegex(
        errors.CorpusError, r"Token id 2147483648 in row 1, column 1 .* below 2\*\*31 = 2147483648"
    ):
      batch_lib.make_rows(tokens, np.ones(2, bool))
    with self.assertRaisesRegex(errors.CorpusError, "2147483648 in row 0, column 1"):
      batch_lib.ShiftToInputsTargets().map({"tokens": tokens[1]})
    tokens[1, 1] = 2**31 - 1
    self.assertEqual(batch_lib.make_rows(tokens, None)["inputs"][1, 1], 2**31 - 1)

  def test_ids_below_the_range_of_int32_do_not_wrap_either(self):
    with self.assertRaisesRegex(errors.CorpusError, "Token id -2147483649 in row 0, column 0"):
      batch_lib.make_rows(np.array([[-(2**31) - 1]]), None)

  def test_tokens_that_are_no_integers_are_an_error(self):
    with self.assertRaisesRegex(errors.CorpusError, "integers, found an array of float64"):
      batch_lib.make_rows(np.zeros((1, 2)), None)

  def test_big_endian_tokens_keep_their_values(self):
    for dtype in (">u4", ">u2", ">i8"):
      rows = batch_lib.make_rows(np.array([[1, 2, 300]], dtype), None)
      np.testing.assert_array_equal(rows["inputs"], [[1, 2, 300]])
      self.assertEqual(rows["inputs"].dtype, np.int32)

  def test_wrong_shapes_are_named(self):
    tokens = np.zeros((2, 3), np.uint32)
    with self.assertRaisesRegex(ValueError, r"keep: expected bool \(2,\), found bool \(3,\)"):
      batch_lib.make_rows(tokens, np.ones(3, bool))
    with self.assertRaisesRegex(ValueError, r"real: expected bool \(2,\), found int64 \(2,\)"):
      batch_lib.make_rows(tokens, np.ones(2, bool), real=np.ones(2, np.int64))
    with self.assertRaisesRegex(ValueError, r"\(rows, tokens\), found \(2,\)"):
      batch_lib.make_rows(tokens[:, 0], None)
    with self.assertRaisesRegex(ValueError, r"1-D tokens, found shape \(2, 3\)"):
      batch_lib.ShiftToInputsTargets().map({"tokens": tokens})

  def test_filter_and_shift_compose_in_a_grain_pipeline(self):
    windows = np.array([[1, 2, 3, 4] * 30, [9] * 120], np.uint32)
    dataset = (
        grain.MapDataset.source([{"tokens": window} for window in windows])
        .map(repetition.NgramFilterTransform())
        .map(pickle.loads(pickle.dumps(batch_lib.ShiftToInputsTargets(eos_id=3))))
        .batch(2)
    )
    batch = dataset[0]
    whole = batch_lib.make_rows(windows, repetition.clean_rows(windows), eos_id=3)
    self.assertCountEqual(batch, _NAMES)
    for name in _NAMES:
      np.testing.assert_array_equal(batch[name], whole[name])
    self.assertFalse(batch["targets_segmentation"][1].any())

  def test_the_repr_says_what_the_transform_does(self):
    self.assertEqual(
        repr(batch_lib.ShiftToInputsTargets(eos_id=3)), "ShiftToInputsTargets(eos_id=3)"
    )


if __name__ == "__main__":
  absltest.main()
