"""Tests of OLMo-core's fingerprints, against its own outputs."""

import base64
import dataclasses
import os
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.loader import olmo_core_fingerprint
from tests import olmo_core_goldens
from tests.loader import elastic_test

_WINDOWS = olmo_core_goldens.load("fsl_extra")["cases"]
_PADDED = olmo_core_goldens.load("padded")
_MIXTURES = [case for case in olmo_core_goldens.load("mixture") if "items" in case]


def _named(cases):
  return [(case["config"]["name"], case) for case in cases]


def ids_of(config):
  corpus = olmo_core_goldens.corpus(config["corpus"])
  return olmo_core_fingerprint.TokenizerIds(
      corpus["vocab_size"],
      config.get("pad", corpus["pad_token_id"]),
      corpus["eos_token_id"],
      corpus["bos_token_id"],
  )


class FingerprintTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    olmo_core_goldens.write_corpora(cls.folder, "docs16", "sft", "bos", "mix", "distinct", "ties")

  def index(self, case, length, longest=None):
    config = case["config"]
    return index_builder.build_index(
        [(path, "label") for path in case["file_order"]],
        length,
        tokenizer="none",
        dtype=olmo_core_goldens.corpus(config["corpus"])["dtype"],
        base=self.folder,
        max_target_sequence_length=longest,
    )

  def mixture_index(self, config):
    sources = [
        source_mixture.MixtureSource(
            source["source_name"],
            source["target_ratio"],
            tuple(source["paths"]),
            source["max_repetition_ratio"],
            source["max_source_fraction"],
        )
        for source in config["sources"]
    ]
    return source_mixture.build_mixture_index(
        sources,
        source_mixture.MixtureSize(
            config["requested_tokens"], config["global_batch_size"], config["S"]
        ),
        tokenizer="none",
        dtype="uint16",
        base=self.folder,
        max_target_sequence_length=config["max_target_sequence_length"],
    )

  @parameterized.named_parameters(*elastic_test._CASES.items())
  def test_plain_windows_have_olmo_cores_fingerprint(self, case):
    path = elastic_test.write_case(self.create_tempdir().full_path, case)
    ids = olmo_core_fingerprint.TokenizerIds(case["vocab_size"], pad_id=1, eos_id=0)
    for release in olmo_core_fingerprint.RELEASES:
      found = olmo_core_fingerprint.windows(index_builder.load_index(path), ids, release=release)
      self.assertEqual(found.fingerprint, case["fingerprint"])

  @parameterized.named_parameters(*_named(_WINDOWS))
  def test_windows_have_olmo_cores_fingerprint(self, case):
    config = case["config"]
    index = self.index(case, config["S"], config.get("M"))
    found = olmo_core_fingerprint.windows(index, ids_of(config))
    self.assertEqual(found.fingerprint, case["items"]["fingerprint"])

  @parameterized.named_parameters(*_named(_PADDED))
  def test_padded_rows_have_olmo_cores_fingerprint(self, case):
    config = case["config"]
    found = olmo_core_fingerprint.padded(self.index(case, 8), ids_of(config), config["S"])
    self.assertEqual(found.fingerprint, case["items"]["fingerprint"])

  @parameterized.named_parameters(*_named(_MIXTURES))
  def test_mixtures_have_olmo_cores_fingerprint_and_earlier_releases_count_unused_files(self, case):
    config = case["config"]
    index, ids = self.mixture_index(config), ids_of(config)
    found = olmo_core_fingerprint.windows(index, ids)
    self.assertEqual(found.fingerprint, case["items"]["fingerprint"])
    self.assertEqual([size for _, size in found.files], case["file_sizes_in_fingerprint"])
    before = olmo_core_fingerprint.windows(index, ids, release="2.5")
    self.assertEqual(
        [(path, size // 2) for path, size in before.files],
        [(path, tokens) for path, tokens, _ in case["path_tokens_before_dropping_empty"]],
    )
    unused = any(not tokens for _, tokens, _ in case["path_tokens_before_dropping_empty"])
    self.assertEqual(before.fingerprint != found.fingerprint, unused)

  @parameterized.named_parameters(*_named(olmo_core_goldens.load("packed")))
  def test_packed_rows_have_olmo_cores_fingerprint(self, case):
    config = case["config"]
    found = olmo_core_fingerprint.packed(
        self.index(case, 8),
        ids_of(config),
        config["S"],
        long_documents=config.get("strategy", "truncate"),
        group_size=config.get("group", 1),
    )
    self.assertEqual(found.fingerprint, case["items"]["fingerprint"])

  def test_boundary_files_are_part_of_the_fingerprint(self):
    golden = olmo_core_goldens.load("packed_metadata")
    for path, data in golden["csv_gz_base64"].items():
      name = os.path.join(self.folder, path)
      with open(name, "wb") as file:
        file.write(base64.b64decode(data))
      self.addCleanup(os.unlink, name)
    for case in golden["cases"]:
      config, index = case["config"], self.index(case, 8)
      uses_array = config["use_array_if_local"]
      hashes = []
      if not uses_array:
        storage = index_builder.open_storage()
        hashes = olmo_core_fingerprint.hash_boundary_files(index, storage)
      found = olmo_core_fingerprint.packed(
          index,
          ids_of(config),
          config["S"],
          long_documents=config.get("strategy", "truncate"),
          group_size=config.get("group", 1),
          use_array_if_local=uses_array,
          boundary_hashes=hashes,
      )
      self.assertEqual(found.fingerprint, case["items"]["fingerprint"])

  def test_fields_of_packed_rows_that_have_defaults_are_left_out(self):
    case = _PADDED[0]
    index, ids = self.index(case, 8), ids_of(case["config"])
    plain = olmo_core_fingerprint.packed(index, ids, 64)
    self.assertEqual(
        list(plain.fields)[-3:], ["long_doc_strategy", "bos_token_id", "sequence_length"]
    )
    hashes = [("part-0.npy", "ab")]
    full = olmo_core_fingerprint.packed(
        index, ids, 64, group_size=8, use_array_if_local=False, boundary_hashes=hashes
    )
    self.assertIn(
        "sequence_length=64,source_group_size=8,use_array_if_local=False,"
        "_metadata_fingerprint=(('part-0.npy', 'ab'),),path=part-0.npy,",
        full.text,
    )
    older = olmo_core_fingerprint.packed(
        index,
        ids,
        64,
        group_size=8,
        use_array_if_local=False,
        boundary_hashes=hashes,
        release="2.5",
    )
    self.assertIn("sequence_length=64,source_group_size=8,path=part-0.npy,", older.text)

  def test_a_difference_is_named(self):
    case = _PADDED[0]
    index, ids = self.index(case, 8), ids_of(case["config"])
    dataset = olmo_core_fingerprint.packed(index, ids, 64, group_size=8)
    files = dataset.files
    for changed, message in (
        (dict(fields={**dataset.fields, "vocab_size": 100278}), "the run had vocab_size=100278"),
        (
            dict(fields={**dataset.fields, "sequence_length": 128}),
            "the run had sequence_length=128",
        ),
        (
            dict(fields={**dataset.fields, "source_group_size": 4}),
            "the run had source_group_size=4, but this dataset has source_group_size=8",
        ),
        (
            dict(fields={**dataset.fields, "use_array_if_local": False}),
            "use_array_if_local=False, but this dataset has use_array_if_local=None",
        ),
        (dict(files=files[:3]), f"only the first 3 of these 5 files, up to {files[2][0]}"),
        (dict(files=files[:2] + files[3:]), f"did not have the file {files[2][0]}"),
        (
            dict(files=(files[0], files[2], files[1], *files[3:])),
            f"the run read {files[2][0]} before {files[1][0]}",
        ),
        (dict(files=(*files[:4], ("part-4.npy", 1))), "or a file has a different size"),
    ):
      other = dataclasses.replace(dataset, **changed)
      self.assertIn(message, dataset.explain(other.fingerprint))
    reversed_ = dataclasses.replace(dataset, files=files[::-1])
    self.assertIn("sorted by path", reversed_.explain(dataset.fingerprint))

  def test_boundary_files_are_hashed_by_the_name_of_their_token_file(self):
    index = self.index(_PADDED[0], 8)
    storage = index_builder.open_storage()
    for path in _PADDED[0]["file_order"]:
      name = os.path.join(self.folder, path.replace(".npy", ".csv.gz"))
      with open(name, "wb") as file:
        file.write(b"x")
      self.addCleanup(os.unlink, name)
    found = olmo_core_fingerprint.hash_boundary_files(index, storage)
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    self.assertEqual(found, [(f"part-{i}.npy", digest) for i in range(5)])


if __name__ == "__main__":
  absltest.main()
