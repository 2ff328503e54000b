"""Tests of `maxtext-olmo order`."""

import importlib.util
import json
import os
import pathlib

import jax
import ml_collections
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import index_builder as index_lib
from tests.cli import runner
from tests.loader import elastic_test


class ImportTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.case = elastic_test._RESUMES["same"]
    self.corpus = elastic_test._CASES[self.case["case"]]
    self.index = elastic_test.write_case(self.directory, self.corpus)
    self.state = self.save(self.case["state_dict"])

  def save(self, values, name="state.json"):
    path = self.directory / name
    path.write_text(json.dumps(values))
    return path

  def run_import(self, *args):
    return runner.run("order", "import-olmo-core", self.state, "--index", self.index, *args)

  def served(self, values):
    config = ml_collections.ConfigDict({**config_lib.defaults(), **values})
    config.olmo_order_cache_dir = str(self.directory / "cache")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    iterator, _ = maxtext_olmo.create_data_iterator(config, mesh)
    self.addCleanup(iterator.close)
    return iterator

  @parameterized.parameters(".py", ".json", ".yml")
  def test_the_written_config_continues_where_olmo_core_would(self, ending):
    path = self.directory / f"go_on{ending}"
    code, out, err = self.run_import("--write", path)
    self.assertEqual((code, err), (0, ""))
    self.assertIn("position 40, which is step 5 with batches of 8 rows", out)
    if ending == ".py":
      spec = importlib.util.spec_from_file_location("go_on", path)
      module = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(module)
      values = {k: v for k, v in module.get_config().items() if k in config_lib.defaults()}
    elif ending == ".json":
      values = json.loads(path.read_text())
    else:
      lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
      values = {k: json.loads(v) for k, v in (line.split(": ", 1) for line in lines)}
    iterator = self.served(values)
    self.assertEqual((iterator.step, iterator.position), (5, 40))
    for expected in self.case["resumed"][0]["next_steps"]:
      self.assertEqual(iterator.row_numbers(iterator.step).tolist(), expected)
      next(iterator)
    code, _, err = self.run_import("--write", path)
    self.assertEqual(code, 2)
    self.assertIn("exists already", err)

  def test_it_prints_the_config_and_checks_the_fingerprint(self):
    ids = ("--vocab-size", 100278, "--pad-id", 1, "--eos-id", 0)
    code, out, _ = self.run_import(*ids)
    self.assertEqual(code, 0)
    self.assertIn("olmo_initial_position=40\n", out)
    self.assertIn("data_shuffle_seed=34521\n", out)
    self.assertIn(f"OLMo-core fingerprint {self.corpus['fingerprint']}", out)
    code, _, err = self.run_import(*ids[:-1], 3)
    self.assertEqual(code, 2)
    self.assertIn("the run had eos_token_id=0, but this dataset has eos_token_id=3", err)
    self.assertIn("work only together", self.run_import("--vocab-size", 5)[2])
    self.assertIn("was not checked", self.run_import()[1])

  def test_another_sequence_length_continues_at_the_same_token(self):
    self.case = elastic_test._RESUMES["seqlen_32_to_64_max64"]
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.index = elastic_test.write_case(self.directory, elastic_test._CASES[self.case["case"]], 32)
    self.state = self.save(self.case["state_dict"])
    path = self.directory / "go_on.json"
    self.assertEqual(self.run_import("--sequence-length", 64, "--write", path)[0], 0)
    iterator = self.served(json.loads(path.read_text()))
    for expected in self.case["resumed"][0]["next_steps"]:
      self.assertEqual(iterator.row_numbers(iterator.step).tolist(), expected)
      next(iterator)

  def test_errors_are_one_line_each(self):
    self.state = self.save({**self.case["state_dict"], "batches_processed": 0})
    self.assertIn("Set --batch-size", self.run_import()[2])
    self.assertEqual(self.run_import("--batch-size", 4)[0], 0)
    self.assertIn(
        "is a .py, .yml, .yaml or .json", self.run_import("--batch-size", 4, "--write", "x.txt")[2]
    )
    self.state.write_text("{")
    self.assertIn("is not JSON", self.run_import()[2])
    self.state.write_text("[" * 100_000)
    self.assertIn("is not JSON", self.run_import()[2])
    self.state = self.directory / "fifo"
    os.mkfifo(self.state)
    self.assertIn("not a regular file", self.run_import()[2])
    self.state = self.directory / "none.json"
    self.assertIn("No such file", self.run_import()[2])

  def test_an_index_is_built_with_olmo_cores_permutation_of_sources(self):
    mix = self.directory / "mix.txt"
    names = sorted(name for name in os.listdir(self.directory) if name.endswith(".npy"))
    mix.write_text("".join(f"x,{name}\n" for name in names))
    out = self.directory / "permuted.json"
    code, _, err = runner.run(
        *("index", "build", "--mix-file", mix, "--sequence-length", 64, "--tokenizer", "t"),
        *("--source-permutation-seed", 7, "--output", out),
    )
    self.assertEqual(code, 0, err)
    found = [entry.path for entry in index_lib.load_index(out).files]
    # random.Random(7).shuffle([0, 1, 2, 3, 4])
    self.assertEqual(found, [f"part-{i:03d}.npy" for i in (4, 0, 3, 1, 2)])


class StatsTest(absltest.TestCase):

  def test_it_shows_all_orders_side_by_side(self):
    code, out, _ = runner.run("order", "stats", "--instances", 20_000, "--largest-stored", 30_000)
    self.assertEqual(code, 0)
    self.assertIn("|  | feistel | olmo_core | Grain's shuffle |", out)
    self.assertIn("| correlation, 1 apart |", out)

  def test_invalid_numbers_are_refused(self):
    for option in (("--instances", 10**30), ("--seed", 1 << 32), ("--seed", -1)):
      code, _, err = runner.run("order", "stats", *option)
      self.assertEqual(code, 2)
      self.assertIn("--instances must be at most", err)


if __name__ == "__main__":
  absltest.main()
