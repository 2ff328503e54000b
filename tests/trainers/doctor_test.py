"""Tests of maxtext_olmo.trainers.doctor, with real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
from typing import Any

import jax
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo.trainers import doctor
from maxtext_olmo.trainers import doctor_host
from maxtext_olmo.trainers import lease
from tests import corpora
from tests import distributed
from tests import object_server
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
    self.assertIn("config: process 1 on a and process 0 on a differ: steps: 6 and 5", str(found))
    self.assertNotIn("seed", str(found))

  def test_facts_that_only_one_release_reports_are_wrong_on_either_side(self):
    more, fewer = {**_report().facts, "kernel": "6.1"}, dict(_report().facts)
    del fewer["config"]
    for reports, expected in (
        ((_report(facts=more), _report(host="b", facts=fewer)), ("unknown and 6.1", "unknown and")),
        ((_report(facts=fewer), _report(host="b", facts=more)), ("6.1 and unknown", "and unknown")),
    ):
      found = {f.check: f for f in doctor.compare(reports)}
      for check, text in zip(("kernel", "config"), expected):
        self.assertEqual(found[check].level, "wrong")
        self.assertRegex(found[check].found, f"process 1 on b and process 0 on a differ: .*{text}")

  def test_another_release_names_hosts_and_releases(self):
    facts = [{**_report().facts, "versions": {"maxtext_olmo": v}} for v in ("0.2", "0.1")]
    reports = [_report(facts=facts[0]), _report(host="b", facts=facts[1])]
    (wrong,) = (f for f in doctor.compare(reports) if f.level == "wrong")
    self.assertEqual(
        wrong.found,
        "versions: process 1 on b and process 0 on a differ: maxtext_olmo: '0.1' and '0.2'",
    )

  def test_reports_of_other_releases_are_read_and_compared(self):
    values = json.loads(_report(findings=[doctor_host.Finding("wrong", "x", "y")]).to_json())
    more = {**values, "kernel": "6.1", "findings": [{**values["findings"][0], "since": 3}]}
    self.assertEqual(
        doctor.Report.from_json(json.dumps(more)).findings, [doctor_host.Finding("wrong", "x", "y")]
    )
    less = {"findings": [{"level": "wrong", "check": "x"}]}
    found = list(doctor.compare([_report(), doctor.Report.from_json(json.dumps(less))]))
    self.assertIn("process 1 on unknown: unknown", str(found))
    self.assertFalse(doctor.findings_ok(found))

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

  def test_a_directory_that_another_run_holds_is_a_warning_that_names_it(self):
    config = train_cases.make_config(**self.keys())
    with lease.Lease(config.checkpoint_dir):
      found, ok = doctor.examine(config)
    self.assertTrue(ok)
    (warning,) = (f for f in found if f.check == "checkpoint_dir")
    self.assertEqual(warning.level, "warning")
    self.assertRegex(warning.found, rf"is in use by process {os.getpid()} on .* is refused")
    found, _ = doctor.examine(config)
    self.assertEqual([f.level for f in found if f.check == "checkpoint_dir"], ["ok"])

  def test_a_batch_that_does_not_divide_over_the_devices_is_wrong(self):
    found, ok = doctor.examine(train_cases.make_config(global_batch_size_to_load=3))
    self.assertFalse(ok)
    (wrong,) = (f for f in found if f.level == "wrong")
    self.assertEqual(wrong.check, "batch")
    self.assertIn("3 rows over 2 shards", wrong.found)

  def run_on(
      self, *flags: list[str], env: dict[str, str] | None = None, other: str = "maxtext_olmo"
  ) -> list[tuple[int, str]]:
    """Runs the command on several processes, each with its flags; returns codes and outputs.

    Args:
      *flags: The flags of each process.
      env: Variables of all processes.
      other: The module that all processes except process 0 run.
    """
    address = f"127.0.0.1:{distributed.free_port()}"
    started = []
    for process, own in enumerate(flags):
      variables = {
          "JAX_COORDINATOR_ADDRESS": address,
          "JAX_NUM_PROCESSES": str(len(flags)),
          "JAX_PROCESS_ID": str(process),
          **(env or {}),
      }
      module = other if process else "maxtext_olmo"
      started.append(launched.start(self, ["doctor", *own], variables, module, subprocess.PIPE))
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
    other_index, _ = corpora.write_corpus(
        self.dir / "other", tokens_per_file=(400,), sequence_length=16
    )
    elsewhere = str(self.dir / "elsewhere")
    outcomes = self.run_on(
        launched.flags(**self.keys()),
        launched.flags(
            **self.keys(olmo_index_path=other_index, checkpoint_dir=elsewhere, learning_rate=0.5)
        ),
    )
    self.assertEqual([code for code, _ in outcomes], [1, 1], outcomes)
    text = outcomes[0][1]
    self.assertRegex(
        text, r"wrong.*config: process 1 on \S+ and process 0 on \S+ differ: learning_rate: 0.5 and"
    )
    self.assertRegex(text, r"wrong.*indexes: process 1 .* differ: olmo_index_path: ")
    self.assertRegex(text, r"wrong.*does not contain the file that process 0 wrote there")

  def test_processes_that_differ_only_in_keys_of_a_host_are_ok(self):
    other_index = shutil.copy(self.index_path, str(self.dir / "other.json"))
    (self.dir / "a").symlink_to(self.dir / "runs")
    self.checkpoints.mkdir(parents=True)
    outcomes = self.run_on(
        launched.flags(**self.keys()),
        launched.flags(
            **self.keys(
                olmo_index_path=other_index,
                checkpoint_dir=str(self.dir / "a" / "checkpoints"),
                olmo_spool_dir=str(self.dir / "spool"),
                olmo_order_cache_dir=str(self.dir / "orders"),
                olmo_prefetch_batches=1,
            )
        ),
    )
    self.assertEqual([code for code, _ in outcomes], [0, 0], outcomes)
    self.assertIn("the same versions, code, config and index on all processes", outcomes[0][1])

  def write_config(self, name: str, **values: Any) -> str:
    """Writes a config file; returns its path."""
    lines = "".join(f"  config.{key} = {value!r}\n" for key, value in values.items())
    path = self.dir / name
    path.write_text(
        "import maxtext_olmo\n\n\ndef get_config():\n"
        f"  config = maxtext_olmo.get_trainer_config()\n{lines}  return config\n"
    )
    return str(path)

  def test_credentials_in_config_files_are_used_but_not_printed(self):
    files = {
        f"bucket/{path.relative_to(self.dir / 'corpus')}": path.read_bytes()
        for path in (self.dir / "corpus").rglob("*.*")
    }
    with object_server.ObjectServer(files) as server:
      base = f"{server.url.replace('//', '//user:hunter2@')}/bucket"
      signature = "?X-Amz-Credential=AKIASECRETKEY&sig=c2lnbmF0dXJl"
      keys = self.keys(
          olmo_index_path=f"{base}/index.json{signature}",
          olmo_path_remap_from=str(self.dir / "corpus"),
          olmo_path_remap_to=f"{base}{signature}",
          max_target_length=16,
          global_batch_size_to_load=4,
      )
      outcomes = self.run_on(
          *(
              [self.write_config(f"{name}.py", **keys, eval_task_dir=f"{base}/{name}{signature}")]
              for name in ("first", "second")
          )
      )
      tokens = [i for i, request in enumerate(server.requests) if ".npy" in request[1]]
      self.assertIn("c2lnbmF0dXJl", server.requests[tokens[-1]][1])
      self.assertStartsWith(server.headers[tokens[-1]]["authorization"], "Basic ")
    text = "".join(text for _, text in outcomes)
    self.assertIn(f"ok       index: {server.url}/bucket/index.json: 4 files", text)
    self.assertRegex(text, "ok       storage: .*read the beginning of 4 files")
    self.assertRegex(text, r"differ: eval_task_dir: 'http://\*\*\*@\S+/bucket/second\?\*\*\*' and")
    for secret in ("hunter2", "AKIASECRETKEY", "c2lnbmF0dXJl"):
      self.assertNotIn(secret, text)

  def write_release(self, changes: dict[str, dict[str, str]]) -> str:
    """Copies this package with changes to its files; returns the module that runs the copy."""
    source, copy = pathlib.Path(maxtext_olmo.__file__).parent, self.dir / "release" / "maxtext_olmo"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, replaced in changes.items():
      text = (copy / name).read_text()
      for old, new in replaced.items():
        self.assertIn(old, text)
        text = text.replace(old, new)
      (copy / name).write_text(text)
    (self.dir / "other_release.py").write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(copy.parent)!r})\n"
        "runpy.run_module('maxtext_olmo', run_name='__main__', alter_sys=True)\n"
    )
    return "other_release"

  def test_a_host_with_another_release_is_wrong(self):
    other = self.write_release(
        {
            "__init__.py": {f'"{maxtext_olmo.__version__}"': '"0.0.9"'},
            "trainers/doctor.py": {
                "  facts: dict[str, Any]\n": "  facts: dict[str, Any]\n  kernel: str = '6.1'\n"
            },
            "trainers/doctor_host.py": {'"python": platform': '"interpreter": platform'},
        }
    )
    outcomes = self.run_on([], [], env={"PYTHONPATH": str(self.dir)}, other=other)
    self.assertEqual([code for code, _ in outcomes], [1, 1], outcomes)
    text = outcomes[0][1]
    self.assertRegex(
        text,
        r"wrong.*versions: process 1 on \S+ and process 0 on \S+ differ: .*"
        rf"maxtext_olmo: '0.0.9' and '{maxtext_olmo.__version__}'",
    )
    self.assertRegex(text, r"wrong.*python: .* differ: unknown and 3")
    self.assertRegex(text, r"wrong.*interpreter: .* differ: 3\S+ and unknown")
    self.assertEqual(outcomes[1][1], "")

  def test_a_report_that_cannot_be_read_is_wrong_on_all_processes(self):
    changes = {"json.dumps(dataclasses.asdict(self))": "'[]'"}
    other = self.write_release({"trainers/doctor.py": changes})
    outcomes = self.run_on([], [], env={"PYTHONPATH": str(self.dir)}, other=other)
    self.assertEqual([code for code, _ in outcomes], [1, 1], outcomes)
    self.assertRegex(outcomes[0][1], "wrong.*processes: AttributeError: 'list' object")
    self.assertEqual(outcomes[1][1], "")  # It got the verdict.

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
