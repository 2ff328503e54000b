"""The laws of the design, on real processes: what a batch holds does not depend on who loads it."""

import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from tests import corpora
from tests import distributed
from tests.loader import laws_cases

STARTS_PROCESSES = True


class LawsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.index_path, self.rows = corpora.write_corpus(self.create_tempdir().full_path)

  def config(self, **values):
    return {
        **config_lib.defaults(),
        "olmo_index_path": self.index_path,
        "max_target_length": 8,
        "global_batch_size_to_load": 8,
        "vocab_size": 100,
        "data_shuffle_seed": 3,
        **values,
    }

  def reference(self, count, **values):
    config = self.config(**values, data_sharding=())
    batches, state = laws_cases.serve(config, {"data": 1}, count)
    return laws_cases.assemble([batches]), state

  def served(self, processes, devices, axes, count, state=None, order=None, **values):
    # The reference is NumPy's, in this process; theirs are the compiled reads.
    results = distributed.run(
        "tests.loader.laws_cases:serve_fast",
        processes=processes,
        devices=devices,
        args=(self.config(**values), axes, count, state, order),
    )
    states = [state for _, state in results]
    for state in states:
      self.assertEqual(state, states[0])
    return laws_cases.assemble([batches for batches, _ in results]), states[0]

  def run_python(self, code):
    done = distributed.run_python(code)
    self.assertEqual(done.returncode, 0, done.stderr)

  def assert_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)

  @parameterized.named_parameters(
      ("two_hosts", 2, 1, {"data": 2}, (("data",),), 0),
      ("four_hosts_with_workers", 4, 1, {"data": 4}, (("data",),), 1),
      ("two_hosts_two_devices_fsdp", 2, 2, {"data": 2, "fsdp": 2}, (("data", "fsdp"),), 2),
      ("a_tensor_axis_across_hosts", 2, 2, {"tensor": 2, "data": 2}, (("data",),), 0),
      ("a_sharded_sequence", 2, 2, {"data": 2, "sequence": 2}, (("data",), "sequence"), 0),
  )
  def test_the_global_batch_does_not_depend_on_hosts(self, processes, devices, axes, spec, workers):
    expected, expected_state = self.reference(18)
    got, state = self.served(
        processes, devices, axes, 18, data_sharding=spec, grain_worker_count=workers
    )
    self.assert_equal(got, expected)
    self.assertEqual(state, expected_state)

  def test_a_process_may_hold_several_ranges_of_rows(self):
    expected, _ = self.reference(4)
    # Process 0 owns devices 0 and 1, and sits at places 0 and 2 of the data axis.
    got, _ = self.served(2, 2, {"data": 4}, 4, order=(0, 2, 1, 3), data_sharding=(("data",),))
    self.assert_equal(got, expected)

  def test_a_run_may_change_hosts_workers_and_batch_size_and_neither_repeats_nor_skips(self):
    expected = np.concatenate([batch["inputs"] for batch in self.reference(24)[0]])
    ledger, state = [], None
    for processes, workers, size, count in (
        (1, 0, 8, 3),
        (2, 1, 4, 5),
        (4, 0, 16, 2),
        (1, 2, 6, 4),
    ):
      got, state = self.served(
          processes,
          1,
          {"data": processes},
          count,
          state,
          grain_worker_count=workers,
          global_batch_size_to_load=size,
      )
      ledger += [batch["inputs"] for batch in got]
    ledger = np.concatenate(ledger)
    np.testing.assert_array_equal(ledger, expected[: len(ledger)])
    self.assertEqual(state["position"], len(ledger))

  def test_every_host_evaluates_the_same_number_of_batches_and_each_instance_once(self):
    config = self.config(eval_interval=1, olmo_eval_instances=11, data_sharding=(("data",),))
    results = distributed.run(
        "tests.loader.laws_cases:evaluate",
        processes=2,
        devices=2,
        args=(config, {"data": 4}),
    )
    first, second = (laws_cases.assemble([passes[i] for passes in results]) for i in range(2))
    self.assert_equal(first, second)
    real = np.concatenate([batch["inputs_segmentation"][:, 0] for batch in first])
    self.assertEqual(real.tolist(), [1] * 11 + [0] * 5)
    rows = np.concatenate([batch["inputs"] for batch in first])[:11]
    self.assertLen(np.unique(rows, axis=0), 11)

  def test_the_checkpoint_decides_where_all_processes_go_on(self):
    expected, _ = self.reference(9)
    _, state = laws_cases.serve(self.config(), {"data": 1}, 7)
    directory = self.create_tempdir().full_path
    with ocp.CheckpointManager(directory) as manager:
      manager.save(6, args=ocp.args.Composite(data=ocp.args.JsonSave(state)))
    got, _ = self.served(2, 1, {"data": 2}, 2, checkpoint_dir=directory)
    self.assert_equal(got, expected[7:])

  def failures(self, configs):
    with self.assertRaises(distributed.DistributedError) as caught:
      distributed.run("tests.loader.laws_cases:differing_index", args=(configs, {"data": 2}))
    self.assertLen(caught.exception.failures, 2)
    return [failure.error for failure in caught.exception.failures]

  @parameterized.parameters(
      {"data_shuffle_seed": 2},
      {"olmo_initial_position": 40},
      {"olmo_apply_ngram_filter": False},
      {"global_batch_size_to_load": 4},
  )
  def test_processes_that_were_told_different_things_are_told_so_before_any_batch(self, **change):
    for error in self.failures([self.config(), self.config(**change)]):
      self.assertIsInstance(error, errors.ConfigError)
      self.assertIn("Processes 0 and 1 would read different streams", str(error))
      self.assertIn(next(iter(change)), str(error))

  def test_data_that_is_missing_on_one_host_stops_all(self):
    elsewhere = self.config(
        olmo_path_remap_from=str(pathlib.Path(self.index_path).parent),
        olmo_path_remap_to="/nowhere",
    )
    mine, theirs = self.failures([self.config(), elsewhere])
    self.assertIsInstance(theirs, errors.CorpusError)
    self.assertIn("Process 1 of 2 failed while opening the corpus", str(mine))

  def test_the_state_is_one_small_json_dict(self):
    _, state = self.reference(2)
    self.assertEqual(json.loads(json.dumps(state)), state)

  def test_reading_initialises_no_jax_backend(self):
    code = (
        "import numpy as np, jax, maxtext_olmo\n"
        "from maxtext_olmo.rows import steps\n"
        "from maxtext_olmo.order import schedule, stream\n"
        f"index = maxtext_olmo.load_index({self.index_path!r})\n"
        "dataset = steps.StepDataset(maxtext_olmo.OlmoNpyDataSource(index),\n"
        "    stream.train_stream(index, order='feistel', seed=0),\n"
        "    schedule.BatchSchedule.constant(4), {4: np.arange(4)})\n"
        "dataset[0]\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    self.run_python(code)

  def test_importing_the_package_imports_neither_jax_nor_grain(self):
    self.run_python(
        "import sys, maxtext_olmo\n"
        "assert not {'jax', 'grain', 'orbax', 'numpy'} & set(sys.modules)\n"
        "assert 'create_data_iterator' in dir(maxtext_olmo)\n"
        "import importlib.util\n"
        "missing = set() if importlib.util.find_spec('lm_eval') else {'JaxLM'}\n"
        "for name in set(maxtext_olmo.__all__) - missing: getattr(maxtext_olmo, name)\n"
    )


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 1)
  absltest.main()
