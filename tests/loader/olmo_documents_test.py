"""`dataset_type=olmo_documents`."""

import collections
import os
import pathlib
import subprocess
import sys

import grain
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from tests import distributed
from tests.loader import document_cases
from tests.loader import laws_cases

STARTS_PROCESSES = True

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _tokens(batches):
  found = collections.Counter()
  for batch in batches:
    inputs = np.asarray(batch["inputs"])
    found.update(inputs[np.asarray(batch["inputs_segmentation"]) != 0].tolist())
  return found


class TrainTest(document_cases.DocumentsCase):

  @parameterized.parameters("planned", "first_fit", "best_fit", "concat_then_split")
  def test_every_token_comes_once_per_epoch(self, packing):
    train = self.make(olmo_packing=packing, olmo_num_epochs=2, olmo_shift="right")
    batches = [{k: np.asarray(v) for k, v in batch.items()} for batch in train]
    found = collections.Counter()
    for batch in batches:
      found.update(batch["targets"][batch["targets_segmentation"] != 0].tolist())
    expected = collections.Counter(np.concatenate(self.tokens).tolist() * 2)
    self.assertEqual(found, expected)

  def test_segments_are_documents_and_positions_count_within_them(self):
    for batch in self.take(self.make(), 5):
      for row in range(4):
        segments = batch["inputs_segmentation"][row]
        for segment in range(1, segments.max() + 1):
          here = np.flatnonzero(segments == segment)
          self.assertEqual(batch["inputs_position"][row, here].tolist(), list(range(len(here))))
          self.assertNotIn(0, batch["inputs"][row, here[:-1]])

  @parameterized.parameters(
      {"olmo_packing": "planned"},
      {"olmo_packing": "none", "olmo_long_documents": "truncate"},
      {"olmo_packing": "first_fit"},
      {"olmo_packing": "none", "olmo_long_documents": "split"},
      {"olmo_packing": "planned", "olmo_mixture": {"label-0": 2.0, "label-*": 0.5}},
      {"olmo_packing": "planned", "olmo_batch_schedule": ((0, 2), (3, 4))},
      {"olmo_packing": "first_fit", "olmo_batch_schedule": ((0, 2), (3, 4))},
  )
  def test_a_run_goes_on_from_its_state(self, **values):
    train = self.make(**values)
    self.take(train, 4)
    state = train.get_state()
    expected = self.take(train, 20)
    resumed = self.make(**values)
    resumed.set_state(state)
    self.assert_equal(self.take(resumed, 20), expected)

  def test_the_state_is_one_position_and_the_checkpoint_decides(self):
    directory = self.create_tempdir().full_path
    train = self.make()
    self.take(train, 7)
    state = train.get_state()
    self.assertEqual(state["position"], 28)
    with ocp.CheckpointManager(directory) as manager:
      manager.save(6, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(train)))
    resumed = self.make(checkpoint_dir=directory)
    self.assertEqual(resumed.get_state(), state)
    self.assert_equal(self.take(resumed, 3), self.take(train, 3))

  def test_a_run_may_change_its_batch_size(self):
    expected = np.concatenate([b["inputs"] for b in self.take(self.make(), 10)])
    train = self.make()
    rows = [b["inputs"] for b in self.take(train, 3)]
    other = self.make(global_batch_size_to_load=2)
    other.set_state(train.get_state())
    rows += [b["inputs"] for b in self.take(other, 6)]
    np.testing.assert_array_equal(np.concatenate(rows), expected[:24])
    placed = self.make(olmo_initial_position=12, initial_step=3)
    self.assert_equal(self.take(placed, 1), self.take(train, 1))

  def test_a_state_of_other_rows_is_refused(self):
    state = self.make().get_state()
    for values in (
        {"max_target_length": 16},
        {"olmo_packing_bins": 9},
        {"olmo_long_documents": "truncate"},
        {"data_shuffle_seed": 1},
        {"olmo_mixture": {"*": 1.0}},
    ):
      with self.assertRaisesRegex(errors.ResumeError, "another stream"):
        self.make(**values).set_state(state)

  def test_the_length_is_exact_once_it_is_counted(self):
    train = self.make(olmo_num_epochs=1)
    train.stream.source.plan.count(1)
    self.assertLen(list(train), len(train))
    with self.assertRaisesRegex(TypeError, "no end"):
      len(self.make())

  def test_a_mixture_gives_each_label_its_share_of_the_rows(self):
    # Files 0 and 2 are label-0: 907 of 2807 tokens.
    one = set(
        map(
            tuple,
            np.lib.stride_tricks.sliding_window_view(np.concatenate(self.tokens[0::2]), 3).tolist(),
        )
    )
    values = {"olmo_mixture": {"label-0": 3.0, "label-1": 1.0}, "olmo_mixture_unit": "weights"}
    batches = self.take(self.make(**values), 25)
    rows = np.concatenate([b["inputs"] for b in batches])
    segments = np.concatenate([b["inputs_segmentation"] for b in batches])
    known = 0
    for row, segment in zip(rows, segments):
      long = next((s for s in range(1, segment.max() + 1) if (segment == s).sum() >= 3), None)
      if long is not None:
        known += tuple(row[segment == long][:3].tolist()) in one
    self.assertAlmostEqual(known / len(rows), 0.75, delta=0.08)

  def test_documents_are_found_once_and_kept_next_to_the_index(self):
    self.make()
    path = self.index_path + ".documents"
    written = os.stat(path).st_mtime_ns
    self.make()
    self.assertEqual(os.stat(path).st_mtime_ns, written)
    with self.assertRaisesRegex(errors.CorpusError, "made with EOS 0"):
      self.make(olmo_eos_id=5)
    other = os.path.join(self.directory, "elsewhere.documents")
    self.make(olmo_eos_id=5, olmo_documents_path=other)
    self.assertTrue(os.path.exists(other))

  def test_a_token_outside_the_vocabulary_stops_the_run(self):
    with self.assertRaisesRegex(errors.CorpusError, "outside the vocabulary of 50.*byte"):
      self.take(self.make(vocab_size=50), 5)

  def test_evaluation_is_one_pass_from_the_beginning(self):
    train, evaluation = self.make(eval_interval=1, olmo_eval_index_path=self.index_path)
    del train
    self.addCleanup(evaluation.close)
    first = [{k: np.asarray(v) for k, v in batch.items()} for batch in evaluation]
    self.assert_equal([{k: np.asarray(v) for k, v in b.items()} for b in evaluation], first)
    self.assertEqual(_tokens(first), collections.Counter(np.concatenate(self.tokens).tolist()))


class HostsTest(document_cases.DocumentsCase):

  def test_the_global_batch_does_not_depend_on_hosts_or_workers(self):
    config = self.config(data_sharding=(("data",),))
    whole, state = laws_cases.serve(config, {"data": 1}, 12)
    found = distributed.run(
        "tests.loader.laws_cases:serve",
        processes=2,
        args=({**config, "grain_worker_count": 1}, {"data": 2}, 12),
    )
    self.assert_equal(
        laws_cases.assemble([batches for batches, _ in found]), laws_cases.assemble([whole])
    )
    self.assertEqual([s for _, s in found], [state, state])


class ConfigsTest(document_cases.DocumentsCase):

  @parameterized.parameters("packed_midtraining", "sft")
  def test_the_tiny_trainer_runs_the_example(self, name):
    arguments = [
        f"--config=configs/{name}.py",
        f"--config.olmo_index_path={self.index_path}",
        "--config.olmo_eos_id=0",
        "--config.steps=6",
        "--config.warmup_steps=2",
        "--config.max_target_length=32",
        "--config.num_layers=1",
        f"--config.metrics_file={self.directory}/{name}.jsonl",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_olmo.trainers.tiny", *arguments],
        cwd=_ROOT,
        env=distributed.child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    lines = pathlib.Path(self.directory, f"{name}.jsonl").read_text().splitlines()
    self.assertLen(lines, 6)


if __name__ == "__main__":
  absltest.main()
