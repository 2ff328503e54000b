"""Tests that padded rows are those of OLMo-core, and that their documents are found."""

import gzip
import json
import os
import pathlib
import tempfile
import unittest
from typing import Any

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from tests import olmo_core_goldens
from tests.loader import cases

_GOLDENS = {case["config"]["name"]: case for case in olmo_core_goldens.load("padded")}

_directory = ""


def setUpModule():
  global _directory
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="olmo_padded_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  olmo_core_goldens.write_corpora(_directory, "docs16", "sft", "bos")


def _config(name: str, folder: str, **values: Any) -> dict[str, Any]:
  """Returns the config that a golden case stands for."""
  case = _GOLDENS[name]
  settings, loader = case["config"], case["loader"]
  corpus = olmo_core_goldens.corpus(settings["corpus"])
  index = maxtext_olmo.build_index(
      [(file, file) for file in case["file_order"]],
      settings["S"],
      tokenizer="none",
      base=_directory,
      dtype=corpus["dtype"],
  )
  index.save(f"{folder}/{name}.json")
  config = {
      "dataset_type": "olmo_padded",
      "olmo_index_path": f"{folder}/{name}.json",
      "olmo_order": "olmo_core",
      "olmo_order_cache_dir": folder,
      "max_target_length": settings["S"],
      "vocab_size": corpus["vocab_size"],
      "data_shuffle_seed": loader["seed"],
      "global_batch_size_to_load": loader["global_batch_size"] // settings["S"],
      "olmo_eos_id": corpus["eos_token_id"],
      "olmo_pad_id": corpus["pad_token_id"],
      "olmo_apply_ngram_filter": bool(settings["filter"]),
      "olmo_batch_extras": ("row_ids",),
  }
  for key, value in (settings["filter"] or {}).items():
    config[key.replace("repetition_", "olmo_ngram_")] = value
  if settings.get("masks"):
    config["olmo_label_masks"] = (f"{settings['corpus']}/labels_mask_part_*.npy",)
  return {**config, **values}


class PaddedCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def make(self, config: dict[str, Any], **values: Any) -> Any:
    """Returns the train and the eval iterator."""
    made = maxtext_olmo.create_data_iterator(
        cases.data_config(**{**config, **values}), cases.device_mesh()
    )
    for iterator in made:
      if iterator is not None:
        self.addCleanup(iterator.close)
    return made


class GoldenTest(PaddedCase):

  @parameterized.parameters(*_GOLDENS)
  def test_rows_and_loss_masks_are_those_of_olmo_core(self, name):
    items = _GOLDENS[name]["items"]
    iterator, _ = self.make(
        _config(name, self.folder),
        olmo_order="sequential",
        global_batch_size_to_load=items["n"],
        olmo_num_epochs=1,
    )
    kept = [row.kept for row in iterator.explain(0).rows]
    self.assertEqual(kept, [bool(one) for one in items.get("instance_mask", [1] * items["n"])])
    (batch,) = cases.take(iterator, 1)
    rows = olmo_core_goldens.row_hash(batch["inputs"])
    self.assertEqual(rows, items["input_ids_int64_sha256"])
    counted = batch["targets_segmentation"] != 0
    for row, mask in enumerate(items["label_mask_first_rows"]):
      expected = np.array(list(mask), int).astype(bool) & kept[row]
      self.assertEqual(counted[row].tolist(), [*expected[1:].tolist(), False])

  @parameterized.parameters(*_GOLDENS)
  def test_epochs_and_ranks_are_those_of_olmo_core(self, name):
    golden = _GOLDENS[name]["loader"]
    iterator, _ = self.make(_config(name, self.folder))
    batches = cases.take(iterator, golden["total_batches"])
    order = np.concatenate([batch["row_ids"] for batch in batches]).tolist()
    self.assertEqual(order, golden["global_indices_epoch1"][: len(order)])
    for rank, steps in enumerate(golden["world2"]):
      self.assertEqual([b["row_ids"][rank::2].tolist() for b in batches[: len(steps)]], steps)
    for expected in golden["epoch2_first_steps"]:
      (batch,) = cases.take(iterator, 1)
      self.assertEqual(batch["row_ids"].tolist(), expected["index"])

  def test_the_eval_iterator_reads_what_olmo_cores_evaluator_reads(self):
    expected = _GOLDENS["docs16"]["lm_evaluator_order"]
    config = _config("docs16", self.folder)
    rows = expected["global_batch_size"] // config["max_target_length"]
    _, iterator = self.make(
        config,
        global_batch_size_to_load=rows,
        olmo_eval_index_path=config["olmo_index_path"],
        eval_interval=1,
    )
    for _ in range(2):  # Every pass has the same order.
      found = [np.asarray(batch["row_ids"]).tolist() for batch in iterator]
      self.assertEqual(found, expected["steps"])


class DocumentsTest(PaddedCase):
  """Files with tokens after the last EOS, which are a document of the rule `auto` alone."""

  def setUp(self):
    super().setUp()
    tokens = [[5, 0, 7, 8], [9, 9, 0, 6, 0]]  # EOS 0, and a tail of two tokens.
    for number, file in enumerate(tokens):
      np.array(file, "<u2").tofile(f"{self.folder}/{number}.npy")
    self.index = maxtext_olmo.build_index(
        [("0.npy", "x"), ("1.npy", "x")], 4, tokenizer="none", base=self.folder, dtype="uint16"
    )
    self.index.save(f"{self.folder}/index.json")
    self.config = {
        "dataset_type": "olmo_padded",
        "olmo_index_path": f"{self.folder}/index.json",
        "olmo_eos_id": 0,
        "olmo_pad_id": 1,
        "olmo_order": "sequential",
        "max_target_length": 4,
        "global_batch_size_to_load": 3,
        "olmo_num_epochs": 1,
        "vocab_size": 10,
    }

  def exclude(self, *lines: Any) -> str:
    path = pathlib.Path(self.folder, "exclude.jsonl")
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)

  def loss(self, **values: Any) -> list[list[int]]:
    iterator, _ = self.make(self.config, **values)
    (batch,) = cases.take(iterator, 1)
    np.testing.assert_array_equal(batch["inputs"], [[5, 0, 1, 1], [9, 9, 0, 1], [6, 0, 1, 1]])
    return (batch["targets_segmentation"] != 0).astype(int).tolist()

  def test_every_target_in_a_document_counts(self):
    self.assertEqual(self.loss(), [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])

  @parameterized.parameters("", "elsewhere.documents")
  def test_a_document_is_excluded_by_the_number_of_its_row(self, documents_path):
    # Of no consequence: in this index, document 1 is the tail of the first file.
    documents_lib.build_documents(self.index, f"{self.folder}/index.json.documents", 0)
    if documents_path:
      documents_path = os.path.join(self.folder, documents_path)
    excluded = self.loss(
        olmo_exclude=self.exclude({"document": 1}), olmo_documents_path=documents_path
    )
    self.assertEqual(excluded, [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])

  def test_a_document_is_excluded_by_its_hash(self):
    lines = self.exclude({"hash": xxhash.xxh3_128_hexdigest(np.array([6, 0], "<u2").tobytes())})
    with self.assertRaisesRegex(errors.ConfigError, "--hashes --boundaries eos"):
      self.loss(olmo_exclude=lines)
    path = documents_lib.default_path(f"{self.folder}/index.json", "eos")
    documents_lib.build_documents(self.index, path, 0, rule="eos", hashes=True)
    self.assertEqual(self.loss(olmo_exclude=lines), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])

  def test_rows_are_explained_by_their_documents(self):
    iterator, _ = self.make(self.config)
    rows = iterator.explain(0).rows
    found = [[span.document for part in row.parts for span in part.documents] for row in rows]
    self.assertEqual(found, [[0], [1], [2]])

  def test_boundary_files_decide_if_they_are_asked_for(self):
    for number, lines in enumerate(("0,3\n3,4\n", "1,5\n")):
      path = pathlib.Path(self.folder, f"{number}.csv.gz")
      path.write_bytes(gzip.compress(lines.encode()))
    iterator, _ = self.make(self.config, olmo_boundaries="csv")
    (batch,) = cases.take(iterator, 1)
    np.testing.assert_array_equal(batch["inputs"], [[5, 0, 7, 1], [8, 1, 1, 1], [9, 0, 6, 0]])

  def test_an_index_without_documents_is_refused(self):
    with self.assertRaisesRegex(errors.CorpusError, "no file has the EOS 3"):
      self.make(self.config, olmo_eos_id=3)


if __name__ == "__main__":
  absltest.main()
