"""Tests of plans of packed rows."""

import dataclasses
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.rows import packed_group
from maxtext_olmo.rows import packed_plan
from maxtext_olmo.rows import parts as parts_lib

_EOS = 0
_RULE = packed_plan.PackingRule(
    16, 2, "truncate", "avx512", document_spans.BoundaryRule("eos", _EOS)
)


def _write(folder: str, *files: list[int]) -> maxtext_olmo.OlmoNpyIndex:
  """Writes files of documents with the given lengths, an EOS at the end of each."""
  for number, lengths in enumerate(files):
    tokens = np.full(sum(lengths), 7, np.uint16)
    tokens[np.cumsum(lengths, dtype=int) - 1] = _EOS
    tokens.tofile(f"{folder}/part-{number}.npy")
  entries = [(f"part-{number}.npy", "label") for number in range(len(files))]
  return maxtext_olmo.build_index(entries, 4, tokenizer="none", base=folder, dtype="uint16")


class PackedPlanTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    rng = np.random.default_rng(0)
    self.index = _write(
        self.folder, *(rng.integers(1, 24, count).tolist() for count in (40, 1, 30, 25, 7))
    )
    self.path = f"{self.folder}/plan"

  def _build(self, rule=_RULE, **values) -> packed_plan.PackedPlan:
    packed_plan.build_plan(self.index, self.path, rule, **values)
    return packed_plan.load_plan(self.path, self.index, rule)

  def _expected(self, rule) -> parts_lib.Parts:
    """Returns all rows, packed group by group."""
    tables = []
    for first in range(0, len(self.index.files), rule.group_size):
      numbers = range(first, min(first + rule.group_size, len(self.index.files)))
      files = maxtext_olmo.OlmoNpyDataSource(self.index).files
      documents = packed_group.find_documents(self.index, files, numbers, rule.boundaries)
      cut = packed_group.cut(documents, rule.row_length, rule.long_documents)
      tables.append(packed_group.pack(cut, rule.row_length, rule.ties))
    ends = np.cumsum([0] + [table.num_rows for table in tables])
    places = [np.arange(a, b) for a, b in zip(ends, ends[1:])]
    return parts_lib.join(tables, places, int(ends[-1]))

  def _assert_equal(self, one: parts_lib.Parts, other: parts_lib.Parts) -> None:
    for field in dataclasses.fields(parts_lib.Parts):
      np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))

  @parameterized.product(group_size=(1, 2, 9), long_documents=("truncate", "split"))
  def test_a_plan_has_the_rows_of_each_group_in_turn(self, group_size, long_documents):
    rule = dataclasses.replace(_RULE, group_size=group_size, long_documents=long_documents)
    plan = self._build(rule)
    expected = self._expected(rule)
    self.assertEqual(plan.num_rows, expected.num_rows)
    self.assertEqual(plan.num_tokens, expected.count.sum())
    rows = np.random.default_rng(1).permutation(plan.num_rows)
    self._assert_equal(plan.parts(rows), expected.take(rows))
    self._assert_equal(pickle.loads(pickle.dumps(plan)).parts(rows), expected.take(rows))

  def test_the_number_of_workers_does_not_change_the_plan(self):
    content = [pathlib.Path(self._build(workers=workers).path).read_bytes() for workers in (1, 4)]
    self.assertEqual(content[0], content[1])

  def test_parts_on_several_machines_give_the_same_plan_once_they_are_merged(self):
    content = pathlib.Path(self._build().path).read_bytes()
    results = f"{self.folder}/results"
    for part in (2, 0, 1):
      options = options_lib.WorkOptions(results=results, part=(part, 3))
      packed_plan.pack_groups(self.index, _RULE, options)
    merge = options_lib.WorkOptions(results=results, merge=True)
    outcome = packed_plan.pack_groups(self.index, _RULE, merge)
    plan = packed_plan.write_plan(self.index, f"{self.folder}/merged", _RULE, outcome)
    self.assertEqual(pathlib.Path(plan.path).read_bytes(), content)

  def test_groups_that_were_packed_before_are_not_packed_again(self):
    options = options_lib.WorkOptions(results=f"{self.path}.work", part=(0, 2))
    packed_plan.pack_groups(self.index, _RULE, options)  # Killed after groups 0 and 2, say.
    rest = options_lib.WorkOptions(results=f"{self.path}.work")
    self.assertEqual(packed_plan.pack_groups(self.index, _RULE, rest).reused, 2)
    plan = self._build()
    self._assert_equal(plan.parts(np.arange(plan.num_rows)), self._expected(_RULE))
    self.assertNotIn("plan.work", [path.name for path in pathlib.Path(self.folder).iterdir()])

  def test_a_file_without_documents_adds_no_rows(self):
    for number in (1, 2, 3):
      np.full(5, 7, np.uint16).tofile(f"{self.folder}/part-{number}.npy")
    self.index = maxtext_olmo.build_index(
        [(f"part-{number}.npy", "label") for number in range(5)],
        4,
        tokenizer="none",
        base=self.folder,
        dtype="uint16",
    )
    plan = self._build()
    self.assertEqual(set(plan.parts(np.arange(plan.num_rows)).source.tolist()), {0, 4})

  def test_rows_are_found_by_their_tokens(self):
    plan = self._build()
    table = plan.parts(np.arange(plan.num_rows))

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, 4), st.integers(0, 500), st.integers(1, 40))
    def check(source, first, count):
      overlaps = (table.source == source) & (table.first < first + count)
      overlaps &= table.first + table.count > first
      found = plan.rows_of(source, first, count)
      self.assertEqual(found.tolist(), np.unique(table.row[overlaps]).tolist())

    check()

  def test_the_fingerprint_names_the_ties_and_differs_between_rules_and_corpora(self):
    plans = [self._build(dataclasses.replace(_RULE, ties=ties)) for ties in ("avx2", "stable")]
    plans.append(self._build(dataclasses.replace(_RULE, group_size=1)))
    self.index = _write(self.folder, [3, 4])
    plans.append(self._build())
    self.assertLen({plan.fingerprint for plan in plans}, 4)
    self.assertStartsWith(plans[0].fingerprint, "packed-avx2:")

  def test_the_default_path_differs_between_corpora_and_rules(self):
    other = dataclasses.replace(_RULE, ties="scalar")
    paths = {packed_plan.default_path("index.json", self.index, rule) for rule in (_RULE, other)}
    index = _write(self.folder, [3, 4])
    paths.add(packed_plan.default_path("index.json", index, _RULE))
    self.assertLen(paths, 3)

  def test_a_plan_of_another_corpus_or_rule_is_refused(self):
    self._build()
    other = dataclasses.replace(_RULE, ties="scalar")
    with self.assertRaisesRegex(errors.CorpusError, "was made with .*avx512.*has .*scalar"):
      packed_plan.load_plan(self.path, self.index, other)
    with tempfile.TemporaryDirectory() as folder:
      index = _write(folder, [3, 4])
      with self.assertRaisesRegex(errors.CorpusError, "belongs to another corpus"):
        packed_plan.load_plan(self.path, index, _RULE)

  @parameterized.parameters((0, "not a plan"), (5000, "checksum"), (None, "expected .* bytes"))
  def test_a_damaged_plan_is_refused(self, place, message):
    self._build()
    data = bytearray(pathlib.Path(self.path).read_bytes())
    if place is None:
      data.pop()
    else:
      data[place] ^= 1
    pathlib.Path(self.path).write_bytes(data)
    with self.assertRaisesRegex(errors.CorpusError, message):
      packed_plan.load_plan(self.path, self.index, _RULE)

  def test_a_missing_token_file_is_named(self):
    pathlib.Path(f"{self.folder}/part-2.npy").unlink()
    with self.assertRaisesRegex(errors.CorpusError, "cannot be packed.*\n.*part-2.npy"):
      self._build()
    self.assertFalse(pathlib.Path(self.path).exists())


if __name__ == "__main__":
  absltest.main()
