"""Tests of the limits of a fleet."""

import dataclasses

from absl.testing import absltest

from maxtext_olmo.inspection import fleet_limits
from maxtext_olmo.inspection import fleet_plan

_FIGURES = fleet_plan.Figures(
    hosts=1024,
    devices=4096,
    batch_rows=4096,
    loaded_rows=4096,
    row_tokens=8192,
    rows_per_host=4,
    copies=1.0,
    steps_per_second=0.5,
    steps=1000,
    files=950,
    remote_files=950,
    store_scheme="gs",
    reads_per_step=0.0,
    requests_per_step=4.0,
    bytes_per_step=4 * 32768.0,
    fleet_reads_per_step=0.0,
    fleet_requests_per_step=4096.0,
    fleet_bytes_per_step=4096 * 32768.0,
    files_per_step=4,
    step_seconds=1e-4,
    batch_bytes=4 * 32768,
    table_bytes=10**6,
    batches_in_memory=4,
    steps_ahead=32,
    wanted_steps_ahead=2,
    order_bytes=0,
    spool_bytes=2.0**30,
    spool_limit=0.0,
    spool_steps=0.0,
    sizes_asked=0,
    index_requests=1,
    versions_asked=0,
)


def _first(limits=None, **changes):
  figures = dataclasses.replace(_FIGURES, **changes)
  found = fleet_limits.check_limits(figures, limits or fleet_limits.Limits())
  return found[0], {limit.name: limit for limit in found}


class FleetLimitsTest(absltest.TestCase):

  def test_limits_are_sorted_and_the_largest_breaks_first(self):
    limits = fleet_limits.Limits(
        store_reads_per_second=5000, descriptors=65_536, memory=10**9, latency=0.05
    )
    first, found = _first(limits)
    self.assertEqual(first.name, "requests per second to the store, all hosts")
    self.assertAlmostEqual(first.used, 2048 / 5000)
    used = [limit.used for limit in found.values()]
    self.assertEqual(used, sorted(used, reverse=True))
    self.assertAlmostEqual(found["memory per host"].needed, _FIGURES.memory_bytes)

  def test_a_store_that_is_asked_too_much_breaks_and_the_remedy_says_for_how_long(self):
    first, _ = _first(fleet_limits.Limits(store_reads_per_second=5000), steps_per_second=8.0)
    self.assertGreater(first.used, 1)
    self.assertIn("about 60 minutes", first.remedy)  # 32,768 per second: three doublings.

  def test_local_files_are_limited_by_descriptors_only(self):
    first, found = _first(
        fleet_limits.Limits(descriptors=1024, store_reads_per_second=5000),
        files=12_000,
        remote_files=0,
        requests_per_step=0.0,
        fleet_requests_per_step=0.0,
    )
    self.assertEqual(first.name, "open files per host")
    self.assertGreater(first.used, 1)
    self.assertIn("ulimit -n 24000", first.remedy)
    self.assertLen(found, 2)

  def test_short_steps_break_the_read_ahead_and_the_search_for_rows(self):
    _, found = _first(steps_per_second=20_000.0, wanted_steps_ahead=1501)
    self.assertGreater(found["steps read ahead"].used, 1)
    self.assertGreater(found["time to find the rows of a step (measured here)"].used, 1)
    self.assertGreater(found["requests per second per host"].used, 1)

  def test_a_spool_that_is_too_small_says_how_large_it_must_be(self):
    first, _ = _first(spool_limit=2.0**28)
    self.assertEqual(first.name, "spool, to bridge the outage")
    self.assertIn("olmo_spool_gib=1.", first.remedy)

  def test_spools_that_are_filled_at_once_are_a_limit_of_their_own(self):
    first, _ = _first(
        fleet_limits.Limits(latency=0.064, store_reads_per_second=5000), spool_limit=2.0**40
    )
    self.assertEqual(first.name, "requests per second while all hosts fill their spools")
    self.assertEqual(first.needed, 1024 * 2000)

  def test_many_hosts_that_read_a_large_index_at_once_may_wait_too_long(self):
    first, _ = _first(fleet_limits.Limits(store_reads_per_second=100), index_requests=4)
    self.assertIn("requests per second to the store", first.name)
    _, found = _first(fleet_limits.Limits(store_reads_per_second=100), index_requests=4)
    self.assertGreater(found["time to serve the first requests of all hosts"].used, 1)


if __name__ == "__main__":
  absltest.main()
