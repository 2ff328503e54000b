"""Tests of the iterator as an item of Orbax checkpoints, on changing numbers of processes."""

import json
import os
import pathlib

import grain
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized
from etils import epath

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.loader import resume
from tests import corpora
from tests import distributed
from tests.loader import checkpoint_cases
from tests.loader import orbax_cases

STARTS_PROCESSES = True


class EveryIteratorTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.index_path = checkpoint_cases.write_corpus(self.create_tempdir().full_path)

  @parameterized.parameters(*checkpoint_cases.KINDS)
  def test_it_saves_and_restores_on_one_process(self, kind):
    self.assertEmpty(checkpoint_cases.round_trips(kind, self.index_path, self.directory))

  def test_all_save_and_restore_on_two_processes_with_one_state(self):
    results = distributed.run(
        "tests.loader.checkpoint_cases:all_round_trips",
        args=(self.index_path, self.directory),
        timeout=900,
    )
    for found in results:
      self.assertRegex(found.pop("old"), "the data state of one process.*this run has 2")
      self.assertEqual(found, {kind: [] for kind in checkpoint_cases.KINDS})
    for kind in checkpoint_cases.KINDS:
      item = pathlib.Path(self.directory, kind.replace(" ", "_"), "0", "grain")
      first, second = (json.loads((item / f"process_{i}-of-2.json").read_text()) for i in range(2))
      self.assertEqual(first, second, kind)
    # Hosts that share a stream may change in number, others may not.
    shared = ("olmo_grain", "olmo_documents planned batch", "records first_fit batch")
    own = ("olmo_documents first_fit slice", "records mixed_stream", "multihost dataset")
    found = checkpoint_cases.restore_elsewhere(
        self.index_path, self.directory, (*shared, *own, "records planned slice")
    )
    for kind in shared:
      self.assertLen(found[kind], 2, kind)
    for kind in own:
      self.assertRegex(found[kind], "saved by 2 processes.*this run has 1. Resume with 2 processes")
    self.assertRegex(found["records planned slice"], "hosts: the state has '2 with a share each'")


class OrbaxStateTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.index_path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    self.directory = self.create_tempdir().full_path

  def config(self, **values):
    return {
        **config_lib.defaults(),
        "olmo_index_path": self.index_path,
        "max_target_length": 8,
        "global_batch_size_to_load": 8,
        **values,
    }

  def go_on(self, processes, restore=None, directory=None, **values):
    args = (self.config(**values), directory or self.directory, restore)
    if processes == 1:
      return orbax_cases.go_on(*args)
    results = distributed.run("tests.loader.orbax_cases:go_on", processes=processes, args=args)
    for result in results:
      self.assertEqual(result, results[0])
    return results[0]

  def test_processes_workers_and_handlers_may_change_from_restart_to_restart(self):
    iterator, _ = self.single()
    expected = [iterator.row_numbers(step).tolist() for step in range(12)]
    taken, _, label = self.go_on(4, grain_worker_count=2)
    self.assertEqual((taken, label), (expected[:2], 1))
    files = {item: os.listdir(f"{self.directory}/1/{item}") for item in ("ours", "grain")}
    self.assertIn("olmo_state.json", files["ours"])
    self.assertEmpty([name for name in files["ours"] if name.startswith("process_")])
    self.assertContainsSubset({f"process_{i}-of-4.json" for i in range(4)}, files["grain"])
    # 4 → 2 processes, from our file; 2 workers → none.
    taken, model, label = self.go_on(2, (1, "ours", "ours"))
    self.assertEqual((taken, model, label), (expected[2:4], 2.0, 3))
    # 4 → 1 process: Grain's files, and Orbax's JSON item, read by our args and as they are.
    for restore in ((1, "grain", "ours"), (1, "json", "ours"), (1, "json", "json")):
      other = self.create_tempdir().full_path
      os.symlink(f"{self.directory}/1", f"{other}/1")
      taken, model, _ = self.go_on(1, restore, other)
      self.assertEqual((taken, model), (expected[2:4], 2.0))
    # 2 → 1 → 4 processes, and Grain's own handler at an equal number of them.
    taken, model, label = self.go_on(1, (3, "grain", "ours"))
    self.assertEqual((taken, model, label), (expected[4:6], 4.0, 5))
    taken, model, label = self.go_on(1, (5, "grain", "grain"))
    self.assertEqual((taken, model, label), (expected[6:8], 6.0, 7))
    taken, model, label = self.go_on(4, (7, "ours", "ours"), grain_worker_count=1)
    self.assertEqual((taken, model, label), (expected[8:10], 8.0, 9))

  def single(self, **values):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    config = ml_collections.ConfigDict(self.config(**values))
    iterator, evaluation = maxtext_olmo.create_data_iterator(config, mesh)
    self.addCleanup(iterator.close)
    return iterator, evaluation

  def test_a_run_finds_our_item_by_itself(self):
    iterator, _ = self.single(checkpoint_dir=self.directory)
    for _ in range(3):
      next(iterator)
    with ocp.CheckpointManager(self.directory) as manager:
      manager.save(2, args=ocp.args.Composite(data=maxtext_olmo.IteratorSave(iterator)))
      manager.wait_until_finished()
    self.assertEqual(self.single(checkpoint_dir=self.directory)[0].step, 3)

  def test_an_item_without_a_state_of_this_library_is_refused(self):
    iterator, _ = self.single()
    foreign = iter(grain.MapDataset.range(5).to_iter_dataset())
    with ocp.CheckpointManager(self.directory) as manager:
      manager.save(0, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(foreign)))
      manager.wait_until_finished()
    refused = self.assertRaisesRegex(errors.ResumeError, "holds no data state of this library")
    with ocp.CheckpointManager(self.directory) as manager, refused:
      manager.restore(0, args=ocp.args.Composite(data=maxtext_olmo.IteratorRestore(iterator)))

  def test_states_of_all_versions_are_found(self):
    states = (
        {"format": 1, "step": 1, "position": 8, "identity": {"seed": 1}},
        {"format": 2, "kind": "stream", "step": 1},
        {"format": 2, "kind": "grain", "step": 1},
        {"step": 1, "iterator_length": 4, "epoch_start": 0, "position": 8, "identity": "lists"},
        {"step": 1, "iterator_length": None, "iterator": {"next_index": 1}},
    )
    directory = epath.Path(self.directory)
    for name in ("olmo_state.json", "metadata", "process_0.json", "process_3-of-4.json"):
      for state in states:
        (directory / name).write_text(json.dumps(state))
        self.assertEqual(resume.find_state(directory), state)
      (directory / name).write_text(json.dumps({"next_index": 4}))
      with self.assertRaisesRegex(errors.ResumeError, f"found {name} with .'next_index': 4"):
        resume.find_state(directory)
      (directory / name).unlink()

  def test_a_damaged_file_is_named(self):
    iterator, _ = self.single()
    with ocp.CheckpointManager(self.directory) as manager:
      manager.save(0, args=ocp.args.Composite(data=maxtext_olmo.IteratorSave(iterator)))
      manager.wait_until_finished()
      pathlib.Path(self.directory, "0", "data", "olmo_state.json").write_text("{")
      with self.assertRaisesRegex(errors.ResumeError, "olmo_state.json is not JSON"):
        manager.restore(0, args=ocp.args.Composite(data=maxtext_olmo.IteratorRestore(iterator)))


if __name__ == "__main__":
  absltest.main()
