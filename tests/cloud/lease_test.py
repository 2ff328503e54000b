"""Tests of leases and shared objects in real object stores: real processes, really killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from unittest import mock

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import shared_object
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.trainers import lease as lease_lib
from maxtext_olmo.trainers import lease_places
from tests import distributed
from tests.cloud import proxy as proxy_lib
from tests.cloud import servers

STARTS_PROCESSES = True

# Takes the lease, says so, and keeps it until its input ends.
_HOLDER = """
import sys
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.trainers import lease
held = lease.Lease(sys.argv[1], options=stores.StoreOptions(sys.argv[2]))
print("holds", flush=True)
for line in sys.stdin:
  held.check()
  print("still holds", flush=True)
"""


class LeaseCase(absltest.TestCase):
  """Tests on a store, which subclasses start."""

  scheme = ""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    stack = contextlib.ExitStack()
    cls.addClassCleanup(stack.close)
    cls.options = cls.start_store(stack)

  def setUp(self):
    super().setUp()
    self.url = f"{self.scheme}://bucket/{self.id().rpartition('.')[2]}"

  def lease(self, **changes) -> lease_lib.Lease:
    return lease_lib.Lease(self.url, options=self.options, **changes)

  def start(self) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, self.url, self.options.endpoint],
        env=distributed.child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def stop() -> None:
      process.kill()
      process.communicate()

    self.addCleanup(stop)
    self.assertEqual(process.stdout.readline(), "holds\n")
    return process

  def foreign(self) -> lease_places.LeaseObject:
    """Returns the place of the lease, for the part of a run on another machine."""
    return lease_places.LeaseObject(self.url, self.options)

  def foreign_text(self) -> str:
    holder = lease_lib.Holder.this_process()
    return json.dumps(dataclasses.asdict(dataclasses.replace(holder, host="else", machine="other")))

  def test_a_second_run_is_refused_until_the_first_is_killed(self):
    holder = self.start()
    with self.assertRaisesRegex(
        errors.ConfigError, rf"is in use by process {holder.pid} on \S+, started 20\d\d-"
    ):
      self.lease()
    holder.stdin.write("check\n")
    holder.stdin.flush()
    self.assertEqual(holder.stdout.readline(), "still holds\n")
    holder.kill()
    holder.wait()
    with self.lease() as lease:
      lease.check()
    self.assertIsNone(self.foreign().read())

  def test_of_many_that_start_at_once_after_a_kill_one_holds_it(self):
    first = self.start()
    first.kill()
    first.wait()
    outcomes: list[lease_lib.Lease | errors.ConfigError] = []
    barrier = threading.Barrier(6)

    def take() -> None:
      barrier.wait()
      try:
        outcomes.append(self.lease())
      except errors.ConfigError as error:
        outcomes.append(error)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    held = [outcome for outcome in outcomes if isinstance(outcome, lease_lib.Lease)]
    self.assertLen(held, 1, outcomes)
    held[0].check()
    held[0].release()

  def test_a_lease_from_elsewhere_is_taken_over_once_it_is_not_renewed_anymore(self):
    place, text = self.foreign(), self.foreign_text()
    place.create(text)
    with mock.patch.object(lease_lib, "STALE_SECONDS", 2.0), self.lease() as lease:
      lease.check()
      # The other run was only suspended; it must not renew what is no longer its lease.
      place.renew(text)
      place.remove(text)
      lease.check()

  def test_a_lease_from_elsewhere_that_is_renewed_meanwhile_refuses_another_run(self):
    place, text = self.foreign(), self.foreign_text()
    place.create(text)
    stopped = threading.Event()

    def renew() -> None:
      while not stopped.wait(0.5):
        place.renew(text)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
      with self.assertRaisesRegex(errors.ConfigError, r"is in use by .* on else"):
        self.lease()
    finally:
      stopped.set()
      thread.join()

  def test_a_run_that_was_taken_over_stops_and_leaves_the_new_lease_alone(self):
    lease = self.lease(renew_seconds=0.01)
    place, text = self.foreign(), self.foreign_text()
    while not place.take_over(place.read(), text):
      pass  # The lease was renewed in between.
    with self.assertRaisesRegex(errors.ConfigError, "now belongs to process .* on else"):
      lease.check()
    with self.assertRaisesRegex(errors.ConfigError, "now belongs to process .* on else"):
      while True:  # Until the thread that renews the lease notices.
        lease.require_held()
    lease.release()
    self.assertEqual(place.read().text, text)

  def test_a_run_that_was_suspended_reads_the_lease_before_its_next_step(self):
    lease = self.lease()
    self.addCleanup(lease.release)
    place, text = self.foreign(), self.foreign_text()
    self.assertTrue(place.take_over(place.read(), text))
    lease.require_held()  # The thread has just renewed the lease.
    later = time.time() + 2 * lease_lib.RENEW_SECONDS + 1
    with (
        mock.patch.object(time, "time", lambda: later),
        self.assertRaisesRegex(errors.ConfigError, "now belongs to process .* on else"),
    ):
      lease.require_held()

  def test_only_the_first_of_two_changes_of_a_version_succeeds(self):
    one = shared_object.SharedObject(f"{self.url}/object", self.options)
    self.assertIsNone(one.read())
    self.assertEqual([one.create(b"a"), one.create(b"b")], [True, False])
    version = one.read()
    self.assertEqual(version.data, b"a")
    self.assertLess(abs(one.now() - version.modified), 60)
    self.assertEqual([one.replace(version, b"c"), one.replace(version, b"d")], [True, False])
    self.assertEqual(one.read().data, b"c")
    one.remove()
    self.assertFalse(one.replace(version, b"e"))
    self.assertIsNone(one.read())

  def test_a_bucket_that_does_not_exist_has_no_lease_and_a_warning_without_secrets(self):
    url = f"{self.scheme}://absent/run"
    with self.assertLogs(level="WARNING") as logs, lease_lib.Lease(
        url, options=self.options
    ) as one:
      one.check()
      one.require_held()
    self.assertIn(f"There is no lease for checkpoint_dir={url}", logs.output[0])
    for secret in (servers.MOTO_SECRET, servers.AZURITE_KEY):
      self.assertNotIn(secret, logs.output[0])


@servers.needs("moto")
class S3LeaseTest(LeaseCase):
  scheme = "s3"

  @classmethod
  def start_store(cls, stack):
    stack.enter_context(servers.environment(servers.moto_environment()))
    server = stack.enter_context(servers.start_moto())
    servers.create_s3_bucket(server, "bucket")
    cls.proxy = stack.enter_context(proxy_lib.start(server.port))
    return stores.StoreOptions(cls.proxy.url)

  def test_a_request_that_is_not_answered_is_soon_sent_again(self):
    lease = self.lease()
    self.addCleanup(lease.release)
    self.addCleanup(self.proxy.heal)
    self.proxy.set(silent=1.0)
    checking = threading.Thread(target=lease.check)
    checking.start()
    while sum(self.proxy.counts().faults.values()) < 2:
      time.sleep(0.1)
    self.proxy.heal()
    checking.join()


@servers.needs("azurite")
class AzureLeaseTest(LeaseCase):
  scheme = "az"

  @classmethod
  def start_store(cls, stack):
    stack.enter_context(servers.environment(servers.azurite_environment()))
    server = stack.enter_context(servers.start_azurite())
    servers.create_azure_container(server, "bucket")
    return stores.StoreOptions(f"{server.url}/{servers.AZURITE_ACCOUNT}")


del LeaseCase  # Only its subclasses are to be run.


if __name__ == "__main__":
  absltest.main()
