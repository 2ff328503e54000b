"""Tests of the options of work over a corpus."""

import os
import stat
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.errors import ConfigError


class WorkOptionsTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"workers": 0}, "workers must be at least 1, got 0"),
      ({"processes": True, "dask": "local"}, "Choose only one of --processes, --dask and --ray"),
      ({"part": (3, 3)}, "got --part 3 --of 3. Parts are numbered from 0"),
      ({"part": (-1, 3)}, "got --part -1"),
      ({"part": (0, 3), "merge": True}, "Choose either --part or --merge"),
      ({"retry_failed": True, "merge": True}, "Choose either --merge or --retry-failed"),
      ({"results": "", "merge": True}, r"need a directory or URL \(--results\)"),
      ({"results": "", "processes": True}, r"need a directory or URL \(--results\)"),
  )
  def test_impossible_options_are_errors(self, values, message):
    with self.assertRaisesRegex(ConfigError, message):
      options_lib.WorkOptions(**{"results": "x", **values})

  def test_other_machines_need_a_shared_place(self):
    shared = [{"dask": "tcp://h:1"}, {"ray": "auto"}, {"part": (0, 2)}, {"merge": True}]
    for values in shared:
      self.assertTrue(options_lib.WorkOptions(results="x", **values).on_other_machines)
    for values in ({}, {"processes": True}, {"dask": "local"}):
      self.assertFalse(options_lib.WorkOptions(results="x", **values).on_other_machines)


class DefaultResultsTest(absltest.TestCase):

  def test_results_go_next_to_the_path(self):
    path = os.path.join(self.create_tempdir().full_path, "index.json")
    found = options_lib.default_results(path)
    self.assertEqual(found, path + ".work")
    self.assertTrue(options_lib.is_next_to(found, path))

  def test_results_for_a_url_go_to_a_private_temporary_directory(self):
    with mock.patch.object(tempfile, "tempdir", self.create_tempdir().full_path):
      found = options_lib.default_results("gs://bucket/index.json")
      self.assertEqual(options_lib.default_results("gs://bucket/index.json"), found)
      self.assertFalse(options_lib.is_next_to(found, "gs://bucket/index.json"))
      self.assertEqual(stat.S_IMODE(os.stat(found).st_mode), 0o700)

  def test_a_temporary_directory_that_others_can_write_is_not_used(self):
    with mock.patch.object(tempfile, "tempdir", self.create_tempdir().full_path):
      first = options_lib.private_directory()
      os.chmod(first, 0o777)
      self.assertNotEqual(options_lib.private_directory(), first)


if __name__ == "__main__":
  absltest.main()
