"""Tests of the summary of a run."""

import dataclasses
import json
import tempfile
import unittest

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.inspection import summary
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun


def setUpModule():
  global _run
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="summary_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = small_run.write(directory.name)


class SummaryTest(absltest.TestCase):

  def test_the_summary_lists_each_change_of_the_batch_size(self):
    told = summary.summarize(run_lib.find_run(_run.checkpoints))
    self.assertEqual((told.checkpoint, told.step, told.position), (14, 15, 60))
    self.assertEqual(told.tokens, 60 * 32)
    self.assertEqual([(c.step, c.position) for c in told.history], [(0, 0), (5, 20), (10, 50)])
    self.assertEqual(told.history[1].what, ("batches of 6 (before: batches of 4)",))
    self.assertIn("continues with step 15 at position 60, batches of 2", told.resume)
    self.assertIn("is the one trained on: 2 files", told.corpus)
    self.assertLen(told.next_rows, 2)
    self.assertEqual(json.loads(json.dumps(told.to_json()))["step"], 15)
    text = "\n".join(told.lines())
    self.assertIn("15 steps, 60 samples, 1,920 tokens", text)
    self.assertIn("from step 5 (position 20)", text)

  def test_packed_rows_of_the_same_corpus_have_not_changed(self):
    values = {"dataset_type": "olmo_packed", "olmo_pad_id": 257, "checkpoint_dir": ""}
    kept = ("olmo_index_path", "max_target_length", "global_batch_size_to_load", "vocab_size")
    config = {name: _run.config[name] for name in kept if name in _run.config}
    config |= {**values, "olmo_eos_id": 256, "olmo_order_cache_dir": str(_run.directory)}
    with run_lib.open_iterator(run_lib.Run("a", config)) as iterator:
      state = iterator.get_state()
    told = summary.summarize(run_lib.Run("a", config, state=state))
    self.assertIn("is the one trained on: 2 files", told.corpus)
    self.assertNotIn("refused", told.resume)
    changed = run_lib.Run("a", {**config, "olmo_source_group_size": 2}, state=state)
    self.assertStartsWith(summary.summarize(changed).corpus, "not compared: the packed rows")

  def test_a_resume_with_another_batch_size_says_what_changes(self):
    config = {**_run.config, "global_batch_size_to_load": 8}
    told = summary.summarize(run_lib.find_run(_run.checkpoints, config=config))
    self.assertIn("batches of 8 (before: batches of 2)", told.resume)

  def test_a_resume_that_would_be_refused_says_why(self):
    config = {**_run.config, "data_shuffle_seed": 5}
    told = summary.summarize(run_lib.find_run(_run.checkpoints, config=config))
    self.assertStartsWith(told.resume, "would be refused")
    self.assertIn("data_shuffle_seed", told.resume)
    self.assertEqual(told.step, 15)

  def test_skipped_samples_are_not_counted_as_done(self):
    config = {**_run.config, "checkpoint_dir": "", "olmo_skip": ((6, 8), (50, 60))}
    run = run_lib.Run("a", config)
    for index_path in (_run.index_path, "/nowhere"):  # Without a corpus, the state is enough.
      with run_lib.open_iterator(run) as iterator:
        iterator.go_to(20)
        state = iterator.get_state()
      changed = {**config, "olmo_index_path": index_path}
      told = summary.summarize(dataclasses.replace(run, config=changed, state=state))
      self.assertEqual((told.position, told.skipped, told.tokens), (44, 4, 40 * 32))
      done = "20 steps, 40 samples, 1,280 tokens (4 samples skipped; position 44)"
      self.assertIn(f"  done      {done}", told.lines())

  def test_skips_are_described(self):
    for mode, words in (("drop", "skips steps 6:8"), ("mask", "takes no loss on steps 6:8")):
      config = {**_run.config, "checkpoint_dir": "", "olmo_skip": ((6, 8),), "olmo_skip_mode": mode}
      self.assertIn(words, "\n".join(summary.summarize(run_lib.Run("a", config)).lines()))

  def test_settings_are_described_in_words_and_only_if_they_are_set(self):
    told = "\n".join(summary.summarize(run_lib.find_run(_run.checkpoints)).lines())
    self.assertIn("    repetition filter: on\n", told)
    for word in ("None", "documents_by_part", "1,13,32"):
      self.assertNotIn(word, told)

  def test_a_resume_with_exclusions_names_their_file(self):
    path = self.create_tempfile("bad.jsonl", '{"rows": [0, 1]}\n').full_path
    config = {**_run.config, "olmo_exclude": path}
    run = run_lib.find_run(_run.checkpoints, config=config)
    self.assertIn(f"olmo_exclude: none → {path}", summary.summarize(run).resume)
    with run_plan.open_plan(run, 40) as plan:
      self.assertIn((15, f"olmo_exclude: none → {path}"), plan.find_changes())

  def test_a_run_that_has_not_begun_is_summarized(self):
    told = summary.summarize(run_lib.Run("c.py", {**_run.config, "checkpoint_dir": ""}))
    self.assertEqual((told.step, told.epoch, told.place), (0, 0, 0))
    self.assertIn("nothing to resume", told.resume)

  def test_a_run_without_a_state_or_a_config_is_an_error(self):
    with self.assertRaises(errors.ConfigError):
      summary.summarize(run_lib.Run("x", None))

  def test_a_changed_corpus_is_reported(self):
    directory = self.create_tempdir().full_path
    run = small_run.write(directory, (4,))
    texts = small_run.texts()
    texts["wiki"].append("one more document, long enough to make another instance of its file")
    small_run.write_texts(run.directory, texts)
    told = summary.summarize(run_lib.find_run(run.checkpoints))
    self.assertIn("would be refused", told.resume)
    self.assertRegex(told.corpus, "has changed: grown: .*wiki.npy")


if __name__ == "__main__":
  absltest.main()
