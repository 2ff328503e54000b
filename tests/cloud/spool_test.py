"""The spool between a trainer and a store that fails: the trainer does not notice.

An outage lasts 45 s with a spool of 64 s. A longer one outlasts the spool; with `make
test-cloud-long`, it takes ten minutes.
"""

import contextlib
import os
import pathlib
import subprocess
import threading
import time

import jax
from absl.testing import absltest

import maxtext_olmo
from tests.cloud import cases
from tests.cloud import child as child_lib
from tests.loader import cases as loader_cases

STARTS_PROCESSES = True

_STEP_SECONDS = 1.0
_SPOOL_STEPS = 64
_OUTAGE_STEPS = 45
_LONG_OUTAGE_SECONDS = 600.0 if cases.LONG else 5.0
_LEAST_GIB = 0.0625
_PATIENCE_SECONDS = 60.0
# Steps after which a run is killed; each start of a process takes seconds.
_KILLS = (2, 5, 9, 14) if cases.LONG else (2, 9)


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 1)
  loader_cases.compile_fast()


def rows_of(counts):
  """Returns the number of rows in the requested ranges of token files."""
  rows = 0
  for request, count in counts.reads(".npy").items():
    first, last = map(int, request.split()[2].split("-"))
    rows += count * (last + 1 - first) // (2 * cases.LENGTH)
  return rows


class SpoolCase(cases.BucketCase):

  batch = 8

  def setUp(self):
    super().setUp()
    self.spool = os.path.join(self.work, "spool")
    self.remote_path = self.remote_index()
    self.proxy.counts(reset=True)

  def keys(self, **values):
    return {
        "olmo_spool_dir": self.spool,
        "olmo_spool_gib": _LEAST_GIB,
        "max_target_length": self.length,
        "global_batch_size_to_load": self.batch,
        **values,
    }

  def spooled(self, **values):
    """Returns an iterator over the bucket, through the spool."""
    return self.make(self.remote_path, **self.keys(**values))

  def expected(self, count, **values):
    keys = {"max_target_length": self.length, "global_batch_size_to_load": self.batch}
    return self.local_batches(count, **{**keys, **values})

  def wait_for_depth(self, iterator, steps):
    while iterator.metrics().get("spool_depth_steps", 0) < steps:
      time.sleep(0.05)

  def job(self, name, steps, **more):
    config = {**cases.CONFIG, "olmo_index_path": self.remote_path, **self.keys()}
    output = os.path.join(self.work, name)
    return {"config": config, "steps": steps, "output": output, **more}


class OutageTest(SpoolCase):
  """Steps of 1 MiB over a corpus that does not fit into the spool."""

  length = 8192
  batch = 64
  tokens_per_file = (8192 * 64 * (_SPOOL_STEPS + 40),)

  def test_an_outage_shorter_than_the_spool_is_not_noticed(self):
    expected = self.expected(5 + _OUTAGE_STEPS + 10)
    iterator = self.spooled(olmo_spool_gib=1.1 * _SPOOL_STEPS / 1024)
    got = loader_cases.take(iterator, 5)
    self.wait_for_depth(iterator, _OUTAGE_STEPS + 1)
    self.addCleanup(self.proxy.heal)  # So that a failure does not wait for the store.
    self.proxy.set(outage="refuse")
    waited = iterator.metrics()["wait_seconds"]
    # The store does not answer, and nobody repairs it meanwhile.
    got += self.take_slowly(iterator, _OUTAGE_STEPS)
    self.assertEqual(self.proxy.faults.outage, "refuse")
    waited = iterator.metrics()["wait_seconds"] - waited
    self.assertLess(waited / (_OUTAGE_STEPS * _STEP_SECONDS), 0.1)
    self.proxy.heal()
    got += loader_cases.take(iterator, 10)
    self.assert_equal_batches(got, expected)

  def test_an_outage_longer_than_the_spool_is_waited_for(self):
    steps = _SPOOL_STEPS + 30  # More than the spool and the prefetcher hold.
    expected = self.expected(steps)
    iterator = self.spooled()
    got = loader_cases.take(iterator, 5)
    self.proxy.set(outage="refuse")
    end = threading.Timer(_LONG_OUTAGE_SECONDS, self.proxy.heal)
    end.start()
    self.addCleanup(end.join)
    got += loader_cases.take(iterator, steps - 5)
    self.assertTrue(end.finished.is_set())  # It could not continue before.
    self.assert_equal_batches(got, expected)

  def take_slowly(self, iterator, count):
    got = []
    for _ in range(count):
      time.sleep(_STEP_SECONDS)
      got += loader_cases.take(iterator, 1)
    return got


class SharedSpoolTest(SpoolCase):
  """Two processes read different files through one spool, which the first one fills."""

  length = 8192
  batch = 64
  tokens_per_file = (8192 * 64 * (_SPOOL_STEPS + 40), 8192 * 64 * 30)

  def index_of(self, path, base, number):
    """Writes an index of one file of another index; returns its path."""
    whole = maxtext_olmo.load_index(path)
    entry = whole.files[number]
    output = os.path.join(self.create_tempdir().full_path, "index.json")
    maxtext_olmo.build_index(
        [(f"{base}/{entry.path}", entry.label)],
        whole.sequence_length,
        tokenizer=whole.tokenizer,
        dtype=whole.dtype,
    ).save(output)
    return output

  def start(self, name, number, steps, seconds):
    """Starts a process over one file; returns its output, and a function that checks it."""
    local = self.index_of(self.index_path, os.path.join(self.directory, "bucket", "data"), number)
    iterator = self.make(local, max_target_length=self.length, global_batch_size_to_load=self.batch)
    expected = [child_lib.hash_of(batch) for batch in loader_cases.take(iterator, steps)]
    iterator.close()
    job = self.job(name, steps, seconds=seconds)
    url = cases.url_of("http", self.proxy.url, "data")
    job["config"]["olmo_index_path"] = self.index_of(self.remote_path, url, number)
    process = child_lib.start(job)
    self.addCleanup(process.kill)

    def check():
      process.wait(timeout=_PATIENCE_SECONDS)
      child_lib.wait_for(process, job["output"])
      lines = child_lib.lines_of(job["output"])
      self.assertEqual([line["hash"] for line in lines], expected)

    return job["output"], check

  def wait_until(self, condition):
    end = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
      self.assertLess(time.monotonic(), end, f"Waited for {_PATIENCE_SECONDS} s.")
      time.sleep(0.05)

  def size(self):
    total = 0
    for path in self.files():
      with contextlib.suppress(FileNotFoundError):  # It has just been deleted.
        total += path.stat().st_size
    return total

  def files(self):
    return sorted(pathlib.Path(self.spool).glob("*.spool"))

  def test_an_outage_for_one_process_does_not_let_the_other_delete_its_files(self):
    output, check_first = self.start("first", 0, 50, seconds=0.6)
    self.wait_until(lambda: self.size() >= (_SPOOL_STEPS - 8) << 20)
    self.addCleanup(self.proxy.heal)
    self.proxy.set(outage="refuse", only="part-000")
    self.wait_until(lambda: self.proxy.counts().faults)  # Now the first process waits.
    needed = self.files()[-1]
    now = time.time()
    for path in self.files():
      with contextlib.suppress(FileNotFoundError):
        os.utime(path, (now - 61, now - 61))
    self.wait_until(lambda: needed.stat().st_mtime >= now)
    self.assertLess(len(child_lib.lines_of(output)), 50)  # Not by closing the spool.
    _, check_second = self.start("second", 1, 20, seconds=0.0)
    check_second()
    check_first()
    self.assertEqual(self.proxy.faults.outage, "refuse")


class SpoolTest(SpoolCase):
  """Steps of 32 KiB over a corpus of 150 steps, which fits."""

  def test_a_corpus_that_fits_is_read_once(self):
    index = maxtext_olmo.load_index(self.index_path)
    steps = index.total_instances // self.batch
    iterator = self.spooled(olmo_num_epochs=3)
    expected = self.expected(3 * steps, olmo_num_epochs=3)
    got = loader_cases.take(iterator, steps)
    self.wait_for_depth(iterator, steps // 2)
    first = self.proxy.counts(reset=True)
    got += loader_cases.take(iterator, 2 * steps)
    second = self.proxy.counts()
    self.assert_equal_batches(got, expected)
    self.assertEqual(rows_of(first) + rows_of(second), index.total_instances)
    self.assertEqual(rows_of(second), 0)

  def test_a_restart_uses_what_is_there(self):
    expected = self.expected(60)
    iterator = self.spooled()
    loader_cases.take(iterator, 5)
    self.wait_for_depth(iterator, 50)
    state = iterator.get_state()
    iterator.close()
    self.proxy.counts(reset=True)
    self.proxy.set(outage="refuse", only=".npy")
    again = self.spooled()
    again.set_state(state)
    self.assert_equal_batches(loader_cases.take(again, 40), expected[5:45])
    self.proxy.heal()

  def test_a_full_disk_turns_the_spool_off_and_nothing_else(self):
    os.mkdir(self.spool)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", self.spool],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
      self.skipTest(f"A small disk cannot be mounted: {mounted.stderr.decode().strip()}")
    self.addCleanup(subprocess.run, ["umount", "-l", self.spool], check=True)
    expected = self.expected(60)
    with self.assertLogs("absl", "WARNING") as logs:
      iterator = self.spooled()
      got = loader_cases.take(iterator, 60)
      iterator.close()
    self.assert_equal_batches(got, expected)
    self.assertRegex("\n".join(logs.output), "(?i)spool")

  def test_killed_while_it_fills_the_spool_a_run_continues_exactly(self):
    expected = [child_lib.hash_of(batch) for batch in self.expected(40)]
    self.proxy.set(latency=0.01, cut=0.01)
    job = self.job("steps", 40, seconds=0.02)
    for kills in _KILLS:
      process = child_lib.start(job)
      self.addCleanup(process.kill)
      child_lib.kill_after(process, job["output"], kills)
    process = child_lib.start(job)
    self.addCleanup(process.kill)
    child_lib.wait_for(process, job["output"])
    lines = child_lib.lines_of(job["output"])
    self.assertEqual([line["hash"] for line in lines], expected)

  def test_two_processes_share_one_spool(self):
    expected = [child_lib.hash_of(batch) for batch in self.expected(60)]
    jobs = [self.job(name, 60, seconds=0.02) for name in ("one", "two")]
    processes = [child_lib.start(job) for job in jobs]
    for process in processes:
      self.addCleanup(process.kill)
    for process, job in zip(processes, jobs):
      child_lib.wait_for(process, job["output"])
      lines = child_lib.lines_of(job["output"])
      self.assertEqual([line["hash"] for line in lines], expected)


if __name__ == "__main__":
  absltest.main()
