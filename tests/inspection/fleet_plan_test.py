"""Tests of the figures of a fleet."""

import math

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.inspection import fleet_plan
from tests.inspection import fleets


class FleetPlanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def figures(self, fleet, *, index=None, steps=None, **keys):
    settings = {"files": 120, "instances": 12_000, "base": "gs://bucket/x", **(index or {})}
    path = fleets.write_index(f"{self.folder}/index.json", **settings)
    options = fleets.make_options(path, **{"global_batch_size_to_load": 256, **keys})
    return fleet_plan.make_figures(options, fleet, steps)

  def test_the_figures_of_a_host_and_of_all_hosts(self):
    # 100 steps per second of 256 rows with 8 tokens of 2 bytes.
    fleet = fleet_plan.Fleet(hosts=16, tokens_per_second=100 * 256 * 8, latency=0.05)
    found = self.figures(fleet)
    self.assertEqual((found.hosts, found.devices, found.batch_rows), (16, 64, 256))
    self.assertEqual((found.rows_per_host, found.copies), (16, 1.0))
    self.assertAlmostEqual(found.steps_per_second, 100.0)
    self.assertEqual(found.steps, math.ceil(12_000 / 256))
    self.assertEqual((found.files, found.remote_files, found.store_scheme), (120, 120, "gs"))
    self.assertEqual((found.reads_per_step, found.bytes_per_step), (0.0, 16 * 16.0))
    # A few rows are neighbours by chance, and are read together.
    self.assertBetween(found.requests_per_step, 15.5, 16.0)
    self.assertBetween(found.fleet_requests_per_step, 250.0, 256.0)
    self.assertAlmostEqual(found.requests_per_second, 100 * found.requests_per_step)
    self.assertAlmostEqual(found.requests, found.fleet_requests_per_step * found.steps)
    self.assertEqual(found.batch_bytes, 16 * 8 * 2)
    self.assertEqual(found.wanted_steps_ahead, math.ceil(1.5 * 0.05 * 100) + 1)
    self.assertEqual(found.steps_held_ahead, found.wanted_steps_ahead)
    self.assertEqual((found.sizes_asked, found.index_requests, found.versions_asked), (0, 0, 0))
    batches = found.batches_in_memory + found.steps_held_ahead
    self.assertEqual(found.memory_bytes, found.table_bytes + batches * found.batch_bytes)
    self.assertGreater(found.table_bytes, 120 * 100)  # At least 100 bytes per file.
    self.assertGreater(found.step_seconds, 0)

  def test_local_files_are_open_and_need_neither_requests_nor_a_spool(self):
    found = self.figures(fleet_plan.Fleet(4, 1e4), index={"base": "/nowhere"})
    self.assertEqual((found.remote_files, found.requests_per_step, found.spool_bytes), (0, 0, 0))
    self.assertEqual((found.descriptors, found.sizes_asked), (120, 120))
    self.assertEqual(found.reads_per_step, 64.0)
    self.assertEqual(found.steps_held_ahead, 0)

  def test_memory_of_the_tables_does_not_grow_with_the_corpus_or_the_fleet(self):
    small = self.figures(fleet_plan.Fleet(1, 1e4), global_batch_size_to_load=4)
    large = self.figures(
        fleet_plan.Fleet(1024, 1e4),
        index={"instances": 12 * 10**10},
        global_batch_size_to_load=4096,
    )
    of_jax = 400 * (large.devices - small.devices)  # Its table of which device holds which rows.
    self.assertLess(large.table_bytes, 1.1 * small.table_bytes + of_jax)

  def test_rows_that_a_mesh_replicates_are_read_by_several_hosts(self):
    fleet = fleet_plan.Fleet(16, 1e4, axes={"tensor": 8, "data": 8})
    found = self.figures(fleet, data_sharding=[["data"]])
    self.assertEqual((found.rows_per_host, found.copies), (128, 8.0))

  @parameterized.parameters(
      ({"axes": {"data": 60}}, {}, "has 60 devices, but 16 hosts with 4 devices have 64"),
      ({}, {"global_batch_size_to_load": 60}, "60 rows over 64 shards"),
      ({"axes": {"data": 64}}, {"data_sharding": ["fsdp"]}, "names the mesh axes"),
      ({"devices_per_host": 0}, {}, "--devices-per-host must be positive"),
  )
  def test_a_fleet_that_cannot_hold_the_batch_is_a_config_error(self, fleet, keys, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      self.figures(fleet_plan.Fleet(16, 1e4, **fleet), **keys)

  def test_the_axes_of_the_config_are_used_unless_others_are_given(self):
    found = self.figures(fleet_plan.Fleet(16, 1e4), data_sharding=[["fsdp", "data"]])
    self.assertEqual(found.rows_per_host, 16)

  def test_a_spool_is_sized_for_an_outage_and_lasts_as_long_as_it_is_large(self):
    fleet = fleet_plan.Fleet(16, 100 * 256 * 8, outage=60.0)
    keys = {"olmo_spool_dir": f"{self.folder}/spool", "olmo_spool_gib": 1.0}
    found = self.figures(fleet, **keys)
    self.assertGreater(found.spool_bytes, 60 * 100 * found.bytes_per_step)
    self.assertEqual(found.spool_limit, 2.0**30)
    self.assertEqual(found.spool_steps, 3600 * 100)  # The filler stays within an hour.
    self.assertEqual(found.versions_asked, 120)
    self.assertEqual(self.figures(fleet, index={"etag": "e"}, **keys).versions_asked, 0)

  def test_a_stored_order_has_a_file(self):
    keys = {"olmo_order": "olmo_core", "olmo_order_cache_dir": self.folder, "olmo_num_epochs": 1}
    found = self.figures(fleet_plan.Fleet(4, 1e4), **keys)
    self.assertBetween(found.order_bytes, 4 * 11_776, 4 * 12_000 + 4096)
    self.assertEqual(self.figures(fleet_plan.Fleet(4, 1e4)).order_bytes, 0)

  def test_a_batch_schedule_is_planned_at_its_largest_batch(self):
    found = self.figures(
        fleet_plan.Fleet(4, 1e4), olmo_batch_schedule=((0, 64), (10, 256)), steps=20
    )
    self.assertEqual((found.batch_rows, found.rows_per_host, found.steps), (256, 64, 20))


if __name__ == "__main__":
  absltest.main()
