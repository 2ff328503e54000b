"""Tests that runs of OLMo-core are taken over exactly, against its own outputs.

Each case is imported by a config as OLMo-core writes it, and served by `create_data_iterator`.
"""

import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.loader import olmo_core_files
from maxtext_olmo.loader import olmo_core_import
from maxtext_olmo.loader import olmo_core_run
from tests import olmo_core_goldens
from tests.loader import cases

_GOLDENS = {
    f"{name}_{case['config']['name']}": case
    for name, some in (
        ("windows", olmo_core_goldens.load("fsl_extra")["cases"]),
        ("padded", olmo_core_goldens.load("padded")),
        ("mixture", olmo_core_goldens.load("mixture")),
    )
    for case in some
    if "items" in case
}


def setUpModule():
  cases.compile_fast()


def config_of(case, folder):
  """Returns the sections `dataset` and `data_loader` as OLMo-core writes them."""
  config = case["config"]
  corpus = olmo_core_goldens.corpus(config["corpus"])
  name = config["class"].replace("DatasetMixture", "Dataset")
  dataset = {
      "_CLASS_": f"olmo_core.data.numpy_dataset.{name}Config",
      "tokenizer": {
          "vocab_size": corpus["vocab_size"],
          "eos_token_id": corpus["eos_token_id"],
          "pad_token_id": config.get("pad", corpus["pad_token_id"]),
          "bos_token_id": corpus["bos_token_id"],
          "_CLASS_": "olmo_core.data.tokenizer.TokenizerConfig",
      },
      "expand_glob": False,
      "instance_filter_config": config["filter"],
      "work_dir": "/scratch",
      "sequence_length": config["S"],
  }
  longest = config.get("M", config.get("max_target_sequence_length"))
  if longest is not None:
    dataset["max_target_sequence_length"] = longest
  if "sources" in config:
    sources = [
        {**source, "paths": [os.path.join(folder, path) for path in source["paths"]]}
        for source in config["sources"]
    ]
    dataset |= {
        "generate_doc_lengths": config["generate_doc_lengths"],
        "source_mixture_config": {
            "source_list": {"sources": sources},
            "requested_tokens": config["requested_tokens"],
            "global_batch_size": config["global_batch_size"],
            "processes": 8,
            "seed": config["seed"],
        },
    }
  else:
    files = corpus["files"]
    files = [files[place] for place in config.get("pick", range(len(files)))]
    base = os.path.join(folder, config["corpus"])
    dataset |= {
        "paths": [os.path.join(base, file["name"]) for file in files],
        "metadata": [{"label": file.get("label", config["corpus"])} for file in files],
        "source_permutation_seed": config.get("perm"),
    }
    if config.get("masks"):
      dataset["label_mask_paths"] = [os.path.join(base, file["mask_name"]) for file in files]
    if "doc_lens" in config:
      dataset["generate_doc_lengths"] = config["doc_lens"]
  loader = case["loader"]
  return {
      "dataset": dataset,
      "data_loader": {
          "_CLASS_": "olmo_core.data.data_loader.NumpyDataLoaderConfig",
          "global_batch_size": loader["global_batch_size"],
          "seed": loader["seed"],
          "num_workers": 8,
          "type": "numpy",
      },
  }


def labels_of(batch):
  """Returns the labels that OLMo-core would compute: -100 where there is no loss."""
  return np.where(batch["targets_segmentation"] != 0, batch["targets"], -100)


def document_lengths(segments):
  """Returns the length of each segment of each row."""
  lengths = []
  for row in segments:
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    lengths.append(np.diff(starts, append=len(row)).tolist())
  return lengths


class GoldenTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    olmo_core_goldens.write_corpora(cls.folder, "docs16", "sft", "bos", "mix")

  def imported(self, name, state=None, **loader):
    case = _GOLDENS[name]
    config = config_of(case, self.folder)
    config["data_loader"] |= loader
    index_path = os.path.join(self.folder, f"{name}.json")
    imported = maxtext_olmo.from_olmo_core(config, state=state, index_path=index_path)
    imported.olmo_order_cache_dir = self.folder
    return imported

  def iterator(self, config, **changes):
    config = config.copy_and_resolve_references()
    config.update(changes)
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    return iterator

  @parameterized.named_parameters((name, name) for name in _GOLDENS)
  def test_every_row_is_olmo_cores(self, name):
    expected = _GOLDENS[name]["items"]
    config = self.imported(name)
    all_rows = dict(enable_data_shuffling=False, global_batch_size_to_load=expected["n"])
    iterator = self.iterator(config, olmo_num_epochs=1, **all_rows)
    explained = iterator.explain(0).rows
    self.assertEqual([row.number for row in explained], list(range(expected["n"])))
    (batch,) = cases.take(iterator, 1)
    rows = batch["inputs"]
    self.assertEqual(olmo_core_goldens.row_hash(rows), expected["input_ids_int64_sha256"])
    self.assertEqual(rows[: len(expected["first_rows"])].tolist(), expected["first_rows"])
    if "instance_mask" in expected:
      self.assertEqual([int(row.kept) for row in explained], expected["instance_mask"])
    if "doc_lens" in expected:
      found = document_lengths(batch["inputs_segmentation"])[: len(expected["doc_lens"])]
      self.assertEqual(found, expected["doc_lens"])
    if "label" in expected.get("metadata_first", {}):
      self.assertEqual(explained[0].label, expected["metadata_first"]["label"])
      self.assertEqual(explained[-1].label, expected["metadata_last"]["label"])

  @parameterized.named_parameters((name, name) for name in _GOLDENS)
  def test_every_batch_of_two_epochs_is_olmo_cores(self, name):
    expected = _GOLDENS[name]["loader"]
    iterator = self.iterator(self.imported(name))
    steps = range(expected["total_batches"])
    numbers = [row.number for step in steps for row in iterator.explain(step).rows]
    self.assertEqual(numbers, expected["global_indices_epoch1"][: len(numbers)])
    batches = cases.take(iterator, expected["total_batches"])
    self.check_steps(batches, expected["epoch1_first_steps"])
    whole = expected["epoch1"]
    self.assertLen(batches, whole["batches"])
    rows = np.concatenate([batch["inputs"] for batch in batches])
    self.assertEqual(olmo_core_goldens.row_hash(rows), whole["input_ids_int64_sha256"])
    labels = np.concatenate([labels_of(batch) for batch in batches])
    self.assertEqual(olmo_core_goldens.row_hash(labels), whole["labels_int64_sha256"])
    first = iterator.step
    for step, wanted in enumerate(expected["epoch2_first_steps"]):
      found = [row.number for row in iterator.explain(first + step).rows]
      self.assertEqual(found, wanted["index"])
    self.check_steps(cases.take(iterator, 2), expected["epoch2_first_steps"])

  def check_steps(self, batches, expected):
    for batch, wanted in zip(batches, expected):
      self.assertEqual(olmo_core_goldens.row_hash(batch["inputs"]), wanted["input_ids_sha256"])
      labels = olmo_core_goldens.row_hash(labels_of(batch))
      self.assertEqual(labels, wanted["labels_int64_sha256"])
      if "doc_lens_int32_sha256" in wanted:
        lengths = document_lengths(batch["inputs_segmentation"])
        padded = np.zeros(wanted["doc_lens_shape"], "<i4")
        for row, some in enumerate(lengths):
          padded[row, : len(some)] = some
        digest = hashlib.sha256(padded.tobytes()).hexdigest()
        self.assertEqual(digest, wanted["doc_lens_int32_sha256"])
        self.assertEqual(list(map(max, lengths)), wanted["max_doc_lens"])

  @parameterized.named_parameters((name, name) for name in _GOLDENS)
  def test_each_rank_of_two_reads_every_other_row(self, name):
    iterator = self.iterator(self.imported(name))
    for rank, steps in enumerate(_GOLDENS[name]["loader"]["world2"]):
      for step, expected in enumerate(steps):
        rows = [row.number for row in iterator.explain(step).rows]
        self.assertEqual(rows[rank::2], expected)

  @parameterized.named_parameters((name, name) for name in _GOLDENS)
  def test_a_state_continues_where_olmo_core_would(self, name):
    loader = _GOLDENS[name]["loader"]
    for resume in loader["resume"]:
      if not resume["next_steps"]:  # The batch is larger than an epoch.
        continue
      with self.subTest(resume["what"]):
        config = self.imported(
            name,
            state=loader["state"],
            global_batch_size=resume["global_batch_size"],
            seed=resume["config_seed"],
        )
        rows = config.global_batch_size_to_load
        tokens = loader["state"]["tokens_processed"]
        self.assertEqual(config.olmo_initial_position * config.max_target_length, tokens)
        # Within a batch, OLMo-core repeats rows; this library would continue exactly.
        config.olmo_initial_position -= config.olmo_initial_position % rows
        iterator = self.iterator(config)
        for ahead, expected in enumerate(resume["next_steps"]):
          found = [row.number for row in iterator.explain(iterator.step + ahead).rows]
          self.assertEqual(found, expected)

  @parameterized.named_parameters((name, name) for name in _GOLDENS)
  def test_a_state_of_the_second_epoch_continues_there(self, name):
    loader = _GOLDENS[name]["loader"]
    state = loader["state_epoch2_after_2"]
    config = self.imported(name, state=state)
    done = state["tokens_processed"] // config.max_target_length
    self.assertEqual(config.olmo_initial_position, _GOLDENS[name]["items"]["n"] + done)


_STAGES = {
    "olmo2_32b_train": dict(
        max_target_length=4096, global_batch_size_to_load=2048, olmo_apply_ngram_filter=False
    ),
    "olmo3_7b_pretrain": dict(max_target_length=8192, global_batch_size_to_load=512),
    "olmo3_7b_midtrain": dict(data_shuffle_seed=1337, global_batch_size_to_load=256),
    "olmo3_7b_long_context": dict(
        dataset_type="olmo_packed",
        max_target_length=65536,
        global_batch_size_to_load=64,
        olmo_source_group_size=8,
        olmo_long_documents="truncate",
        olmo_document_mask=True,
        olmo_apply_ngram_filter=False,
        olmo_pad_id=100277,
    ),
    "olmo3_32b_pretrain": dict(global_batch_size_to_load=1024, olmo_apply_ngram_filter=True),
    "olmo3_32b_midtrain_1": dict(data_shuffle_seed=42069, olmo_apply_ngram_filter=True),
    "olmo3_32b_long_context": dict(
        dataset_type="olmo_packed", global_batch_size_to_load=128, olmo_apply_ngram_filter=True
    ),
    "hybrid_7b_midtrain": dict(
        dataset_type="olmo_grain", data_shuffle_seed=1337, olmo_apply_ngram_filter=True
    ),
    "sft_think": dict(
        dataset_type="olmo_packed",
        max_target_length=32768,
        olmo_document_mask=True,
        olmo_source_group_size=1,
    ),
    "eval_v3_small_ppl": dict(
        dataset_type="olmo_padded",
        data_shuffle_seed=0,
        max_target_length=8192,
        global_batch_size_to_load=128,
    ),
}


class OfficialStagesTest(parameterized.TestCase):
  """Imports the configs of AI2's stages, over empty files of the right names."""

  def write(self, path, tokens):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, 4 * tokens)  # Sparse: it takes no room.

  @parameterized.named_parameters((name, name) for name in _STAGES)
  def test_the_config_is_understood(self, name):
    content = olmo_core_goldens.config(name)
    folder = self.create_tempdir().full_path
    dataset, mix_file = content["dataset"], None
    if "mix" in dataset:
      mix_file = olmo_core_goldens.mix_file(dataset["mix"])
      files = olmo_core_files.tokenizer_of_mix(dataset["mix"], dataset["tokenizer"]["identifier"])
      for line in mix_file.read_text().splitlines():
        if not line.startswith("#"):
          path = line.split(",")[1].replace("{TOKENIZER}", files)
          self.write(f"{folder}/{path}", 20_000)
    elif "source_mixture_config" in dataset:
      self.write(f"{folder}/web/part-0.npy", 50_000_000_000)
      self.write(f"{folder}/web/part-1.npy", 40_000_000_000)
      self.write(f"{folder}/code/part-0.npy", 15_000_000_000)
    else:
      for number in range(3):
        self.write(f"{folder}/token_ids_part_{number}.npy", 100)
        self.write(f"{folder}/labels_mask_{number}.npy", 25)
    config = maxtext_olmo.from_olmo_core(
        content, base=folder, mix_file=mix_file, index_path=f"{folder}/index.json"
    )
    for key, value in {"olmo_order": "olmo_core", "vocab_size": 100278, **_STAGES[name]}.items():
      self.assertEqual(config[key], value, key)
    index = maxtext_olmo.load_index(config.olmo_index_path)
    self.assertGreaterEqual(len(index.files), 3)
    if name == "sft_think":
      self.assertEqual(
          config.olmo_label_masks, tuple(f"{folder}/labels_mask_{i}.npy" for i in range(3))
      )
    if name == "hybrid_7b_midtrain":
      self.assertEqual(index.total_instances, 23842 * 512)  # The steps of the official run.
      self.assertLen(index.files, 4)  # The code is read twice.
    if name == "olmo3_7b_long_context":
      manifest = mix_file.read_text().splitlines()
      listed = [line.rpartition("/")[2] for line in manifest if not line.startswith("#")]
      found = [entry.path.rpartition("/")[2] for entry in index.files]
      self.assertEqual(found, olmo_core_import.permute_sources(listed, 123))


class ConfigTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    olmo_core_goldens.write_corpora(self.folder, "docs16")
    self.config = config_of(_GOLDENS["windows_docs16_doclens_filter_M"], self.folder)

  def test_steps_that_were_skipped_are_delivered_without_loss(self):
    self.config["trainer"] = {
        "steps_to_skip": [{"start": 2, "stop": 4}],
        "max_duration": {"value": 2, "unit": "epochs"},
    }
    config = maxtext_olmo.from_olmo_core(self.config, index_path=f"{self.folder}/index.json")
    self.assertEqual(config.olmo_num_epochs, 2)
    config.olmo_order_cache_dir = self.folder
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    trained = [bool(batch["targets_segmentation"].any()) for batch in cases.take(iterator, 5)]
    self.assertEqual(trained, [True, False, False, True, True])  # OLMo-core's steps 1 to 5.
    wanted = _GOLDENS["windows_docs16_doclens_filter_M"]["loader"]["epoch1_first_steps"][1]
    found = [row.number for row in iterator.explain(1).rows]
    self.assertEqual(found, wanted["index"])

  def test_an_index_is_used_again_if_it_fits_the_run(self):
    path = f"{self.folder}/index.json"
    first = maxtext_olmo.from_olmo_core(self.config, index_path=path)
    shutil.rmtree(f"{self.folder}/docs16")  # Token files are not needed any more.
    self.assertEqual(maxtext_olmo.from_olmo_core(self.config, index_path=path), first)
    self.config["dataset"]["max_target_sequence_length"] = 128
    with self.assertRaisesRegex(errors.ConfigError, "tokens per window: expected 128, found 64"):
      maxtext_olmo.from_olmo_core(self.config, index_path=path)

  def test_the_default_index_is_in_the_cache(self):
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=self.folder):
      config = maxtext_olmo.from_olmo_core(self.config)
    self.assertStartsWith(config.olmo_index_path, f"{self.folder}/maxtext_olmo/indexes/")
    self.assertLen(maxtext_olmo.load_index(config.olmo_index_path).files, 5)

  def test_files_are_read_by_path_and_by_content(self):
    path = pathlib.Path(self.folder, "config.json")
    path.write_text(json.dumps(self.config))
    index_path = f"{self.folder}/index.json"
    by_path = maxtext_olmo.from_olmo_core(path, index_path=index_path)
    self.assertEqual(by_path, maxtext_olmo.from_olmo_core(self.config, index_path=index_path))
    path.write_text("{")
    with self.assertRaisesRegex(errors.ConfigError, "config.json is not JSON"):
      maxtext_olmo.from_olmo_core(path)

  def test_a_state_that_is_not_json_says_what_is_expected(self):
    path = pathlib.Path(self.folder, "state.json")
    for text, found in (("", "is empty"), ("\x80PK", "is not JSON")):
      path.write_text(text)
      with self.assertRaisesRegex(errors.ConfigError, f"{found}.*checkpoint folder.*state_dict"):
        maxtext_olmo.from_olmo_core(self.config, state=path)

  def test_a_mismatch_names_the_field(self):
    case = _GOLDENS["windows_docs16_doclens_filter_M"]
    self.config["dataset"]["tokenizer"]["pad_token_id"] = 2
    with self.assertRaisesRegex(
        errors.ResumeError, "the run had pad_token_id=1, but this dataset has pad_token_id=2"
    ):
      maxtext_olmo.from_olmo_core(
          self.config, state=case["loader"]["state"], index_path=f"{self.folder}/index.json"
      )


class MixtureTest(absltest.TestCase):
  """An index of heads of files is an index like any other."""

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    olmo_core_goldens.write_corpora(self.folder, "mix")
    content = config_of(_GOLDENS["mixture_repeat"], self.folder)
    self.config = maxtext_olmo.from_olmo_core(content, index_path=f"{self.folder}/index.json")
    self.index = maxtext_olmo.load_index(self.config.olmo_index_path)

  def iterator(self, **changes):
    config = self.config.copy_and_resolve_references()
    with config.unlocked():
      config.update(changes)
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    return iterator

  def test_labels_can_be_mixed_and_rows_explained(self):
    iterator = self.iterator(olmo_order="feistel", olmo_mixture={"s0": 1.0, "s2": 0.5})
    found = set()
    for step, batch in enumerate(cases.take(iterator, 6)):
      for row, tokens in zip(iterator.explain(step).rows, batch["inputs"]):
        (part,) = row.parts
        number = int(self.index.locate(np.array([row.number]))[0][0])
        self.assertEqual(part.file, self.index.resolve(number))
        self.assertLessEqual(part.first + part.count, self.index.files[number].head_tokens)
        read = np.fromfile(part.file, "<u2")[part.first : part.first + part.count]
        np.testing.assert_array_equal(read, tokens)
        found.add(row.label)
    self.assertEqual(found, {"s0", "s2"})

  def test_a_run_resumes_and_another_mixture_is_refused(self):
    iterator = self.iterator(olmo_order_cache_dir=self.folder)
    cases.take(iterator, 3)
    state = iterator.get_state()
    expected = cases.take_inputs(iterator, 2)
    again = self.iterator(olmo_order_cache_dir=self.folder)
    again.set_state(state)
    np.testing.assert_array_equal(cases.take_inputs(again, 2), expected)
    content = config_of(_GOLDENS["mixture_repeat"], self.folder)
    content["dataset"]["source_mixture_config"]["requested_tokens"] -= 800
    other = maxtext_olmo.from_olmo_core(content, index_path=f"{self.folder}/other.json")
    other = self.iterator(olmo_index_path=other.olmo_index_path, olmo_order_cache_dir=self.folder)
    with self.assertRaisesRegex(errors.ResumeError, "changed head|fingerprint"):
      other.set_state(state)

  def test_documents_of_heads_are_refused(self):
    for dataset_type in ("olmo_padded", "olmo_documents"):
      with self.assertRaisesRegex(errors.ConfigError, "is a source mixture"):
        self.iterator(
            dataset_type=dataset_type,
            olmo_order="feistel" if dataset_type == "olmo_documents" else "olmo_core",
            olmo_pad_id=1 if dataset_type == "olmo_padded" else -1,
            olmo_apply_ngram_filter=None,
        )


class OtherDataTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.case = olmo_core_goldens.load("fsl_extra")["other_data"]
    self.folder = self.create_tempdir().full_path
    olmo_core_goldens.write_corpora(self.folder, "docs16")
    files = olmo_core_goldens.corpus("docs16")["files"]
    names = [files[place]["name"] for place in self.case["config"]["then"]]
    self.config = {
        "dataset": {
            "_CLASS_": "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig",
            "tokenizer": {"vocab_size": 50000, "eos_token_id": 0, "pad_token_id": 1},
            "paths": [f"{self.folder}/docs16/{name}" for name in names],
            "sequence_length": self.case["config"]["S"],
        },
        "data_loader": {
            "global_batch_size": self.case["config"]["global_batch_size"],
            "seed": self.case["config"]["seed"],
        },
    }

  def imported(self):
    path = os.path.join(self.folder, "index.json")
    return olmo_core_run.import_run(self.config, state=self.case["state"], index_path=path)

  def test_a_state_of_other_data_is_refused(self):
    with self.assertRaisesRegex(
        errors.ResumeError,
        "The loader's dataset has the fingerprint 9141.* this index has 7151",
    ):
      self.imported()

  def test_it_continues_if_the_config_ignores_the_mismatch(self):
    self.config["data_loader"]["ignore_fingerprint_mismatch"] = True
    imported = self.imported()
    self.assertIn("differs and is ignored", dict(imported.understood)["state"])
    config = imported.config
    config.olmo_order_cache_dir = self.folder
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    for ahead, expected in enumerate(self.case["ignored"]["next_steps"]):
      found = [row.number for row in iterator.explain(iterator.step + ahead).rows]
      self.assertEqual(found, expected)

  def test_the_seed_of_the_state_wins_and_is_reported(self):
    self.config["data_loader"]["ignore_fingerprint_mismatch"] = True
    seed = self.case["state"]["seed"]
    self.assertNotIn("seed", dict(self.imported().understood)["state"])
    self.config["data_loader"]["seed"] = seed + 1
    imported = self.imported()
    self.assertIn(f"its seed {seed} is used", dict(imported.understood)["state"])
    self.assertStartsWith(dict(imported.understood)["order"], f"olmo_core, seed {seed}")
    self.assertEqual(imported.config.data_shuffle_seed, seed)


if __name__ == "__main__":
  absltest.main()
