import collections

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from tests import distributed
from tests import shards as shards_lib
from tests.grain_llm import pipeline_cases

STARTS_PROCESSES = True


def _unique_documents(count, longest=15):
  rng = np.random.default_rng(count)
  found, number = [], 100
  for length in rng.integers(1, longest, count):
    found.append({"inputs": np.append(np.arange(number, number + length), 99)})
    number += length
  return found


def _tokens(batches):
  found = collections.Counter()
  for batch in batches:
    found.update(batch["inputs"][batch["inputs_segmentation"] != 0].tolist())
  return found


class HostsTest(parameterized.TestCase):

  def served(self, *cases, devices=1):
    """Returns the batches, the length and the states of two processes for each case."""
    results = distributed.run(
        "tests.grain_llm.pipeline_cases:serve_all",
        devices=devices,
        args=([("serve", *case) for case in cases],),
    )
    found = []
    for per_process in zip(*results):
      self.assertLen(
          {len(batches) for batches, _, _ in per_process}, 1, "they took unequal numbers of batches"
      )
      self.assertLen({length for _, length, _ in per_process}, 1)
      batches = shards_lib.assemble([batches for batches, _, _ in per_process])
      found.append((batches, per_process[0][1], [state for _, _, state in per_process]))
    return found

  def alone(self, documents, options, steps=None, state=None):
    batches, length, found = pipeline_cases.serve(documents, options, {"data": 1}, steps, state)
    return shards_lib.assemble([batches]), length, found

  def assert_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)

  @parameterized.parameters(({"data": 2}, 1, None), ({"tensor": 2, "data": 2}, 2, (("data",),)))
  def test_with_shard_batch_the_global_batch_does_not_depend_on_hosts(self, axes, devices, spec):
    documents = _unique_documents(61)
    choices = [
        {
            "shard": "batch",
            "packing": packing,
            "num_epochs": 2,
            "drop_remainder": False,
            "grain_packing_bin_count": 8,
            "data_sharding": spec,
        }
        for packing in (None, "first_fit", "planned")
    ]
    found = self.served(*((documents, options, axes) for options in choices), devices=devices)
    for options, (batches, length, states) in zip(choices, found):
      expected, expected_length, state = self.alone(documents, {**options, "data_sharding": None})
      self.assert_equal(batches, expected)
      if options["packing"] != "planned":  # counted in the background: sooner or later
        self.assertEqual(length, expected_length)
      for one in states:
        self.assertEqual({**one, "iterator_length": 0}, {**state, "iterator_length": 0})

  def test_a_run_resumes_with_another_number_of_hosts(self):
    documents = _unique_documents(61)
    choices = [
        {"shard": "batch", "packing": packing, "grain_packing_bin_count": 8}
        for packing in (None, "planned", "first_fit")
    ]
    found = self.served(*((documents, options, {"data": 2}, 3) for options in choices))
    for options, (first, _, states) in zip(choices, found):
      expected, _, _ = self.alone(documents, options, 7)
      rest, _, _ = self.alone(documents, options, 4, states[1])
      self.assert_equal(first + rest, expected)

  def test_hosts_with_unequal_shares_end_together(self):
    documents = _unique_documents(29)  # 15 and 14
    choices = [
        {
            "packing": packing,
            "num_epochs": 1,
            "drop_remainder": drop_remainder,
            "global_batch_size": 4,
            "grain_packing_bin_count": 3,
            "shift": False,
        }
        for packing in (None, "planned", "first_fit", "concat_then_split")
        for drop_remainder in (True, False)
    ]
    found = self.served(*((documents, options, {"data": 2}) for options in choices))
    for options, (batches, length, _) in zip(choices, found):
      drop = options["drop_remainder"]
      if options["packing"] is None:
        self.assertLen(batches, 7 if drop else 8)
        self.assertEqual(length, len(batches))
      for batch in batches:
        self.assertEqual(batch["inputs"].shape, (4, 16))
        padding = batch["inputs_segmentation"].max(axis=1) == 0
        for values in batch.values():
          self.assertFalse(values[padding].any())
        self.assertFalse(drop and padding.any() and options["packing"] in (None, "planned"))
      if not drop:
        expected = collections.Counter()
        for document in documents:
          expected.update(document["inputs"].tolist())
        self.assertEqual(_tokens(batches), expected, options)

  def test_a_host_without_any_document_gives_padding_and_ragged_ones_are_padded(self):
    one = {"num_epochs": 1, "drop_remainder": False, "global_batch_size": 2}
    ragged = {
        "apply_padding": False,
        "pad_shapes": True,
        "shuffle": False,
        "num_epochs": 1,
        "global_batch_size": 4,
    }
    documents = [{"inputs": [1] * (i + 1)} for i in range(8)]
    found = self.served(
        (documents[1:2], one, {"data": 2}),
        (documents[1:2], {**one, "packing": "first_fit"}, {"data": 2}),
        (documents, ragged, {"data": 2}),
    )
    for (batch,), _, _ in found[:2]:
      self.assertEqual(batch["inputs_segmentation"].max(axis=1).tolist(), [1, 0])
    batches = found[2][0]
    self.assertEqual([b["inputs"].shape for b in batches], [(4, 6), (4, 8)])
    self.assertEqual((batches[0]["inputs_segmentation"] > 0).sum(axis=1).tolist(), [1, 2, 5, 6])

  def test_a_mix_of_unequal_shares_ends_together(self):
    choices = (({"drop_remainder": True}, 8), ({"drop_remainder": False}, 10))
    results = distributed.run(
        "tests.grain_llm.pipeline_cases:serve_all",
        args=([("mix", options, {"data": 2}) for options, _ in choices],),
    )
    for (options, rows), parts in zip(choices, zip(*results)):
      real = sum((b["inputs_segmentation"][:, 0] > 0).sum() for b in shards_lib.assemble(parts))
      self.assertEqual(real, rows, options)


class ScheduleTest(parameterized.TestCase):

  def test_a_batch_that_does_not_divide_over_hosts_is_an_error(self):
    rows = pipeline_lib.make_grain_llm_dataset(0, 2, _unique_documents(9), 6, 16, True, 3)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    with self.assertRaisesRegex(errors.ConfigError, "9 rows.*from step 3.*2 hosts"):
      pipeline_lib.make_grain_multihost_iterator(
          [rows], None, mesh, 6, 2, batch_rampup_factors={3: 1.5}
      )


if __name__ == "__main__":
  absltest.main()
