"""Tests of maxtext_olmo.trainers.lease: real processes, really killed."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.trainers import lease as lease_lib
from maxtext_olmo.trainers import lease_places
from tests import distributed

STARTS_PROCESSES = True

# Takes the lease, says so, and keeps it until its input ends; "check" checks it.
_HOLDER = """
import sys
from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.trainers import lease
try:
  held = lease.Lease(sys.argv[1])
except errors.ConfigError as error:
  print("refused", str(error), flush=True)
  sys.exit(2)
print("holds", flush=True)
for line in sys.stdin:
  try:
    held.check()
    print("still holds", flush=True)
  except errors.ConfigError as error:
    print("lost", str(error), flush=True)
"""


class LeaseTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path) / "checkpoints"
    self.file = self.dir / lease_places.FILE_NAME

  def start(self) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(self.dir)],
        env=distributed.child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def stop() -> None:
      process.kill()
      process.communicate()

    self.addCleanup(stop)
    return process

  def ask(self, process: subprocess.Popen[str]) -> str:
    process.stdin.write("check\n")
    process.stdin.flush()
    return process.stdout.readline()

  def write_foreign_lease(self, **changes: object) -> None:
    """Writes the lease of a process that cannot be seen from here."""
    holder = dataclasses.replace(
        lease_lib.Holder.this_process(), host="elsewhere", machine="another boot", **changes
    )
    self.dir.mkdir(exist_ok=True)
    self.file.write_text(json.dumps(dataclasses.asdict(holder)))

  def test_a_second_run_is_refused_with_the_name_of_the_holder(self):
    holder = self.start()
    self.assertEqual(holder.stdout.readline(), "holds\n")
    with self.assertRaisesRegex(
        errors.ConfigError, rf"is in use by process {holder.pid} on \S+, started 20\d\d-"
    ):
      lease_lib.Lease(self.dir)
    self.assertEqual(self.ask(holder), "still holds\n")

  def test_the_lease_of_a_killed_run_is_taken_over_at_once(self):
    holder = self.start()
    self.assertEqual(holder.stdout.readline(), "holds\n")
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # Ended, but still a zombie.
    with lease_lib.Lease(self.dir) as lease:
      lease.check()
    self.assertEqual(os.listdir(self.dir), [])

  def test_a_process_with_a_reused_id_does_not_keep_the_lease(self):
    holder = lease_lib.Holder.this_process()
    self.dir.mkdir()
    old = dataclasses.replace(holder, pid=1, process_start=holder.process_start)
    self.file.write_text(json.dumps(dataclasses.asdict(old)))
    with lease_lib.Lease(self.dir) as lease:
      lease.check()

  def test_of_many_that_start_at_once_after_a_kill_one_holds_it(self):
    first = self.start()
    self.assertEqual(first.stdout.readline(), "holds\n")
    others = [self.start() for _ in range(3)]
    self.assertTrue(all(other.stdout.readline().startswith("refused") for other in others))
    first.kill()
    first.wait()
    outcomes: list[lease_lib.Lease | errors.ConfigError] = []
    barrier = threading.Barrier(8)

    def take() -> None:
      barrier.wait()
      try:
        outcomes.append(lease_lib.Lease(self.dir))
      except errors.ConfigError as error:
        outcomes.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    held = [outcome for outcome in outcomes if isinstance(outcome, lease_lib.Lease)]
    self.assertLen(held, 1)
    held[0].check()
    held[0].release()
    self.assertEqual(os.listdir(self.dir), [])

  def test_a_lease_from_elsewhere_is_taken_over_once_it_has_not_been_renewed(self):
    self.write_foreign_lease()
    now = self.file.stat().st_mtime
    os.utime(self.file, (now, now - 301))
    with lease_lib.Lease(self.dir) as lease:
      lease.check()
    self.write_foreign_lease()
    os.utime(self.file, (now, now - 299))
    with self.assertLogs(level="WARNING") as logs, lease_lib.Lease(self.dir) as lease:
      lease.check()
    self.assertLen(logs.output, 1)
    self.assertRegex(
        logs.output[0], r"belongs to process \d+ on elsewhere.*Waiting \d s for a renewal"
    )

  def test_a_lease_from_elsewhere_that_is_renewed_meanwhile_refuses_another_run(self):
    self.write_foreign_lease()
    stopped = threading.Event()

    def renew() -> None:
      while not stopped.wait(0.2):
        os.utime(self.file)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
      with self.assertRaisesRegex(errors.ConfigError, r"is in use by .* on elsewhere"):
        lease_lib.Lease(self.dir)
    finally:
      stopped.set()
      thread.join()
    self.assertEqual(json.loads(self.file.read_text())["host"], "elsewhere")

  def test_a_holder_that_was_taken_over_stops_and_leaves_the_new_lease_alone(self):
    lease = lease_lib.Lease(self.dir)
    self.write_foreign_lease(pid=4711)
    with self.assertRaisesRegex(errors.ConfigError, "now belongs to process 4711 on elsewhere"):
      lease.check()
    lease.release()
    self.assertTrue(self.file.exists())

  def test_a_lost_lease_is_not_taken_again_because_nothing_would_renew_it(self):
    lease = lease_lib.Lease(self.dir, renew_seconds=0.01)
    self.write_foreign_lease(pid=4711)
    with self.assertRaisesRegex(errors.ConfigError, "now belongs to process 4711"):
      while True:  # Until the thread that renews the lease has noticed, and ended.
        time.sleep(0.01)
        lease.require_held()
    while any(thread.name == "olmo-lease" for thread in threading.enumerate()):
      time.sleep(0.01)
    self.file.unlink()  # The other run ends.
    with self.assertRaisesRegex(errors.ConfigError, "now belongs to process 4711"):
      lease.check()
    lease.release()
    self.assertFalse(self.file.exists())

  def test_between_saves_only_a_takeover_counts_and_not_a_storage_that_fails(self):
    with lease_lib.Lease(self.dir) as lease:
      lease.require_held()
      self.file.unlink()
      self.file.mkdir()
      lease.require_held()
      with self.assertRaisesRegex(errors.ConfigError, "cannot be read"):
        lease.check()
      self.file.rmdir()
      self.write_foreign_lease(pid=4711)
      with self.assertRaisesRegex(errors.ConfigError, "now belongs to process"):
        lease.require_held()

  def test_a_deleted_lease_is_taken_again(self):
    with lease_lib.Lease(self.dir) as lease:
      self.file.unlink()
      lease.check()
      with self.assertRaisesRegex(errors.ConfigError, "is in use by"):
        lease_lib.Lease(self.dir)

  def test_the_lease_is_renewed(self):
    with lease_lib.Lease(self.dir, renew_seconds=0.01):
      os.utime(self.file, (0, 0))
      while self.file.stat().st_mtime == 0:
        time.sleep(0.01)

  def test_a_run_that_exits_releases_the_lease(self):
    holder = self.start()
    self.assertEqual(holder.stdout.readline(), "holds\n")
    holder.communicate("")
    self.assertEqual(os.listdir(self.dir), [])

  def test_a_run_that_exits_immediately_releases_the_lease(self):
    code = (
        "import sys\n"
        "from maxtext_olmo.trainers import failure, lease\n"
        "lease.Lease(sys.argv[1])\n"
        "failure.exit_now(75)\n"
    )
    done = distributed.run_python(code, str(self.dir))
    self.assertEqual(done.returncode, 75, done.stderr)
    self.assertEqual(os.listdir(self.dir), [])

  def test_a_bucket_that_does_not_answer_is_an_error_that_a_restart_may_fix(self):
    options = stores.StoreOptions("http://127.0.0.1:1", anonymous=True, first_patience=0.1)
    with self.assertRaisesRegex(errors.ConfigError, "cannot be written to.*be reached") as caught:
      lease_lib.Lease("s3://bucket/run", options=options)
    self.assertTrue(errors.is_transient(caught.exception))

  def test_a_bucket_without_obstore_has_no_lease_and_a_warning_says_what_follows(self):
    code = (
        "import sys\n"
        "sys.modules['obstore'] = None\n"
        "from maxtext_olmo.trainers import lease\n"
        "with lease.Lease('gs://bucket/run') as held:\n"
        "  held.check()\n"
    )
    done = distributed.run_python(code)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertRegex(
        done.stderr,
        r"There is no lease for checkpoint_dir=gs://bucket/run \(.*obstore.*\): nothing prevents a"
        " second run from writing there",
    )

  @parameterized.named_parameters(
      ("nonsense", "nonsense"), ("list", "[1]"), ("deep", "[" * 100_000), ("empty", "")
  )
  def test_a_lease_that_cannot_be_read_counts_until_it_is_stale(self, text: str):
    self.dir.mkdir()
    self.file.write_text(text)
    with self.assertRaisesRegex(errors.ConfigError, "is in use by an unknown process"):
      lease_lib.Lease(self.dir)
    os.utime(self.file, (0, 0))
    with lease_lib.Lease(self.dir) as lease:
      lease.check()

  def test_a_directory_that_cannot_be_written_to_is_a_config_error(self):
    self.dir.mkdir()
    (self.dir / "file").write_text("")
    for bad in (self.dir / "file", self.dir / "file" / "below", "/proc/none", "/proc", "a\0b"):
      with self.assertRaisesRegex(errors.ConfigError, "cannot be written to"):
        lease_lib.Lease(bad)
    self.file.mkdir()
    with self.assertRaisesRegex(errors.ConfigError, "cannot be written to"):
      lease_lib.Lease(self.dir)

  def test_a_pipe_in_its_place_does_not_block(self):
    self.dir.mkdir()
    os.mkfifo(self.file)
    with self.assertRaisesRegex(errors.ConfigError, "is in use by an unknown process"):
      lease_lib.Lease(self.dir)


if __name__ == "__main__":
  absltest.main()
