"""Tests of the bench's corpus and of the look into the page cache."""

import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.rows import repetition


class BenchCorpusTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path) / "corpus"
    self.corpus = bench_corpus.make(self.directory, megabytes=40, files=4)

  def test_tokens_are_of_the_vocabulary_with_documents_and_some_repetitions(self):
    tokens = np.concatenate([np.fromfile(path, np.uint32) for path in self.corpus.files])
    self.assertLess(tokens.max(), bench_corpus.VOCAB_SIZE)
    self.assertAlmostEqual((tokens == bench_corpus.EOS_ID).mean(), 1 / 600, delta=1e-3)
    clean = repetition.clean_rows(tokens.reshape(-1, 8192))
    self.assertGreater(clean.mean(), 0.98)
    self.assertLess(clean.mean(), 1)

  def test_there_is_an_index_for_each_length_and_beginnings_of_all_windows(self):
    for length, path in self.corpus.indices.items():
      index = index_lib.load_index(path)
      self.assertEqual(index.sequence_length, length)
      self.assertEqual(index.total_tokens * 4, self.corpus.bytes)
      self.assertLen(self.corpus.beginnings(length), index.total_instances)

  def test_the_same_corpus_is_taken_again_and_another_is_refused(self):
    before = pathlib.Path(self.corpus.files[0]).stat().st_mtime_ns
    again = bench_corpus.make(self.directory, megabytes=40, files=4)
    self.assertEqual(again, self.corpus)
    self.assertEqual(pathlib.Path(self.corpus.files[0]).stat().st_mtime_ns, before)
    with self.assertRaisesRegex(errors.ConfigError, "choose another --directory"):
      bench_corpus.make(self.directory, megabytes=20, files=4)

  def test_pages_that_are_taken_back_while_others_are_read_are_read_again(self):
    look = bench_corpus.resident_share
    shares = iter([0.99, 0.5])
    with mock.patch.object(
        bench_corpus, "resident_share", lambda paths: next(shares, None) or look(paths)
    ):
      bench_corpus.warm(self.corpus.files)
    shares = iter([0.99, 0.5, 0.9, 0.9])
    with (
        mock.patch.object(bench_corpus, "resident_share", lambda paths: next(shares)),
        self.assertRaisesRegex(errors.CorpusError, "Only 90.0 %"),
    ):
      bench_corpus.warm(self.corpus.files)

  def test_dropped_pages_are_missed_and_read_pages_are_found(self):
    kept = bench_corpus.drop(self.corpus.files)
    if kept > 0.5:
      self.skipTest("This file system keeps pages that it is asked to forget.")
    with self.assertRaisesRegex(errors.CorpusError, "in the page cache"):
      bench_corpus.check_resident(self.corpus.files)
    bench_corpus.warm(self.corpus.files)
    self.assertEqual(bench_corpus.resident_share(self.corpus.files), 1)


if __name__ == "__main__":
  absltest.main()
