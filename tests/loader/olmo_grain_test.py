"""Tests of `dataset_type=olmo_grain` in one process."""

import gc
import os
import pathlib
import threading
import types

import grain
import hypothesis
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import olmo_grain
from maxtext_olmo.order import permutations
from tests import corpora

STARTS_PROCESSES = True

jax.config.update("jax_num_cpu_devices", 4)

_NAMES = {
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
}


def _mesh() -> jax.sharding.Mesh:
  return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))


class OlmoCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.index_path, self.rows = corpora.write_corpus(self.directory)

  def config(self, **values) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {
            **config_lib.defaults(),
            "olmo_index_path": self.index_path,
            "max_target_length": 8,
            "global_batch_size_to_load": 4,
            "vocab_size": 100,
            "data_sharding": (("data",),),
            "data_shuffle_seed": 11,
            **values,
        }
    )

  def make(self, **values):
    train, evaluation = maxtext_olmo.create_data_iterator(self.config(**values), _mesh())
    self.addCleanup(train.close)
    if evaluation is not None:
      self.addCleanup(evaluation.close)
    return train, evaluation

  def train(self, **values):
    return self.make(**values)[0]

  def take(self, iterator, count):
    return [np.asarray(next(iterator)["inputs"]) for _ in range(count)]


class MixtureTest(OlmoCase):

  def test_a_mixture_gives_each_label_its_epochs_and_goes_on_after_a_restore(self):
    values = {"olmo_mixture": {"label-0": 2.0, "label-*": 0.5}, "olmo_num_epochs": 1}
    train = self.train(**values)
    ids = []
    for step in range(len(train)):
      ids.append(train.row_numbers(step))
    ids = np.concatenate(ids)
    index = index_lib.load_index(self.index_path)
    files, _ = index.locate(ids[ids >= 0])
    first = np.array([index.files[f].label == "label-0" for f in files])
    sizes = dict.fromkeys(("label-0", "label-1"), 0)
    for entry in index.files:
      sizes[entry.label] += entry.n_instances
    self.assertEqual(first.sum(), 2 * sizes["label-0"])
    self.assertEqual((~first).sum(), round(0.5 * sizes["label-1"]))
    self.take(train, 5)
    state = train.get_state()
    expected = self.take(train, 3)
    resumed = self.train(**values)
    resumed.set_state(state)
    np.testing.assert_array_equal(self.take(resumed, 3), expected)
    other = self.train(olmo_mixture={"label-0": 2.0, "label-1": 0.25})
    with self.assertRaisesRegex(errors.ResumeError, "mixture"):
      other.set_state(state)

  def test_labels_that_a_mixture_leaves_out_are_named_in_the_log(self):
    with self.assertLogs(level="WARNING") as logs:
      self.train(olmo_mixture={"label-1": 1.0})
    self.assertIn("leaves out 1 labels, which never come: label-0", "".join(logs.output))

  def test_a_mixture_that_is_not_a_dict_of_numbers_is_an_error(self):
    for wrong in ("label-0=2", {"label-0": "much"}):
      config = types.SimpleNamespace(**{**self.config().to_dict(), "olmo_mixture": wrong})
      with self.assertRaisesRegex(errors.ConfigError, "should be a dict from label to number"):
        config_lib.Options.read(config)
    with self.assertRaisesRegex(errors.ConfigError, "olmo_allow_corpus_change='no', not 'extend'"):
      config_lib.Options.read(
          self.config(olmo_mixture={"label-0": 1.0}, olmo_allow_corpus_change="extend")
      )
    with self.assertRaisesRegex(
        errors.ConfigError, "olmo_mixture_unit='files' must be one of epochs"
    ):
      config_lib.Options.read(self.config(olmo_mixture_unit="files"))


class TrainTest(OlmoCase):

  def test_a_batch_is_a_dict_of_six_global_int32_arrays(self):
    batch = next(self.train())
    self.assertEqual(set(batch), _NAMES)
    for array in batch.values():
      self.assertIsInstance(array, jax.Array)
      self.assertEqual((array.shape, array.dtype), ((4, 8), np.int32))
      self.assertEqual(array.sharding.spec, jax.sharding.PartitionSpec(("data",)))
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
    self.assertFalse(np.asarray(batch["targets_segmentation"])[:, -1].any())

  def test_each_epoch_has_every_instance_once_in_another_order(self):
    iterator = self.train()
    batches = self.take(iterator, 3 * len(self.rows) // 4)
    served = np.concatenate(batches)
    per_epoch = [served[e * len(self.rows) : (e + 1) * len(self.rows)] for e in range(2)]
    expected = sorted(map(tuple, self.rows.tolist()))
    for epoch in per_epoch:
      self.assertEqual(sorted(map(tuple, epoch.tolist())), expected)
    self.assertFalse(np.array_equal(*per_epoch))

  def test_instance_ids_tell_what_a_step_holds_without_reading(self):
    iterator = self.train()
    for step, batch in enumerate(self.take(iterator, 5)):
      np.testing.assert_array_equal(self.rows[iterator.row_numbers(step)], batch)

  @parameterized.parameters(0, 1, 2, 3)
  def test_batches_do_not_depend_on_worker_count(self, workers):
    expected = self.take(self.train(olmo_prefetch_batches=0), 9)
    iterator = self.train(grain_worker_count=workers, grain_per_worker_buffer_size=2)
    np.testing.assert_array_equal(self.take(iterator, 5), expected[:5])
    state = iterator.get_state()
    self.assertEqual(state["position"], 20)
    resumed = self.train(grain_worker_count=(workers + 1) % 3)
    resumed.set_state(state)
    np.testing.assert_array_equal(self.take(resumed, 4), expected[5:])

  @hypothesis.given(
      stops=st.lists(st.integers(0, 40), min_size=1, max_size=4),
      sizes=st.lists(st.sampled_from([2, 4, 6, 8]), min_size=5, max_size=5),
  )
  @hypothesis.settings(max_examples=15, deadline=None)
  def test_any_interruptions_and_batch_sizes_neither_repeat_nor_skip(self, stops, sizes):
    state, ledger = None, []
    for size, steps in zip(sizes, [*stops, 3]):
      iterator = self.train(global_batch_size_to_load=size, olmo_prefetch_batches=1)
      if state is not None:
        iterator.set_state(state)
      ledger += [row for batch in self.take(iterator, steps) for row in batch]
      state = iterator.get_state()
      iterator.close()
    expected = self.rows[self.train().stream.instance_ids(np.arange(len(ledger)))]
    np.testing.assert_array_equal(np.array(ledger).reshape(-1, 8), expected)

  def test_iter_does_not_move_the_train_position(self):
    iterator = self.train()
    expected = self.take(self.train(), 4)
    got = self.take(iterator, 2) + self.take(iter(iterator), 2)
    np.testing.assert_array_equal(got, expected)

  def test_reset_goes_back_to_where_the_iterator_began(self):
    iterator = self.train(initial_step=3)
    first = self.take(iterator, 3)
    iterator.reset()
    np.testing.assert_array_equal(self.take(iterator, 3), first)

  def test_a_finite_stream_pads_its_last_batch_and_stops(self):
    iterator = self.train(olmo_num_epochs=1)
    self.assertLen(iterator, 31)
    batches = [jax.tree.map(np.asarray, batch) for batch in iterator]
    self.assertLen(batches, 31)
    segments = np.concatenate([batch["inputs_segmentation"][:, 0] for batch in batches])
    self.assertEqual(segments.tolist(), [1] * 123 + [0])
    with self.assertRaises(StopIteration):
      next(iterator)

  def test_an_endless_stream_has_no_length(self):
    with self.assertRaisesRegex(TypeError, "no end"):
      len(self.train())

  def test_padding_batches_follow_the_end_where_asked(self):
    iterator = self.train(olmo_num_epochs=1, generate_padding_batch_train=True, initial_step=31)
    for _ in range(3):
      batch = next(iterator)
      self.assertEqual(set(batch), _NAMES)
      self.assertFalse(any(np.asarray(array).any() for array in batch.values()))
    self.assertEqual(iterator.step, 31)

  def test_more_rows_loaded_than_trained_on_are_padding_and_the_position_counts_the_others(self):
    iterator = self.train(global_batch_size_to_load=8, global_batch_size_to_train_on=4)
    expected = self.take(self.train(), 3)
    for batch in expected:
      got = np.asarray(next(iterator)["inputs"])
      np.testing.assert_array_equal(got[:4], batch)
      self.assertFalse(got[4:].any())
    self.assertEqual(iterator.position, 12)

  def test_the_batch_schedule_changes_the_shape_and_nothing_else(self):
    iterator = self.train(olmo_batch_schedule=((0, 2), (4, 8)))
    batches = self.take(iterator, 6)
    self.assertEqual([len(batch) for batch in batches], [2, 2, 2, 2, 8, 8])
    np.testing.assert_array_equal(
        np.concatenate(batches), np.concatenate(self.take(self.train(), 6))
    )

  @parameterized.parameters(0, 1, 3)
  def test_batches_sent_ahead_change_neither_batches_nor_state(self, depth):
    expected = self.take(self.train(olmo_device_prefetch=0, olmo_prefetch_batches=0), 8)
    iterator = self.train(olmo_device_prefetch=depth)
    for step, batch in enumerate(expected):
      self.assertEqual(iterator.get_state()["position"], 4 * step)
      np.testing.assert_array_equal(np.asarray(next(iterator)["inputs"]), batch)
    state = iterator.get_state()
    following = self.take(iterator, 2)
    iterator.set_state(state)
    np.testing.assert_array_equal(self.take(iterator, 2), following)

  def test_batches_that_are_kept_never_change(self):
    iterator = self.train()
    kept = [next(iterator) for _ in range(25)]
    copies = [jax.tree.map(lambda x: np.array(x, copy=True), batch) for batch in kept]
    self.take(iterator, 60)
    for batch, copy in zip(kept, copies):
      for name, array in batch.items():
        np.testing.assert_array_equal(np.asarray(array), copy[name], err_msg=name)

  def test_it_says_what_loading_costs(self):
    iterator = self.train()
    self.take(iterator, 6)
    found = iterator.metrics()
    self.assertEqual(found["batches"], 6)
    self.assertGreater(found["read_seconds"], 0)
    # Two bytes per token cross for a uint16 corpus.
    self.assertGreaterEqual(found["bytes_to_device"], 6 * 4 * 8 * 2)

  def test_a_closed_iterator_says_so(self):
    iterator = self.train()
    next(iterator)
    iterator.close()
    iterator.close()
    with self.assertRaises(ValueError):
      next(iterator)

  def test_any_object_with_the_attributes_is_a_config(self):
    config = types.SimpleNamespace(**self.config().to_dict())
    train, evaluation = maxtext_olmo.create_data_iterator(config, _mesh())
    self.addCleanup(train.close)
    self.assertIsNone(evaluation)
    np.testing.assert_array_equal(self.take(train, 1), self.take(self.train(), 1))

  def test_sequence_length_may_change_within_the_maximum(self):
    path, rows = corpora.write_corpus(
        self.create_tempdir().full_path, max_target_sequence_length=32
    )
    short = self.train(olmo_index_path=path)
    first = self.take(short, 4)
    long = self.train(olmo_index_path=path, max_target_length=16)
    long.set_state(short.get_state())
    both = np.concatenate([np.concatenate(part).ravel() for part in (first, self.take(long, 2))])
    ids = short.stream.instance_ids(np.arange(32))
    np.testing.assert_array_equal(both, rows[ids].ravel())

  def test_the_start_is_announced_in_one_line(self):
    with self.assertLogs(level="INFO") as logs:
      self.train(initial_step=40)
    lines = [line for line in logs.output if "olmo_grain" in line]
    self.assertLen(lines, 1)
    self.assertRegex(
        lines[0],
        r"step 40 at position 160 \(epoch 1, place 37 of 123\), first instances \[\d+, .*fingerprint"
        r" \S+, order feistel, seed 11, split none",
    )


class EvalTest(OlmoCase):

  def test_eval_is_held_out_of_training_in_every_epoch_and_each_counts_once(self):
    train, evaluation = self.make(eval_interval=5, olmo_eval_instances=10, initial_step=9)
    held = evaluation.row_numbers(0).tolist()
    batches = [jax.tree.map(np.asarray, batch) for batch in evaluation]
    self.assertLen(batches, 3)
    real = np.concatenate([batch["inputs_segmentation"][:, 0] for batch in batches])
    self.assertEqual(real.tolist(), [1] * 10 + [0] * 2)
    held = np.concatenate([evaluation.row_numbers(step) for step in range(3)])[:10]
    np.testing.assert_array_equal(
        np.concatenate([batch["inputs"] for batch in batches])[:10], self.rows[held]
    )
    seen = np.concatenate([train.row_numbers(step) for step in range(3 * 123 // 4)])
    self.assertEmpty(set(held.tolist()) & set(seen.tolist()))
    self.assertLen(set(seen.tolist()), 113)

  def test_eval_is_the_same_whenever_it_runs(self):
    _, evaluation = self.make(eval_interval=5, olmo_eval_instances=10, initial_step=9)
    _, other = self.make(eval_interval=5, olmo_eval_instances=10, data_shuffle_seed=99)
    first = [np.asarray(batch["inputs"]) for batch in evaluation]
    next(iter(evaluation))
    again = [np.asarray(batch["inputs"]) for batch in evaluation]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, [np.asarray(batch["inputs"]) for batch in other])

  def test_train_and_eval_look_at_each_file_once(self):
    stats = []
    original = os.stat

    def counting(path, *args, **kwargs):
      if str(path).endswith(".npy"):
        stats.append(str(path))
      return original(path, *args, **kwargs)

    os.stat = counting
    self.addCleanup(setattr, os, "stat", original)
    self.make(eval_interval=5, olmo_eval_instances=10)
    self.assertLen(stats, 4)
    self.assertLen(set(stats), 4)

  def test_another_index_can_be_evaluated_on(self):
    path, rows = corpora.write_corpus(
        self.create_tempdir().full_path, tokens_per_file=(50,), seed=77
    )
    _, evaluation = self.make(eval_interval=5, olmo_eval_index_path=path)
    got = np.concatenate([np.asarray(batch["inputs"]) for batch in evaluation])
    np.testing.assert_array_equal(got[: len(rows)], rows)

  def test_padding_batches_follow_the_end_where_asked(self):
    _, evaluation = self.make(
        eval_interval=5, olmo_eval_instances=3, generate_padding_batch_eval=True
    )
    iterator = iter(evaluation)
    next(iterator)
    self.assertFalse(np.asarray(next(iterator)["inputs_segmentation"]).any())


class ErrorsTest(OlmoCase):

  def test_a_file_replaced_by_one_of_another_size_stops_before_training(self):
    path = pathlib.Path(self.directory) / "data" / "part-001.npy"
    os.truncate(path, 100)
    with self.assertRaisesRegex(errors.CorpusError, r"part-001\.npy.*300.*100"):
      self.train()

  def test_a_missing_file_stops_before_training(self):
    (pathlib.Path(self.directory) / "data" / "part-003.npy").unlink()
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy"):
      self.train()

  @parameterized.parameters(0, 1)
  def test_a_file_truncated_during_training_stops_the_run(self, workers):
    iterator = self.train(grain_worker_count=workers)
    next(iterator)
    os.truncate(pathlib.Path(self.directory) / "data" / "part-003.npy", 64)
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy"):
      self.take(iterator, 60)

  @parameterized.product(workers=(0, 1), on_device=(0, 1))
  def test_after_an_error_the_same_step_is_tried_again(self, workers, on_device):
    expected = self.take(self.train(), 40)
    iterator = self.train(grain_worker_count=workers, olmo_device_prefetch=on_device)
    path = pathlib.Path(self.directory) / "data" / "part-003.npy"
    content = path.read_bytes()
    os.truncate(path, 64)
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy"):
      self.take(iterator, 40)
    path.write_bytes(content)
    step = iterator.step
    np.testing.assert_array_equal(self.take(iterator, 40 - step), expected[step:])

  def test_a_dropped_iterator_leaves_no_threads(self):
    before = set(threading.enumerate())
    for _ in range(3):
      iterator, _ = maxtext_olmo.create_data_iterator(self.config(), _mesh())
      next(iterator)
      del iterator
    gc.collect()
    for thread in set(threading.enumerate()) - before:
      if thread.name.startswith(("olmo-ahead", "olmo-read", "grain-prefetch")):
        thread.join(60)
        self.assertFalse(thread.is_alive(), thread.name)

  def test_a_token_outside_the_vocabulary_stops_the_run(self):
    with self.assertRaisesRegex(errors.CorpusError, "outside the vocabulary of 50"):
      self.take(self.train(vocab_size=50), 2)

  def test_another_sequence_length_without_a_maximum_is_refused(self):
    with self.assertRaisesRegex(errors.CorpusError, "max-target-sequence-length"):
      self.train(max_target_length=4)

  def test_a_batch_that_does_not_divide_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "5 rows over 2 shards"):
      self.train(global_batch_size_to_load=5)

  def test_data_that_moved_is_found_by_a_remap(self):
    expected = self.take(self.train(), 2)
    moved = self.create_tempdir().full_path + "/elsewhere"
    os.rename(self.directory + "/data", moved)
    iterator = self.train(olmo_path_remap_from=self.directory + "/data", olmo_path_remap_to=moved)
    np.testing.assert_array_equal(self.take(iterator, 2), expected)

  def test_an_empty_corpus_is_an_error(self):
    path, _ = corpora.write_corpus(self.create_tempdir().full_path, tokens_per_file=(5, 7))
    with self.assertRaisesRegex(errors.CorpusError, "has no instance: no file holds 8 tokens"):
      self.train(olmo_index_path=path)

  @parameterized.parameters(
      ({"data_shuffle_seed": 12}, "seed: the checkpoint has 11, this run has 12"),
      ({"enable_data_shuffling": False}, "order: the checkpoint has 'feistel'"),
      ({"olmo_eval_instances": 4}, "split: the checkpoint has 'none'"),
  )
  def test_a_state_of_another_stream_is_refused_and_nothing_moves(self, change, message):
    state = self.train(initial_step=7).get_state()
    iterator = self.train(**change)
    next(iterator)
    with self.assertRaisesRegex(errors.ResumeError, message):
      iterator.set_state(state)
    self.assertEqual(iterator.step, 1)


class OrbaxTest(OlmoCase):

  def test_it_saves_and_restores_through_orbax_as_grain_iterators_do(self):
    iterator = self.train()
    self.take(iterator, 5)
    manager = ocp.CheckpointManager(pathlib.Path(self.create_tempdir().full_path))
    self.addCleanup(manager.close)
    manager.save(5, args=grain.checkpoint.CheckpointSave(iterator), force=True)
    manager.wait_until_finished()
    expected = self.take(iterator, 3)
    other = self.train(grain_worker_count=1)
    manager.restore(5, args=grain.checkpoint.CheckpointRestore(other))
    np.testing.assert_array_equal(self.take(other, 3), expected)
    self.assertIs(iterator.local_iterator, iterator)


class DataLoaderTest(OlmoCase):

  def _loader(self, **values):
    return olmo_grain.make_olmo_grain_data_loader(
        index_lib.load_index(self.index_path),
        **{"seed": 11, "batch_size": 4, "shard_index": 0, "shard_count": 1, **values},
    )

  def _inputs(self, loader, count, name="inputs"):
    iterator = iter(loader)
    return [next(iterator)[name] for _ in range(count)]

  @parameterized.parameters(0, 1, 2, 3)
  def test_its_batches_are_those_of_the_train_iterator_for_any_workers(self, workers):
    expected = self.take(self.train(), 36)
    got = self._inputs(self._loader(grain_worker_count=workers, grain_worker_buffer_size=2), 36)
    np.testing.assert_array_equal(got, expected)

  @parameterized.parameters(2, 4)
  def test_hosts_share_the_global_batches(self, hosts):
    expected = self.take(self.train(), 6)
    parts = [
        self._inputs(
            self._loader(
                batch_size=4 // hosts, shard_index=h, shard_count=hosts, initial_step=8 // hosts
            ),
            4,
        )
        for h in range(hosts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected[2:])

  def test_all_arrays_equal_those_of_the_train_iterator(self):
    batch, expected = next(iter(self._loader())), next(self.train())
    self.assertEqual(set(batch), _NAMES)
    for name, array in batch.items():
      np.testing.assert_array_equal(array, expected[name])

  def test_without_shift_it_gives_the_tokens_as_they_are(self):
    loader = self._loader(shift_to_inputs_targets=False, apply_ngram_filter=False)
    batch = next(iter(loader))
    self.assertEqual(set(batch), {"tokens", "instance_id", "file_id"})
    np.testing.assert_array_equal(batch["tokens"], self.rows[batch["instance_id"]])

  def test_the_filter_masks_and_can_be_left_out(self):
    self.assertIn("instance_mask", next(iter(self._loader(shift_to_inputs_targets=False))))

  def test_the_maxtext_order_is_served_too(self):
    cache = self.create_tempdir().full_path
    got = self._inputs(self._loader(order="maxtext", order_cache_dir=cache), 3)
    order = permutations.make_order("maxtext", num_instances=123, seed=11, cache_dir=cache)
    np.testing.assert_array_equal(np.concatenate(got), self.rows[order.ids(0, np.arange(12))])

  def test_grain_state_restores_into_the_same_workers(self):
    iterator = iter(self._loader())
    for _ in range(3):
      next(iterator)
    state = iterator.get_state()
    expected = next(iterator)["inputs"]
    other = iter(self._loader())
    other.set_state(state)
    np.testing.assert_array_equal(next(other)["inputs"], expected)


if __name__ == "__main__":
  absltest.main()
