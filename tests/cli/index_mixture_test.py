"""Tests of `maxtext-olmo index mixture`."""

import json
import pathlib
import re

from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from tests import olmo_core_goldens
from tests.cli import runner

_CASE = next(c for c in olmo_core_goldens.load("mixture") if c["config"]["name"] == "repeat")


class IndexMixtureTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    olmo_core_goldens.write_corpora(self.folder, "mix")
    config = _CASE["config"]
    sources = [
        {**source, "paths": [f"gs://bucket/{path}" for path in source["paths"]]}
        for source in config["sources"]
    ]
    sources[0]["paths"] = ["gs://bucket/mix/m0.npy", "gs://bucket/mix/m1*", "gs://bucket/**/m2.npy"]
    self.mixture = self.folder / "mixture.yaml"
    self.mixture.write_text(json.dumps({"sources": sources}))

  def run_command(self, *arguments):
    config = _CASE["config"]
    return runner.run(
        "index",
        "mixture",
        str(self.mixture),
        f"--requested-tokens={config['requested_tokens']}",
        f"--global-batch-size={config['global_batch_size']}",
        f"--sequence-length={config['S']}",
        "--dtype=uint16",
        f"--output={self.folder}/index.json",
        *arguments,
    )

  def test_the_index_has_what_olmo_core_reads_of_each_file(self):
    code, out, err = self.run_command(f"--base={self.folder}")
    self.assertEqual(code, 0, err)
    index = index_builder.load_index(self.folder / "index.json")
    found = [[entry.path, entry.head_tokens, entry.n_tokens] for entry in index.files]
    self.assertEqual(found, _CASE["path_tokens_before_dropping_empty"])
    self.assertRegex(out, r"s0 +│ +3 │ +3,171 │ +\d")
    self.assertIn(f"{_CASE['items']['n']} instances of 32 tokens.", out)
    self.assertRegex(out, r"s2 .* 3\.\d+ │")

  def test_problems_are_errors(self):
    code, _, err = self.run_command(f"--base={self.folder}/nowhere")
    self.assertEqual(code, 2)
    self.assertRegex(err, "No file matches .*nowhere/mix/m1")
    self.mixture.write_text(json.dumps({"sources": [{"source_name": "a", "weight": 1}], "x": 2}))
    code, _, err = self.run_command(f"--base={self.folder}")
    self.assertEqual(code, 2)
    self.assertTrue(
        re.search(r"(?s)target_ratio is missing.*weight=1 is not known.*\.x=2 is not known", err),
        err,
    )


if __name__ == "__main__":
  absltest.main()
