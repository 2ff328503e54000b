"""Tests of `dataset_type=olmo_grain`; laws_test has what holds for every row source."""

import os
import pathlib
import types
from typing import Any, ClassVar

import grain
import hypothesis
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

import maxtext_olmo
from maxtext_olmo import errors
from tests import corpora
from tests.loader import cases

_NAMES = {
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
}


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 4)
  cases.compile_fast()


class OlmoCase(cases.LoaderCase):

  defaults: ClassVar[dict[str, Any]] = {**cases.WINDOWS, "data_sharding": (("data",),)}
  axes: ClassVar[dict[str, int]] = {"data": 2, "tensor": 2}

  def take(self, iterator, count):
    return cases.take_inputs(iterator, count)


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
    served = np.concatenate(self.take(self.train(), 3 * len(self.rows) // 4))
    per_epoch = [served[e * len(self.rows) : (e + 1) * len(self.rows)] for e in range(2)]
    expected = sorted(map(tuple, self.rows.tolist()))
    for epoch in per_epoch:
      self.assertEqual(sorted(map(tuple, epoch.tolist())), expected)
    self.assertFalse(np.array_equal(*per_epoch))

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

  def test_more_rows_loaded_than_trained_on_are_padding_and_the_position_counts_the_others(self):
    iterator = self.train(global_batch_size_to_load=8, global_batch_size_to_train_on=4)
    for batch in self.take(self.train(), 3):
      got = np.asarray(next(iterator)["inputs"])
      np.testing.assert_array_equal(got[:4], batch)
      self.assertFalse(got[4:].any())
    self.assertEqual(iterator.position, 12)

  def test_the_batch_schedule_changes_the_shape_and_nothing_else(self):
    batches = self.take(self.train(olmo_batch_schedule=((0, 2), (4, 8))), 6)
    self.assertEqual([len(batch) for batch in batches], [2, 2, 2, 2, 8, 8])
    expected = np.concatenate(self.take(self.train(), 6))
    np.testing.assert_array_equal(np.concatenate(batches), expected)

  def test_it_says_what_loading_costs(self):
    iterator = self.train()
    self.take(iterator, 6)
    found = iterator.metrics()
    self.assertEqual(found["batches"], 6)
    self.assertGreater(found["read_seconds"], 0)
    # Two bytes per token cross for a uint16 corpus.
    self.assertGreaterEqual(found["bytes_to_device"], 6 * 4 * 8 * 2)

  def test_any_object_with_the_attributes_is_a_config(self):
    config = types.SimpleNamespace(**self.config().to_dict())
    train, evaluation = maxtext_olmo.create_data_iterator(config, cases.device_mesh(self.axes))
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
      self.take(self.train(initial_step=40), 2)
    lines = [line for line in logs.output if "olmo_grain" in line]
    self.assertLen(lines, 1)
    self.assertRegex(
        lines[0],
        r"step 40 at position 160 \(epoch 1, place 37 of 123\), first instances \[\d+, .*"
        r"fingerprint \S+, order feistel, seed 11, split none",
    )

  def test_a_restored_position_is_announced_and_no_other(self):
    first = self.train()
    self.take(first, 5)
    second = self.train()
    with self.assertLogs(level="INFO") as logs:
      second.set_state(first.get_state())
      self.take(second, 1)
    lines = [line for line in logs.output if "olmo_grain" in line]
    self.assertLen(lines, 1)
    self.assertIn("step 5 at position 20 (epoch 0, place 20 of 123)", lines[0])

  def test_it_saves_and_restores_through_orbax_as_grain_iterators_do(self):
    iterator = self.train()
    self.take(iterator, 5)
    with ocp.CheckpointManager(pathlib.Path(self.create_tempdir().full_path)) as manager:
      manager.save(5, args=grain.checkpoint.CheckpointSave(iterator), force=True)
      manager.wait_until_finished()
      expected = self.take(iterator, 3)
      other = self.train()
      manager.restore(5, args=grain.checkpoint.CheckpointRestore(other))
    np.testing.assert_array_equal(self.take(other, 3), expected)


class MixtureTest(OlmoCase):

  def test_a_mixture_gives_each_label_its_epochs_and_resumes(self):
    values = {"olmo_mixture": {"label-0": 2.0, "label-*": 0.5}, "olmo_num_epochs": 1}
    train = self.train(**values)
    ids = np.concatenate([train.row_numbers(step) for step in range(len(train))])
    index = maxtext_olmo.load_index(self.index_path)
    files, _ = index.locate(ids[ids >= 0])
    first = np.array([index.files[f].label == "label-0" for f in files])
    sizes = dict.fromkeys(("label-0", "label-1"), 0)
    for entry in index.files:
      sizes[entry.label] += entry.n_instances
    self.assertEqual(first.sum(), 2 * sizes["label-0"])
    self.assertEqual((~first).sum(), round(0.5 * sizes["label-1"]))
    state = self.train(**values, initial_step=5).get_state()
    again = self.train(**values)
    again.set_state(state)
    self.assertLen(again, len(train))
    other = self.train(olmo_mixture={"label-0": 2.0, "label-1": 0.25})
    with self.assertRaisesRegex(errors.ResumeError, "mixture"):
      other.set_state(state)

  def test_labels_that_a_mixture_leaves_out_are_named_in_the_log(self):
    with self.assertLogs(level="WARNING") as logs:
      self.train(olmo_mixture={"label-1": 1.0})
    self.assertIn("leaves out 1 labels, which are never read: label-0", "".join(logs.output))


class EvalTest(OlmoCase):

  def test_eval_instances_are_held_out_of_every_epoch_and_evaluated_once(self):
    train, evaluation = self.make(eval_interval=5, olmo_eval_instances=10, initial_step=9)
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

  def test_padding_batches_follow_the_end_on_request(self):
    _, evaluation = self.make(
        eval_interval=5, olmo_eval_instances=3, generate_padding_batch_eval=True
    )
    iterator = iter(evaluation)
    next(iterator)
    self.assertFalse(np.asarray(next(iterator)["inputs_segmentation"]).any())


class ErrorsTest(OlmoCase):

  def test_a_token_outside_the_vocabulary_stops_the_run(self):
    with self.assertRaisesRegex(errors.CorpusError, "outside the vocabulary of 50.*byte"):
      self.take(self.train(vocab_size=50), 2)

  def test_another_sequence_length_without_a_maximum_is_refused(self):
    with self.assertRaisesRegex(errors.CorpusError, "max-target-sequence-length"):
      self.train(max_target_length=4)

  def test_a_batch_that_does_not_divide_over_the_devices_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "5 rows over 2 shards"):
      self.train(global_batch_size_to_load=5)

  def test_an_empty_corpus_is_an_error(self):
    path, _ = corpora.write_corpus(self.create_tempdir().full_path, tokens_per_file=(5, 7))
    with self.assertRaisesRegex(errors.CorpusError, "has no instances: no file holds 8 tokens"):
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


class FilesTest(OlmoCase):
  """Files that change; each test has its own."""

  def setUp(self):
    super().setUp()
    directory = self.create_tempdir().full_path
    self.index_path, _ = corpora.write_corpus(directory)
    self.data = pathlib.Path(directory, "data")

  def test_a_file_replaced_by_one_of_another_size_stops_before_training(self):
    os.truncate(self.data / "part-001.npy", 100)
    with self.assertRaisesRegex(errors.CorpusError, r"part-001\.npy.*300.*100"):
      self.train()

  def test_a_missing_file_stops_before_training(self):
    (self.data / "part-003.npy").unlink()
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy"):
      self.train()

  def test_a_file_truncated_during_training_stops_the_run(self):
    iterator = self.train()
    next(iterator)
    os.truncate(self.data / "part-003.npy", 64)
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy"):
      self.take(iterator, 60)

  @parameterized.parameters(False, True)
  def test_a_file_replaced_between_the_start_and_its_first_read_stops_the_run(self, evaluation):
    iterator = self.make(
        enable_data_shuffling=False,
        olmo_prefetch_batches=1,
        eval_interval=5,
        olmo_eval_index_path=self.index_path,
    )[evaluation]
    path = self.data / "part-003.npy"
    np.zeros(514, np.uint16).tofile(self.data / "new")
    os.replace(self.data / "new", path)
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy was replaced or changed"):
      self.take(iter(iterator), 25)

  def test_data_that_moved_is_found_by_a_remap(self):
    expected = self.take(self.train(), 2)
    moved = self.create_tempdir().full_path + "/elsewhere"
    os.rename(self.data, moved)
    iterator = self.train(olmo_path_remap_from=str(self.data), olmo_path_remap_to=moved)
    np.testing.assert_array_equal(self.take(iterator, 2), expected)


if __name__ == "__main__":
  absltest.main()
