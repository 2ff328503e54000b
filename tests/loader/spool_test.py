"""Tests of reading an object store through a spool: the laws hold, and outages are bridged."""

import faulthandler
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any, ClassVar

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from tests import object_server
from tests.loader import cases

STARTS_PROCESSES = True

_PATIENCE_SECONDS = 180


def setUpModule():
  cases.compile_fast()


def _wait_for(condition):
  end = time.monotonic() + _PATIENCE_SECONDS
  while not condition():
    if time.monotonic() > end:
      faulthandler.dump_traceback(sys.__stderr__)
      raise AssertionError(
          f"Waited for {_PATIENCE_SECONDS} s; the log shows what each thread does."
      )
    time.sleep(0.01)


class SpoolCase(cases.LoaderCase):

  defaults: ClassVar[dict[str, Any]] = {**cases.WINDOWS, "max_target_length": 64}
  corpus: ClassVar[dict[str, Any]] = {
      "tokens_per_file": (3330, 1500, 70, 5140),
      "sequence_length": 64,
  }

  def setUp(self):
    super().setUp()
    data = pathlib.Path(self.directory) / "data"
    self.server = object_server.ObjectServer(
        {f"bucket/{path.name}": path.read_bytes() for path in data.iterdir()}
    )
    self.enterContext(self.server)
    self.spool = self.create_tempdir().full_path
    base = f"{self.server.url}/bucket"
    index = index_lib.build_index(
        [(f"{base}/{path.name}", "label") for path in sorted(data.iterdir())],
        self.corpus["sequence_length"],
        tokenizer="test",
        dtype="uint16",
    )
    path = self.create_tempfile("index.json").full_path
    index.save(path)
    self.remote = {"olmo_index_path": path}
    self.remap = {  # An index of local files has no ETags.
        "olmo_path_remap_from": str(data),
        "olmo_path_remap_to": base,
    }
    self.server.requests.clear()

  def spooled(self, **values):
    """Returns an iterator over the files on the server, through the spool."""
    return self.train(**{**self.remote, "olmo_spool_dir": self.spool, **values})

  @property
  def gets(self):
    return sum(method == "GET" for method, _, _ in self.server.requests)

  def wait_until_filled(self, iterator, steps):
    _wait_for(lambda: iterator.metrics().get("spool_depth_steps", 0) >= steps)


class SpoolTest(SpoolCase):

  @parameterized.parameters(0, 2)
  def test_batches_with_and_without_a_spool_equal_those_of_local_files(self, workers):
    local = cases.take(self.train(), 50)
    for values in ({}, {"olmo_spool_dir": ""}):
      iterator = self.spooled(grain_worker_count=workers, **values)
      for expected, found in zip(local, cases.take(iterator, 50)):
        for name in expected:
          np.testing.assert_array_equal(found[name], expected[name])
      iterator.close()

  def test_the_requests_of_worker_processes_are_counted(self):
    iterator = self.spooled(grain_worker_count=2, olmo_spool_dir="")
    cases.take(iterator, 20)
    metrics = iterator.metrics()
    self.assertBetween(metrics["store_requests"], 20, len(self.server.requests))
    self.assertGreaterEqual(metrics["store_bytes"], metrics["bytes_read"])
    self.assertGreater(metrics["store_latency_p50"], 0)

  def test_a_corpus_that_fits_is_requested_once(self):
    iterator = self.spooled()
    epoch = -(-len(self.rows) // 4)
    cases.take(iterator, 2)
    self.wait_until_filled(iterator, 2 * epoch)
    before = self.gets
    self.assertLessEqual(before, len(self.rows))  # Ranges that touch are read at once.
    cases.take(iterator, 2 * epoch)
    self.assertEqual(self.gets, before)
    metrics = iterator.metrics()
    self.assertEqual(metrics["store_requests"], before)
    self.assertGreater(metrics["spool_hits"], len(self.rows))
    self.assertGreater(metrics["spool_bytes"], 0)

  def test_a_restart_uses_what_is_there_and_a_jump_is_followed(self):
    iterator = self.spooled()
    cases.take(iterator, 5)
    state = iterator.get_state()
    self.wait_until_filled(iterator, 60)
    iterator.close()
    before = self.gets
    again = self.spooled()
    again.set_state(state)
    local = self.train()
    local.set_state(state)
    for expected, found in zip(cases.take(local, 30), cases.take(again, 30)):
      np.testing.assert_array_equal(found["inputs"], expected["inputs"])
    again.set_state(state)
    cases.take(again, 5)
    self.assertEqual(self.gets, before)

  def test_an_outage_shorter_than_the_spool_is_not_noticed(self):
    iterator = self.spooled()
    cases.take(iterator, 1)
    self.wait_until_filled(iterator, 100)
    self.server.faults = lambda number, path: "503"
    local = cases.take(self.train(), 60)[1:]
    for expected, found in zip(local, cases.take(iterator, 59)):
      np.testing.assert_array_equal(found["inputs"], expected["inputs"])
    self.server.faults = lambda number, path: ""

  def test_a_longer_outage_is_waited_for(self):
    iterator = self.spooled(olmo_spool_dir="")
    cases.take(iterator, 1)
    began = time.monotonic()
    self.server.faults = lambda number, path: "503" if time.monotonic() - began < 2 else ""
    local = cases.take(self.train(), 20)[1:]
    for expected, found in zip(local, cases.take(iterator, 19)):
      np.testing.assert_array_equal(found["inputs"], expected["inputs"])

  def test_bytes_of_a_replaced_object_are_not_used(self):
    iterator = self.spooled(**self.remap, olmo_index_path=self.index_path)
    cases.take(iterator, 1)
    self.wait_until_filled(iterator, 60)
    iterator.close()
    self.server.objects = {
        name: bytes(len(content)) for name, content in self.server.objects.items()
    }
    # Without ETags in the index, a new run takes the objects as they are now.
    again = self.spooled(**self.remap, olmo_index_path=self.index_path)
    self.assertFalse(np.asarray(next(again)["inputs"]).any())

  def test_a_full_disk_changes_nothing(self):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", self.spool], capture_output=True
    )
    if mounted.returncode:
      self.skipTest(f"No tmpfs can be mounted: {mounted.stderr.decode()}")
    self.addCleanup(subprocess.run, ["umount", "-l", self.spool], check=True)
    local = cases.take(self.train(), 60)
    with self.assertLogs(level="WARNING") as logs:
      iterator = self.spooled()
      for expected, found in zip(local, cases.take(iterator, 60)):
        np.testing.assert_array_equal(found["inputs"], expected["inputs"])
      iterator.close()
    self.assertLen([line for line in logs.output if "turned off" in line], 1)

  def test_two_runs_may_share_a_spool(self):
    iterators = [self.spooled(), self.spooled(), self.spooled(data_shuffle_seed=3)]
    expected = [self.train(), self.train(), self.train(data_shuffle_seed=3)]
    for _ in range(100):
      for iterator, local in zip(iterators, expected):
        np.testing.assert_array_equal(next(iterator)["inputs"], next(local)["inputs"])

  @parameterized.parameters(
      cases.DOCUMENTS,
      {"dataset_type": "olmo_packed", "olmo_eos_id": 0, "olmo_pad_id": 1},
      {"dataset_type": "olmo_padded", "olmo_eos_id": 0, "olmo_pad_id": 1},
  )
  def test_documents_are_spooled_too(self, **values):
    values = {**values, "max_target_length": 64}
    local = cases.take(self.train(**values), 20)
    iterator = self.spooled(**values)
    found = cases.take(iterator, 20)
    for expected, batch in zip(local, found):
      np.testing.assert_array_equal(batch["inputs"], expected["inputs"])
    self.wait_until_filled(iterator, 3)

  def test_local_files_are_not_spooled(self):
    iterator = self.train(olmo_spool_dir=self.spool)
    cases.take(iterator, 2)
    self.assertEmpty(os.listdir(self.spool))
    self.assertNotIn("spool_hits", iterator.metrics())

  def test_evaluation_does_not_request_more_than_it_reads(self):
    values = {**self.remote, "olmo_spool_dir": self.spool, "olmo_eval_instances": 80}
    _, evaluation = maxtext_olmo.create_data_iterator(
        self.config(eval_interval=5, **values), cases.device_mesh()
    )
    self.addCleanup(evaluation.close)
    next(iter(evaluation))
    time.sleep(0.3)
    self.assertLess(self.gets, 60)

  @parameterized.parameters(
      ({"olmo_spool_dir": "s3://bucket/spool"}, "is a URL, but a spool must be on a disk"),
      ({"olmo_spool_gib": 0.0}, "must be at least 0.0625"),
      (
          {
              "olmo_spool_dir": "/tmp/x",
              "dataset_type": "olmo_documents",
              "olmo_eos_id": 0,
              "olmo_packing": "first_fit",
          },
          "olmo_spool_dir='/tmp/x' needs rows that are addressed by position",
      ),
  )
  def test_values_that_cannot_work_are_refused(self, values, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      self.train(**values)


_TRAINER = textwrap.dedent("""
    import sys
    import jax
    import numpy as np
    import maxtext_olmo
    from tests.loader import cases

    values = dict(arg.split("=", 1) for arg in sys.argv[2:])
    config = cases.data_config(
        **{**cases.WINDOWS, "max_target_length": 64, "olmo_spool_gib": 0.0625, **values})
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    for step in range(int(sys.argv[1])):
      print(hash(np.asarray(next(iterator)["inputs"]).tobytes()), flush=True)
    """)


class KilledTest(SpoolCase):

  def _start(self, steps):
    values = {**self.remote, "olmo_spool_dir": self.spool}
    return subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(steps), *(f"{k}={v}" for k, v in values.items())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"},
    )

  def test_a_killed_run_leaves_a_spool_that_the_next_one_uses(self):
    self.server.latency = 0.002
    killed = self._start(10_000)
    for _ in range(3):
      self.assertTrue(killed.stdout.readline(), killed)
    _wait_for(lambda: list(pathlib.Path(self.spool).glob("*.spool")))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = self.gets
    local = cases.take(self.train(), 80)
    iterator = self.spooled()
    for expected, found in zip(local, cases.take(iterator, 80)):
      np.testing.assert_array_equal(found["inputs"], expected["inputs"])
    self.assertLess(self.gets - before, len(self.rows))
    self.assertGreater(iterator.metrics()["spool_hits"], 0)

  def test_two_processes_share_a_spool(self):
    processes = [self._start(120) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, outputs):
      self.assertEqual(process.returncode, 0, error.decode()[-3000:])
    self.assertEqual(outputs[0][0], outputs[1][0])
    self.assertLen(outputs[0][0].splitlines(), 120)


if __name__ == "__main__":
  absltest.main()
