"""Tests of counting the cores a process may use."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import cores


class CoresTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.membership = self.root / "membership"

  def _write(self, path: str, content: str) -> None:
    (self.root / path).parent.mkdir(parents=True, exist_ok=True)
    (self.root / path).write_text(content)

  def _quota(self, membership: str) -> float | None:
    self.membership.write_text(membership)
    return cores.cgroup_quota(self.root, self.membership)

  def test_the_affinity_mask_bounds_the_cores(self):
    mine = os.sched_getaffinity(0)
    self.assertBetween(cores.available_cores(), 1, len(mine))
    os.sched_setaffinity(0, {min(mine)})
    try:
      self.assertEqual(cores.available_cores(), 1)
    finally:
      os.sched_setaffinity(0, mine)

  @parameterized.parameters(
      ("150000 100000\n", 1.5), ("50000 100000", 0.5), ("max 100000\n", None), ("", None)
  )
  def test_version_2_has_quota_and_period_in_one_file(self, content, expected):
    self._write("a/cpu.max", content)
    self.assertEqual(self._quota("0::/a\n"), expected)

  def test_an_ancestor_with_less_decides(self):
    self._write("cpu.max", "800000 100000")
    self._write("a/cpu.max", "200000 100000")
    self._write("a/b/cpu.max", "300000 100000")
    self._write("a/b/c/cpu.max", "max 100000")
    self.assertEqual(self._quota("0::/a/b/c\n"), 2)
    self.assertEqual(self._quota("0::/\n"), 8)

  def test_a_path_of_the_host_that_is_not_visible_here_is_skipped(self):
    self._write("cpu.max", "100000 100000")
    self.assertEqual(self._quota("0::/kubepods/pod-1/x\n"), 1)

  @parameterized.parameters("cpu,cpuacct", "cpu")
  def test_version_1_has_two_files(self, mount):
    self._write(f"{mount}/a/cpu.cfs_quota_us", "250000\n")
    self._write(f"{mount}/a/cpu.cfs_period_us", "100000\n")
    self._write(f"{mount}/cpu.cfs_quota_us", "-1\n")
    self._write(f"{mount}/cpu.cfs_period_us", "100000\n")
    membership = "5:memory:/other\n4:cpu,cpuacct:/a\n3:cpuset:/b\n"
    self.assertEqual(self._quota(membership), 2.5)

  def test_both_versions_may_be_mounted(self):
    self._write("cpu/cpu.cfs_quota_us", "300000")
    self._write("cpu/cpu.cfs_period_us", "100000")
    self.assertEqual(self._quota("1:cpu:/\n0::/\n"), 3)

  def test_without_cgroups_there_is_no_quota(self):
    self.assertIsNone(cores.cgroup_quota(self.root, self.root / "missing"))
    self.assertIsNone(self._quota("0::/\n4:cpu:/\n"))
    self._write("cpu.max", "nonsense")
    self.assertIsNone(self._quota("0::/\n"))


if __name__ == "__main__":
  absltest.main()
