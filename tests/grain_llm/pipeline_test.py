"""Tests of the Grain LLM iterators in one process."""

import collections
import importlib.util
import inspect
import json
import subprocess
import sys
import time
from unittest import mock

import grain
import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from array_record.python import array_record_module

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.devices import multihost
from maxtext_olmo.grain_llm import batches as batches_lib
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import packing as packing_lib
from tests import corpora
from tests import distributed

STARTS_PROCESSES = True

E = 99
L = 16


def _documents(count=37, longest=15, seed=0):
  """Returns documents that share no ids, each with an EOD."""
  rng = np.random.default_rng(seed)
  found, number = [], 100
  for length in rng.integers(1, longest, count):
    found.append({"inputs": np.append(np.arange(number, number + length), E)})
    number += length
  return found


def _mesh():
  return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def _make(documents=None, **kwargs):
  values = {
      "dataloading_host_index": 0,
      "dataloading_host_count": 1,
      "global_mesh": _mesh(),
      "dataset": documents or _documents(),
      "global_batch_size": 4,
      "max_target_length": L,
      "shuffle": True,
      "data_shuffle_seed": 3,
      "eod_token_id": E,
      "worker_count": 0,
      "batch_class": dict,
      **kwargs,
  }
  return maxtext_olmo.make_grain_llm_iterator(**values)


def _arrays(batch):
  return {name: np.asarray(values) for name, values in batch.items()}


def _take(iterator, count=None):
  found = []
  while count is None or len(found) < count:
    try:
      found.append(_arrays(next(iterator)))
    except StopIteration:
      if count is None:
        break
      try:
        found.append(_arrays(next(iter(iterator))))  # the next epoch
      except StopIteration:
        break
  return found


def _tokens(batches, scored=False):
  """Counts each id among the inputs that are not padding."""
  side = "targets" if scored else "inputs"
  found = collections.Counter()
  for batch in batches:
    found.update(batch[side][batch[f"{side}_segmentation"] != 0].tolist())
  return found


def _expected(documents, times=1):
  found = collections.Counter()
  for document in documents:
    found.update(document["inputs"].tolist() * times)
  return found


class LLMCase(parameterized.TestCase):

  def assert_batches_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)

  def make(self, *args, **kwargs):
    iterator = _make(*args, **kwargs)
    self.addCleanup(iterator.close)
    return iterator


class SignatureTest(absltest.TestCase):

  def test_signatures_and_defaults_are_those_documented(self):
    dataset = (
        "dataloading_host_index, dataloading_host_count, dataset, global_batch_size,"
        " max_target_length, shuffle,"
        " data_shuffle_seed, num_epochs=None, operations=None, grain_packing=False,"
        " grain_packing_bin_count=None,"
        " shift=True, shift_target=True, eod_token_id=0, apply_padding=True"
    )
    multi = (
        "grain_datasets, dataset_lengths, global_mesh, global_batch_size, dataloading_host_count,"
        " dataset_weights=None,"
        " worker_count=1, worker_buffer_size=1, drop_remainder=True, batch_class=LLMBatch,"
        " reset_after_epoch=False,"
        " use_thread_prefetch=False, batch_rampup_factors=None"
    )
    both = (
        "dataloading_host_index, dataloading_host_count, global_mesh, dataset, global_batch_size,"
        " max_target_length,"
        " shuffle, data_shuffle_seed, num_epochs=None, operations=None, grain_packing=False,"
        " grain_packing_bin_count=None, shift=True, shift_target=True, eod_token_id=0,"
        " worker_count=1,"
        " worker_buffer_size=1, apply_padding=True, drop_remainder=True, batch_class=LLMBatch,"
        " reset_after_epoch=False, use_thread_prefetch=False, batch_rampup_factors=None"
    )
    sharded = "grain_dataset, dataloading_host_index, dataloading_host_count"
    for function, documented in (
        (pipeline_lib.make_grain_llm_dataset, dataset),
        (pipeline_lib.make_grain_multihost_iterator, multi),
        (pipeline_lib.make_grain_llm_iterator, both),
        (pipeline_lib.shard_grain_dataset, sharded),
    ):
      found = []
      for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
          self.assertIsNot(parameter.default, parameter.empty)
          continue
        default = parameter.default
        default = default.__name__ if inspect.isclass(default) else default
        none = default is inspect.Parameter.empty or default == "_empty"
        found.append(parameter.name if none else f"{parameter.name}={default}")
      self.assertEqual(", ".join(found), documented)


class ShardTest(parameterized.TestCase):

  @parameterized.parameters(
      (10, 3, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
      (4, 2, [[0, 1], [2, 3]]),
      (2, 3, [[0], [1], []]),
  )
  def test_shares_are_contiguous_and_the_first_hosts_get_one_more(self, count, hosts, expected):
    dataset = grain.MapDataset.range(count)
    found = [list(pipeline_lib.shard_grain_dataset(dataset, host, hosts)) for host in range(hosts)]
    self.assertEqual(found, expected)

  @parameterized.parameters(*packing_lib.PACKINGS)
  def test_rows_of_a_shared_stream_do_not_depend_on_the_number_of_hosts(self, packing):
    documents = [{"inputs": [1 + i] * (3 + 7 * i % 29)} for i in range(200)]

    def rows(hosts):
      dataset = pipeline_lib.make_grain_llm_dataset(
          hosts - 1, hosts, documents, 8, 32, True, 0, 1, packing=packing, shard="batch"
      )
      return [row["inputs"].tolist() for row in dataset]

    alone = rows(1)
    self.assertGreater(len(alone), 16)
    for hosts in (2, 4):
      self.assertEqual(rows(hosts), alone)

  def test_a_host_that_does_not_exist_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "no host 2 of 2"):
      pipeline_lib.shard_grain_dataset(grain.MapDataset.range(4), 2, 2)


class RowsTest(LLMCase):

  def test_rows_equal_the_worked_example(self):
    documents = [{"inputs": [1, 2, E, 4, 5]}]
    kwargs = {"max_target_length": 7, "global_batch_size": 1, "num_epochs": 1}
    (left,) = _take(self.make(documents, **kwargs))
    self.assertEqual(left["targets"].tolist(), [[2, E, 4, 5, 0, 0, 0]])
    self.assertEqual(left["inputs_segmentation"].tolist(), [[1, 1, 2, 2, 2, 0, 0]])
    (right,) = _take(self.make(documents, shift_target=False, **kwargs))
    self.assertEqual(right["inputs"].tolist(), [[E, 1, 2, E, 4, 5, 0]])
    self.assertEqual(right["targets_segmentation"].tolist(), [[1, 1, 1, 2, 2, 0, 0]])
    (none,) = _take(self.make(documents, shift=False, **kwargs))
    self.assertEqual(none["inputs"].tolist(), none["targets"].tolist())

  def test_packed_rows_are_shifted_after_they_are_packed(self):
    documents = [{"inputs": [1, 2, E]}, {"inputs": [4, 5, E]}]
    for name in packing_lib.PACKINGS:
      kwargs = {"max_target_length": 7, "global_batch_size": 1, "num_epochs": 1, "packing": name}
      kwargs["shuffle"] = False
      (left,) = _take(self.make(documents, drop_remainder=False, **kwargs))
      self.assertEqual(left["inputs"].tolist(), [[1, 2, E, 4, 5, E, 0]])
      self.assertEqual(left["targets"].tolist(), [[2, E, 4, 5, E, 0, 0]])
      self.assertEqual(left["inputs_segmentation"].tolist(), [[1, 1, 1, 2, 2, 2, 0]])
      self.assertEqual(left["targets_segmentation"].tolist(), [[1, 1, 2, 2, 2, 0, 0]])
      self.assertEqual(left["inputs_position"].tolist(), [[0, 1, 2, 0, 1, 2, 0]])
      (right,) = _take(self.make(documents, drop_remainder=False, shift_target=False, **kwargs))
      self.assertEqual(right["inputs"].tolist(), [[E, 1, 2, E, 4, 5, E]])
      self.assertEqual(right["targets"].tolist(), [[1, 2, E, 4, 5, E, 0]])
      self.assertEqual(right["inputs_segmentation"].tolist(), [[1, 1, 1, 2, 2, 2, 0]])

  @parameterized.product(name=(None, *packing_lib.PACKINGS), shard=("slice", "batch"))
  def test_every_token_comes_once_per_epoch(self, name, shard):
    documents = _documents()
    iterator = self.make(
        documents, packing=name, shard=shard, num_epochs=2, drop_remainder=False, shift=False
    )
    batches = []
    while True:  # an epoch of the iterator may end before the data does
      found = [_arrays(batch) for batch in iterator]
      if not found:
        break
      batches += found
    if name is None:
      batches = [
          {k: np.where(b["inputs_segmentation"] > 0, v, 0) for k, v in b.items()} for b in batches
      ]
    self.assertEqual(_tokens(batches), _expected(documents, 2))

  def test_seeded_orders_differ_by_epoch_and_seed_and_are_the_same_again(self):
    documents = _documents(16)
    one = _take(self.make(documents), 8)
    self.assert_batches_equal(_take(self.make(documents), 8), one)
    other = _take(self.make(documents, data_shuffle_seed=4), 4)
    self.assertFalse(all((a["inputs"] == b["inputs"]).all() for a, b in zip(one, other)))
    self.assertEqual(_tokens(one[:4]), _tokens(one[4:]))
    self.assertFalse(all((a["inputs"] == b["inputs"]).all() for a, b in zip(one[:4], one[4:])))
    plain = _take(self.make(documents, shuffle=False), 4)
    self.assertEqual(
        plain[0]["inputs"][0][: len(documents[0]["inputs"])].tolist(),
        documents[0]["inputs"].tolist(),
    )

  def test_records_are_not_changed_by_epochs(self):
    documents = [{"inputs": np.array([5, 6, E]), "targets": np.array([5, 6, E])}]
    before = json.dumps([v.tolist() for v in documents[0].values()])
    batches = _take(self.make(documents, global_batch_size=1, shift_target=False), 4)
    for batch in batches:
      self.assertEqual(batch["inputs"][0, :3].tolist(), [E, 5, 6])
    self.assertEqual(json.dumps([v.tolist() for v in documents[0].values()]), before)

  @parameterized.parameters(None, *packing_lib.PACKINGS)
  def test_long_documents_are_cut_divided_or_refused(self, name):
    documents = [{"inputs": np.arange(100, 140)}, {"inputs": np.arange(200, 203)}]
    kwargs = {"packing": name, "num_epochs": 1, "drop_remainder": False, "shift": False}
    with self.assertRaisesRegex(errors.CorpusError, "40 tokens, but a row holds 16"):
      _take(self.make(documents, **kwargs))
    split = _take(self.make(documents, long_documents="split", **kwargs))
    self.assertEqual(_tokens(split), _expected(documents))
    cut = _take(self.make(documents, long_documents="truncate", **kwargs))
    short = [{"inputs": np.arange(100, 116)}, documents[1]]
    self.assertEqual(_tokens(cut), _expected(short))

  def test_an_empty_document_is_a_row_of_padding_and_nothing_in_a_packed_row(self):
    documents = [{"inputs": []}, {"inputs": [1, 2]}]
    kwargs = {"num_epochs": 1, "shuffle": False, "drop_remainder": False, "global_batch_size": 2}
    (rows,) = _take(self.make(documents, **kwargs))
    self.assertEqual(rows["inputs_segmentation"].max(axis=1).tolist(), [0, 1])
    for name in packing_lib.PACKINGS:
      (rows,) = _take(self.make(documents, packing=name, **kwargs))
      self.assertEqual(rows["inputs_segmentation"][:, :2].tolist(), [[1, 1], [0, 0]])

  def test_operations_run_first_and_may_filter(self):
    class Odd(grain.transforms.Filter):

      def filter(self, element):
        return len(element["ids"]) % 2 == 1

    documents = [{"ids": list(range(100 * n, 101 * n))} for n in range(1, 15)]
    kept = [{"inputs": np.array([*d["ids"], E])} for d in documents if len(d["ids"]) % 2]
    operations = [
        Odd(),
        maxtext_olmo.TokenFeatures("ids"),
        maxtext_olmo.AddEndOfDocument(E),
    ]
    for name in (None, *packing_lib.PACKINGS):
      iterator = self.make(
          documents,
          operations=operations,
          packing=name,
          num_epochs=1,
          drop_remainder=False,
          shift=False,
      )
      self.assertEqual(_tokens(_take(iterator)), _expected(kept))

  @parameterized.parameters(None, *packing_lib.PACKINGS)
  def test_records_may_mask_what_is_not_scored(self, name):
    documents = [
        {"inputs": [1, 2, 3, E], "targets_segmentation": [0, 0, 1, 1]},
        {"inputs": [4, 5, E], "targets_segmentation": [0, 1, 1]},
    ]
    batches = _take(
        self.make(documents, packing=name, num_epochs=1, drop_remainder=False, shuffle=False)
    )
    self.assertEqual(_tokens(batches, scored=True), {3: 1, E: 2, 5: 1})
    self.assertEqual(_tokens(batches), {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, E: 2})

  def test_without_padding_rows_of_a_batch_are_as_long_as_the_longest(self):
    documents = [{"inputs": [1, 2, 3]}, {"inputs": [4]}]
    (batch,) = _take(
        self.make(documents, apply_padding=False, num_epochs=1, global_batch_size=2, shuffle=False)
    )
    self.assertEqual(batch["inputs"].tolist(), [[1, 2, 3], [4, 0, 0]])
    self.assertEqual(batch["inputs_segmentation"].tolist(), [[1, 1, 1], [1, 0, 0]])

  def test_unknown_choices_list_the_known_ones(self):
    for kwargs, message in (
        ({"packing": "tetris"}, "packing='tetris' is unknown; choose from None, 'first_fit'"),
        ({"shard": "file"}, "shard='file' is unknown; choose from 'slice', 'batch'"),
        ({"long_documents": "wrap"}, "long_documents='wrap'"),
        ({"num_epochs": -1}, "num_epochs=-1"),
        ({"max_target_length": 0}, "must be positive"),
        ({"dataset": [], "documents": []}, "dataset is empty"),
        ({"worker_count": -1}, "worker_count=-1"),
        ({"batch_class": int}, "batch_class must be dict or a data class"),
    ):
      kwargs.pop("documents", None)
      with self.assertRaisesRegex(errors.ConfigError, message):
        _make(**kwargs)
    with self.assertRaisesRegex(errors.ConfigError, "Host 1 of 2 has no document"):
      _make([{"inputs": [1]}], dataloading_host_index=1, dataloading_host_count=2)

  def test_batches_have_the_requested_class(self):
    batch = next(self.make(batch_class=batch_lib.LLMBatch))
    self.assertIsInstance(batch, batch_lib.LLMBatch)
    self.assertIsInstance(batch.inputs, jax.Array)
    borders = np.asarray(batch.get_document_borders())
    self.assertTrue(borders[:, 0].all())


class SourcesTest(LLMCase):

  def test_array_records_are_a_source(self):
    documents = _documents(12)
    path = self.create_tempfile("a.arrayrecord").full_path
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for document in documents:
      writer.write(document["inputs"].astype(np.int32).tobytes())
    writer.close()

    class Parse(grain.transforms.Map):

      def map(self, element):
        return {"inputs": np.frombuffer(element, np.int32)}

    source = grain.sources.ArrayRecordDataSource([path])
    for name in (None, "first_fit", "planned"):
      iterator = self.make(
          source,
          operations=[Parse()],
          packing=name,
          num_epochs=1,
          drop_remainder=False,
          shift=False,
      )
      self.assertEqual(_tokens(_take(iterator)), _expected(documents))

  @absltest.skipUnless(importlib.util.find_spec("datasets"), "needs the extra [hf]")
  def test_hugging_face_datasets_are_a_source(self):
    import datasets

    documents = _documents(12)
    table = datasets.Dataset.from_dict({"ids": [d["inputs"].tolist() for d in documents]})
    for name in (None, "first_fit", "planned"):
      iterator = self.make(
          table,
          operations=[maxtext_olmo.TokenFeatures("ids")],
          packing=name,
          num_epochs=1,
          drop_remainder=False,
          shift=False,
      )
      self.assertEqual(_tokens(_take(iterator)), _expected(documents))

  @parameterized.parameters(None, *packing_lib.PACKINGS)
  def test_the_documents_of_a_corpus_are_a_source(self, name):
    index_path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    index = index_lib.load_index(index_path)
    found = documents_lib.build_documents(index, index_path + ".documents", 0)
    source = maxtext_olmo.OlmoDocumentSource(index, found)
    iterator = self.make(
        source,
        packing=name,
        long_documents="split",
        num_epochs=1,
        drop_remainder=False,
        shift=False,
        eod_token_id=0,
    )
    tokens = [np.fromfile(index.resolve(i), index.dtype) for i in range(len(index.files))]
    self.assertEqual(_tokens(_take(iterator)), collections.Counter(np.concatenate(tokens).tolist()))


class EpochsTest(LLMCase):

  def test_metrics_include_the_wait_of_the_trainer(self):
    batches = self.make(num_epochs=1)
    taken = len(_take(batches))
    found = batches.metrics()
    self.assertEqual(found["batches"], taken)
    self.assertGreater(found["wait_seconds"], 0)

  def test_no_epochs_is_one_pass(self):
    self.assertEqual(
        _tokens(_take(self.make(num_epochs=0, drop_remainder=False, shift=False))),
        _expected(_documents()),
    )

  def test_batches_span_epochs_and_only_the_last_is_dropped(self):
    documents = _documents(10)
    for drop, rows in ((True, 28), (False, 30)):
      iterator = self.make(documents, num_epochs=3, drop_remainder=drop)
      self.assertLen(iterator, 2 if drop else 3)
      lengths, real = [], 0
      while True:
        announced = len(iterator)
        found = [_arrays(batch) for batch in iterator]
        if not found:
          break
        self.assertLessEqual(len(found), announced)
        lengths.append(len(found))
        real += sum((b["inputs_segmentation"][:, 0] > 0).sum() for b in found)
      self.assertEqual(real, rows)
      self.assertEqual(sum(lengths), 7 if drop else 8)

  def test_the_length_is_correct_in_every_epoch_even_with_rampup(self):
    for factors in (None, {3: 2.0, 5: 0.5}):
      for drop in (True, False):
        iterator = self.make(
            _documents(10), num_epochs=3, drop_remainder=drop, batch_rampup_factors=factors
        )
        for _ in range(5):
          epoch = iter(iterator)
          announced = len(iterator)
          self.assertLen(list(epoch), announced)

  def test_an_epoch_may_restart_or_continue(self):
    documents = _documents(10)
    again = self.make(documents, reset_after_epoch=True)
    first = [_arrays(batch) for batch in again]
    self.assert_batches_equal([_arrays(batch) for batch in again], first)
    on = self.make(documents)
    self.assert_batches_equal([_arrays(batch) for batch in on], first)
    self.assertFalse((next(iter(on))["inputs"] == first[0]["inputs"]).all())

  @parameterized.parameters(*packing_lib.STREAMING)
  def test_a_pass_over_endless_packed_rows_is_as_long_as_their_documents_could_make_it(self, name):
    # Rows hold about two documents each, so a pass of 37 // 4 batches is more than an epoch.
    iterator = self.make(packing=name)
    passes = [[_arrays(batch) for batch in iterator] for _ in range(3)]
    self.assertEqual([len(batches) for batches in passes], [9, 9, 9])
    self.assertLen(iterator, 9)
    stream = _take(self.make(packing=name), 27)
    self.assert_batches_equal([batch for batches in passes for batch in batches], stream)
    ramped = self.make(packing=name, batch_rampup_factors={2: 2.0}, drop_remainder=False)
    self.assertEqual([len(list(ramped)), len(list(ramped))], [6, 5])

  @parameterized.parameters(*packing_lib.STREAMING)
  def test_packed_epochs_are_divided_into_passes_without_loss(self, name):
    documents = [{"inputs": np.full(L, number)} for number in range(1, 13)]  # A row each.
    iterator = self.make(documents, packing=name, num_epochs=3, shift=False)
    passes = [[_arrays(batch) for batch in iterator] for _ in range(4)]
    self.assertEqual([len(batches) for batches in passes], [3, 3, 3, 0])
    for batches in passes[:3]:
      self.assertEqual(_tokens(batches), _expected(documents))

  def test_a_filter_leaves_at_most_as_many_rows(self):
    class Short(grain.transforms.Filter):

      def filter(self, element):
        return len(element["inputs"]) < 9

    iterator = self.make(operations=[Short()])
    self.assertLen(iterator, 9)
    self.assertLen(list(iterator), 9)

  def test_the_number_of_rows_of_split_documents_is_not_guessed(self):
    for name in (None, *packing_lib.STREAMING):
      with self.assertRaisesRegex(TypeError, "known only once they are split"):
        len(self.make(packing=name, long_documents="split"))

  def test_a_state_from_before_passes_had_a_length_continues(self):
    iterator = self.make(packing="first_fit")
    _take(iterator, 20)
    state = iterator.get_state()
    expected = _take(iterator, 12)
    del state["checksum"]
    state |= {"epoch_start": 0, "iterator_length": None}
    resumed = self.make(packing="first_fit")
    resumed.set_state(state)
    self.assertLen(resumed, 9)
    self.assert_batches_equal([_arrays(next(resumed)) for _ in range(9)], expected[:9])

  def test_the_length_of_planned_rows_is_exact(self):
    for drop in (True, False):
      iterator = self.make(packing="planned", num_epochs=2, drop_remainder=drop)
      for _ in range(3):
        epoch = iter(iterator)
        announced = len(iterator)
        self.assertLen(list(epoch), announced)

  def test_the_length_of_many_planned_rows_is_there_once_they_are_counted(self):
    self.enter_context(mock.patch.object(batches_lib, "COUNTED_AT_ONCE", 10))
    with self.assertRaisesRegex(TypeError, "the data has no end"):
      len(self.make(packing="planned"))
    iterator = self.make(packing="planned", num_epochs=2, drop_remainder=False)
    while True:
      try:
        announced = len(iterator)
        break
      except TypeError as error:
        self.assertIn("still being counted", str(error))
        time.sleep(0.01)
    self.assertLen(list(iterator), announced)

  def test_factors_become_stages(self):
    schedule = pipeline_lib.rampup_schedule(8, {10: 2.0, 5: 1.5})
    self.assertEqual(schedule.stages, ((0, 8), (5, 12), (10, 16)))
    self.assertEqual(pipeline_lib.rampup_schedule(8, {0: 0.5}).stages, ((0, 4),))
    self.assertEqual(pipeline_lib.rampup_schedule(8, None).stages, ((0, 8),))
    exact = pipeline_lib.rampup_schedule(56, {100: 488 / 56})
    self.assertEqual(exact.stages, ((0, 56), (100, 488)))

  def test_ramp_up_factors_do_not_multiply_and_hold_from_their_step_on(self):
    batches = _take(self.make(batch_rampup_factors={2: 2.0, 4: 0.5}), 6)
    self.assertEqual([len(b["inputs"]) for b in batches], [4, 4, 8, 8, 2, 2])
    flat = np.concatenate([b["inputs"] for b in batches])
    plain = np.concatenate([b["inputs"] for b in _take(self.make(), 7)])
    np.testing.assert_array_equal(flat, plain)
    for factors in ({1: 0.0}, {-1: 2.0}, {1: 0.1}, ((2, 2.0),)):
      with self.assertRaisesRegex(errors.ConfigError, "batch_rampup_factors"):
        _make(batch_rampup_factors=factors)


class MixTest(LLMCase):

  def mix(self, datasets, lengths, **kwargs):
    rows = []
    for documents in datasets:
      options = {"num_epochs": None, **kwargs.get("rows", {})}
      rows.append(
          pipeline_lib.make_grain_llm_dataset(
              0, 1, documents, 4, L, True, 3, eod_token_id=E, **options
          )
      )
    kwargs.pop("rows", None)
    iterator = pipeline_lib.make_grain_multihost_iterator(
        rows, lengths, _mesh(), 4, 1, worker_count=0, batch_class=dict, **kwargs
    )
    self.addCleanup(iterator.close)
    return iterator

  def share(self, batches):
    first = np.concatenate([b["inputs"][:, 0] for b in batches])
    return (first < 10_000).mean()

  def two(self, *counts):
    large = [{"inputs": d["inputs"] + 10_000} for d in _documents(counts[1], seed=1)]
    return [_documents(counts[0]), large]

  @parameterized.parameters(None, "first_fit", "planned")
  def test_proportions_hold_over_every_range(self, name):
    iterator = self.mix(self.two(20, 30), [20, 30], dataset_weights=[3, 1], rows={"packing": name})
    for _ in range(4):
      self.assertAlmostEqual(self.share(_take(iterator, 4)), 0.75, delta=2 / 16)

  def test_each_member_comes_in_its_own_order(self):
    one, two = self.two(20, 30)
    alone = np.concatenate([b["inputs"] for b in _take(self.make(one), 6)])
    mixed = np.concatenate([b["inputs"] for b in _take(self.mix([one, two], [20, 30]), 6)])
    mine = mixed[mixed[:, 0] < 10_000]
    np.testing.assert_array_equal(mine, alone[: len(mine)])

  def test_an_epoch_is_over_when_each_has_been_seen_once(self):
    iterator = self.mix(self.two(20, 30), [20, 30], dataset_weights=[0.75, 0.25])
    self.assertLen(iterator, 30 * 4 // 4)
    seen = _tokens([_arrays(batch) for batch in iterator])
    self.assertContainsSubset(_expected(self.two(20, 30)[1]), seen)

  def test_a_member_that_ends_stops_the_mix_or_restarts(self):
    kwargs = {"rows": {"num_epochs": 1}, "drop_remainder": False}
    stop = self.mix(self.two(5, 50), [5, 50], **kwargs)
    rows = sum((b["inputs_segmentation"][:, 0] > 0).sum() for b in _take(stop))
    self.assertEqual(rows, 10)
    repeat = self.mix(self.two(5, 50), [5, 50], when_exhausted="repeat", **kwargs)
    batches = []
    for _ in range(3):
      batches += [_arrays(batch) for batch in repeat]
    rows = sum((b["inputs_segmentation"][:, 0] > 0).sum() for b in batches)
    self.assertEqual(rows, 100)
    self.assertContainsSubset(_expected(self.two(5, 50)[1]), _tokens(batches))

  def test_the_state_of_random_access_members_is_one_number(self):
    for name in (None, "planned"):
      iterator = self.mix(self.two(20, 30), [20, 30], rows={"packing": name})
      _take(iterator, 3)
      self.assertEqual(iterator.get_state()["iterator"], {"next_index": 3})

  def test_any_grain_dataset_of_dicts_may_be_a_member(self):
    rows = grain.MapDataset.source(
        [{"inputs": np.full(3, i), "extra": np.float32(i)} for i in range(8)]
    )
    iterator = pipeline_lib.make_grain_multihost_iterator(
        [rows.to_iter_dataset()], [8], _mesh(), 4, 1, worker_count=0, batch_class=dict
    )
    batches = _take(iterator)
    self.assertLen(iterator, 2)
    self.assertEqual(batches[1]["inputs"].tolist(), [[i] * 3 for i in range(4, 8)])
    self.assertEqual(batches[1]["extra"].tolist(), [4, 5, 6, 7])

  @parameterized.parameters("stop", "repeat")
  def test_rows_without_padding_may_be_mixed(self, when_exhausted):
    members = [[{"inputs": [1] * 3}] * 2, [{"inputs": [2] * 5}] * 2]
    rows = {"apply_padding": False, "num_epochs": 1}
    (batch,) = _take(self.mix(members, None, rows=rows, when_exhausted=when_exhausted))
    self.assertEqual(batch["inputs"].shape, (4, 5))
    self.assertEqual(_tokens([batch]), {1: 6, 2: 10})

  @parameterized.parameters(True, False)
  def test_one_dataset_and_one_length_need_no_list(self, random_access):
    rows = pipeline_lib.make_grain_llm_dataset(
        0, 1, _documents(8), 4, L, False, 3, packing=None if random_access else "first_fit"
    )
    for datasets, lengths in ((rows, [8]), ([rows], 8), (rows, np.int64(8)), ([rows], [8])):
      iterator = pipeline_lib.make_grain_multihost_iterator(
          datasets, lengths, _mesh(), 4, 1, worker_count=0, batch_class=dict
      )
      self.addCleanup(iterator.close)
      self.assertLen(iterator, 2)
      self.assertEqual(next(iterator)["inputs"].shape, (4, L))
      self.assertEqual(iterator.get_dataset_size(), 8)

  def test_a_map_dataset_may_be_a_member(self):
    rows = grain.MapDataset.source([{"inputs": np.full(3, i)} for i in range(8)])
    for datasets in (rows, [rows]):
      iterator = pipeline_lib.make_grain_multihost_iterator(
          datasets, 8, _mesh(), 4, 1, worker_count=0, batch_class=dict
      )
      self.assertLen(list(iterator), 2)

  def test_impossible_mixes_say_why(self):
    two = self.two(3, 3)
    with self.assertRaisesRegex(errors.ConfigError, "2 datasets, 1 weights"):
      self.mix(two, [3, 3], dataset_weights=[1])
    with self.assertRaisesRegex(errors.ConfigError, "positive and finite"):
      self.mix(two, [3, 3], dataset_weights=[1, 0])
    with self.assertRaisesRegex(errors.ConfigError, "when_exhausted='wait'"):
      self.mix(two, [3, 3], when_exhausted="wait")
    rows = [
        pipeline_lib.make_grain_llm_dataset(0, 1, two[0], 4, L, True, 3, shard=shard)
        for shard in ("slice", "batch")
    ]
    with self.assertRaisesRegex(errors.ConfigError, "the same shard"):
      pipeline_lib.make_grain_multihost_iterator(rows, [3, 3], _mesh(), 4, 1)


class StateTest(LLMCase):

  def test_a_state_of_another_stream_is_refused(self):
    state = self.make().get_state()
    other = self.make(data_shuffle_seed=4)
    before = other.get_state()
    with self.assertRaisesRegex(errors.ResumeError, "another stream"):
      other.set_state(state)
    self.assertEqual(other.get_state(), before)
    with self.assertRaisesRegex(errors.ResumeError, "not saved by this kind"):
      other.set_state({"step": 1})

  @parameterized.parameters(None, "planned")
  def test_after_another_batch_size_it_can_go_back_and_start_again(self, name):
    kwargs = {"packing": name, "shard": "batch", "grain_packing_bin_count": 4}
    first = self.make(**kwargs)
    states = []
    for _ in range(4):
      next(first)
      states.append(json.loads(json.dumps(first.get_state())))
    second = self.make(**kwargs, global_batch_size=2, reset_after_epoch=True)
    beginning = _take(self.make(**kwargs, global_batch_size=2), 2)
    for state, position in ((states[3], 16), (states[1], 8)):
      second.set_state(state)
      self.assertEqual(second.position, position)
    second.reset()
    for got, expected in zip(_take(second, 2), beginning):
      np.testing.assert_array_equal(got["inputs"], expected["inputs"])

  @parameterized.parameters(None, "planned", "first_fit")
  def test_a_run_may_continue_with_another_batch_size(self, name):
    kwargs = {"packing": name, "shard": "batch", "grain_packing_bin_count": 4}
    expected = np.concatenate([b["inputs"] for b in _take(self.make(**kwargs), 5)])
    first = self.make(**kwargs)
    rows = [b["inputs"] for b in _take(first, 3)]
    second = self.make(**kwargs, global_batch_size=2)
    second.set_state(json.loads(json.dumps(first.get_state())))
    rows += [b["inputs"] for b in _take(second, 4)]
    np.testing.assert_array_equal(np.concatenate(rows), expected)
    if name != "first_fit":
      self.assertEqual(second.position, 20)

  def test_a_plain_script_with_workers_runs_and_closes_without_noise(self):
    code = (
        "import jax, numpy as np, maxtext_olmo\n"
        "if __name__ == '__main__':\n"
        "  mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))\n"
        "  documents = [{'inputs': [n] * (n % 5 + 1)} for n in range(30)]\n"
        "  for packing in (None, 'first_fit'):\n"
        "    iterator = maxtext_olmo.make_grain_llm_iterator(\n"
        "        0, 1, mesh, documents, 4, 8, True, 0, worker_count=1, packing=packing)\n"
        "    next(iterator)\n"
        "    iterator.close()\n"
        "    iterator.close()\n"
    )
    script = self.create_tempfile("script.py", code).full_path
    done = subprocess.run(
        [sys.executable, script],
        env=distributed.child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

  def test_the_iterator_is_the_documented_one(self):
    self.assertIsInstance(self.make(), multihost.MultiHostDataLoadIterator)


if __name__ == "__main__":
  absltest.main()
