"""Tests of the reconstructed data of MaxText's own loader, against that loader."""

import collections
import itertools
import os

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.trainers.maxtext import loader_history as history
from tests.trainers.maxtext import runs

_LOADER = "OLMo grain loader: index=i.json total_instances=2,003"
_LOG = f"""\
{_LOADER} shard=0/2 per_host_batch=4 seq=128 resumed_step=0 initial_step=0
{_LOADER} shard=0/2 per_host_batch=4 seq=128 resumed_step=0 initial_step=0
checkpoint manager exists so trying to load this run's existing checkpoint
{_LOADER} shard=1/4 per_host_batch=2 seq=128 resumed_step=10 initial_step=20
restoring from this run's directory step 10
restoring from this run's directory step 10
"""


def _start(label: int, hosts: int = 1, rows: int = 4, workers: int = 0) -> history.Start:
  return history.Start(label, max(0, label), hosts, rows, workers)


class SegmentsTest(parameterized.TestCase):

  def test_a_restart_discards_the_steps_after_its_checkpoint(self):
    starts = [_start(-1), _start(10), _start(5), _start(8)]
    found = history.segments(starts, 20)
    self.assertEqual(
        [(part.first_step, part.last_step) for part in found], [(0, 5), (6, 8), (9, 20)]
    )

  def test_a_start_after_the_checkpoint_is_ignored(self):
    found = history.segments([_start(-1), _start(10)], 7)
    self.assertEqual([(part.first_step, part.last_step) for part in found], [(0, 7)])

  def test_a_missing_beginning_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "steps 0 to 10"):
      history.segments([_start(10)], 20)

  def test_starts_are_read_from_a_log(self):
    found = history.read_starts(_LOG.splitlines(), workers=2)
    self.assertEqual(
        found,
        [history.Start(-1, 0, 2, 4, 2), history.Start(10, 10, 4, 2, 2)],
    )


class CountTest(parameterized.TestCase):

  def test_one_host_sees_each_instance_once_in_an_epoch(self):
    parts = history.segments([_start(-1)], 24)
    found = history.count(100, 0, parts)
    self.assertEqual(found.num_rows, 100)
    np.testing.assert_array_equal(found.counts, np.ones(100))
    self.assertEqual(found.num_epochs, 1)
    self.assertFalse(found.consumed.any())

  def test_the_replayed_batch_is_repeated(self):
    parts = history.segments([_start(-1), _start(9)], 19)
    found = history.count(100, 0, parts)
    self.assertEqual((found.num_rows, found.num_distinct), (80, 76))
    self.assertEqual((found.num_repeated, found.num_missing), (4, 4))
    self.assertEqual(int(found.consumed.sum()), 76)

  def test_two_hosts_repeat_and_miss_within_an_epoch_of_steps(self):
    found = history.count(2000, 0, history.segments([_start(-1, hosts=2)], 249))
    self.assertEqual(found.num_rows, 2000)
    self.assertBetween(found.num_distinct, 1400, 1600)
    self.assertEqual(found.num_missing, 2000 - found.num_distinct)
    self.assertEqual(found.num_repeated, int(np.maximum(found.counts.astype(int) - 2, 0).sum()))

  def test_rows_that_were_loaded_and_not_trained_on_do_not_count(self):
    parts = history.segments([_start(-1)], 9)
    found = history.count(100, 0, parts, trained_rows=2)
    self.assertEqual(found.num_rows, 20)

  def test_more_hosts_than_instances_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "fewer than the 9 hosts"):
      history.count(5, 0, history.segments([_start(-1, hosts=9)], 1))

  # Each worker of MaxText's loader imports MaxText anew, so that one case has to do for them.
  @parameterized.parameters(
      *itertools.product((1, 2, 4), (0,), ((), (7,), (7, 15))),
      (2, 2, ()),
  )
  @runs.needs_maxtext
  def test_counts_are_those_of_maxtexts_own_loader(self, hosts, workers, restarts):
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    from maxtext.input_pipeline import olmo_data
    from maxtext.input_pipeline import olmo_data_grain

    directory = self.create_tempdir().full_path
    runs.write_corpus(directory, 101)
    files = sorted(os.scandir(os.path.join(directory, "data")), key=lambda entry: entry.name)
    index = olmo_data.build_index(
        [(entry.path, "web") for entry in files],
        runs.LENGTH,
        tokenizer="test",
        header_reader=lambda path: olmo_data.read_raw_metadata_from_path(path, "uint16"),
    )
    rows = 2
    starts = [_start(label, hosts, rows, workers) for label in (-1, *restarts)]
    parts = history.segments(starts, 22)
    expected: collections.Counter[int] = collections.Counter()
    from maxtext_olmo.rows import workers as workers_lib

    workers_lib.parse_grain_flags()
    for part in parts:
      for host in range(hosts):
        loader = olmo_data_grain.make_olmo_grain_data_loader(
            index,
            seed=5,
            batch_size=rows,
            shard_index=host,
            shard_count=hosts,
            shift_to_inputs_targets=False,
            apply_ngram_filter=False,
            grain_worker_count=workers,
            initial_step=part.start.data_label * rows,
        )
        for batch in itertools.islice(iter(loader), part.num_batches):
          expected.update(batch["instance_id"].tolist())
    found = history.count(101, 5, parts)
    self.assertEqual(found.num_rows, expected.total())
    self.assertEqual({i: int(c) for i, c in enumerate(found.counts) if c}, dict(expected))


if __name__ == "__main__":
  absltest.main()
