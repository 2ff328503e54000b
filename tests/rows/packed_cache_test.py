"""Tests of the packing of a run of OLMo-core, with cache files as its goldens describe them."""

import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.rows import packed_plan
from tests import olmo_core_goldens

_CASE = "docs16_g2_truncate_filter_perm"


def _case(file: str) -> dict:
  return next(c for c in olmo_core_goldens.load(file) if c["config"]["name"] == _CASE)


def _write_cache(case: dict, directory: str) -> None:
  """Writes the files of each group; the hashes in their names are arbitrary."""
  length = case["config"]["S"]
  for number, group in enumerate(case["groups"]):
    rows = group["docs_by_instance"]
    ends = np.cumsum([0] + [len(row) for row in rows])
    arrays = {
        "document-indices": group["documents_sorted"],
        "instance-offsets": list(zip(ends, ends[1:])),
        "documents-by-instance": [document for row in rows for document in row],
    }
    for name, values in arrays.items():
      np.array(values, "<u8").tofile(f"{directory}/{name}-{length}-{9 - number:064x}.npy")


class PackedCacheTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    olmo_core_goldens.write_corpora(self.folder, "docs16")
    self.work_dir = self.create_tempdir().full_path
    self.cache = f"{self.work_dir}/dataset-common"
    pathlib.Path(self.cache).mkdir()

  def _plan(self, case: dict, ties: str, **values) -> packed_plan.PackedPlan:
    corpus, config = olmo_core_goldens.corpus("docs16"), case["config"]
    index = maxtext_olmo.build_index(
        [(file, "label") for file in case["file_order"]],
        config["S"],
        tokenizer="none",
        base=self.folder,
        dtype=corpus["dtype"],
    )
    self.index = index
    boundaries = document_spans.BoundaryRule("eos", corpus["eos_token_id"])
    rule = packed_plan.PackingRule(config["S"], config["group"], "truncate", ties, boundaries)
    return packed_plan.build_plan(index, f"{self.folder}/plan", rule, **values)

  def _rows(self, plan: packed_plan.PackedPlan) -> list:
    table = plan.parts(np.arange(plan.num_rows))
    columns = (table.row, table.source, table.first, table.count)
    return list(zip(*(column.tolist() for column in columns)))

  @parameterized.parameters(("packed", "avx2"), ("packed_scalar", "scalar"))
  def test_rows_are_those_of_the_run_whatever_its_cpu(self, file, ties):
    case = _case(file)
    _write_cache(case, self.cache)
    expected = self._rows(self._plan(case, ties))
    for directory in (self.work_dir, self.cache):
      plan = self._plan(case, "cache", cache_dir=directory)
      self.assertEqual(self._rows(plan), expected)
    self.assertStartsWith(plan.fingerprint, "packed-cache:")

  def test_other_cache_files_have_another_plan(self):
    paths = []
    for file in ("packed", "packed_scalar"):
      _write_cache(_case(file), self.cache)
      plan = self._plan(_case(file), "cache", cache_dir=self.work_dir)
      for _ in range(2):
        paths.append(packed_plan.default_path("i", self.index, plan.rule, self.work_dir))
    self.assertEqual(paths[0], paths[1])
    self.assertNotEqual(paths[1], paths[2])

  def test_the_goldens_of_two_cpus_differ(self):
    rows = [case["groups"] for case in (_case("packed"), _case("packed_scalar"))]
    self.assertNotEqual(*rows)

  def test_a_directory_without_the_files_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "olmo_packing_cache_dir.*no files"):
      self._plan(_case("packed"), "cache", cache_dir=self.work_dir)

  def test_the_packing_of_other_documents_is_refused(self):
    case = _case("packed")
    group = case["groups"][0]
    first, end = group["documents_sorted"][0]
    changed = {**group, "documents_sorted": [[first, end - 1], *group["documents_sorted"][1:]]}
    _write_cache({**case, "groups": [changed, *case["groups"][1:]]}, self.cache)
    with self.assertRaisesRegex(errors.CorpusError, "None of the .* packings .*group 0"):
      self._plan(case, "cache", cache_dir=self.work_dir)

  @parameterized.parameters("documents-by-instance", "instance-offsets")
  def test_damaged_files_are_refused(self, name):
    case = _case("packed")
    _write_cache(case, self.cache)
    for path in pathlib.Path(self.cache).glob(f"{name}-*"):
      values = np.fromfile(path, "<u8")
      values[-1] = 0
      values.tofile(path)
    with self.assertRaisesRegex(errors.CorpusError, "is damaged"):
      self._plan(case, "cache", cache_dir=self.work_dir)

  def test_a_file_that_was_cut_off_is_refused(self):
    case = _case("packed")
    _write_cache(case, self.cache)
    for path in pathlib.Path(self.cache).glob("documents-by-instance-*"):
      path.write_bytes(path.read_bytes()[:-3])
    with self.assertRaisesRegex(errors.CorpusError, "expected a multiple of 8"):
      self._plan(case, "cache", cache_dir=self.work_dir)


if __name__ == "__main__":
  absltest.main()
