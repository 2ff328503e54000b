"""Tests that devices expand a compact batch into the same arrays as the host."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from maxtext_olmo.devices import expand
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import segments as segments_lib
from tests.rows import segments_test

jax.config.update("jax_num_cpu_devices", 4)

_ROWS, _LENGTH = 8, 44  # A length that is no multiple of 32.
_FULL = np.full(_ROWS, _LENGTH)
_PADDED = np.array([44, 7, 1, 44, 32, 33, 43, 44])
_WITH_PADDING_ROWS = np.array([44, 0, 9, 44, 0, 31, 44, 0])
_NOTHING = np.zeros(_ROWS, np.int64)
_ALL = np.ones(_ROWS, bool)
_MASKED = np.array([True, False, True, True, False, True, True, True])

# The shape of a mesh over the axes (data, other), and the layout of a batch on it.
_MESHES = (
    ((1, 1), P("data")),
    ((2, 1), P("data")),
    ((2, 1), P(None, "data")),
    ((2, 2), P("data")),
    ((2, 2), P(("data", "other"))),
    ((2, 2), P("data", "other")),
    ((1, 4), P(None, "other")),
)
_ONE_DEVICE, _SPLIT_ROWS = _MESHES[0], _MESHES[2]


def _layout(shape=(2, 1), spec=P("data"), rows=_ROWS, length=_LENGTH):
  devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
  return layout_lib.BatchLayout(jax.sharding.Mesh(devices, ("data", "other")), spec, rows, length)


def _batch(
    dtype="uint32", used=_FULL, trained=_ALL, *, starts=False, loss=False, extras=(), seed=0
):
  rng = np.random.default_rng(seed)
  rows, length = len(used), _LENGTH if used.max() <= _LENGTH else int(used.max())
  batch = {
      "tokens": rng.integers(0, 200, (rows, length)).astype(dtype),
      "used": used,
      "trained": trained,
  }
  if starts:
    begins = rng.random((rows, length)) < 0.2
    begins[:, 0] = False
    batch["starts"] = segments_lib.pack_bits(begins & (np.arange(length) < used[:, None]))
  if loss:
    batch["loss"] = segments_lib.pack_bits(rng.random((rows, length)) < 0.5)
  for name in extras:
    batch[name] = rng.integers(-1, 100, rows).astype(np.int32)
  return batch


class ExpandTest(parameterized.TestCase):

  def _compare(self, mesh, batch, shift=batch_lib.Shift()):
    layout = _layout(*mesh)
    expander = expand.Expander(layout, shift)
    got = expander.finish(expander.place(batch))
    expected = batch_lib.to_arrays(batch, shift)
    self.assertEqual(set(got), set(expected))
    for name, array in got.items():
      self.assertEqual(array.dtype, np.int32, name)
      if name in batch_lib.NAMES:
        self.assertEqual(array.sharding.spec, mesh[1], name)
      np.testing.assert_array_equal(array, expected[name], err_msg=name)

  @parameterized.parameters(*_MESHES)
  def test_the_arrays_equal_those_of_the_host_on_every_mesh(self, shape, spec):
    every = {"starts": True, "loss": True, "extras": ("row_ids", "labels")}
    self._compare((shape, spec), _batch())
    self._compare((shape, spec), _batch("uint32", _WITH_PADDING_ROWS, _MASKED, **every))

  @parameterized.product(
      used=(_FULL, _PADDED, _WITH_PADDING_ROWS, _NOTHING),
      kind=(
          (_ALL, ()),
          (_MASKED, ()),
          (_ALL, ("starts",)),
          (_MASKED, ("loss",)),
          (_MASKED, ("starts", "loss")),
      ),
  )
  def test_the_arrays_equal_those_of_the_host_for_every_kind_of_row(self, used, kind):
    trained, bits = kind
    batch = _batch("uint16", used, trained, **dict.fromkeys(bits, True))
    self._compare(_ONE_DEVICE, batch)

  @parameterized.product(
      dtype=("uint16", "uint32", "uint64"),
      used=(_FULL, _WITH_PADDING_ROWS),
      mesh=(_ONE_DEVICE, _SPLIT_ROWS),
  )
  def test_the_arrays_equal_those_of_the_host_for_every_dtype(self, dtype, used, mesh):
    self._compare(mesh, _batch(dtype, used, starts=True))
    self._compare(mesh, _batch(dtype, used))

  @parameterized.product(
      used=(_FULL, _PADDED, _WITH_PADDING_ROWS),
      bits=((), ("starts", "loss")),
      mesh=(_ONE_DEVICE, _SPLIT_ROWS),
  )
  def test_the_arrays_equal_those_of_the_host_for_a_right_shift(self, used, bits, mesh):
    batch = _batch("uint32", used, _MASKED, **dict.fromkeys(bits, True))
    self._compare(mesh, batch, batch_lib.Shift("right", 42))

  @parameterized.parameters(("uint32", 4), ("uint16", 2), ("uint8", 1), ("uint64", 4))
  def test_only_tokens_are_sent_for_full_rows(self, dtype, size):
    expander = expand.Expander(_layout())
    self.assertEqual(expander.place(_batch(dtype)).bytes_crossed, _ROWS * _LENGTH * size)

  @parameterized.parameters(
      ({}, 4.1),
      ({"trained": _MASKED}, 4.1),
      ({"starts": True, "loss": True}, 4.3),
      ({"starts": True, "loss": True, "trained": _MASKED, "cut": 100}, 4.3),
  )
  def test_about_four_bytes_per_token_are_sent(self, kind, most):
    length = 1024
    kind = dict(kind)
    used = np.full(_ROWS, length)
    used[1] -= kind.pop("cut", 0)
    batch = _batch("uint32", used, **kind)
    expander = expand.Expander(_layout((1, 1), length=length))
    placed = expander.place(batch)
    self.assertLessEqual(placed.bytes_crossed / (_ROWS * length), most)
    for name, array in expander.finish(placed).items():
      np.testing.assert_array_equal(array, batch_lib.to_arrays(batch)[name], err_msg=name)

  def test_all_six_arrays_are_sent_if_rows_are_split(self):
    expander = expand.Expander(_layout((2, 2), P("data", "other")))
    self.assertEqual(expander.place(_batch()).bytes_crossed, 24 * _ROWS * _LENGTH)

  def test_shared_arrays_are_made_once(self):
    expander = expand.Expander(_layout())
    first, second = (expander.finish(expander.place(_batch(seed=i))) for i in range(2))
    for name in batch_lib.NAMES[2:]:
      self.assertIs(first[name], second[name])
    # Two names never share one array: a trainer that donates a batch would donate it twice.
    self.assertLen({id(array) for array in first.values()}, 6)

  def test_a_masked_row_changes_nothing_but_the_segments_of_targets(self):
    expander = expand.Expander(_layout())
    whole, masked = (expander.finish(expander.place(_batch(trained=t))) for t in (_ALL, _MASKED))
    for name in batch_lib.NAMES[2:5]:
      self.assertIs(whole[name], masked[name])
    self.assertEqual(
        np.asarray(masked["targets_segmentation"]).any(axis=1).tolist(), _MASKED.tolist()
    )

  def test_a_trainer_that_donates_its_batch_gets_fresh_arrays(self):
    expander = expand.Expander(_layout())
    consume = jax.jit(lambda batch: jax.tree.map(lambda x: x + 1, batch), donate_argnums=0)
    ahead = expander.place(_batch(seed=0))
    for seed in range(4):
      expected = batch_lib.to_arrays(_batch(seed=seed))
      now, ahead = ahead, expander.place(_batch(seed=seed + 1))
      result = consume(expander.finish(now))
      for name, array in result.items():
        np.testing.assert_array_equal(array, expected[name] + 1, err_msg=name)


# Few lengths, because a program is compiled for each.
_LENGTHS = (1, 2, 31, 32, 33, 64, 100)
_BIT_ROWS = 3


# In one program, as in the expansion of a batch.
_segments_and_positions = jax.jit(expand.segments_and_positions, static_argnames="length")


def _on_device(starts):
  words = expand.scan_words(jnp.asarray(segments_lib.pack_bits(starts)))
  segments, positions = _segments_and_positions(words, starts.shape[1])
  return np.asarray(segments), np.asarray(positions)


class SegmentBitsTest(parameterized.TestCase):

  def _check(self, starts):
    """Compares full rows; the expansion of a batch clears padding."""
    used = np.full(len(starts), starts.shape[1])
    found, expected = _on_device(starts), segments_lib.segments_and_positions(starts, used)
    for got, wanted in zip(found, expected):
      self.assertEqual(got.dtype, np.int32)
      np.testing.assert_array_equal(got, wanted)

  @parameterized.parameters(*segments_test.RULES)
  def test_rows_by_any_rule_equal_those_of_the_host(self, rule):
    @given(segments_test.batches(st.sampled_from(_LENGTHS), max_rows=_BIT_ROWS))
    @settings(max_examples=15, deadline=None)
    def check(batch):
      tokens, counts = batch
      parts = segments_test.parts_of(counts)
      starts = np.zeros((_BIT_ROWS, tokens.shape[1]), bool)
      starts[: len(tokens)] = segments_lib.segment_starts(tokens, parts.used, rule, parts)
      self._check(starts)

    check()

  @given(
      st.sampled_from(_LENGTHS),
      st.integers(0, 2**32 - 1),
      st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
  )
  @settings(max_examples=25, deadline=None)
  def test_rows_with_any_share_of_starts_equal_those_of_the_host(self, length, seed, share):
    starts = np.random.default_rng(seed).random((_BIT_ROWS, length)) < share
    starts[:, 0] = False
    self._check(starts)

  @parameterized.parameters(1, 30, 31, 32, 33, 63, 64, 95)
  def test_a_start_at_any_place_of_a_word(self, place):
    starts = np.zeros((1, 96), bool)
    starts[0, place] = True
    self._check(starts)

  def test_a_long_row(self):
    starts = np.random.default_rng(0).random((2, 8192)) < 0.002
    starts[:, 0] = False
    self._check(starts)

  @parameterized.parameters(*_LENGTHS)
  def test_unpack_gives_the_flags_that_were_packed(self, length):
    flags = np.random.default_rng(length).random((_BIT_ROWS, length)) < 0.5
    found = expand.unpack(jnp.asarray(segments_lib.pack_bits(flags)), length)
    self.assertEqual(found.dtype, np.int32)
    np.testing.assert_array_equal(found, flags)


if __name__ == "__main__":
  absltest.main()
