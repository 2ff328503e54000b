"""Tests of a simulated fleet."""

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.rows import steps as steps_lib
from tests import corpora
from tests.inspection import fleets


class FleetTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def index(self, **settings):
    settings = {"files": 120, "instances": 10**9, "base": "/nowhere", **settings}
    return fleets.write_index(f"{self.folder}/index.json", **settings)

  @parameterized.parameters(
      (1, {"data": 4}, (), "feistel", 10**6, 1024),
      (16, {"data": 64}, (), "feistel", 10**9, 64),
      (256, {"data": 1024}, (), "feistel", 10**12, 4),
      (64, {"data": 256}, (), "sequential", 10**12, 16),
      (64, {"data": 32, "tensor": 8}, [["data"]], "feistel", 10**9, 32),
      (64, {"tensor": 8, "data": 32}, [["data"]], "feistel", 10**9, 128),
      (16, {"data": 8, "sequence": 8}, [["data"], "sequence"], "feistel", 10**9, 128),
      (8, {"data": 32}, (), "olmo_core", 10**4, 128),
  )
  def test_the_rows_of_all_hosts_are_the_global_batch(
      self, hosts, axes, sharding, order, instances, rows_per_host
  ):
    size = 1024
    options = fleets.make_options(
        self.index(instances=instances),
        global_batch_size_to_load=size,
        data_sharding=sharding,
        olmo_order=order,
        olmo_order_cache_dir=self.folder,
        **({"olmo_num_epochs": 1} if order == "olmo_core" else {}),
    )
    fleet = fleets.make_fleet(options, axes, hosts)
    self.assertEqual(fleet.hosts, hosts)
    start = fleet.run.start
    whole = steps_lib.StepDataset(
        fleet.rows,
        fleet.reader,
        start.stream,
        start.schedule,
        {size: np.arange(size)},
        block_steps=1,
    )
    for step in (0, 1, 7):
      found = np.full(size, -1)
      for process in range(hosts):
        rows = fleet.rows_of(process)[size]
        numbers = fleet.steps_of(process, block_steps=1).row_numbers(step)
        self.assertLen(rows, rows_per_host)
        # A row that several hosts hold is the same row on each of them.
        np.testing.assert_array_equal(np.where(found[rows] < 0, numbers, found[rows]), numbers)
        found[rows] = numbers
      np.testing.assert_array_equal(found, whole.row_numbers(step))
      self.assertLen(set(found.tolist()), size)

  def test_a_simulated_host_reads_what_a_real_one_reads(self):
    path, _ = corpora.write_corpus(self.folder, tokens_per_file=(4000, 800, 1600))
    keys = {"global_batch_size_to_load": 8, "data_shuffle_seed": 3}
    fleet = fleets.make_fleet(fleets.make_options(path, **keys), {"data": 1}, 1)
    config = maxtext_olmo.get_config()
    config.update(olmo_index_path=path, max_target_length=fleets.LENGTH, olmo_num_epochs=0, **keys)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    iterator, _ = maxtext_olmo.create_data_iterator(config, mesh)
    self.addCleanup(iterator.close)
    real, own = iterator.host_batches(), fleet.steps_of(0)
    for step in (0, 5, 99):
      for name in ("bounds", "source", "first", "count"):
        np.testing.assert_array_equal(
            getattr(own.parts(step), name), getattr(real.parts(step), name)
        )

  @parameterized.parameters((1, 10**6), (16, 10**9), (1024, 10**9), (1024, 10**12))
  def test_the_work_of_a_host_does_not_grow_with_hosts_or_instances(self, hosts, instances):
    options = fleets.make_options(
        self.index(instances=instances), global_batch_size_to_load=4 * hosts
    )
    fleet = fleets.make_fleet(options, {"data": 4 * hosts}, hosts)
    stream = _CountingStream(fleet.run.start.stream)
    dataset = steps_lib.StepDataset(
        fleet.rows, fleet.reader, stream, fleet.run.start.schedule, fleet.rows_of(hosts - 1)
    )
    steps = 2048
    for step in range(steps):
      self.assertEqual(dataset.parts(step).num_rows, 4)
    self.assertEqual(stream.calls, [4 * steps])  # All rows of these steps in one call, no others.

  def test_samples_count_reads_requests_and_bytes(self):
    options = fleets.make_options(self.index(), global_batch_size_to_load=64)
    local = fleets.make_fleet(options, {"data": 16}, 4).sample(3, range(10))
    self.assertEqual((local.rows, local.reads, local.requests), (16, 16.0, 0.0))
    self.assertEqual(local.bytes, 16 * fleets.LENGTH * 2)
    self.assertBetween(local.files, 1, 16)
    options = fleets.make_options(
        self.index(base="gs://bucket/x", chunk=4), global_batch_size_to_load=64
    )
    remote = fleets.make_fleet(options, {"data": 16}, 4).sample(3, range(10))
    # The four instances of a window are neighbours, and are read in one request.
    self.assertEqual((remote.rows, remote.reads, remote.requests), (16, 0.0, 4.0))

  def test_files_are_checked_as_a_host_checks_them(self):
    for base, asked in (("/nowhere", 120), ("gs://bucket/x", 0)):
      fleet = fleets.make_fleet(
          fleets.make_options(self.index(base=base), global_batch_size_to_load=4), {"data": 4}, 1
      )
      self.assertEqual(fleet.check_files(), asked)


class _CountingStream:
  """Notes how many positions each call of `locate` asks for."""

  def __init__(self, stream):
    self._stream = stream
    self.calls = []

  def __getattr__(self, name):
    return getattr(self._stream, name)

  def locate(self, positions):
    self.calls.append(len(positions))
    return self._stream.locate(positions)


if __name__ == "__main__":
  absltest.main()
