"""Tests of outcomes whose results are damaged, or removed by another command."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import CorpusError
from tests import object_server
from tests.corpus.work import sample_work
from tests.corpus.work.sample_work import SumWork


class OutcomeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.trace = self.create_tempdir().full_path
    self.index = sample_work.write_corpus(self.directory)
    self.pieces = sample_work.pieces(self.index)
    self.place = os.path.join(self.directory, "x.work")
    self.expected = sample_work.values(self.run_work(results=""))

  def run_work(self, *, trace="", **options):
    options = WorkOptions(**{"workers": 2, "results": self.place} | options)
    work = SumWork(trace=trace)
    return run.run_work(work, self.pieces, options, fingerprint=self.index.fingerprint)

  def calls(self):
    return sum(sample_work.calls(self.trace).values())

  def use_bucket(self):
    server = self.enter_context(object_server.ObjectServer())
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    self.place = "s3://bucket/results"

  @parameterized.parameters(False, True)
  def test_results_that_another_command_removed_are_computed_again(self, is_bucket):
    if is_bucket:
      self.use_bucket()
    mine = self.run_work(trace=self.trace)
    self.run_work(trace=self.trace).discard()
    self.assertEqual(sample_work.values(mine), self.expected)
    self.assertEqual(self.calls(), 2 * len(self.pieces))

  def test_results_that_are_removed_while_they_are_merged_are_computed_again(self):
    mine = self.run_work(trace=self.trace)
    found = []
    for number, (item, result) in enumerate(mine):
      found.append((item.key, result["sum"], result["lengths"].tolist()))
      if number in (2, 5):
        self.run_work(trace=self.trace).discard()
    self.assertEqual(found, self.expected)

  def test_only_results_that_are_damaged_or_gone_are_computed_again(self):
    outcome = self.run_work(trace=self.trace)
    files = sorted(pathlib.Path(outcome.results.place).iterdir())
    files[0].unlink()
    files[1].write_bytes(b"damaged")
    again = self.run_work(trace=self.trace)
    self.assertEqual(sample_work.values(again), self.expected)
    self.assertEqual(self.calls(), len(self.pieces) + 2)

  def test_a_file_that_changed_since_its_result_was_removed_is_an_error(self):
    outcome = self.run_work()
    outcome.discard()
    os.utime(self.pieces[0].source.path, ns=(5, 5))
    with self.assertRaisesRegex(CorpusError, "part-000.npy changed during this run"):
      list(outcome)

  def test_a_merge_computes_nothing_and_says_what_to_do(self):
    self.run_work(trace=self.trace)
    merge = self.run_work(trace=self.trace, merge=True)
    self.run_work(trace=self.trace).discard()
    with self.assertRaisesRegex(CorpusError, "was damaged or removed. .*, without --merge, to"):
      list(merge)
    self.assertEqual(self.calls(), len(self.pieces))


if __name__ == "__main__":
  absltest.main()
