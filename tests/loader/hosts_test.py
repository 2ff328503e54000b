"""The laws of the design on real processes: what a batch holds does not depend on who loads it.

All cases share two runs: one of two processes with two devices each, and one of four with one.
"""

import pathlib
import tempfile
import unittest
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.corpus.storage import pace
from tests import corpora
from tests import distributed
from tests import shards as shards_lib
from tests.loader import cases
from tests.loader import hosts_cases
from tests.loader import row_sources

STARTS_PROCESSES = True

_STEPS = 20
_CROSSES_AN_EPOCH = 14
# Axes (the outermost first, which spans processes), the data sharding, and the device order.
_MESHES = {
    "data": ({"data": 4}, (("data",),), None),
    "two axes": ({"data": 2, "fsdp": 2}, (("data", "fsdp"),), None),
    "processes with equal rows": ({"tensor": 2, "data": 2}, (("data",),), None),
    "replicated": ({"tensor": 4}, ((),), None),
    "sequence": ({"data": 2, "sequence": 2}, (("data",), "sequence"), None),
    "sequence across processes": ({"sequence": 2, "data": 2}, (("data",), "sequence"), None),
    "several ranges of rows per process": ({"data": 4}, (("data",),), (0, 2, 1, 3)),
}
_EVERY_SOURCE = parameterized.named_parameters((name, name) for name in row_sources.SOURCES)
_REFUSED = (
    {"data_shuffle_seed": 2},
    {"olmo_initial_position": 40},
    {"olmo_apply_ngram_filter": False},
    {"global_batch_size_to_load": 4},
)

_directory = ""
_alone: dict[str, tuple[list[cases.Batch], list[dict[str, Any]]]] = {}  # by row source
_results: dict[int, dict[Any, Any]] = {}  # by number of processes, then by the name of the job


def setUpModule():
  global _directory
  jax.config.update("jax_num_cpu_devices", 1)
  directory = tempfile.TemporaryDirectory(prefix="hosts_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  row_sources.write_corpus(_directory)
  for source in row_sources.SOURCES:
    _alone[source] = _run_alone(source)
  state = _alone["windows"][1][7]
  with ocp.CheckpointManager(f"{_directory}/checkpoints") as manager:
    manager.save(6, args=ocp.args.Composite(data=ocp.args.JsonSave(state)))
  _results[2] = _run_jobs(2, _jobs_of_two_processes())
  _results[4] = _run_jobs(4, _jobs_of_four_processes())


def _config(source: str, **values: Any) -> dict[str, Any]:
  return {**row_sources.config_values(source, f"{_directory}/index.json", _directory), **values}


def _iterator(source: str, **values: Any) -> Any:
  config = cases.data_config(**_config(source, **values))
  return maxtext_olmo.create_data_iterator(config, cases.device_mesh())[0]


def _run_alone(source: str) -> tuple[list[cases.Batch], list[dict[str, Any]]]:
  iterator = _iterator(source)
  batches, states = [], []
  for _ in range(_STEPS):
    states.append(iterator.get_state())
    batches += cases.take(iterator, 1)
  states.append(iterator.get_state())
  iterator.close()
  return batches, states


def _on_meshes(source: str, meshes: list[str], **values: Any) -> dict[Any, hosts_cases.Serve]:
  state = _alone[source][1][_CROSSES_AN_EPOCH]
  jobs = {}
  for name in meshes:
    axes, spec, order = _MESHES[name]
    config = _config(source, data_sharding=spec, **values)
    jobs[source, name] = hosts_cases.Serve(config, axes, 3, state, order)
  return jobs


def _jobs_of_two_processes() -> dict[Any, Any]:
  jobs: dict[Any, Any] = {}
  for source in row_sources.SOURCES:
    jobs |= _on_meshes(source, list(_MESHES))
    # The second leg of a run that began on one process with batches of 8.
    config = _config(source, global_batch_size_to_load=4)
    state = _alone[source][1][3]
    jobs[source, "leg"] = hosts_cases.Serve(config, {"data": 4}, 5, state)
  config = _config("windows", eval_interval=1, olmo_eval_instances=11)
  jobs["evaluate"] = hosts_cases.Evaluate(config, {"data": 4})
  config = _config("windows", checkpoint_dir=f"{_directory}/checkpoints")
  jobs["checkpoint"] = hosts_cases.Serve(config, {"data": 4}, 2)
  usual = _config("windows")
  for number, change in enumerate(_REFUSED):
    jobs["refuse", number] = hosts_cases.Refuse([usual, _config("windows", **change)], {"data": 4})
  elsewhere = _config("windows", olmo_path_remap_from=_directory, olmo_path_remap_to="/nowhere")
  jobs["missing"] = hosts_cases.Refuse([usual, elsewhere], {"data": 4})
  no_index = _config("windows", olmo_index_path="/nowhere/index.json")
  jobs["no index"] = hosts_cases.Refuse([usual, no_index], {"data": 4})
  damaged = pathlib.Path(_directory, "damaged.documents")
  damaged.write_bytes(b"{}")
  documents = [_config("planned"), _config("planned", olmo_documents_path=str(damaged))]
  jobs["damaged documents"] = hosts_cases.Refuse(documents, {"data": 4})
  other_copy = _config("windows", checkpoint_dir=_write_other_copy())
  jobs["other copy"] = hosts_cases.Refuse([config, other_copy], {"data": 4})
  return jobs


def _write_other_copy() -> str:
  """Returns a run's directory whose copy of the index is that of another corpus."""
  fingerprint = maxtext_olmo.load_index(f"{_directory}/index.json").fingerprint
  directory = pathlib.Path(_directory, "other")
  path, _ = corpora.write_corpus(directory, tokens_per_file=(80,))
  copy = directory / "olmo_corpus" / f"{fingerprint.partition(':')[2]}.json"
  copy.parent.mkdir()
  copy.write_bytes(pathlib.Path(path).read_bytes())
  return str(directory)


def _jobs_of_four_processes() -> dict[Any, Any]:
  jobs: dict[Any, Any] = {}
  for source in row_sources.SOURCES:
    jobs |= _on_meshes(source, ["data", "sequence"])
    config = _config(source, global_batch_size_to_load=16)
    state = _results[2][source, "leg"][0][1]
    jobs[source, "leg"] = hosts_cases.Serve(config, {"data": 4}, 2, state)
  for source in ("windows", "planned"):
    jobs[source, "workers"] = _on_meshes(source, ["data"], grain_worker_count=1)[source, "data"]
  jobs["sharing"] = pace.sharing
  return jobs


def _run_jobs(processes: int, jobs: dict[Any, Any]) -> dict[Any, list[Any]]:
  """Returns for each job the results of all processes."""
  found = distributed.run(
      "tests.loader.hosts_cases:run_all",
      processes=processes,
      devices=4 // processes,
      args=(list(jobs.values()), processes == 2),
      timeout=600,
  )
  return dict(zip(jobs, zip(*found), strict=True))


class HostsTest(parameterized.TestCase):

  def served(self, processes, job):
    """Returns the global batches of a job, and the state, which must be equal on all processes."""
    results = _results[processes][job]
    states = [state for _, state in results]
    for state in states:
      self.assertEqual(state, states[0])
    return shards_lib.assemble([batches for batches, _ in results]), states[0]

  def assert_equal(self, got, expected, msg=""):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=f"{name} {msg}")

  def assert_continues(self, processes, job):
    batches, states = _alone[job[0]]
    got, state = self.served(processes, job)
    end = _CROSSES_AN_EPOCH + len(got)
    self.assert_equal(got, batches[_CROSSES_AN_EPOCH:end], f"{processes} processes, {job}")
    self.assertEqual(state, states[end])

  @_EVERY_SOURCE
  def test_the_global_batch_does_not_depend_on_hosts_or_meshes(self, source):
    for mesh in _MESHES:
      self.assert_continues(2, (source, mesh))
    for mesh in ("data", "sequence"):
      self.assert_continues(4, (source, mesh))

  @parameterized.parameters("windows", "planned")
  def test_the_global_batch_of_several_hosts_does_not_depend_on_workers(self, source):
    self.assert_continues(4, (source, "workers"))

  @_EVERY_SOURCE
  def test_a_run_may_change_hosts_and_batch_size_and_neither_repeats_nor_skips(self, source):
    batches, _ = _alone[source]
    got = batches[:3]  # 24 rows on one process, then 20 on two and 32 on four, then 24 on one.
    for processes in (2, 4):
      leg, state = self.served(processes, (source, "leg"))
      got = [*got, *leg]
    iterator = _iterator(source, global_batch_size_to_load=6)
    self.addCleanup(iterator.close)
    iterator.set_state(state)
    got += cases.take(iterator, 4)
    for name in batches[0]:
      rows = np.concatenate([batch[name] for batch in got])
      expected = np.concatenate([batch[name] for batch in batches])
      np.testing.assert_array_equal(rows, expected[: len(rows)], err_msg=name)
    self.assertEqual(iterator.position, 24 + 20 + 32 + 24)
    self.assertEqual(
        [(entry.step, entry.position) for entry in iterator.history.entries],
        [(0, 0), (3, 24), (8, 44), (10, 76)],
    )

  def test_every_host_leaves_the_others_their_share_of_requests_to_a_store(self):
    self.assertEqual(_results[4]["sharing"], (4, 4, 4, 4))

  def test_every_host_evaluates_the_same_number_of_batches_and_each_row_once(self):
    results = _results[2]["evaluate"]
    first, second = (shards_lib.assemble([passes[i] for passes in results]) for i in range(2))
    self.assert_equal(first, second)
    real = np.concatenate([batch["inputs_segmentation"][:, 0] for batch in first])
    self.assertEqual(real.tolist(), [1] * 11 + [0] * 5)
    rows = np.concatenate([batch["inputs"] for batch in first])[:11]
    self.assertLen(np.unique(rows, axis=0), 11)

  def test_the_checkpoint_decides_where_all_processes_resume(self):
    got, _ = self.served(2, "checkpoint")
    self.assert_equal(got, _alone["windows"][0][7:9])

  def test_processes_with_different_configs_fail_before_any_batch(self):
    for number, change in enumerate(_REFUSED):
      for kind, message in _results[2]["refuse", number]:
        self.assertEqual(kind, "ConfigError")
        self.assertIn("Processes 0 and 1 would read different streams", message)
        self.assertIn(next(iter(change)), message)

  def test_data_that_is_missing_on_one_host_stops_all_hosts(self):
    mine, theirs = _results[2]["missing"]
    self.assertEqual(theirs[0], "MissingFileError")
    self.assertIn(str(pathlib.Path("/nowhere")), theirs[1])
    self.assertIn("Process 1 of 2 failed while opening the corpus", mine[1])

  def test_a_problem_on_one_host_stops_all_hosts(self):
    mine, theirs = _results[2]["no index"]
    self.assertEqual(theirs[0], "ConfigError")
    self.assertIn("Process 1 of 2 failed while reading the configuration", mine[1])
    mine, theirs = _results[2]["damaged documents"]
    self.assertEqual(theirs[0], "CorpusError")
    self.assertIn("Process 1 of 2 failed while opening the document index", mine[1])

  def test_a_state_that_one_process_refuses_stops_all_processes(self):
    (first, first_text), (second, second_text) = _results[2]["other copy"]
    self.assertEqual((first, second), ("MaxtextOlmoError", "ResumeError"))
    self.assertIn("Files of the corpus were replaced", second_text)
    self.assertIn("Process 1 of 2 failed while reading the data state", first_text)
    self.assertIn(second_text, first_text)


if __name__ == "__main__":
  absltest.main()
