"""Grain's own interface over OLMo corpora: each operation of its overview, on
`OlmoNpyDataSource`."""

import dataclasses
import sys

import grain
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from absl.testing import absltest
from array_record.python import array_record_module

import maxtext_olmo
from maxtext_olmo.corpus import index_builder as index_lib
from tests import corpora

STARTS_PROCESSES = True


@dataclasses.dataclass
class Scale(grain.transforms.Map):
  by: int

  def map(self, element):
    return {**element, "tokens": element["tokens"].astype(np.int64) * self.by}


@dataclasses.dataclass
class Tokens(grain.transforms.Map):

  def map(self, element):
    return element["tokens"].astype(np.int32)


@dataclasses.dataclass
class EvenInstances(grain.transforms.Filter):

  def filter(self, element):
    return element["instance_id"] % 2 == 0


@dataclasses.dataclass
class Noise(grain.transforms.RandomMap):

  def random_map(self, element, rng):
    return element["tokens"] + rng.integers(0, 5)


@dataclasses.dataclass
class Halves(grain.experimental.FlatMapTransform):
  max_fan_out: int = 2

  def flat_map(self, element):
    return [element["tokens"][:4], element["tokens"][4:]]


@dataclasses.dataclass
class Place(grain.transforms.MapWithIndex):

  def map_with_index(self, index, element):
    return index, element["instance_id"]


class Case(absltest.TestCase):

  def setUp(self):
    super().setUp()
    path, self.rows = corpora.write_corpus(self.create_tempdir().full_path)
    self.index = index_lib.load_index(path)
    self.source = maxtext_olmo.OlmoNpyDataSource(self.index)
    self.dataset = grain.MapDataset.source(self.source)
    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()

  def ids(self, dataset):
    return [element["instance_id"] for element in dataset]


class MapDatasetTest(Case):

  def test_source(self):
    self.assertLen(self.dataset, len(self.rows))
    np.testing.assert_array_equal(self.dataset[3]["tokens"], self.rows[3])
    self.assertEqual(self.ids(self.dataset), list(range(len(self.rows))))

  def test_range_of_instance_ids(self):
    dataset = grain.MapDataset.range(2, 10, 2).map(lambda i: self.source[i])
    self.assertEqual(self.ids(dataset), [2, 4, 6, 8])

  def test_shuffle(self):
    one = self.ids(self.dataset.shuffle(seed=42))
    self.assertEqual(one, self.ids(self.dataset.shuffle(seed=42)))
    self.assertCountEqual(one, range(len(self.rows)))
    self.assertNotEqual(one, sorted(one))
    self.assertCountEqual(self.ids(self.dataset.seed(42).shuffle()), range(len(self.rows)))

  def test_map(self):
    np.testing.assert_array_equal(self.dataset.map(Scale(3))[5]["tokens"], self.rows[5] * 3)
    self.assertEqual(self.dataset.map(lambda e: int(e["tokens"][0]))[2], self.rows[2, 0])

  def test_random_map(self):
    one = [row.tolist() for row in self.dataset.seed(1).random_map(Noise())]
    self.assertEqual(one, [row.tolist() for row in self.dataset.seed(1).random_map(Noise())])
    self.assertNotEqual(one, [row.tolist() for row in self.dataset.seed(2).random_map(Noise())])

  def test_map_with_index(self):
    shuffled = self.dataset.shuffle(seed=1)
    found = list(shuffled.map_with_index(Place()))
    self.assertEqual([place for place, _ in found], list(range(len(self.rows))))
    self.assertEqual([i for _, i in found], self.ids(shuffled))

  def test_filter(self):
    kept = self.dataset.filter(EvenInstances())
    self.assertIsNone(kept[1])
    self.assertEqual(self.ids(kept), list(range(0, len(self.rows), 2)))
    batches = list(kept.map(Tokens()).to_iter_dataset().batch(3))
    np.testing.assert_array_equal(batches[0], self.rows[[0, 2, 4]])

  def test_batch(self):
    batches = list(self.dataset.map(Tokens()).batch(10))
    self.assertEqual([len(b) for b in batches], [10] * 12 + [3])
    self.assertLen(list(self.dataset.map(Tokens()).batch(10, drop_remainder=True)), 12)
    longest = self.dataset.batch(
        4, batch_fn=lambda records: max(r["tokens"].max() for r in records)
    )
    self.assertEqual(longest[0], self.rows[:4].max())

  def test_repeat(self):
    twice = self.dataset.shuffle(seed=0).repeat(2)
    ids = self.ids(twice)
    first, second = ids[: len(self.rows)], ids[len(self.rows) :]
    self.assertCountEqual(first, second)
    self.assertNotEqual(first, second)
    self.assertLen(self.dataset.repeat(), sys.maxsize)

  def test_slice(self):
    shards = [self.ids(self.dataset[i::4]) for i in range(4)]
    self.assertEqual(shards[1][:3], [1, 5, 9])
    self.assertCountEqual([i for shard in shards for i in shard], range(len(self.rows)))
    self.assertEqual(self.ids(self.dataset.slice(slice(2, 5))), [2, 3, 4])

  def test_mix(self):
    low, high = self.dataset[:50], self.dataset[50:100]
    self.assertEqual(self.ids(grain.MapDataset.mix([low, high]))[:4], [0, 50, 1, 51])
    weighted = self.ids(grain.MapDataset.mix([low, high], weights=[0.7, 0.3]))
    self.assertEqual(sum(i < 50 for i in weighted[:20]), 14)

  def test_concatenate(self):
    both = grain.MapDataset.concatenate([self.dataset[:2], self.dataset[5:7]])
    self.assertEqual(self.ids(both), [0, 1, 5, 6])

  def test_pipe(self):
    piped = self.dataset.pipe(lambda ds, by: ds.map(Scale(by)), by=2)
    np.testing.assert_array_equal(piped[1]["tokens"], self.rows[1] * 2)

  def test_apply(self):
    made = self.dataset.apply([EvenInstances(), Scale(2), Tokens()])
    np.testing.assert_array_equal(made[2], self.rows[2] * 2)
    batched = self.dataset.apply([Tokens(), grain.transforms.Batch(batch_size=3)])
    np.testing.assert_array_equal(batched[1], self.rows[3:6])

  def test_flat_map(self):
    halves = grain.experimental.FlatMapMapDataset(self.dataset, Halves())
    np.testing.assert_array_equal(halves[3], self.rows[1, 4:])


class IterDatasetTest(Case):

  def test_to_iter_dataset(self):
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=20)
    dataset = self.dataset.shuffle(seed=0)
    self.assertEqual(self.ids(dataset.to_iter_dataset(options)), self.ids(dataset))

  def test_mp_prefetch_and_close(self):
    batches = self.dataset.shuffle(seed=42).map(Tokens()).batch(16)
    iterator = iter(
        batches.to_iter_dataset().mp_prefetch(
            grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
        )
    )
    try:
      for got, expected in zip(iterator, batches):
        np.testing.assert_array_equal(got, expected)
    finally:
      iterator.close()

  def test_mix(self):
    even = self.dataset.filter(EvenInstances()).to_iter_dataset()
    odd = self.dataset.filter(lambda e: e["instance_id"] % 2).to_iter_dataset()
    mixed = self.ids(grain.IterDataset.mix([even, odd], weights=[0.5, 0.5]))
    self.assertEqual(mixed[:4], [0, 1, 2, 3])
    named = grain.IterDataset.mix({"a": even, "b": odd}, weights={"a": 0.5, "b": 0.5})
    self.assertEqual(self.ids(named), mixed)

  def test_get_state_and_set_state(self):
    iterator = iter(self.dataset.seed(42).shuffle().to_iter_dataset())
    for _ in range(30):
      next(iterator)
    state = iterator.get_state()
    expected = next(iterator)["instance_id"]
    iterator.set_state(state)
    self.assertEqual(next(iterator)["instance_id"], expected)

  def test_orbax_saves_and_restores(self):
    iterator = iter(self.dataset.seed(42).shuffle().to_iter_dataset())
    for _ in range(30):
      next(iterator)
    with ocp.CheckpointManager(self.create_tempdir().full_path) as manager:
      manager.save(30, args=grain.checkpoint.CheckpointSave(iterator), force=True)
      manager.wait_until_finished()
      expected = next(iterator)["instance_id"]
      manager.restore(30, args=grain.checkpoint.CheckpointRestore(iterator))
    self.assertEqual(next(iterator)["instance_id"], expected)


class DataLoaderTest(Case):

  def loader(self, **kwargs):
    sampler = grain.samplers.IndexSampler(
        num_records=len(self.source),
        shard_options=kwargs.pop("shard_options", grain.sharding.NoSharding()),
        shuffle=True,
        num_epochs=kwargs.pop("num_epochs", None),
        seed=42,
    )
    operations = [Scale(1), Tokens(), grain.transforms.Batch(batch_size=8, drop_remainder=True)]
    return grain.DataLoader(
        data_source=self.source, sampler=sampler, operations=operations, **kwargs
    )

  def test_a_loader_over_a_corpus(self):
    batches = list(self.loader(num_epochs=1, worker_count=0))
    self.assertLen(batches, len(self.rows) // 8)
    rows = {tuple(row) for row in self.rows.tolist()}
    for row in np.concatenate(batches).tolist():
      self.assertIn(tuple(row), rows)

  def test_its_state_is_bytes_and_restores(self):
    iterator = iter(self.loader(worker_count=0))
    for _ in range(5):
      next(iterator)
    state = iterator.get_state()
    self.assertIsInstance(state, bytes)
    expected = next(iterator)
    again = iter(self.loader(worker_count=0))
    again.set_state(state)
    np.testing.assert_array_equal(next(again), expected)

  def test_worker_processes(self):
    found = list(self.loader(num_epochs=1, worker_count=1, worker_buffer_size=2))
    np.testing.assert_array_equal(found, list(self.loader(num_epochs=1, worker_count=0)))

  def test_shards_share_out_the_corpus(self):
    shards = []
    for index in range(2):
      options = grain.sharding.ShardOptions(shard_index=index, shard_count=2, drop_remainder=True)
      shards.append(
          np.concatenate(list(self.loader(num_epochs=1, shard_options=options, worker_count=0)))
      )
    one, two = ({tuple(row) for row in shard.tolist()} for shard in shards)
    self.assertEmpty(one & two)
    by_process = grain.sharding.ShardByJaxProcess(drop_remainder=True)
    self.assertEqual((by_process.shard_index, by_process.shard_count), (0, 1))

  def test_an_index_sampler_says_what_it_is(self):
    text = repr(self.loader()._sampler)
    self.assertIn(f"num_records={len(self.source)}", text)

  def test_load(self):
    loader = grain.load(
        self.source,
        num_epochs=1,
        shuffle=True,
        seed=0,
        shard_options=grain.sharding.NoSharding(),
        transformations=[Tokens()],
        batch_size=8,
        drop_remainder=True,
        worker_count=0,
    )
    self.assertLen(list(loader), len(self.rows) // 8)

  def test_instances_may_be_moved_to_array_records(self):
    path = self.create_tempfile("a.arrayrecord").full_path
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for i in range(10):
      writer.write(self.source[i]["tokens"].tobytes())
    writer.close()
    records = grain.sources.ArrayRecordDataSource(path)
    self.assertLen(records, 10)
    np.testing.assert_array_equal(np.frombuffer(records[4], self.index.dtype), self.rows[4])
    many = grain.sources.ArrayRecordDataSource([path])
    dataset = grain.MapDataset.source(many).map(lambda r: np.frombuffer(r, self.index.dtype))
    np.testing.assert_array_equal(dataset[9], self.rows[9])


if __name__ == "__main__":
  absltest.main()
