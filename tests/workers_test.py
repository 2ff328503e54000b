"""Workers that start quickly are as much processes of their own as others."""

import multiprocessing
import os

import grain
from absl.testing import absltest

from maxtext_olmo.rows import prefetch
from tests import workers

STARTS_PROCESSES = True


class _Pids(grain.MapDataset):
  """The process that makes each element, and its parent."""

  def __len__(self):
    return 100

  def __getitem__(self, index):
    return self.slice(index) if isinstance(index, slice) else (index, os.getpid(), os.getppid())


class StartedQuicklyTest(absltest.TestCase):

  def test_each_worker_is_a_new_process_also_after_a_restore(self):
    with workers.started_quickly():
      iterator = iter(prefetch.PrefetchedDataset(_Pids(), workers=2))
      self.addCleanup(iterator.close)
      first = [next(iterator) for _ in range(4)]
      iterator.set_state({"next_index": 50})
      second = [next(iterator) for _ in range(4)]
    self.assertEqual([index for index, _, _ in first + second], [0, 1, 2, 3, 50, 51, 52, 53])
    pids = [{pid for _, pid, _ in found} for found in (first, second)]
    self.assertEqual([len(found) for found in pids], [2, 2])
    self.assertEmpty(pids[0] & pids[1])
    parents = {parent for _, _, parent in first + second}
    self.assertLen(parents, 1)
    self.assertNotIn(os.getpid(), parents | pids[0] | pids[1])

  def test_before_and_after_it_processes_are_spawned_as_ever(self):
    spawn = multiprocessing.get_context("spawn")
    with workers.started_quickly():
      self.assertEqual(multiprocessing.get_context("spawn").get_start_method(), "forkserver")
      self.assertEqual(multiprocessing.get_context("fork").get_start_method(), "fork")
    self.assertIs(multiprocessing.get_context("spawn"), spawn)


if __name__ == "__main__":
  absltest.main()
