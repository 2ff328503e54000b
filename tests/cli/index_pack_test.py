"""`maxtext-olmo index pack`."""

import json
import pathlib
import types

import numpy as np
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo.loader import olmo_packed
from tests.cli import runner


class IndexPackTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    rng = np.random.default_rng(0)
    for number in range(5):
      tokens = rng.integers(1, 100, 500)
      tokens[rng.integers(0, 20, 500) == 0] = 0
      tokens.astype("<u2").tofile(self.folder / f"part-{number}.npy")
    index = maxtext_olmo.build_index(
        [(f"part-{n}.npy", "web") for n in range(5)],
        16,
        tokenizer="none",
        dtype="uint16",
        base=str(self.folder),
    )
    index.save(str(self.folder / "index.json"))
    self.config = str(self.folder / "config.json")
    self.write_config(dataset_type="olmo_packed")

  def write_config(self, **keys):
    values = {
        "olmo_index_path": str(self.folder / "index.json"),
        "max_target_length": 16,
        "olmo_pad_id": 1,
        "olmo_eos_id": 0,
        "olmo_source_group_size": 2,
        **keys,
    }
    pathlib.Path(self.config).write_text(json.dumps(values))

  def plans(self):
    return [path.read_bytes() for path in self.folder.glob("index.json.packed-*")]

  def test_parts_and_a_merge_write_the_plan_that_one_command_writes(self):
    results = str(self.folder / "results")
    for part in ("1", "0"):
      code, out, err = runner.run(
          *("index", "pack", self.config, "--part", part, "--of", "2", "--results", results)
      )
      self.assertEqual(code, 0, err)
      self.assertIn(f"part {part} of 2", out)
      self.assertEmpty(self.plans())
    code, out, err = runner.run("index", "pack", self.config, "--merge", "--results", results)
    self.assertEqual(code, 0, err)
    self.assertRegex(out, r"index.json.packed-\w+: \d+ rows with \d+ documents, \d+.\d\d% full")
    (merged,) = self.plans()
    for path in self.folder.glob("index.json.packed-*"):
      path.unlink()
    code, _, err = runner.run("index", "pack", self.config)
    self.assertEqual(code, 0, err)
    self.assertEqual(self.plans(), [merged])
    self.assertEmpty(list(self.folder.glob("*.work")))

  def test_a_run_uses_the_plan_that_is_there(self):
    code, _, err = runner.run("index", "pack", self.config, "--config.olmo_source_group_size=3")
    self.assertEqual(code, 0, err)
    before = self.plans()
    values = json.loads(pathlib.Path(self.config).read_text()) | {"olmo_source_group_size": 3}
    options = config_lib.Options.read(types.SimpleNamespace(**config_lib.defaults() | values))
    olmo_packed.open_rows(options, options.olmo_index_path)
    self.assertEqual(self.plans(), before)
    code, out, _ = runner.run("index", "pack", self.config, "--config.olmo_source_group_size=3")
    self.assertEqual(code, 0)
    self.assertIn("already exists", out)

  def test_other_dataset_types_have_no_plan(self):
    code, _, err = runner.run(
        *("index", "pack", self.config, "--config.dataset_type=olmo_padded"),
        "--config.olmo_source_group_size=1",
    )
    self.assertEqual(code, 2)
    self.assertIn("has dataset_type='olmo_padded'", err)


if __name__ == "__main__":
  absltest.main()
