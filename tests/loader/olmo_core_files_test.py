"""Tests of the files that a config of OLMo-core names."""

import dataclasses
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.loader import olmo_core_config
from maxtext_olmo.loader import olmo_core_files
from tests import olmo_core_goldens


class FilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def run_config(self, name, **changes):
    run = olmo_core_config.RunConfig.from_json(olmo_core_goldens.config(name), "config")
    return dataclasses.replace(run, **changes)

  def touch(self, *names):
    for name in names:
      path = self.folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()

  def test_a_mix_is_read_below_its_base(self):
    run = self.run_config("olmo3_7b_pretrain")
    mix_file = olmo_core_goldens.mix_file(run.mix)
    files = olmo_core_files.find_files(run, mix_file=mix_file)
    self.assertEqual(files.base, "/data/ai2-llm")
    self.assertEqual(
        files.paths[0],
        "/data/ai2-llm/preprocessed/dolma3-0625/v0.1-official/allenai/dolma3-tokenizer"
        "/common_crawl/adult_content/000000.npy",
    )
    self.assertEqual(files.labels[0], "common_crawl_adult_content")
    moved = olmo_core_files.find_files(run, mix_file=mix_file, base="gs://bucket/x/")
    self.assertStartsWith(moved.paths[0], "gs://bucket/x/preprocessed/")

  def test_a_manifest_is_found_next_to_the_config(self):
    run = self.run_config("olmo3_7b_pretrain")
    mix_file = olmo_core_goldens.mix_file(run.mix)
    (self.folder / mix_file.name).write_bytes(mix_file.read_bytes())
    files = olmo_core_files.find_files(run, near=str(self.folder))
    self.assertIn(str(self.folder), files.origin)

  def test_a_missing_manifest_is_named(self):
    run = self.run_config("olmo2_32b_train", mix="dolma3-0625-6T-mix")
    with self.assertRaisesRegex(
        errors.MissingFileError, "is one of OLMo-core's, and its manifest OLMo-mix-0625.txt is not"
    ):
      olmo_core_files.find_files(run, near=str(self.folder))

  @parameterized.parameters(
      ("OLMo-mix-0925-official", "allenai/dolma2-tokenizer", "allenai/dolma3-tokenizer"),
      ("OLMo-mix-0925", "allenai/dolma2-tokenizer", "allenai/dolma2-tokenizer"),
      ("v3-small-ppl-validation", "allenai/dolma2-tokenizer", "dolma2-tokenizer"),
      ("v3-small-ppl-validation", "allenai/gpt-neox-olmo-dolma-v1_5", "gptneox20b"),
      ("OLMoE-mix-0824", "allenai/gpt-neox-olmo-dolma-v1_5", "gpt-neox-olmo-dolma-v1_5"),
      ("mine", "my-tokenizer", "my-tokenizer"),
  )
  def test_mixes_have_their_own_names_of_tokenizers(self, mix, tokenizer, expected):
    self.assertEqual(olmo_core_files.tokenizer_of_mix(mix, tokenizer), expected)

  def test_patterns_are_sorted_as_text_and_masks_paired_by_place(self):
    numbers = (1, 2, 10)
    self.touch(*(f"token_ids_part_{i}.npy" for i in numbers))
    self.touch(*(f"labels_mask_{i}.npy" for i in numbers))
    files = olmo_core_files.find_files(self.run_config("sft_think"), base=self.folder)
    order = ("1", "10", "2")
    self.assertEqual(files.paths, tuple(f"{self.folder}/token_ids_part_{i}.npy" for i in order))
    self.assertEqual(files.masks, tuple(f"{self.folder}/labels_mask_{i}.npy" for i in order))
    self.assertEqual(set(files.labels), {self.folder.name})
    self.touch("labels_mask_3.npy")
    with self.assertRaisesRegex(errors.ConfigError, "4 label masks for 3 token files"):
      olmo_core_files.find_files(self.run_config("sft_think"), base=self.folder)

  def test_files_are_shuffled_but_masks_keep_the_order_before(self):
    run = self.run_config(
        "sft_think",
        paths=("/a/x.npy", "/a/y.npy", "/a/z.npy"),
        mask_paths=("/a/1", "/a/2", "/a/3"),
        labels=("x", "y", "z"),
        expand_glob=False,
        permutation_seed=1,
    )
    files = olmo_core_files.find_files(run)
    self.assertEqual(files.paths, ("/a/y.npy", "/a/z.npy", "/a/x.npy"))
    self.assertEqual(files.labels, ("y", "z", "x"))
    self.assertEqual(files.masks, ("/a/1", "/a/2", "/a/3"))

  def test_the_metadata_of_patterns_must_fit_their_matches(self):
    self.touch("token_ids_part_0.npy")
    run = self.run_config("sft_think", mask_paths=None, labels=("a", "b"))
    with self.assertRaisesRegex(errors.ConfigError, "metadata for 2 files, but .* match 1 file"):
      olmo_core_files.find_files(run, base=self.folder)

  def test_sources_move_from_the_directory_they_have_in_common(self):
    self.touch("web/a/1.npy", "web/b/2.npy", "code/c.npy")
    sources = (
        source_mixture.MixtureSource("web", 0.5, ("gs://bucket/data/web/**/*.npy",)),
        source_mixture.MixtureSource("code", 0.5, ("gs://bucket/data/code/c.npy",)),
    )
    found, base = olmo_core_files.resolve_sources(sources, str(self.folder))
    self.assertEqual(base, str(self.folder))
    self.assertEqual(
        [source.paths for source in found],
        [
            (f"{self.folder}/web/a/1.npy", f"{self.folder}/web/b/2.npy"),
            (f"{self.folder}/code/c.npy",),
        ],
    )
    run = self.run_config("hybrid_7b_midtrain", mixture=sources, permutation_seed=5)
    files = olmo_core_files.find_files(run, base=self.folder)
    self.assertEqual(files.labels, ("web", "web", "code"))  # OLMo-core does not shuffle them.


if __name__ == "__main__":
  absltest.main()
