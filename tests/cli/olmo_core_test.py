"""Tests of `maxtext-olmo olmo-core import`."""

import json
import pathlib
import runpy

from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from tests import olmo_core_goldens
from tests.cli import runner
from tests.loader import cases

_CASE = next(
    case for case in olmo_core_goldens.load("padded") if case["config"]["name"] == "sft_masks"
)


class ImportTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    olmo_core_goldens.write_corpora(self.folder, "sft")
    self.content = {
        "dataset": {
            "_CLASS_": "olmo_core.data.numpy_dataset.NumpyPaddedFSLDatasetConfig",
            "tokenizer": {"vocab_size": 100278, "eos_token_id": 100257, "pad_token_id": 100277},
            "paths": ["/data/sft/token_ids_part_*.npy"],
            "label_mask_paths": ["/data/sft/labels_mask_*.npy"],
            "expand_glob": True,
            "sequence_length": 32,
        },
        "data_loader": {"global_batch_size": 256, "seed": 34521, "num_workers": 8},
        "model": {},
    }
    (self.folder / "state.json").write_text(json.dumps(_CASE["loader"]["state"]))

  def import_run(self, *arguments, output="run.py"):
    (self.folder / "config.json").write_text(json.dumps(self.content))
    config, out = str(self.folder / "config.json"), str(self.folder / output)
    base = f"--base={self.folder}/sft"
    return runner.run("olmo-core", "import", config, base, f"--output={out}", *arguments)

  def test_it_prints_what_it_understood_and_the_config_continues_the_run(self):
    code, out, err = self.import_run(f"--state={self.folder}/state.json")
    self.assertEqual(code, 0, err)
    for text in (
        "NumpyPaddedFSLDataset",
        "3 with",
        "8 rows, 256 tokens",
        "olmo_core, seed 34521",
        _CASE["items"]["fingerprint"],
        "position 24; its fingerprint agrees",
        "data_loader.num_workers, model",
        f"Wrote {self.folder}/run.py.",
    ):
      self.assertIn(text, out)
    config = runpy.run_path(str(self.folder / "run.py"))["get_config"]()
    with config.unlocked():
      config.olmo_order_cache_dir = str(self.folder)
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    for ahead, expected in enumerate(_CASE["loader"]["resume"][0]["next_steps"]):
      rows = iterator.explain(iterator.step + ahead).rows
      self.assertEqual([row.number for row in rows], expected)

  @parameterized.parameters("run.yml", "run.json")
  def test_other_formats_are_written(self, name):
    code, _, err = self.import_run(output=name)
    self.assertEqual(code, 0, err)
    self.assertIn('"olmo_padded"', (self.folder / name).read_text())
    self.assertTrue((self.folder / "run.index.json").exists())

  def test_problems_are_errors_and_write_nothing(self):
    self.content["dataset"]["surprise"] = 1
    code, _, err = self.import_run()
    self.assertEqual(code, 2)
    self.assertIn("dataset.surprise=1 is not known", err)
    del self.content["dataset"]["surprise"]
    self.content["dataset"]["tokenizer"]["bos_token_id"] = 3
    code, _, err = self.import_run(f"--state={self.folder}/state.json")
    self.assertEqual(code, 2)
    self.assertIn("the run had bos_token_id=None, but this dataset has bos_token_id=3", err)
    self.assertFalse((self.folder / "run.py").exists())


if __name__ == "__main__":
  absltest.main()
