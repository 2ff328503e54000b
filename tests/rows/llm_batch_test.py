"""Tests of the batch classes."""

import dataclasses
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.rows import batch as batch_lib
from tests import distributed

STARTS_PROCESSES = True

_FIELDS = {
    "inputs": [[1, 2, 9, 4, 5, 0], [7, 9, 8, 8, 8, 8]],
    "targets": [[2, 9, 4, 5, 0, 0], [9, 8, 8, 8, 8, 0]],
    "inputs_position": [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]],
    "inputs_segmentation": [[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]],
    "targets_position": [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]],
    "targets_segmentation": [[1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 0]],
}
_BORDERS = [[1, 0, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0]]


def _batch(xp, **more):
  fields = {name: xp.asarray(rows, dtype=np.int32) for name, rows in _FIELDS.items()}
  return batch_lib.LLMBatch(**fields, **more)


def _indexed(xp):
  fields = {name: xp.asarray(rows, dtype=np.int32) for name, rows in _FIELDS.items()}
  return batch_lib.LLMIndexedBatch(
      **fields,
      document_idx=xp.asarray([3, 0], dtype=np.int32),
      sequence_idx=xp.asarray([1, 0], dtype=np.int32),
  )


class LLMBatchTest(parameterized.TestCase):

  @parameterized.named_parameters(("numpy", np, np.ndarray), ("jax", jnp, jax.Array))
  def test_borders_are_where_the_segmentation_changes(self, xp, kind):
    borders = _batch(xp).get_document_borders()
    self.assertIsInstance(borders, kind)
    self.assertEqual(borders.dtype, np.bool_)
    np.testing.assert_array_equal(borders, np.array(_BORDERS, bool))

  @parameterized.named_parameters(("numpy", np), ("jax", jnp))
  def test_given_borders_override_the_segmentation(self, xp):
    none = xp.zeros((2, 6), dtype=bool)
    np.testing.assert_array_equal(
        _batch(xp, _document_borders=none).get_document_borders(), np.zeros((2, 6), bool)
    )

  @parameterized.named_parameters(("numpy", np, np.ndarray), ("jax", jnp, jax.Array))
  def test_a_slice_in_mid_document_invents_no_border(self, xp, kind):
    part = _batch(xp)[:, 1:4]
    self.assertIsInstance(part.inputs, kind)
    np.testing.assert_array_equal(part.inputs, [[2, 9, 4], [9, 8, 8]])
    np.testing.assert_array_equal(part.get_document_borders(), np.array(_BORDERS, bool)[:, 1:4])
    again = part[:, 1:]
    np.testing.assert_array_equal(again.get_document_borders(), np.array(_BORDERS, bool)[:, 2:4])

  @parameterized.parameters(0, slice(1, 2), ([1, 0],), Ellipsis)
  def test_a_key_that_is_no_tuple_picks_rows(self, key):
    part = _indexed(np)[key]
    np.testing.assert_array_equal(part.targets, np.array(_FIELDS["targets"])[key])
    np.testing.assert_array_equal(part.document_idx, np.array([3, 0])[key])
    np.testing.assert_array_equal(part.get_document_borders(), np.array(_BORDERS, bool)[key])

  @parameterized.named_parameters(("numpy", np), ("jax", jnp))
  def test_a_tuple_key_is_cut_to_the_axes_of_each_array(self, xp):
    part = _indexed(xp)[:, 2:]
    np.testing.assert_array_equal(part.document_idx, [3, 0])
    np.testing.assert_array_equal(part.sequence_idx, [1, 0])
    self.assertEqual(part.inputs.shape, (2, 4))
    one = _indexed(xp)[1:, 2:]
    np.testing.assert_array_equal(one.document_idx, [0])

  def test_slicing_leaves_the_batch_as_it_was(self):
    batch = _batch(np)
    _ = batch[:, 1:]
    self.assertIsNone(batch._document_borders)

  def test_batches_are_frozen_and_take_keywords_only(self):
    batch = _batch(np)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      batch.inputs = batch.targets
    with self.assertRaises(TypeError):
      batch_lib.LLMBatch(*_FIELDS.values())


class PytreeTest(parameterized.TestCase):

  def test_absent_borders_are_no_leaf(self):
    self.assertLen(jax.tree.leaves(_batch(np)), 6)
    self.assertLen(jax.tree.leaves(_batch(np, _document_borders=np.ones((2, 6), bool))), 7)
    self.assertLen(jax.tree.leaves(_indexed(np)), 8)

  def test_leaves_are_named_after_the_fields(self):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(_indexed(np))]
    self.assertCountEqual(
        paths, [f".{name}" for name in _FIELDS] + [".document_idx", ".sequence_idx"]
    )

  def test_tree_map_gives_the_same_class(self):
    batch = jax.tree.map(lambda x: x + 1, _indexed(np))
    self.assertIsInstance(batch, batch_lib.LLMIndexedBatch)
    np.testing.assert_array_equal(batch.document_idx, [4, 1])

  @parameterized.named_parameters(("numpy", np), ("jax", jnp))
  def test_batches_pass_through_jit(self, xp):
    @jax.jit
    def second_half(batch):
      part = batch[:, 3:]
      return part, part.get_document_borders()

    part, borders = second_half(_indexed(xp))
    self.assertIsInstance(part, batch_lib.LLMIndexedBatch)
    np.testing.assert_array_equal(part.inputs, np.array(_FIELDS["inputs"])[:, 3:])
    np.testing.assert_array_equal(part.sequence_idx, [1, 0])
    np.testing.assert_array_equal(borders, np.array(_BORDERS, bool)[:, 3:])

  def test_from_inputs_works_under_jit(self):
    batch = jax.jit(batch_lib.LLMBatch.from_inputs)(jnp.array([[5, 6, 7]], jnp.int32))
    np.testing.assert_array_equal(batch.inputs, [[0, 5, 6]])
    np.testing.assert_array_equal(batch.targets_position, [[0, 1, 2]])

  def test_batches_survive_pickling(self):
    batch = pickle.loads(pickle.dumps(_indexed(np)))
    np.testing.assert_array_equal(batch.targets, _FIELDS["targets"])

  def test_importing_starts_no_backend(self):
    script = (
        "from jax._src import xla_bridge\n"
        "from maxtext_olmo.rows import batch\n"
        "batch.LLMIndexedBatch.get_sample(2, 3)[:, 1:]\n"
        "batch.LLMBatch.get_dtype_struct(2, 3)\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert 'flax' not in __import__('sys').modules\n"
    )
    environment = distributed.child_environment()
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


class MakingTest(parameterized.TestCase):

  @parameterized.named_parameters(("numpy", np, np.ndarray), ("jax", jnp, jax.Array))
  def test_inputs_alone_are_predicted_from_those_before(self, xp, kind):
    batch = batch_lib.LLMBatch.from_inputs(xp.asarray([[5, 6, 7], [8, 9, 1]], dtype=np.int32))
    np.testing.assert_array_equal(batch.targets, [[5, 6, 7], [8, 9, 1]])
    np.testing.assert_array_equal(batch.inputs, [[0, 5, 6], [0, 8, 9]])
    for position in (batch.inputs_position, batch.targets_position):
      np.testing.assert_array_equal(position, [[0, 1, 2], [0, 1, 2]])
    for segmentation in (batch.inputs_segmentation, batch.targets_segmentation):
      np.testing.assert_array_equal(segmentation, np.ones((2, 3)))
    for leaf in jax.tree.leaves(batch):
      self.assertIsInstance(leaf, kind)
      self.assertEqual(leaf.dtype, np.int32)

  def test_given_targets_leave_the_inputs_alone(self):
    inputs, targets = np.array([[1, 2]], np.int32), np.array([[2, 3]], np.int32)
    batch = batch_lib.LLMBatch.from_inputs(inputs, targets)
    np.testing.assert_array_equal(batch.inputs, inputs)
    np.testing.assert_array_equal(batch.targets, targets)

  def test_an_indexed_batch_takes_its_indices_too(self):
    rows = np.array([[1, 2], [3, 4]], np.int32)
    index = np.array([1, 2], np.int32)
    batch = batch_lib.LLMIndexedBatch.from_inputs(rows, document_idx=index, sequence_idx=index - 1)
    np.testing.assert_array_equal(batch.document_idx, [1, 2])
    np.testing.assert_array_equal(batch.sequence_idx, [0, 1])
    with self.assertRaisesRegex(TypeError, "document_idx"):
      batch_lib.LLMIndexedBatch.from_inputs(rows)
    by_position = batch_lib.LLMIndexedBatch.from_inputs(rows, index, index - 1, rows + 1)
    np.testing.assert_array_equal(by_position.document_idx, index)
    np.testing.assert_array_equal(by_position.sequence_idx, index - 1)
    np.testing.assert_array_equal(by_position.inputs, rows)
    np.testing.assert_array_equal(by_position.targets, rows + 1)

  @parameterized.parameters((batch_lib.LLMBatch, 6), (batch_lib.LLMIndexedBatch, 8))
  def test_sample_and_struct_agree_and_have_no_borders(self, cls, leaves):
    sample, struct = cls.get_sample(2, 5), cls.get_dtype_struct(2, 5)
    self.assertIsInstance(sample, cls)
    self.assertIsInstance(struct, cls)
    self.assertIsNone(struct._document_borders)
    self.assertLen(jax.tree.leaves(struct), leaves)
    self.assertEqual(jax.tree.structure(sample), jax.tree.structure(struct))
    for zeros, shape in zip(jax.tree.leaves(sample), jax.tree.leaves(struct)):
      self.assertEqual((zeros.shape, zeros.dtype), (shape.shape, shape.dtype))
      self.assertEqual(zeros.dtype, np.int32)
      self.assertFalse(zeros.any())
    self.assertEqual(struct.inputs.shape, (2, 5))

  def test_row_fields_have_one_value_per_row(self):
    struct = batch_lib.LLMIndexedBatch.get_dtype_struct(2, 5)
    self.assertEqual(struct.document_idx.shape, (2,))
    self.assertEqual(struct.sequence_idx.shape, (2,))


if __name__ == "__main__":
  absltest.main()
