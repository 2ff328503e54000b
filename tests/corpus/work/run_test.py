"""Tests of doing the items of a work: what is done, reused, done again, and reported."""

import dataclasses
import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.corpus.work import run
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import WriteError
from tests import object_server
from tests.corpus.work import sample_work
from tests.corpus.work.sample_work import SumWork


class RunTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.trace = self.create_tempdir().full_path
    self.index = sample_work.write_corpus(self.directory)
    self.pieces = sample_work.pieces(self.index)
    self.options = WorkOptions(workers=2, results=os.path.join(self.directory, "x.work"))

  def run_work(self, work=None, **changes):
    work = SumWork(trace=self.trace) if work is None else work
    options = dataclasses.replace(self.options, **changes)
    return run.run_work(work, self.pieces, options, fingerprint=self.index.fingerprint)

  def calls(self):
    return sum(sample_work.calls(self.trace).values())

  @parameterized.parameters(1, 3, 20)
  def test_results_come_in_the_order_of_the_items(self, workers):
    found = sample_work.values(self.run_work(workers=workers))
    self.assertEqual([key for key, *_ in found], [piece.key for piece in self.pieces])
    for piece, (_, total, lengths) in zip(self.pieces, found):
      tokens = np.fromfile(piece.source.path, np.uint16)[piece.first : piece.first + piece.count]
      self.assertEqual((total, sum(lengths)), (tokens.sum(), len(tokens)))

  def test_memory_and_files_give_the_same(self):
    memory = self.run_work(results="")
    self.assertEqual(sample_work.values(memory), sample_work.values(self.run_work()))
    memory.discard()

  def test_a_second_run_reuses_all_and_discard_removes_all(self):
    first = self.run_work()
    second = self.run_work()
    self.assertEqual(self.calls(), len(self.pieces))
    self.assertEqual((first.reused, second.reused), (0, len(self.pieces)))
    second.discard()
    self.assertCountEqual(os.listdir(self.directory), ["data", "index.json"])

  def test_other_settings_and_other_corpora_are_other_results(self):
    self.run_work()
    doubled = self.run_work(SumWork(scale=2, trace=self.trace))
    self.assertEqual(doubled.reused, 0)
    other = run.run_work(
        SumWork(trace=self.trace), self.pieces, self.options, fingerprint="another"
    )
    self.assertEqual(other.reused, 0)

  def test_only_the_pieces_of_a_changed_file_are_done_again(self):
    self.run_work()
    path = pathlib.Path(self.pieces[0].source.path)
    tokens = np.fromfile(path, np.uint16)
    tokens[0] += 1
    tokens.tofile(path)
    os.utime(path, ns=(5, 5))
    again = self.run_work()
    self.assertEqual(again.reused, len(self.pieces) - 2)
    self.assertEqual(again.failures, ())
    fresh = self.run_work(results="")
    self.assertEqual(sample_work.values(again), sample_work.values(fresh))

  def test_failed_items_are_recorded_reported_and_done_again_only_if_asked(self):
    key = self.pieces[3].key
    work = SumWork(trace=self.trace, failing=(key,))
    for _ in range(2):
      outcome = self.run_work(work)
      self.assertEqual([failure.item for failure in outcome.failures], [self.pieces[3]])
      self.assertLen(list(outcome), len(self.pieces) - 1)
    self.assertEqual(self.calls(), len(self.pieces))
    with self.assertRaisesRegex(
        CorpusError,
        rf"Sums are wrong \(1 of 10 pieces failed\):\n  {key} fails on purpose.\n.*--retry-failed",
    ):
      outcome.check("Sums are wrong")
    self.assertLen(self.run_work(work, retry_failed=True).failures, 1)
    pathlib.Path(self.trace, "fixed").touch()
    outcome = self.run_work(work, retry_failed=True)
    outcome.check("Sums are wrong")
    self.assertEqual(sample_work.calls(self.trace), {p.key: 1 for p in self.pieces} | {key: 3})

  def test_a_failed_item_is_done_again_if_its_file_changes(self):
    key = self.pieces[0].key
    work = SumWork(trace=self.trace, failing=(key,))
    self.run_work(work)
    os.utime(self.pieces[0].source.path, ns=(5, 5))
    self.run_work(work)
    self.assertEqual(sample_work.calls(self.trace)[key], 2)

  def test_a_missing_file_fails_its_pieces_only(self):
    os.unlink(self.pieces[0].source.path)
    outcome = self.run_work()
    self.assertEqual([failure.item.file for failure in outcome.failures], [0, 0])
    with self.assertRaisesRegex(FileNotFoundError, "part-000.npy: No such file or directory"):
      outcome.check("Sums are wrong")

  def test_parts_do_disjoint_items_and_a_merge_finds_all(self):
    for part in (2, 0):
      outcome = self.run_work(part=(part, 3))
      self.assertEqual(list(outcome.items), self.pieces[part::3])
    message = "3 of 10 pieces have no result yet in .*x.work/.*:\n  tokens 512 to"
    with self.assertRaisesRegex(CorpusError, message):
      self.run_work(merge=True).check("Sums are wrong")
    self.run_work(part=(1, 3))
    merged = self.run_work(merge=True)
    merged.check("Sums are wrong")
    self.assertEqual(self.calls(), len(self.pieces))
    self.assertEqual(sample_work.values(merged), sample_work.values(self.run_work(results="")))

  def test_a_run_without_parts_completes_what_parts_have_left(self):
    self.run_work(part=(0, 2))
    self.assertEqual(self.run_work().reused, 5)

  def test_results_in_a_bucket_are_reused_merged_and_removed(self):
    server = self.enter_context(object_server.ObjectServer())
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    place = {"results": "s3://bucket/results"}
    self.run_work(**place, part=(0, 2))
    self.run_work(**place, part=(1, 2))
    self.assertLen(server.objects, len(self.pieces))
    merged = self.run_work(**place, merge=True)
    self.assertEqual(merged.reused, len(self.pieces))
    self.assertEqual(sample_work.values(merged), sample_work.values(self.run_work(results="")))
    merged.discard()
    self.assertEmpty(server.objects)

  def test_a_result_that_cannot_be_written_stops_the_run(self):
    os.symlink("/no/such/directory", self.options.results)
    with self.assertRaisesRegex(WriteError, "x.work.*0 of 10 pieces are done, and will not be"):
      self.run_work()
    self.assertLess(self.calls(), 8)  # Those in hand when the first result was refused.
    os.unlink(self.options.results)
    pathlib.Path(self.options.results).write_text("a file is in the way")
    with self.assertRaisesRegex(CorpusError, "Cannot list the results in .*: Not a directory"):
      self.run_work()

  def test_an_interrupt_leaves_what_is_done(self):
    interrupted = self.pieces[6].key

    class Interrupting(SumWork):

      def __call__(self, item):
        if item.key == interrupted:
          raise KeyboardInterrupt
        return super().__call__(item)

    with self.assertRaises(KeyboardInterrupt):
      self.run_work(Interrupting(trace=self.trace), workers=1)
    # One worker does the items in order; it may do some after the seventh, and be stopped in the
    # middle of one, before the run cancels the rest.
    kept = self.run_work(merge=True).done
    self.assertContainsSubset([piece.key for piece in self.pieces[:6]], kept)
    self.assertNotIn(interrupted, kept)
    again = self.run_work()
    self.assertEqual(again.reused, len(kept))
    self.assertLessEqual(self.calls(), len(self.pieces) + 1)

  def test_items_with_the_same_key_are_an_error(self):
    self.pieces = [self.pieces[0]] * 2
    with self.assertRaisesRegex(ValueError, "the same key"):
      self.run_work()

  def test_a_result_holds_the_identity_of_its_file_in_its_name(self):
    outcome = self.run_work()
    names = {name.partition("@")[0] for name in outcome.results.names()}
    self.assertEqual(names, {piece.key for piece in self.pieces})
    self.assertIsInstance(outcome.results, results_lib.ResultFiles)


if __name__ == "__main__":
  absltest.main()
