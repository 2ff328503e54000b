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

import maxtext_olmo
from maxtext_olmo import errors
from tests import corpora
from tests import distributed
from tests.loader import cases

STARTS_PROCESSES = True

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _tokens(batches):
  found = collections.Counter()
  for batch in batches:
    inputs = np.asarray(batch["inputs"])
    found.update(inputs[np.asarray(batch["inputs_segmentation"]) != 0].tolist())
  return found


def setUpModule():
  cases.compile_fast()


class TrainTest(cases.DocumentsCase):

  @parameterized.product(
      packing=("planned", "first_fit", "best_fit", "concat_then_split", "none"),
      shard=("batch", "slice"),
  )
  def test_every_token_comes_once_per_epoch(self, packing, shard):
    train = self.train(
        olmo_packing=packing,
        olmo_shard=shard,
        olmo_num_epochs=2,
        olmo_shift="right",
        olmo_long_documents="split",
    )
    batches = [{k: np.asarray(v) for k, v in batch.items()} for batch in train]
    found = collections.Counter()
    for batch in batches:
      found.update(batch["targets"][batch["targets_segmentation"] != 0].tolist())
    expected = collections.Counter(np.concatenate(self.tokens).tolist() * 2)
    self.assertEqual(found, expected)

  def test_segments_are_documents_and_positions_count_within_them(self):
    for batch in cases.take(self.train(), 5):
      for row in range(4):
        segments = batch["inputs_segmentation"][row]
        for segment in range(1, segments.max() + 1):
          here = np.flatnonzero(segments == segment)
          self.assertEqual(batch["inputs_position"][row, here].tolist(), list(range(len(here))))
          self.assertNotIn(0, batch["inputs"][row, here[:-1]])

  @parameterized.parameters("first_fit", "planned")
  def test_a_restart_finds_the_latest_checkpoint_by_itself(self, packing):
    values = {"olmo_packing": packing, "checkpoint_dir": self.create_tempdir().full_path}
    train = self.train(**values)
    cases.take(train, 3)
    with ocp.CheckpointManager(values["checkpoint_dir"]) as manager:
      manager.save(2, args=ocp.args.Composite(data=maxtext_olmo.IteratorSave(train)))
    self.assert_equal_batches(cases.take(self.train(**values), 2), cases.take(train, 2))
    again = cases.take(self.train(**values, initial_step=0), 1)
    self.assert_equal_batches(again, cases.take(self.train(olmo_packing=packing), 1))

  def test_a_packing_that_streams_cannot_resume_by_step(self):
    directory = self.create_tempdir().full_path
    with ocp.CheckpointManager(directory) as manager:
      manager.save(2, args=ocp.args.Composite(model=ocp.args.JsonSave({"a": 1})))
    with self.assertRaisesRegex(errors.ResumeError, "'first_fit' cannot resume by step"):
      self.train(olmo_packing="first_fit", checkpoint_dir=directory)

  @parameterized.parameters("planned", "none")
  def test_other_documents_of_the_same_files_are_another_stream(self, packing):
    values = {"olmo_packing": packing, "olmo_long_documents": "truncate"}
    state = self.train(**values).get_state()
    del state["history"][0]["identity"]["documents"]  # As it was saved by an earlier release.
    self.train(**values).set_state(state)
    state["history"][0]["identity"]["documents"] = "other boundaries"
    with self.assertRaisesRegex(errors.ResumeError, "documents: the checkpoint has 'other"):
      self.train(**values).set_state(state)

  @parameterized.parameters(
      {"olmo_packing": "planned"},
      {"olmo_packing": "none", "olmo_long_documents": "truncate"},
      {"olmo_packing": "first_fit"},
      {"olmo_packing": "none", "olmo_long_documents": "split"},
      {"olmo_packing": "planned", "olmo_mixture": {"label-0": 2.0, "label-*": 0.5}},
      {"olmo_packing": "planned", "olmo_batch_schedule": ((0, 2), (3, 4))},
      {"olmo_packing": "first_fit", "olmo_batch_schedule": ((0, 2), (3, 4))},
  )
  def test_a_run_resumes_from_its_state(self, **values):
    train = self.train(**values)
    cases.take(train, 4)
    state = train.get_state()
    expected = cases.take(train, 8)
    resumed = self.train(**values)
    resumed.set_state(state)
    self.assert_equal_batches(cases.take(resumed, 8), expected)

  def test_the_state_is_one_position_and_the_checkpoint_decides(self):
    directory = self.create_tempdir().full_path
    train = self.train()
    cases.take(train, 7)
    state = train.get_state()
    self.assertEqual(state["position"], 28)
    with ocp.CheckpointManager(directory) as manager:
      manager.save(6, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(train)))
    resumed = self.train(checkpoint_dir=directory)
    self.assertEqual(resumed.get_state(), state)
    self.assert_equal_batches(cases.take(resumed, 3), cases.take(train, 3))

  def test_a_run_may_change_its_batch_size(self):
    expected = np.concatenate([b["inputs"] for b in cases.take(self.train(), 10)])
    train = self.train()
    rows = [b["inputs"] for b in cases.take(train, 3)]
    other = self.train(global_batch_size_to_load=2)
    other.set_state(train.get_state())
    rows += [b["inputs"] for b in cases.take(other, 6)]
    np.testing.assert_array_equal(np.concatenate(rows), expected[:24])
    placed = self.train(olmo_initial_position=12, initial_step=3)
    self.assert_equal_batches(cases.take(placed, 1), cases.take(train, 1))

  def test_a_state_of_other_rows_is_refused(self):
    state = self.train().get_state()
    for values, message in (
        ({"max_target_length": 16}, "another stream"),
        ({"olmo_packing_bins": 9}, "another stream"),
        ({"olmo_long_documents": "truncate"}, "another stream"),
        ({"data_shuffle_seed": 1}, "another stream"),
        ({"olmo_mixture": {"*": 1.0}}, "set it in a new stage"),
    ):
      with self.assertRaisesRegex(errors.ResumeError, message):
        self.train(**values).set_state(state)

  def test_the_length_is_exact_once_it_is_counted(self):
    train = self.train(olmo_num_epochs=1)
    self.assertEqual(sum(1 for _ in train), len(train))
    with self.assertRaisesRegex(TypeError, "no end"):
      len(self.train())

  def test_a_mixture_gives_each_label_its_share_of_the_rows(self):
    values = {"olmo_mixture": {"label-0": 3.0, "label-1": 1.0}, "olmo_mixture_unit": "weights"}
    batches = cases.take(self.train(**values, olmo_batch_extras=("labels",)), 25)
    labels = np.concatenate([batch["labels"] for batch in batches])
    self.assertEqual(np.bincount(labels).tolist(), [75, 25])

  def test_the_filter_looks_at_tokens_and_not_at_padding(self):
    # A document of 100 equal tokens, and short ones whose rows are mostly padding.
    path = pathlib.Path(self.create_tempdir().full_path, "tokens.npy")
    documents = [[7] * 100, *([[number, number + 1] for number in range(10, 60)])]
    np.concatenate([[*document, 0] for document in documents]).astype("<u2").tofile(path)
    index = maxtext_olmo.build_index([(str(path), "x")], 8, tokenizer="t", dtype="uint16")
    index.save(path.with_name("index.json"))
    values = {"olmo_index_path": str(path.with_name("index.json")), "max_target_length": 128}
    values |= {"olmo_packing": "none", "olmo_long_documents": "truncate", "olmo_num_epochs": 1}
    for filtered in (True, False):
      train = self.train(**values, olmo_apply_ngram_filter=filtered)
      batches = cases.take(train, len(train))
      inputs = np.concatenate([batch["inputs"] for batch in batches])
      trained = np.concatenate([batch["targets_segmentation"] for batch in batches]).any(axis=1)
      repeats = inputs[:, 0] == 7
      self.assertEqual(repeats.sum(), 1)
      self.assertEqual(trained.tolist(), (inputs.any(axis=1) & ~(repeats & filtered)).tolist())

  def test_documents_are_found_once_and_kept_next_to_the_index(self):
    self.train()
    path = self.index_path + ".documents"
    written = os.stat(path).st_mtime_ns
    self.train()
    self.assertEqual(os.stat(path).st_mtime_ns, written)
    with self.assertRaisesRegex(errors.CorpusError, "made with EOS 0"):
      self.train(olmo_eos_id=5)
    other = os.path.join(self.directory, "elsewhere.documents")
    self.train(olmo_eos_id=5, olmo_documents_path=other)
    self.assertTrue(os.path.exists(other))

  def test_a_token_outside_the_vocabulary_stops_the_run(self):
    with self.assertRaisesRegex(errors.CorpusError, "outside the vocabulary of 50.*byte"):
      cases.take(self.train(vocab_size=50), 5)

  def test_a_file_replaced_after_the_start_stops_the_run(self):
    directory = self.create_tempdir().full_path
    path, _ = corpora.write_corpus(directory)
    iterator = self.train(olmo_index_path=path, olmo_packing="none", enable_data_shuffling=False)
    data = pathlib.Path(directory, "data")
    np.zeros(514, np.uint16).tofile(data / "new")
    os.replace(data / "new", data / "part-003.npy")
    with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy was replaced or changed"):
      cases.take(iterator, 40)

  def test_evaluation_is_one_pass_from_the_beginning(self):
    train, evaluation = self.make(eval_interval=1, olmo_eval_index_path=self.index_path)
    del train
    self.addCleanup(evaluation.close)
    first = [{k: np.asarray(v) for k, v in batch.items()} for batch in evaluation]
    self.assert_equal_batches([{k: np.asarray(v) for k, v in b.items()} for b in evaluation], first)
    self.assertEqual(_tokens(first), collections.Counter(np.concatenate(self.tokens).tolist()))


class ConfigsTest(cases.DocumentsCase):

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
