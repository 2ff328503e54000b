"""Tests for `maxtext-olmo eval`, as a user would run it."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile

from absl.testing import absltest

from maxtext_olmo.cli import main as main_lib
from maxtext_olmo.trainers.tiny import trainer
from tests import distributed
from tests.evaluation import perplexity_test
from tests.evaluation import reference
from tests.evaluation.requests_test import needs_harness
from tests.trainers.tiny import evaluation_test

STARTS_PROCESSES = True


class EvalTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.task_dir = reference.write_tasks(cls.folder + "/tasks")
    files = [("wiki", [reference.text(i).encode() for i in range(6)]), ("code", [b"x = 1"])]
    cls.index_path = perplexity_test.write_index(cls.folder, files)
    config = evaluation_test.tiny_config(checkpoint_dir=cls.folder + "/checkpoints")
    trainer.train(config)
    defaults = evaluation_test.config_lib.get_config()
    cls.flags = [
        f"--config.{name}={value}" for name, value in config.items() if value != defaults[name]
    ]

  def run_command(self, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      code = main_lib.main(["eval", *self.flags, *arguments])
    return code, out.getvalue(), err.getvalue()

  def run_process(self, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_olmo", "eval", *self.flags, *arguments],
        env=distributed.child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout

  def test_perplexity_is_printed_and_written_label_by_label(self):
    path = self.folder + "/deep/ppl.json"
    code, out, err = self.run_command(f"--ppl={self.index_path}", f"--output={path}", "--step=1")
    self.assertEqual(code, 0, err)
    for word in ("wiki", "code", "all", "perplexity", "bits per byte"):
      self.assertIn(word, out)
    self.assertNotIn("unknown", out)
    with open(path, encoding="utf-8") as file:
      results = json.load(file)
    self.assertEqual(results["checkpoint"], 1)
    code_score = results["perplexity"][self.index_path]["code"]
    self.assertEqual((code_score["tokens"], code_score["bytes"]), (6, 5))
    self.assertIn(f"{code_score['perplexity']:.4f}", out)
    for limit, documents in (("2", 2), ("0.5", 3)):
      code, _, err = self.run_command(
          f"--ppl={self.index_path}", f"--output={path}", "--step=1", f"--limit={limit}"
      )
      self.assertEqual(code, 0, err)
      with open(path, encoding="utf-8") as file:
        limited = json.load(file)["perplexity"][self.index_path]
      self.assertEqual(limited["wiki"]["documents"], documents)
      self.assertEqual(limited["code"], code_score)

  def test_two_processes_report_once_and_the_same(self):
    found = {}
    for processes in (1, 2):
      path = f"{self.folder}/{processes}.json"
      out = self.run_process(
          "--ppl",
          self.index_path,
          "--output",
          path,
          "--processes",
          str(processes),
          "--batch-size=4",
      )
      self.assertEqual(out.count("bits per byte"), 1)
      with open(path, encoding="utf-8") as file:
        found[processes] = json.load(file)["perplexity"][self.index_path]
    for label, score in found[1].items():
      for name, value in score.items():
        self.assertAlmostEqual(found[2][label][name], value, delta=1e-3, msg=f"{label} {name}")

  @needs_harness
  def test_tasks_print_the_harness_table_and_write_its_json(self):
    path, cache = self.folder + "/tasks.json", self.folder + "/cache.jsonl"
    arguments = [
        "--tasks=colours,texts",
        f"--task-dir={self.task_dir}",
        f"--output={path}",
        f"--cache={cache}",
        "--limit=3",
        "--log-samples",
    ]
    code, out, err = self.run_command(*arguments)
    self.assertEqual(code, 0, err)
    self.assertRegex(out, r"\|colours\s*\|\s*1\|none")
    self.assertIn("bits_per_byte", out)
    self.assertRegex(out, r"Scored in rows of [\d, ]+ tokens: \d shapes? compiled, \d+\.\d% of")
    with open(path, encoding="utf-8") as file:
      results = json.load(file)
    self.assertEqual(results["checkpoint"], 3)
    self.assertIn("acc,none", results["results"]["colours"])
    self.assertLen(results["samples"]["colours"], 3)
    code, again, _ = self.run_command(*arguments)
    self.assertEqual(code, 0)
    self.assertIn("There were no requests to score.", again)
    self.assertEqual(again.split("There were no requests")[0], out.split("Scored in")[0])

  def test_documents_end_with_the_eos_of_the_run(self):
    path = self.folder + "/eos.json"
    flags = (f"--ppl={self.index_path}", f"--config.olmo_eos_id={ord('e')}")
    code, out, err = self.run_command(*flags, f"--output={path}", "--max-length=128")
    self.assertEqual(code, 0, err)
    self.assertIn("unknown", out)
    with open(path, encoding="utf-8") as file:
      score = json.load(file)["perplexity"][self.index_path]["wiki"]
    texts = [reference.text(i) for i in range(6)]
    self.assertEqual(score["documents"], sum(text.count("e") for text in texts) + 1)
    self.assertEqual((score["bytes"], score["bits_per_byte"]), (0, None))
    code, _, err = self.run_command(*flags, "--tokenizer=bytes")
    self.assertEqual(code, 2)
    self.assertIn("bytes has the EOS 256, but the documents of this run end with", err)

  @needs_harness
  def test_figures_are_the_same_with_and_without_packing(self):
    found = {}
    for packing in ("on", "off", "auto"):
      path = f"{self.folder}/{packing}.json"
      code, _, err = self.run_command(
          "--tasks=colours,texts",
          f"--task-dir={self.task_dir}",
          f"--ppl={self.index_path}",
          f"--packing={packing}",
          f"--output={path}",
          "--batch-size=2",
          "--max-length=128",
      )
      self.assertEqual(code, 0, err)
      with open(path, encoding="utf-8") as file:
        results = json.load(file)
      found[packing] = [
          results["results"]["colours"]["acc,none"],
          results["results"]["texts"]["bits_per_byte,none"],
          results["perplexity"][self.index_path]["wiki"]["bits_per_byte"],
      ]
      found[packing, "padding"] = results["config"]["padding_share"]
    for packing in ("on", "auto"):
      for mine, theirs in zip(found[packing], found["off"]):
        self.assertAlmostEqual(mine, theirs, delta=1e-4)
    self.assertLess(found["on", "padding"], found["off", "padding"])

  @needs_harness
  def test_a_context_that_is_too_long_stops_it_on_request(self):
    code, _, err = self.run_command(
        "--tasks=colours", f"--task-dir={self.task_dir}", "--truncation=error", "--max-length=16"
    )
    self.assertEqual(code, 2)
    self.assertIn("takes at most 16", err)

  def test_missing_inputs_are_one_line_errors(self):
    for arguments, message in (
        ((), "error: There is nothing to evaluate. Give --tasks=NAMES, --ppl=INDEX, or both."),
        (("--ppl=/nowhere.json",), "/nowhere.json"),
        ((f"--ppl={self.index_path}", "--step=9"), "no checkpoint 9; the latest is 3"),
        ((f"--ppl={self.index_path}", "--tokenizer=/nowhere"), "There is no tokenizer /nowhere"),
        ((f"--ppl={self.index_path}", "--config.emb=3"), "did you mean 'emb_dim'"),
        ((f"--ppl={self.index_path}", "--processes=0"), "--processes=0 must be positive"),
        ((f"--ppl={self.index_path}", "--limit=0"), "--limit=0 must be positive"),
        ((f"--ppl={self.index_path}", "--batch-size=-3"), "--batch-size=-3 must be positive"),
        ((f"--ppl={self.index_path}", "--max-length=0"), "--max-length=0 must be positive"),
        ((f"--ppl={self.index_path}", "--packing=yes"), "unknown; choose from auto, on, off"),
    ):
      code, out, err = self.run_command(*arguments)
      self.assertEqual(code, 2, arguments)
      self.assertEqual(out, "")
      self.assertIn(message, err)
      self.assertNotIn("Traceback", err)

  def test_unknown_flags_are_an_error(self):
    with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
      main_lib.main(["eval", "--task=colours"])
    self.assertIn("unrecognized arguments: --task=colours", err.getvalue())

  def test_help_names_every_flag(self):
    with self.assertRaises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
      main_lib.main(["eval", "--help"])
    for flag in ("--tasks", "--ppl", "--tokenizer", "--cache", "--processes", "examples:"):
      self.assertIn(flag, out.getvalue())


if __name__ == "__main__":
  absltest.main()
