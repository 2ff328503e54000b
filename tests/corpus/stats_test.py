"""Tests of the statistics of a corpus."""

import math
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import stats as stats_lib
from maxtext_olmo.corpus.storage import remote
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import options as options_lib
from tests import corpora
from tests import object_server

_EOS = 0


class StatsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    # The third file, with the label of the first, has no tokens; some end within a document.
    self.path, _ = corpora.write_corpus(self.folder, tokens_per_file=(333, 150, 0, 514, 64))
    self.index = maxtext_olmo.load_index(self.path)
    files = [np.fromfile(self.index.resolve(i), np.uint16) for i in range(5)]
    self.files = {"label-0": [files[0], files[2], files[4]], "label-1": [files[1], files[3]]}

  def stats(self, options=None, **settings):
    settings = {"eos_id": _EOS, "piece_bytes": 64, **settings}
    return stats_lib.make_stats(stats_lib.count_pieces(self.index, options, **settings))

  def check(self, found):
    self.assertEqual([stats.label for stats in found], list(self.files))
    for stats in found:
      files = self.files[stats.label]
      tokens = np.concatenate(files)
      self.assertEqual((stats.files, stats.tokens), (len(files), len(tokens)))
      np.testing.assert_array_equal(stats.ids, np.bincount(tokens))
      lengths = np.concatenate([np.diff(np.flatnonzero(f == _EOS), prepend=-1) for f in files])
      self.assertEqual(stats.lengths.documents, len(lengths))
      self.assertAlmostEqual(stats.mean_length, lengths.mean())
      bounds, counts = stats.lengths.octaves()
      expected = np.bincount(np.log2(lengths).astype(int))
      self.assertEqual(counts.tolist(), expected.tolist())
      self.assertEqual(bounds.tolist(), [2**i for i in range(len(expected))])
      self.assertEqual(stats.distinct, len(np.unique(tokens)))
      shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
      self.assertAlmostEqual(stats.bits, -(shares * np.log2(shares)).sum())

  def test_tokens_of_a_replaced_object_are_not_counted(self):
    files = [(f"b/{i}.npy", pathlib.Path(self.index.resolve(i)).read_bytes()) for i in (0, 1)]
    server = self.enter_context(object_server.ObjectServer(dict(files)))
    self.index = maxtext_olmo.build_index(
        [(f"{server.url}/{name}", "l") for name, _ in files], 8, tokenizer="t", dtype="uint16"
    )
    self.assertEqual(self.stats()[0].tokens, 333 + 150)
    server.objects["b/1.npy"] = files[1][1][::-1]
    with self.assertRaisesRegex(errors.CorpusError, r"1\.npy.*was replaced"):
      self.stats()

  def test_a_silent_store_stops_the_work_and_the_next_run_does_what_is_missing(self):
    files = [(f"b/{i}.npy", pathlib.Path(self.index.resolve(i)).read_bytes()) for i in (0, 1)]
    server = self.enter_context(object_server.ObjectServer(dict(files)))
    self.index = maxtext_olmo.build_index(
        [(f"{server.url}/{name}", "l") for name, _ in files], 8, tokenizer="t", dtype="uint16"
    )
    options = options_lib.WorkOptions(results=f"{self.folder}/results", workers=1)
    storage = remote.RemoteStorage(stores.StoreOptions(patience=0.2, first_patience=0.2))
    # Sizes and ETags are still answered, so that the work begins.
    server.faults = lambda number, path: "503" if server.requests[-1][0] == "GET" else ""
    with self.assertRaisesRegex(errors.StoreUnavailableError, "HTTP 503.*0 of 16 pieces are done"):
      self.stats(options, storage=storage)
    server.faults = lambda number, path: ""
    self.assertEqual(self.stats(options)[0].tokens, 333 + 150)

  @parameterized.parameters(8, 64, 1 << 20)
  def test_statistics_do_not_depend_on_the_size_of_pieces(self, piece_bytes):
    self.check(self.stats(piece_bytes=piece_bytes))

  def test_parts_on_several_machines_give_the_same_once_they_are_merged(self):
    results = f"{self.folder}/results"
    for part in (2, 0, 1):
      outcome = stats_lib.count_pieces(
          self.index,
          options_lib.WorkOptions(results=results, part=(part, 3)),
          eos_id=_EOS,
          piece_bytes=64,
      )
      self.assertEmpty(outcome.failures)
    self.check(self.stats(options_lib.WorkOptions(results=results, merge=True)))

  def test_a_part_that_is_missing_is_an_error(self):
    options = options_lib.WorkOptions(results=f"{self.folder}/results", merge=True)
    with self.assertRaisesRegex(errors.CorpusError, "have no result yet"):
      self.stats(options)

  def test_a_missing_file_is_named(self):
    pathlib.Path(self.index.resolve(3)).unlink()
    with self.assertRaisesRegex(errors.MissingFileError, "(?s)cannot be counted.*part-003"):
      self.stats()

  def test_a_file_that_has_grown_is_named(self):
    with open(self.index.resolve(3), "ab") as file:
      file.write(b"\0\0")
    with self.assertRaisesRegex(
        errors.CorpusError, r"(?s)cannot be counted.*part-003\S* expected 1028 bytes, found 1030"
    ):
      self.stats()

  def test_without_an_eos_there_are_no_documents(self):
    for stats in self.stats(eos_id=None):
      self.assertIsNone(stats.lengths)
      self.assertEqual(stats.mean_length, 0.0)

  def test_an_eos_that_cannot_occur_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "70000 cannot occur in files of uint16"):
      self.stats(eos_id=70_000)

  def test_labels_add_up_to_the_corpus(self):
    whole = stats_lib.add_up(self.stats())
    tokens = np.concatenate([file for files in self.files.values() for file in files])
    self.assertEqual((whole.files, whole.tokens), (5, len(tokens)))
    np.testing.assert_array_equal(whole.ids, np.bincount(tokens))
    self.assertEqual(whole.lengths.documents, int((tokens == _EOS).sum()))

  def test_the_most_frequent_ids_come_first_and_ties_are_in_order(self):
    stats = stats_lib.Stats("web", 1, 9, np.array([0, 2, 4, 2, 1]), 0, None)
    self.assertEqual(stats.most_frequent(3), [(2, 4), (1, 2), (3, 2)])
    self.assertLen(stats.most_frequent(99), 4)

  def test_entropy_is_that_of_the_shares(self):
    for ids, bits in (([4, 4], 1.0), ([1] * 8, 3.0), ([5], 0.0), ([], 0.0)):
      stats = stats_lib.Stats("", 1, sum(ids), np.array(ids, np.int64), 0, None)
      self.assertTrue(math.isclose(stats.bits, bits), ids)


if __name__ == "__main__":
  absltest.main()
