"""Tests of the step from tokens to rows."""

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
  """One row, one token at a time."""
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
  @hypothesis.settings(max_examples=150, deadline=None)
  def test_batch_and_record_agree_row_by_row_and_with_a_slow_account(self, tokens, eos_id, data):
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

  def test_without_a_verdict_every_row_is_kept(self):
    tokens = np.arange(12, dtype=np.uint16).reshape(3, 4)
    for eos_id in (None, 5):
      without = batch_lib.make_rows(tokens, None, eos_id=eos_id)
      kept = batch_lib.make_rows(tokens, np.ones(3, bool), eos_id=eos_id)
      for name in _NAMES:
        np.testing.assert_array_equal(without[name], kept[name])

  def test_a_batch_without_rows_has_none(self):
    rows = batch_lib.make_rows(np.zeros((0, 8), np.uint32), np.zeros(0, bool))
    self.assertEqual({values.shape for values in rows.values()}, {(0, 8)})

  def test_what_is_the_same_in_every_row_is_held_once(self):
    tokens = np.arange(12, dtype=np.uint32).reshape(3, 4)
    rows = batch_lib.make_rows(tokens, np.ones(3, bool))
    self.assertTrue(np.shares_memory(rows["inputs"], tokens))
    for name in ("inputs_position", "inputs_segmentation", "targets_segmentation"):
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
