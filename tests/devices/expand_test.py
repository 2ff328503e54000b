"""Tests that the devices make of a compact batch what the host would."""

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from maxtext_olmo.devices import expand
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.rows import steps

jax.config.update("jax_num_cpu_devices", 4)


def _layout(spec=P("data"), rows=8, length=12):
  mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "other"))
  return layout_lib.BatchLayout(mesh, spec, rows, length)


def _batch(dtype="uint32", flags=None, rows=8, length=12, seed=0):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 5, size=(rows, length)).astype(dtype)
  flags = np.full(rows, steps.TRAINED, np.uint8) if flags is None else np.array(flags, np.uint8)
  tokens[flags == steps.PADDING] = 0
  return {"tokens": tokens, "flags": flags}


_SOME = [2, 2, 1, 2, 2, 0, 1, 0]
_MASKED = [2, 1, 2, 2, 1, 2, 2, 2]


class ExpandTest(parameterized.TestCase):

  @parameterized.product(
      dtype=("uint16", "uint32"),
      flags=(None, _SOME, _MASKED, [0] * 8),
      eos_id=(None, 3),
      spec=(P("data"), P("data", "other")),
  )
  def test_the_arrays_equal_those_of_the_host_transforms(self, dtype, flags, eos_id, spec):
    self._compare(dtype, flags, eos_id, spec)

  @parameterized.parameters(
      ("uint8", _SOME, 0, P(("data", "other"))),
      ("uint64", None, 99, P()),
      ("uint64", _SOME, None, P("data")),
  )
  def test_so_do_those_of_other_dtypes_and_partitions(self, dtype, flags, eos_id, spec):
    self._compare(dtype, flags, eos_id, spec)

  def _compare(self, dtype, flags, eos_id, spec):
    content = steps.Content(document_eos_id=eos_id)
    expander = expand.Expander(_layout(spec), content)
    for seed in range(2):
      batch = _batch(dtype, flags, seed=seed)
      got = expander.finish(expander.place(batch))
      expected = steps.to_arrays(batch, content)
      self.assertEqual(set(got), set(expected))
      for name, array in got.items():
        self.assertEqual(array.dtype, np.int32, name)
        self.assertEqual(array.sharding.spec, spec)
        np.testing.assert_array_equal(array, expected[name], err_msg=name)

  @parameterized.parameters(("uint32", 4), ("uint16", 2), ("uint8", 1))
  def test_only_tokens_cross(self, dtype, size):
    expander = expand.Expander(_layout(), steps.Content())
    self.assertEqual(expander.place(_batch(dtype)).bytes_crossed, 8 * 12 * size)
    self.assertEqual(expander.place(_batch(dtype, _SOME)).bytes_crossed, 8 * 12 * size + 8)

  def test_an_eos_id_beyond_the_dtype_ends_no_document(self):
    content = steps.Content(document_eos_id=2**16 + 3)
    expander = expand.Expander(_layout(), content)
    batch = _batch("uint16")
    got = expander.finish(expander.place(batch))
    self.assertTrue((np.asarray(got["inputs_segmentation"]) == 1).all())
    for name, array in steps.to_arrays(batch, content).items():
      np.testing.assert_array_equal(got[name], array, err_msg=name)

  def test_what_all_batches_share_is_made_once(self):
    expander = expand.Expander(_layout(), steps.Content())
    first, second = (expander.finish(expander.place(_batch(seed=i))) for i in range(2))
    for name in expand.NAMES[2:]:
      self.assertIs(first[name], second[name])
    # Two names never share one array: a trainer that donates a batch would give it away twice.
    self.assertLen({id(array) for array in first.values()}, 6)

  def test_a_masked_row_changes_nothing_but_the_segments_of_targets(self):
    expander = expand.Expander(_layout(), steps.Content())
    whole, masked = (expander.finish(expander.place(_batch(flags=f))) for f in (None, _MASKED))
    for name in expand.NAMES[2:5]:
      self.assertIs(whole[name], masked[name])
    self.assertEqual(
        np.asarray(masked["targets_segmentation"]).any(axis=1).tolist(), [f == 2 for f in _MASKED]
    )

  def test_a_trainer_that_donates_its_batch_gets_fresh_arrays(self):
    content = steps.Content()
    expander = expand.Expander(_layout(), content)
    consume = jax.jit(lambda batch: jax.tree.map(lambda x: x + 1, batch), donate_argnums=0)
    ahead = expander.place(_batch(seed=0))
    for seed in range(4):
      batch = _batch(seed=seed)
      expected = steps.to_arrays(batch, content)
      now, ahead = ahead, expander.place(_batch(seed=seed + 1))
      result = consume(expander.finish(now))
      for name, array in result.items():
        np.testing.assert_array_equal(array, expected[name] + 1, err_msg=name)


if __name__ == "__main__":
  absltest.main()
