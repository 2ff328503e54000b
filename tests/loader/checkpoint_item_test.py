"""Tests of the iterator as an item of Orbax checkpoints, on changing numbers of processes."""

import os
import pathlib

import grain
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from tests import corpora
from tests import distributed
from tests.loader import orbax_cases


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
    expected = [iterator.instance_ids(step).tolist() for step in range(12)]
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
