"""Tests of packing groups of files."""

import gzip
import pathlib
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.rows import packed_group
from maxtext_olmo.rows import packed_work

_RULE = packed_work.PackingRule(8, 2, "truncate", "stable", document_spans.BoundaryRule("eos", 0))


class PackedWorkTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.create_tempdir().full_path
    for number, lengths in enumerate(([5, 3], [12, 2], [4])):
      tokens = np.full(sum(lengths), 7, np.uint16)
      tokens[np.cumsum(lengths) - 1] = 0
      tokens.tofile(f"{folder}/part-{number}.npy")
    self.index = maxtext_olmo.build_index(
        [(f"part-{n}.npy", "web") for n in range(3)],
        4,
        tokenizer="none",
        base=folder,
        dtype="uint16",
    )
    self.groups = packed_work.groups_of(pieces_lib.source_files(self.index), _RULE)

  def test_groups_have_consecutive_files_and_their_inputs(self):
    self.assertEqual([[s.id for s in group.sources] for group in self.groups], [[0, 1], [2]])
    self.assertEqual([group.key for group in self.groups], ["group-0", "group-1"])
    self.assertEqual([group.weight for group in self.groups], [44, 8])
    self.assertEqual(self.groups[1].inputs, (self.index.resolve(2),))
    csv = packed_work.PackingRule(8, 2, "truncate", "stable", document_spans.BoundaryRule("csv", 0))
    groups = packed_work.groups_of(pieces_lib.source_files(self.index), csv)
    self.assertEndsWith(groups[1].inputs[0], "part-2.csv.gz")

  def test_a_group_is_packed_as_all_its_files_together_are(self):
    work = pickle.loads(pickle.dumps(packed_work.PackWork(_RULE)))
    files = maxtext_olmo.OlmoNpyDataSource(self.index).files
    for group, numbers in zip(self.groups, ([0, 1], [2])):
      found = work(group)
      documents = packed_group.find_documents(self.index, files, numbers, _RULE.boundaries)
      table = packed_group.pack(packed_group.cut(documents, 8, "truncate"), 8, "stable")
      parts = found["parts"].view(packed_work.PART)
      np.testing.assert_array_equal(found["bounds"], table.bounds)
      for name in ("source", "first", "count"):
        np.testing.assert_array_equal(parts[name], getattr(table, name))
      self.assertEqual(found["tokens"], table.count.sum())

  @parameterized.parameters("eos", "csv")
  def test_a_token_file_that_has_grown_is_an_error_that_names_it(self, source):
    rule = packed_work.PackingRule(
        8, 2, "truncate", "stable", document_spans.BoundaryRule(source, 0)
    )
    *_, group = packed_work.groups_of(pieces_lib.source_files(self.index), rule)
    path = pathlib.Path(self.index.resolve(2))
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(b"0,4\n"))
    path.write_bytes(path.read_bytes() + b"\0\0")
    self.assertIn(str(path), group.inputs)
    with self.assertRaisesRegex(errors.CorpusError, "part-2.npy: expected 8 bytes, found 10"):
      packed_work.PackWork(rule)(group)

  def test_settings_name_all_that_decides_the_packing(self):
    other = packed_work.PackingRule(8, 2, "split", "stable", _RULE.boundaries)
    self.assertNotEqual(packed_work.PackWork(_RULE).settings, packed_work.PackWork(other).settings)

  def test_cache_files_that_are_missing_are_a_config_error(self):
    rule = packed_work.PackingRule(8, 2, "truncate", "cache", _RULE.boundaries)
    work = packed_work.PackWork(rule, self.create_tempdir().full_path)
    with self.assertRaisesRegex(errors.ConfigError, "olmo_packing_cache_dir"):
      _ = work.cache


if __name__ == "__main__":
  absltest.main()
