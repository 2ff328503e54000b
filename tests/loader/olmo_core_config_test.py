"""Tests of the sections of OLMo-core's config.json."""

import copy

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import olmo_core_config
from tests import olmo_core_goldens


class RunConfigTest(parameterized.TestCase):

  def read(self, values):
    return olmo_core_config.RunConfig.from_json(values, "config.json")

  def error(self, values):
    with self.assertRaises(errors.ConfigError) as caught:
      self.read(values)
    return str(caught.exception)

  def test_a_stage_of_olmo_3_is_read_in_full(self):
    run = self.read(olmo_core_goldens.config("olmo3_32b_long_context"))
    self.assertEqual(run.dataset, olmo_core_config.PACKED)
    self.assertEqual((run.ids.vocab_size, run.ids.eos_id, run.ids.bos_id), (100278, 100257, None))
    self.assertEqual((run.dtype, run.mix, run.rows), ("uint32", "OLMo-longmino-mix-0925", 128))
    self.assertEqual((run.permutation_seed, run.group_size, run.seed), (123, 8, 34521))
    self.assertEqual(run.filter, olmo_core_config.Filter(13, 1, 32))
    self.assertTrue(run.document_lengths)
    self.assertIn("dataset.work_dir", run.no_effect)

  def test_the_sources_of_a_mixture_are_read(self):
    run = self.read(olmo_core_goldens.config("hybrid_7b_midtrain"))
    self.assertEqual([source.name for source in run.mixture], ["web", "code"])
    self.assertEqual(run.mixture[1].max_repetition_ratio, 2.0)
    self.assertEqual(run.mixture_tokens, (100_000_000_000, 4_194_304))

  def test_unknown_fields_are_listed_together(self):
    values = olmo_core_goldens.config("hybrid_7b_midtrain")
    values["dataset"]["new_field"] = 1
    values["dataset"]["tokenizer"]["other"] = None
    values["dataset"]["source_mixture_config"]["source_list"]["sources"][0]["x"] = 2
    values["data_loader"]["shuffle"] = False
    error = self.error(values)
    for name in (
        "dataset.new_field=1",
        "dataset.tokenizer.other=None",
        "dataset.source_mixture_config.sources[0].x=2",
        "data_loader.shuffle=False",
    ):
      self.assertIn(f"{name} is not known", error)

  @parameterized.parameters(
      (
          "NumpyInterleavedFSLDatasetConfig",
          "are not supported, because no official stage uses them",
      ),
      ("NumpyVSLDatasetConfig", "are not supported, because no official stage uses them"),
      ("SomethingElse", "'SomethingElse', which is not known. Supported: NumpyFSLDatasetConfig, "),
      ("", "has the class '', which is not known"),
  )
  def test_other_datasets_are_refused_by_name(self, name, message):
    values = olmo_core_goldens.config("olmo3_7b_pretrain")
    values["dataset"]["_CLASS_"] = f"olmo_core.data.numpy_dataset.{name}"
    self.assertIn(message, self.error(values))

  def test_composable_loaders_are_refused(self):
    values = olmo_core_goldens.config("olmo3_7b_pretrain")
    values["data_loader"]["_CLASS_"] = "olmo_core.data.composable.ComposableDataLoaderConfig"
    self.assertIn("Composable sources are not supported", self.error(values))

  def test_all_problems_are_reported_in_one_error(self):
    values = olmo_core_goldens.config("sft_think")
    values["dataset"]["mix"] = "OLMo-mix-0625"
    values["dataset"]["tokenizer"]["eos_token_id"] = "2"
    values["dataset"]["long_doc_strategy"] = "drop"
    values["dataset"]["label_mask_paths"] = [1]
    values["data_loader"]["global_batch_size"] = 100
    del values["dataset"]["tokenizer"]["pad_token_id"]
    error = self.error(values)
    for problem in (
        "dataset.tokenizer.eos_token_id cannot be '2'.",
        "dataset.tokenizer.pad_token_id is missing.",
        "dataset.label_mask_paths is not a list of texts.",
        "global_batch_size=100 is not a multiple of dataset.sequence_length=32768.",
        "dataset needs exactly one of paths, mix and source_mixture_config, found 2.",
        "dataset.mix needs dataset.mix_base_dir.",
        "dataset.long_doc_strategy must be truncate or fragment, got 'drop'.",
    ):
      self.assertIn(problem, error)

  def test_what_is_no_config_is_an_error(self):
    for values in ([], {}, {"dataset": 1}, None):
      self.assertIn("is not a config of OLMo-core", self.error(values))

  def test_missing_sections_are_an_error(self):
    values = copy.deepcopy(olmo_core_goldens.config("olmo3_7b_pretrain"))
    del values["data_loader"]
    self.assertIn("data_loader is missing or not an object.", self.error(values))

  def test_steps_are_counted_from_0_and_empty_ranges_left_out(self):
    values = olmo_core_goldens.config("olmo3_7b_pretrain")
    ranges = [{"start": 961, "stop": 976}, {"start": 5, "stop": 5}, {"start": 0, "stop": 2}]
    values["trainer"] = {"steps_to_skip": ranges, "max_duration": {"value": 5, "unit": "tokens"}}
    run = self.read(values)
    self.assertEqual(run.skips, ((960, 975), (0, 1)))
    self.assertEqual(run.num_epochs, 0)

  @parameterized.parameters((256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"))
  def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(self, vocab_size, dtype):
    values = olmo_core_goldens.config("olmo3_7b_pretrain")
    values["dataset"]["tokenizer"]["vocab_size"] = vocab_size
    self.assertEqual(self.read(values).dtype, dtype)


class SourcesTest(absltest.TestCase):

  def test_the_list_of_a_mixture_file_is_read(self):
    values = {"sources": [{"source_name": "a", "target_ratio": 1, "paths": ["x/*.npy"]}]}
    (source,) = olmo_core_config.parse_sources(values, "mixture.yaml")
    self.assertEqual((source.name, source.target_ratio, source.paths), ("a", 1.0, ("x/*.npy",)))
    with self.assertRaisesRegex(errors.ConfigError, "expected a list `sources`"):
      olmo_core_config.parse_sources({"sources": 3}, "mixture.yaml")
    values["sources"][0]["ratio"] = 1
    with self.assertRaisesRegex(errors.ConfigError, r"sources\[0\].ratio=1 is not known"):
      olmo_core_config.parse_sources(values, "mixture.yaml")


if __name__ == "__main__":
  absltest.main()
