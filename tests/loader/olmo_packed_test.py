"""Tests that packed rows, and windows with label masks, are those of OLMo-core."""

import base64
import hashlib
import json
import pathlib
import tempfile
import unittest
from typing import Any

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from tests import olmo_core_goldens
from tests.loader import cases

_IGNORED = -100  # OLMo-core's label for a position without loss.

_directory = ""


def setUpModule():
  global _directory
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="olmo_packed_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  corpora = ("docs16", "ties", "distinct", "sft", "bos")
  olmo_core_goldens.write_corpora(_directory, *corpora)
  for path, content in olmo_core_goldens.load("packed_metadata")["csv_gz_base64"].items():
    (pathlib.Path(_directory) / path).write_bytes(base64.b64decode(content))


_TIES = {"packed": "avx2", "packed_scalar": "scalar", "packed_metadata": "avx2"}


def _golden(file: str, number: int) -> dict[str, Any]:
  golden = olmo_core_goldens.load(file)
  return (golden["cases"] if isinstance(golden, dict) else golden)[number]


def _each_case(*files: str) -> Any:
  """Runs a test with the file and the number of every case in some golden files."""
  # Not with the cases themselves, because the output of a failed test contains its arguments.
  found = []
  for file in files:
    golden = olmo_core_goldens.load(file)
    for number, case in enumerate(golden["cases"] if isinstance(golden, dict) else golden):
      found.append((f"{file}_{case['config']['name']}", file, number))
  return parameterized.named_parameters(found)


def _build_index(case: dict[str, Any], directory: str) -> str:
  settings = case["config"]
  path = f"{directory}/{settings['name']}.json"
  index = maxtext_olmo.build_index(
      [(file, file) for file in case["file_order"]],
      settings["S"],
      tokenizer="none",
      base=_directory,
      dtype=olmo_core_goldens.corpus(settings["corpus"])["dtype"],
      max_target_sequence_length=settings.get("M"),
  )
  index.save(path)
  return path


def _config(case: dict[str, Any], directory: str, **values: Any) -> dict[str, Any]:
  """Returns the config that a golden case stands for."""
  settings = case["config"]
  corpus = olmo_core_goldens.corpus(settings["corpus"])
  config: dict[str, Any] = {
      "olmo_index_path": _build_index(case, directory),
      "olmo_order_cache_dir": directory,
      "olmo_order": "olmo_core",
      "olmo_order_resume": "olmo_core",
      "max_target_length": settings["S"],
      "vocab_size": corpus["vocab_size"],
      "data_shuffle_seed": case["loader"]["seed"],
      "global_batch_size_to_load": case["loader"]["global_batch_size"] // settings["S"],
      "olmo_eos_id": corpus["eos_token_id"],
      "olmo_bos_id": -1 if corpus["bos_token_id"] is None else corpus["bos_token_id"],
      "olmo_document_mask": bool(settings.get("doc_lens")),
      "olmo_apply_ngram_filter": bool(settings.get("filter")),
      "olmo_batch_extras": ("row_ids",),
  }
  for name, value in (settings.get("filter") or {}).items():
    config[name.replace("repetition_", "olmo_ngram_")] = value
  if settings.get("masks"):
    config["olmo_label_masks"] = (f"{settings['corpus']}/labels_mask_part_*.npy",)
  return {**config, **values}


def _packed_config(case: dict[str, Any], ties: str, directory: str) -> dict[str, Any]:
  settings = case["config"]
  pad_id = olmo_core_goldens.corpus(settings["corpus"])["pad_token_id"]
  return _config(
      case,
      directory,
      dataset_type="olmo_packed",
      olmo_pad_id=settings.get("pad", pad_id),
      olmo_source_group_size=settings["group"],
      olmo_long_documents="split" if settings.get("strategy") == "fragment" else "truncate",
      olmo_packing_ties=ties,
      olmo_boundaries="csv" if settings.get("use_array_if_local") is False else "eos",
      olmo_packed_segments="documents",
  )


def labels_of(batch: cases.Batch) -> np.ndarray:
  """Returns the labels that OLMo-core would make of a batch."""
  counts = batch["targets_segmentation"] != 0
  return np.where(counts, batch["targets"].astype(np.int64), _IGNORED)


def document_lengths(segments: np.ndarray) -> list[int]:
  """Returns the lengths of the segments of a row."""
  borders = np.flatnonzero(np.diff(segments)) + 1
  return np.diff(borders, prepend=0, append=len(segments)).tolist()


class GoldenCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path

  def make(self, config: dict[str, Any], **values: Any) -> Any:
    iterator, _ = maxtext_olmo.create_data_iterator(
        cases.data_config(**{**config, **values}), cases.device_mesh()
    )
    self.addCleanup(iterator.close)
    return iterator

  def check_items(self, case: dict[str, Any], config: dict[str, Any]) -> None:
    """Checks all rows in the order of the dataset."""
    items, settings = case["items"], case["config"]
    size = next(size for size in range(64, 0, -1) if items["n"] % size == 0)
    iterator = self.make(
        config,
        olmo_order="sequential",
        olmo_order_resume="exact",
        global_batch_size_to_load=size,
        olmo_num_epochs=1,
    )
    batches = cases.take(iterator, items["n"] // size)
    with self.assertRaises(StopIteration):
      next(iterator)
    rows = np.concatenate([batch["inputs"] for batch in batches])
    self.assertEqual(rows[0].tolist(), items["first_rows"][0])
    self.assertEqual(rows[-1].tolist(), items["last_row"])
    self.assertEqual(olmo_core_goldens.row_hash(rows), items["input_ids_int64_sha256"])
    counted = np.concatenate([batch["targets_segmentation"] for batch in batches]) != 0
    self.assertFalse(counted[:, -1].any())
    kept = np.array(items.get("instance_mask", [1] * items["n"]), bool)
    if "label_mask_first_rows" in items:
      for row, expected in enumerate(items["label_mask_first_rows"]):
        expected = np.array(list(expected), int).astype(bool) & kept[row]
        np.testing.assert_array_equal(counted[row, :-1], expected[1:])
    else:
      np.testing.assert_array_equal(counted[:, :-1].all(axis=1), kept)
    np.testing.assert_array_equal(counted.any(axis=1) & ~kept, False)
    if settings.get("doc_lens"):
      segments = np.concatenate([batch["inputs_segmentation"] for batch in batches])
      for row, lengths in enumerate(items["doc_lens"]):
        self.assertEqual(document_lengths(segments[row]), lengths)
    if "instance_mask" in items:
      explained = [iterator.explain(step).rows for step in range(len(batches))]
      self.assertEqual([row.kept for rows in explained for row in rows], kept.tolist())

  def check_step(self, batch: cases.Batch, expected: dict[str, Any]) -> None:
    self.assertEqual(batch["row_ids"].tolist(), expected["index"])
    hashes = expected["input_ids_sha256"], expected["labels_int64_sha256"]
    found = batch["inputs"], labels_of(batch)
    self.assertEqual(tuple(map(olmo_core_goldens.row_hash, found)), hashes)
    if "max_doc_lens" in expected:
      lengths = [document_lengths(row) for row in batch["inputs_segmentation"]]
      self.assertEqual([max(row) for row in lengths], expected["max_doc_lens"])
      self.assertEqual(max(map(len, lengths)), expected["doc_lens_shape"][1])

  def check_loader(self, case: dict[str, Any], config: dict[str, Any]) -> None:
    """Checks two epochs, the rows of ranks, and resumes with other batch sizes."""
    golden = case["loader"]
    iterator = self.make(config)
    batches, states = [], [iterator.get_state()]
    for _ in range(golden["total_batches"]):
      batches += cases.take(iterator, 1)
      states.append(json.loads(json.dumps(iterator.get_state())))
    for batch, expected in zip(batches, golden["epoch1_first_steps"]):
      self.check_step(batch, expected)
    whole = golden["epoch1"]
    rows = np.concatenate([batch["inputs"] for batch in batches])
    labels = np.concatenate([labels_of(batch) for batch in batches])
    self.assertLen(batches, whole["batches"])
    self.assertEqual(olmo_core_goldens.row_hash(rows), whole["input_ids_int64_sha256"])
    self.assertEqual(olmo_core_goldens.row_hash(labels), whole["labels_int64_sha256"])
    order = np.concatenate([batch["row_ids"] for batch in batches])
    expected = golden["global_indices_epoch1"]
    if isinstance(expected, list):
      self.assertEqual(order.tolist(), expected[: len(order)])
    elif expected["len"] == len(order):
      digest = hashlib.sha256(order.astype("<u4").tobytes()).hexdigest()
      self.assertEqual(digest, expected["sha256_uint32"])
    for expected in golden["epoch2_first_steps"]:
      self.check_step(cases.take(iterator, 1)[0], expected)
    for rank, steps in enumerate(golden["world2"]):
      for batch, expected in zip(batches, steps):
        self.assertEqual(batch["row_ids"][rank::2].tolist(), expected)
    state = states[golden["state_after"]]
    consumed = golden["state"]["tokens_processed"] // config["max_target_length"]
    self.assertEqual(state["position"], consumed)
    for resume in golden["resume"]:
      size = resume["global_batch_size"] // config["max_target_length"]
      if resume["config_seed"] != config["data_shuffle_seed"]:
        continue  # The import of a state takes its seed; a config with another seed is refused.
      resumed = self.make(config, global_batch_size_to_load=size)
      resumed.set_state(state)
      for expected in resume["next_steps"]:
        self.assertEqual(cases.take(resumed, 1)[0]["row_ids"].tolist(), expected)


class PackedGoldenTest(GoldenCase):

  @_each_case(*_TIES)
  def test_rows_labels_and_document_lengths_are_those_of_olmo_core(self, file, number):
    case = _golden(file, number)
    self.check_items(case, _packed_config(case, _TIES[file], self.folder))

  @_each_case(*_TIES)
  def test_epochs_ranks_and_resumes_are_those_of_olmo_core(self, file, number):
    case = _golden(file, number)
    self.check_loader(case, _packed_config(case, _TIES[file], self.folder))


class WindowsGoldenTest(GoldenCase):

  @_each_case("fsl_extra")
  def test_windows_are_those_of_olmo_core(self, file, number):
    case = _golden(file, number)
    config = _config(case, self.folder)
    self.check_items(case, config)
    self.check_loader(case, config)


if __name__ == "__main__":
  absltest.main()
