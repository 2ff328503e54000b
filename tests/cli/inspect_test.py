"""Tests of `maxtext-olmo inspect`."""

import json
import os
import pathlib
import tempfile
import unittest

import numpy as np
from absl.testing import absltest

from maxtext_olmo.inspection import run as run_lib
from tests.cli import runner
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun


def setUpModule():
  global _run
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="inspect_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = small_run.write(directory.name)
  small_run.write_names(_run)


class InspectTest(absltest.TestCase):

  def inspect(self, *argv, code=0):
    found, out, err = runner.run("inspect", *argv)
    self.assertEqual(found, code, err)
    return out if code != 2 else err

  def test_the_state_is_shown_as_text_and_as_json(self):
    out = self.inspect(_run.checkpoints)
    self.assertIn("15 steps, 60 samples", out)
    self.assertIn("batches of 6 (before: batches of 4)", out)
    values = json.loads(self.inspect(_run.checkpoints, "--json"))
    self.assertEqual((values["step"], values["position"]), (15, 60))

  def test_a_step_shows_its_rows_and_their_bytes(self):
    values = json.loads(self.inspect(_run.checkpoints, "--step", 7, "--json"))
    self.assertLen(values["rows"], 6)
    for row in values["rows"]:
      (part,) = row["parts"]
      raw = pathlib.Path(part["file"]).read_bytes()[part["first_byte"] : part["end_byte"]]
      np.testing.assert_array_equal(
          np.frombuffer(raw, "<u2"), _run.batches[7]["inputs"][row["row"]]
      )
    out = self.inspect(_run.checkpoints, "--step", 7)
    self.assertIn("step 7 (seen): 6 rows of 32 tokens from position 32", out)
    self.assertIn("step 15 (to come)", self.inspect(_run.checkpoints, "--step", 15))
    base = os.path.dirname(values["rows"][0]["parts"][0]["file"])
    self.assertIn(f"\nPaths are relative to {base}.\n", out)
    self.assertRegex(out, r"│ (web|wiki)\.npy +│")
    self.assertEqual(out.count(base), 1)

  def test_text_is_that_of_the_batch_and_harmless(self):
    with run_lib.open_iterator(run_lib.find_run(_run.checkpoints)) as iterator:
      steps = (iterator.explain(step) for step in range(60))
      step, row = next(
          (step.step, row.row) for step in steps for row in step.rows if 0x1B in row.tokens
      )
    out = self.inspect(_run.checkpoints, "--step", step, "--row", row, "--text")
    self.assertIn("\\x1b[", out)
    self.assertNotIn("\x1b[", out)
    self.assertIn("── document ", out)
    values = json.loads(
        self.inspect(_run.checkpoints, "--step", step, "--row", row, "--text", "--json")
    )
    self.assertNotEmpty(values["rows"][0]["text"])

  def test_a_range_of_steps_has_a_line_each(self):
    out = self.inspect(_run.checkpoints, "--steps", "3:6")
    self.assertLen([line for line in out.splitlines() if "wiki" in line or "web" in line], 3)
    values = json.loads(self.inspect(_run.checkpoints, "--steps", "3:6", "--json"))
    self.assertEqual([len(step["rows"]) for step in values], [4, 4, 6])

  def test_excluded_tokens_are_not_shown_as_kept(self):
    lines = '{"rows": [0, 1]}\n{"document": 50}\n'
    path = self.create_tempfile("exclude.jsonl", lines).full_path
    config = pathlib.Path(self.create_tempdir().full_path, "config.json")
    config.write_text(json.dumps({**_run.config, "checkpoint_dir": "", "olmo_exclude": path}))
    (found,) = json.loads(self.inspect(config, "--document", 50, "--json"))
    for visit in found["visits"]:
      self.assertEqual(visit["excluded"], visit["tokens"])
    self.assertRegex(self.inspect(config, "--document", 50), r" EXCLUDED\b")
    self.assertRegex(self.inspect(config, "--document", 49), r" yes\b")
    (row,) = json.loads(self.inspect(config, "--file", "wiki.npy", "--byte", 0, "--json"))
    step = row["visits"][0]["step"]
    shown = self.inspect(config, "--step", step, "--row", row["visits"][0]["row"])
    self.assertRegex(shown, r" EXCLUDED\W+0.00%")
    overview = self.inspect(config, "--steps", f"{step}:{step + 1}")
    self.assertRegex(overview, r"masked\W+excluded tokens\W+loss tokens")
    explained = json.loads(self.inspect(config, "--step", step, "--json"))
    excluded = sum(row["excluded"] for row in explained["rows"])
    self.assertGreaterEqual(excluded, 32)
    self.assertRegex(overview, rf" {excluded} ")

  def test_two_runs_are_compared(self):
    out = self.inspect(f"{_run.checkpoints}/4", _run.checkpoints, code=1)
    self.assertIn("They differ from step 5 on", out)
    self.assertIn("The same stream", self.inspect(_run.checkpoints, _run.checkpoints))

  def test_a_config_file_is_a_run(self):
    path = pathlib.Path(self.create_tempdir().full_path, "config.json")
    path.write_text(json.dumps({**_run.config, "checkpoint_dir": ""}))
    self.assertIn("step 3 (to come): 2 rows", self.inspect(path, "--step", 3))
    yml = path.with_suffix(".yml")
    yml.write_text(f"olmo_index_path: {_run.index_path}\nmax_target_length: 32\nsteps: 5\n")
    out = self.inspect(yml, "--step", 3, "--config.global_batch_size_to_load=5")
    self.assertIn("step 3 (to come): 5 rows", out)
    python = path.with_suffix(".py")
    python.write_text(
        "import maxtext_olmo\ndef get_config():\n  config = maxtext_olmo.get_config()\n"
        f"  config.olmo_index_path = {_run.index_path!r}\n  config.max_target_length = 32\n"
        "  return config\n"
    )
    self.assertIn("8 rows of 32", self.inspect(python, "--step", 3))

  def test_text_is_found_with_every_step_that_has_it(self):
    (found,) = json.loads(self.inspect(_run.checkpoints, "--find", "harbour seal", "--json"))
    self.assertEqual({visit["epoch"] for visit in found["visits"]}, {0, 1})
    visit = found["visits"][0]
    shown = self.inspect(_run.checkpoints, "--step", visit["step"], "--text")
    self.assertRegex(shown, "harbour|seal")
    self.assertIn("label web", self.inspect(_run.checkpoints, "--find", "harbour seal"))
    (document,) = found["documents"]
    self.assertIn("to come", self.inspect(_run.checkpoints, "--document", document))
    byte = ("--file", "data/web.npy", "--byte", found["first_byte"])
    self.assertIn(f"document {document}", self.inspect(_run.checkpoints, *byte))
    unread = self.inspect(_run.checkpoints, "--document", document, "--read", 1)
    self.assertIn("rows were not read, so it is unknown whether they are in the loss", unread)
    nothing = ("--find", "harbour seal", "--label", "wiki")
    said = self.inspect(_run.checkpoints, *nothing, code=1)
    self.assertIn("This text does not occur in the --label=wiki part of the corpus", said)

  def test_a_search_in_parts_finds_what_one_command_finds(self):
    search = (_run.checkpoints, "--find", "harbour seal")
    results = ("--results", self.create_tempdir().full_path)
    for part in (1, 0):
      out = self.inspect(*search, *results, "--part", part, "--of", 2)
      self.assertIn(f"part {part} of 2: 1 piece of 1 done", out)
    merged = self.inspect(*search, *results, "--merge", "--json")
    self.assertEqual(merged, self.inspect(*search, "--json"))
    self.assertFalse(os.path.exists(f"{_run.index_path}.work"))

  def test_a_search_says_which_rows_are_skipped(self):
    (found,) = json.loads(self.inspect(_run.checkpoints, "--find", "harbour seal", "--json"))
    later = next(visit for visit in found["visits"] if not visit["seen"])
    config = pathlib.Path(self.create_tempdir().full_path, "config.json")
    skip = {"olmo_skip": ((later["position"], later["position"] + 1),), "olmo_skip_unit": "samples"}
    config.write_text(json.dumps({**_run.config, "checkpoint_dir": "", **skip}))
    out = self.inspect(config, "--find", "harbour seal")
    (line,) = (line for line in out.splitlines() if "skipped (olmo_skip)" in line)
    self.assertRegex(line, rf"\b{later['position']}\b")

  def test_a_document_is_found_by_its_name(self):
    (found,) = json.loads(self.inspect(_run.checkpoints, "--document", "web-17", "--json"))
    self.assertEqual((found["label"], found["names"]), ("web", ["web-17"]))
    number = found["documents"][0]
    out = self.inspect(_run.checkpoints, "--document", "web-17")
    self.assertIn(f"document {number} (web-17)", out)
    self.assertEqual(out, self.inspect(_run.checkpoints, "--document", number))
    visit = next(visit for visit in found["visits"] if visit["step"] is not None)
    row = ("--step", visit["step"], "--row", visit["row"])
    shown = f"document {number} (web-17, from web.jsonl:18), "
    self.assertIn(shown, self.inspect(_run.checkpoints, *row))
    self.assertIn(f"── {shown}", self.inspect(_run.checkpoints, *row, "--text"))
    values = json.loads(self.inspect(_run.checkpoints, *row, "--json"))
    spans = [span for part in values["rows"][0]["parts"] for span in part["documents"]]
    (span,) = (span for span in spans if span["document"] == number)
    self.assertEqual((span["name"], span["source"], span["line"]), ("web-17", "web.jsonl", 18))

  def test_a_name_that_documents_share_lists_them_all(self):
    found = json.loads(self.inspect(_run.checkpoints, "--document", "shared", "--json"))
    self.assertEqual([one["names"] for one in found], [["shared"], ["shared"]])
    numbers = [one["documents"][0] for one in found]
    self.assertEqual(numbers[1], numbers[0] + 1)
    # A document may be named by digits: it comes after the one with this number.
    found = json.loads(self.inspect(_run.checkpoints, "--document", "3", "--json"))
    self.assertEqual([one["names"] for one in found], [[""], ["3"]])

  def test_names_are_harmless_and_an_unknown_one_is_an_error(self):
    out = self.inspect(_run.checkpoints, "--document", "\x1b[31mred")
    self.assertIn("(\\x1b[31mred)", out)
    self.assertNotIn("\x1b[31m", out)
    err = self.inspect(_run.checkpoints, "--document", "web-99", code=2)
    self.assertIn("no document has this number or name. The corpus has documents 0 to 79", err)
    self.assertIn("of which 40 have a name", err)

  def test_keys_on_the_command_line_change_the_kept_config(self):
    out = self.inspect(_run.checkpoints, "--config.global_batch_size_to_load=10")
    self.assertIn("batches of 10 (before: batches of 2)", out)

  def test_invalid_combinations_of_options_are_an_error(self):
    for argv, message in (
        (("--row", 1), "--row needs --step"),
        (("--step", 1, "--steps", "1:2"), "not both"),
        (("--steps", "5"), "such as 100:120"),
        (("--steps", "1:²"), "such as 100:120"),
        (("--file", "a"), "give both"),
        (("--document", 1, "--read", -1), "--read=-1 must be 0 or more"),
        (("--find", "a", "--label", "x"), "matches no label"),
        (("--step", 1, "--row", 9), "has rows 0 to 3"),
        (("--step", 1, "--workers", 2), "--merge and --retry-failed work only with --find"),
        (("--config", "/nowhere.py"), "does not exist"),
    ):
      self.assertIn(message, self.inspect(_run.checkpoints, *argv, code=2))
    self.assertIn("does not exist", self.inspect("/nowhere", code=2))

  def test_an_index_in_place_of_a_run_is_an_error_that_says_so(self):
    text = self.inspect(_run.index_path, "--find", "a", code=2)
    self.assertIn("is an index, but this command needs a run", text)


if __name__ == "__main__":
  absltest.main()
