"""Tests of behaviour that code for xlstm-jax's data modules relies on.

What differs on purpose is in docs/guides/differences.md, and is tested here as well.
"""

import dataclasses
import itertools
import logging

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.devices import multihost
from maxtext_olmo.evaluation import pipeline as evaluation_pipeline
from maxtext_olmo.grain_llm import pipeline as pipeline_lib


def _mesh():
  return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def _numbered(count, length=8):
  """Documents that fill a row, of one token each: the number of the document, from 1."""
  return [{"inputs": np.full(length, number, np.int32)} for number in range(1, count + 1)]


def _iterator(documents, host=0, hosts=1, **kwargs):
  values = {
      "dataloading_host_index": host,
      "dataloading_host_count": hosts,
      "global_mesh": _mesh(),
      "dataset": documents,
      "global_batch_size": 8,
      "max_target_length": 8,
      "shuffle": False,
      "data_shuffle_seed": 42,
      "worker_count": 0,
  }
  return maxtext_olmo.make_grain_llm_iterator(**values | kwargs)


def _firsts(batches):
  """Returns the document of each row, without padding rows."""
  found = [np.asarray(batch.inputs)[:, 0] for batch in batches]
  return [number for number in np.concatenate([*found, []]).astype(int).tolist() if number]


class HostsTest(parameterized.TestCase):

  @parameterized.product(hosts=(2, 4), count=(10, 34, 51))
  def test_with_whole_batches_only_each_host_has_the_beginning_of_its_share(self, hosts, count):
    documents = _numbered(count)
    steps = count // 8
    for host in range(hosts):
      found = list(_iterator(documents, host, hosts, num_epochs=1))
      self.assertLen(found, steps)
      share = pipeline_lib.shard_grain_dataset(grain.MapDataset.source(documents), host, hosts)
      mine = [int(document["inputs"][0]) for document in share]
      self.assertEqual(_firsts(found), mine[: steps * 8 // hosts])

  @parameterized.product(hosts=(2, 4), count=(10, 34, 51))
  def test_a_kept_remainder_is_padded_so_that_hosts_end_together_on_purpose(self, hosts, count):
    documents, found, lengths = _numbered(count), [], set()
    for host in range(hosts):
      batches = list(_iterator(documents, host, hosts, num_epochs=1, drop_remainder=False))
      lengths.add(len(batches))
      self.assertEqual({batch.inputs.shape for batch in batches}, {(8 // hosts, 8)})
      found += _firsts(batches)
    self.assertLen(lengths, 1)
    self.assertEqual(found, list(range(1, count + 1)))

  @parameterized.parameters((10, 3), (9, 3), (2, 4), (0, 2))
  def test_shares_are_contiguous_and_the_first_ones_larger(self, count, hosts):
    numbers = grain.MapDataset.range(count)
    shares = [list(pipeline_lib.shard_grain_dataset(numbers, h, hosts)) for h in range(hosts)]
    self.assertEqual(list(itertools.chain(*shares)), list(range(count)))
    sizes = [len(share) for share in shares]
    self.assertEqual(sizes, sorted(sizes, reverse=True))
    self.assertLessEqual(sizes[0] - sizes[-1], 1)


class EpochsTest(parameterized.TestCase):

  @parameterized.parameters(32, 45)
  def test_every_epoch_is_shuffled_its_own_way(self, count):
    iterator = _iterator(_numbered(count), shuffle=True, num_epochs=4)
    length = iterator.iterator_length
    self.assertEqual(length, count // 8)
    epochs = [_firsts(iterator) for _ in range(4)]
    self.assertEqual([len(epoch) for epoch in epochs], [8 * length] * 4)
    self.assertLen({tuple(epoch[:8]) for epoch in epochs}, 4)
    self.assertNotEqual(epochs[0], sorted(epochs[0]))
    self.assertLen(set(epochs[0]), len(epochs[0]))

  def test_with_packing_the_length_is_the_largest_possible_number_of_batches(self):
    documents = [{"inputs": np.full(3, number)} for number in range(1, 33)]
    for epochs, passes in ((None, [4, 4, 4]), (1, [2, 0, 0]), (5, [4, 4, 2])):
      iterator = _iterator(documents, grain_packing=True, num_epochs=epochs)
      self.assertLen(iterator, 4)
      self.assertEqual([len(list(iterator)) for _ in range(3)], passes)
    # Documents that do not share rows need as many batches as there could be.
    iterator = _iterator(_numbered(8), grain_packing=True, num_epochs=3)
    self.assertEqual([len(list(iterator)) for _ in range(4)], [1, 1, 1, 0])

  def test_one_dataset_or_a_list_of_them(self):
    rows = pipeline_lib.make_grain_llm_dataset(0, 1, _numbered(16), 8, 8, False, 0)
    for datasets, lengths in ((rows, 16), (rows, [16]), ([rows], 16), ([rows], [16])):
      iterator = maxtext_olmo.make_grain_multihost_iterator(
          datasets, lengths, _mesh(), 8, 1, worker_count=0
      )
      self.assertLen(list(iterator), 2)
      self.assertEqual(iterator.get_dataset_size(), 16)

  def test_a_mix_lasts_until_each_member_was_seen_once(self):
    members = [_numbered(8), _numbered(24)]
    rows = [pipeline_lib.make_grain_llm_dataset(0, 1, m, 8, 8, False, 0) for m in members]
    iterator = maxtext_olmo.make_grain_multihost_iterator(
        rows, [8, 24], _mesh(), 8, 1, [0.5, 0.5], worker_count=0
    )
    self.assertLen(iterator, 6)
    self.assertContainsSubset(range(1, 25), set(_firsts(iterator)))

  def test_the_batch_size_ramps_up_by_factors_of_the_first_one(self):
    iterator = _iterator(_numbered(64), batch_rampup_factors={2: 2.0, 3: 0.5})
    sizes = [next(iterator).inputs.shape[0] for _ in range(5)]
    self.assertEqual(sizes, [8, 8, 16, 4, 4])

  def test_packed_rows_number_their_documents_and_count_within_them(self):
    documents = [{"inputs": [1, 2, 3]}, {"inputs": [4, 5]}, {"inputs": [6, 7, 8, 9]}]
    rows = pipeline_lib.make_grain_llm_dataset(
        0, 1, documents, 8, 8, False, 0, num_epochs=1, grain_packing=True, shift=False
    )
    first, second = rows
    self.assertEqual(first["inputs"].tolist(), [1, 2, 3, 4, 5, 0, 0, 0])
    self.assertEqual(first["inputs_segmentation"].tolist(), [1, 1, 1, 2, 2, 0, 0, 0])
    self.assertEqual(first["inputs_position"].tolist(), [0, 1, 2, 0, 1, 0, 0, 0])
    self.assertEqual(second["inputs"].tolist(), [6, 7, 8, 9, 0, 0, 0, 0])


class BatchTest(parameterized.TestCase):

  @parameterized.parameters((4, 32), (16, 128))
  def test_borders_are_where_segments_begin(self, batch_size, length):
    inputs = jax.random.randint(jax.random.PRNGKey(length), (batch_size, length), 0, 10)
    ends = inputs == 0
    batch = dataclasses.replace(
        maxtext_olmo.LLMBatch.from_inputs(inputs), inputs_segmentation=1 + jnp.cumsum(ends, axis=1)
    )
    borders = np.asarray(batch.get_document_borders())
    self.assertTrue(borders[:, 0].all())
    np.testing.assert_array_equal(borders[:, 1:], ends[:, 1:])

  @parameterized.parameters(maxtext_olmo.LLMBatch, maxtext_olmo.LLMIndexedBatch)
  def test_a_sample_has_the_announced_shapes(self, cls):
    sample = cls.get_sample(batch_size=4, max_length=8)
    announced = cls.get_dtype_struct(batch_size=4, max_length=8)
    leaves = list(zip(jax.tree.leaves(sample), jax.tree.leaves(announced), strict=True))
    self.assertLen(leaves, 6 if cls is maxtext_olmo.LLMBatch else 8)
    for mine, spec in leaves:
      self.assertEqual((mine.shape, mine.dtype), (spec.shape, spec.dtype))

  def test_an_indexed_batch_is_made_by_position(self):
    rows, index = jnp.ones((2, 3), jnp.int32), jnp.array([1, 2])
    batch = maxtext_olmo.LLMIndexedBatch.from_inputs(rows, index, index - 1)
    self.assertEqual(batch.document_idx.tolist(), [1, 2])
    self.assertEqual(batch.inputs.tolist(), [[0, 1, 1]] * 2)


class MultihostTest(absltest.TestCase):

  def _batches(self, count):
    return [{"x": np.full((2, 2), number)} for number in range(count)]

  def test_an_endless_loader_is_divided_into_epochs(self):
    iterator = maxtext_olmo.MultiHostDataLoadIterator(
        itertools.cycle(self._batches(5)), _mesh(), iterator_length=3, dataset_size=6
    )
    self.assertLen(iterator, 3)
    self.assertEqual(iterator.get_dataset_size(), 6)
    epochs = [[int(batch["x"][0, 0]) for batch in iterator] for _ in range(2)]
    self.assertEqual(epochs, [[0, 1, 2], [3, 4, 0]])

  def test_an_epoch_may_start_at_the_beginning(self):
    iterator = maxtext_olmo.MultiHostDataLoadIterator(
        self._batches(5), _mesh(), iterator_length=3, reset_after_epoch=True
    )
    epochs = [[int(batch["x"][0, 0]) for batch in iterator] for _ in range(2)]
    self.assertEqual(epochs, [[0, 1, 2]] * 2)

  def test_a_state_continues_in_mid_epoch(self):
    def make():
      dataset = grain.MapDataset.source(self._batches(20)).to_iter_dataset()
      return maxtext_olmo.MultiHostDataLoadIterator(dataset, _mesh(), iterator_length=4)

    iterator = make()
    for _ in range(6):
      next(iter(iterator) if iterator.step_counter == 4 else iterator)
    state = iterator.get_state()
    rest = [int(batch["x"][0, 0]) for batch in iter(lambda: next(iterator, None), None)]
    resumed = make()
    resumed.set_state(state)
    self.assertTrue(resumed.state_set)
    self.assertEqual([int(batch["x"][0, 0]) for batch in resumed], rest)

  def test_what_is_not_iterable_is_a_value_error(self):
    with self.assertRaises(ValueError):
      maxtext_olmo.MultiHostDataLoadIterator(3, _mesh())

  def test_one_batch_of_all_hosts(self):
    batch = maxtext_olmo.get_next_batch_sharded(iter(self._batches(1)), _mesh(), pad=True)
    self.assertIsInstance(batch["x"], jax.Array)
    with self.assertRaises(StopIteration):
      maxtext_olmo.get_next_batch_sharded(iter([]), _mesh())

  def test_modules_have_a_logger(self):
    for module in (multihost, pipeline_lib, evaluation_pipeline):
      self.assertIsInstance(module.LOGGER, logging.Logger)
      with self.assertLogs(module.LOGGER, "WARNING"):
        module.LOGGER.warning("heard")


@dataclasses.dataclass(frozen=True)
class _Request:
  args: tuple[str, ...]


class EvaluationTest(parameterized.TestCase):

  def test_long_texts_become_windows_that_score_each_token_once(self):
    texts = ["1234567", "x" * 11, "1234567", "x" * 16]
    rows = maxtext_olmo.HFTokenizeLogLikelihoodRolling(tokenizer_path="bytes", max_length=8).map(
        [_Request((text,)) for text in texts]
    )
    self.assertLen(rows, 6)
    np.testing.assert_array_equal(rows[1]["inputs_segmentation"], np.ones(8))
    scored = dict.fromkeys(range(1, 5), 0)
    for row in rows:
      self.assertEqual(row["inputs"].shape, (8,))
      scored[int(row["document_idx"])] += int(row["targets_segmentation"].sum())
      used = int(row["inputs_segmentation"].sum())
      np.testing.assert_array_equal(row["inputs"][1:used], row["targets"][: used - 1])
    self.assertEqual(list(scored.values()), [len(text) for text in texts])

  @parameterized.parameters(1, 2, 4)
  def test_every_request_is_in_a_batch_whatever_the_number_of_hosts(self, hosts):
    requests = [_Request(("short",))] + [_Request(("long " * (n % 5 + 1),)) for n in range(12)]
    found, shapes = [], []
    for host in range(hosts):
      batches = list(
          maxtext_olmo.lmeval_preprocessing_pipeline(
              dataloading_host_index=host,
              dataloading_host_count=hosts,
              global_mesh=_mesh(),
              dataset=requests,
              global_batch_size=2 * hosts,
              tokenizer_path="bytes",
              padding_multiple=16,
              worker_count=0,
          )
      )
      shapes.append([batch.inputs.shape for batch in batches])
      found += [number for b in batches for number in b.document_idx.tolist() if number]
      for batch in batches:
        self.assertEqual(batch.inputs.shape[0], 2)
        self.assertEqual(batch.inputs.shape[1] % 16, 0)
        self.assertEqual(batch.targets_segmentation.shape, batch.inputs.shape)
        self.assertEqual(batch.sequence_idx.shape, (2,))
    self.assertEqual(sorted(found), list(range(1, 14)))
    # Hosts agree on the shape of each step without asking each other.
    self.assertEqual(shapes, [shapes[0]] * hosts)

  def test_the_documented_examples_of_datasets(self):
    ordered = maxtext_olmo.SortedDataset(grain.MapDataset.source([3, 1, 2]), lambda x: x)
    self.assertEqual([ordered.repeat(2)[number] for number in range(6)], [1, 2, 3, 1, 2, 3])
    sample = maxtext_olmo.empty_llm_indexed_sample()
    self.assertEqual(maxtext_olmo.token_length(sample), 1)
    made = maxtext_olmo.CompleteLLMIndexedBatch.map(
        item={"inputs": np.array([[1, 2]]), "targets": np.array([[1, 2]]), "idx": np.array(0)}
    )
    self.assertEqual(made["document_idx"].tolist(), [1])
    self.assertEqual(made["_document_borders"].tolist(), [[False, False]])
    parsed = maxtext_olmo.ParseLMEval().map(item={"idx": 1, "req": _Request(("Text",))})
    self.assertEqual(parsed, {"idx": 1, "prefix": "", "text": "Text"})


if __name__ == "__main__":
  absltest.main()
