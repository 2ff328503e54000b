"""Tests of maxtext_olmo.trainers.doctor, with real processes."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
from typing import Any

import jax
from absl.testing import absltest

from maxtext_olmo.trainers import doctor
from maxtext_olmo.trainers import doctor_host
from tests import corpora
from tests import distributed
from tests.trainers import launched
from tests.trainers.tiny import train_cases

STARTS_PROCESSES = True


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 2)


def _report(**changes: Any) -> doctor.Report:
  facts = {"python": "3", "versions": {"jax": "1"}, "code": "c", "config": {}, "indexes": {}}
  return dataclasses.replace(doctor.Report("a", [100.0, 200.0], 1, [], facts), **changes)


class CompareTest(absltest.TestCase):

  def levels(self, *reports: doctor.Report) -> dict[str, str]:
    return {found.check: found.level for found in doctor.compare(reports)}

  def test_equal_hosts_are_ok(self):
    levels = self.levels(_report(), _report(host="b"))
    self.assertEqual(levels, dict.fromkeys(("processes", "hosts agree", "devices", "clock"), "ok"))

  def test_clocks_that_differ_are_a_warning_and_then_wrong(self):
    for skew, level in ((0.5, "ok"), (3.0, "warning"), (100.0, "wrong")):
      self.assertEqual(
          self.levels(_report(), _report(clocks=[100 + skew, 203 + skew]))["clock"], level
      )
    found = list(doctor.compare([_report(), _report(host="b", clocks=[80.0, 190.0])]))
    self.assertIn("a is 10.0 s ahead of b", str(found))

  def test_one_process_has_a_clock_and_nothing_to_compare_it_with(self):
    (found,) = (f for f in doctor.compare([_report(clocks=[86400.0])]) if f.check == "clock")
    self.assertEqual(found.level, "ok")
    self.assertStartsWith(found.found, "1970-01-02 00:00:00 UTC")

  def test_another_number_of_devices_is_a_warning(self):
    self.assertEqual(self.levels(_report(), _report(devices=3))["devices"], "warning")

  def test_a_finding_of_another_process_names_it(self):
    wrong = doctor_host.Finding("wrong", "storage", "no file", "mount it")
    found = list(doctor.compare([_report(), _report(host="b", findings=[wrong])]))
    self.assertIn("process 1 on b: no file", str(found))
    self.assertFalse(doctor.findings_ok(found))

  def test_only_the_keys_that_differ_are_named(self):
    facts = [{**_report().facts, "config": {"steps": n, "seed": 1}} for n in (5, 6)]
    found = list(doctor.compare([_report(facts=facts[0]), _report(facts=facts[1])]))
    self.assertIn("config: process 1 on a and process 0 differ: steps: 6 and 5", str(found))
    self.assertNotIn("seed", str(found))

  def test_reports_survive_json(self):
    finding = doctor_host.Finding("ok", "code", "here")
    report = _report(findings=[finding])
    self.assertEqual(doctor.Report.from_json(report.to_json()), report)


class DoctorTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.index_path, _ = corpora.write_corpus(self.dir / "corpus", sequence_length=16)
    self.checkpoints = self.dir / "runs" / "checkpoints"

  def keys(self, **changes: Any) -> dict[str, Any]:
    return {
        "dataset_type": "olmo_grain",
        "olmo_index_path": self.index_path,
        "vocab_size": 100,
        "checkpoint_dir": str(self.checkpoints),
        **changes,
    }

  def test_one_process_in_order_is_ok_and_nothing_is_left(self):
    (self.dir / "runs").mkdir()
    found, ok = doctor.examine(train_cases.make_config(**self.keys()))
    self.assertTrue(ok, found)
    self.assertIn("1 (no cluster was found)", str(found))
    self.assertContainsSubset(
        {"devices", "batch", "checkpoint_dir", "storage", "processes"}, {f.check for f in found}
    )
    self.assertFalse(self.checkpoints.exists())

  def test_a_mesh_that_does_not_fit_and_a_directory_that_is_a_file_are_wrong(self):
    self.checkpoints.parent.mkdir()
    self.checkpoints.touch()
    config = train_cases.make_config(**self.keys(mesh_shape=(7, 1)))
    found, ok = doctor.examine(config)
    wrong = {f.check: f.found for f in found if f.level == "wrong"}
    self.assertFalse(ok)
    self.assertContainsSubset({"devices", "checkpoint_dir"}, wrong)
    self.assertIn("needs 7 devices", wrong["devices"])

  def test_a_batch_that_does_not_divide_over_the_devices_is_wrong(self):
    found, ok = doctor.examine(train_cases.make_config(global_batch_size_to_load=3))
    self.assertFalse(ok)
    (wrong,) = (f for f in found if f.level == "wrong")
    self.assertEqual(wrong.check, "batch")
    self.assertIn("3 rows over 2 shards", wrong.found)

  def run_on(self, *flags: list[str], env: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Runs the command on several processes, each with its flags; returns codes and outputs."""
    address = f"127.0.0.1:{distributed.free_port()}"
    started = []
    for process, own in enumerate(flags):
      variables = {
          "JAX_COORDINATOR_ADDRESS": address,
          "JAX_NUM_PROCESSES": str(len(flags)),
          "JAX_PROCESS_ID": str(process),
          **(env or {}),
      }
      started.append(
          launched.start(self, ["doctor", *own], variables, "maxtext_olmo", subprocess.PIPE)
      )
    texts = [process.communicate()[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, texts)]

  def test_processes_that_agree_are_ok_and_process_0_prints(self):
    flags = launched.flags(**self.keys())
    (code, text), (other_code, other) = self.run_on(flags, flags)
    self.assertEqual((code, other_code), (0, 0), text)
    self.assertIn("2 of 2, on", text)
    self.assertIn("the same versions, code, config and index on all processes", text)
    self.assertIn("hosts agree within", text)
    self.assertEqual(other, "")

  def test_processes_with_other_config_index_and_directory_are_wrong(self):
    other_index, _ = corpora.write_corpus(self.dir / "other", sequence_length=16, seed=5)
    elsewhere = str(self.dir / "elsewhere")
    outcomes = self.run_on(
        launched.flags(**self.keys()),
        launched.flags(**self.keys(olmo_index_path=other_index, checkpoint_dir=elsewhere)),
    )
    self.assertEqual([code for code, _ in outcomes], [1, 1], outcomes)
    text = outcomes[0][1]
    self.assertRegex(text, r"wrong.*config: process 1 on \S+ and process 0 differ: .*olmo_index")
    self.assertRegex(text, r"wrong.*indexes: process 1")
    self.assertRegex(text, r"wrong.*does not contain the file that process 0 wrote there")

  def test_a_bucket_that_cannot_be_opened_is_wrong_on_all_processes(self):
    (self.dir / "gcsfs.py").write_text("raise ImportError('a broken package')")
    flags = launched.flags(checkpoint_dir="gs://bucket/checkpoints")
    outcomes = self.run_on(flags, flags, env={"PYTHONPATH": str(self.dir)})
    self.assertEqual([code for code, _ in outcomes], [1, 1], outcomes)
    text = outcomes[0][1]
    self.assertRegex(text, "wrong    checkpoint_dir: gs://bucket/checkpoints cannot be written to")
    self.assertRegex(text, r"wrong    checkpoint_dir: process 1 on \S+: gs://\S+ cannot be read")

  def test_a_process_whose_peers_do_not_come_is_wrong(self):
    (outcome,) = self.run_on(["--wait=3"], env={"JAX_NUM_PROCESSES": "2"})
    self.assertEqual(outcome[0], 1, outcome)
    self.assertRegex(outcome[1], "wrong.*processes.*waiting 3 s for the others")

  def test_a_task_that_cannot_reach_the_others_is_wrong(self):
    slurm = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    process = launched.start(self, ["doctor"], slurm, "maxtext_olmo", subprocess.PIPE)
    text = process.communicate()[0]
    self.assertEqual(process.returncode, 1, text)
    self.assertRegex(text, "wrong.*processes.*SLURM_NTASKS=2, so this is one of 2 tasks")


if __name__ == "__main__":
  absltest.main()
