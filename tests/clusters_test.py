"""Tests of the files in docs/guides/clusters, with stand-ins for the commands of clusters."""

from __future__ import annotations

import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import yaml
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as data_keys
from maxtext_olmo.cli import demo
from maxtext_olmo.cli import main
from maxtext_olmo.devices import layout as layout_lib
from maxtext_olmo.devices import simulated
from maxtext_olmo.loader import wiring
from maxtext_olmo.trainers import RESTART_CODE
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import model
from tests import distributed
from tests.trainers.tiny import ledger

STARTS_PROCESSES = True

_ROOT = pathlib.Path(__file__).resolve().parent
_FILES = _ROOT.parent / "docs" / "guides" / "clusters"
_SCRIPTS = sorted(path for path in _FILES.iterdir() if path.suffix in (".sh", ".sbatch"))
_MANIFESTS = sorted(_FILES.glob("*.yaml"))
_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
_OLMO_VOCABULARY = 100278  # Of AI2's tokenizer, and so of its corpora.
_PATH = f"{_ROOT / 'standins'}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


class ManifestTest(parameterized.TestCase):

  def load(self, path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(path.read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container

  @parameterized.parameters(*_MANIFESTS)
  def test_the_pods_are_one_run_that_is_started_again_after_preemption(self, path: pathlib.Path):
    service, job, container = self.load(path)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    self.assertEqual(spec["completionMode"], "Indexed")
    self.assertEqual(spec["completions"], spec["parallelism"])
    self.assertEqual(pod["subdomain"], service["metadata"]["name"])
    self.assertEqual(service["spec"]["selector"], {"job-name": job["metadata"]["name"]})
    self.assertEqual(service["spec"]["clusterIP"], "None")
    self.assertEqual(pod["restartPolicy"], "Never")  # Which podFailurePolicy needs.
    self.assertGreaterEqual(pod["terminationGracePeriodSeconds"], 300)
    rules = spec["podFailurePolicy"]["rules"]
    codes = {
        (rule["action"], *rule["onExitCodes"]["values"]) for rule in rules if "onExitCodes" in rule
    }
    self.assertEqual(codes, {("Ignore", RESTART_CODE), ("FailJob", 2)})
    for rule in rules:
      if "onExitCodes" in rule:
        self.assertEqual(rule["onExitCodes"]["containerName"], container["name"])

  @parameterized.parameters(*_MANIFESTS)
  def test_the_command_is_one_that_the_trainer_takes(self, path: pathlib.Path):
    _, _, container = self.load(path)
    self.assertEqual(container["command"], ["maxtext-olmo", "train"])
    config = config_lib.read_config(["train", *container["args"]])
    self.assertNotEmpty(config.checkpoint_dir)
    config.checkpoint_dir = ""  # A bucket may need a package that is not installed here.
    config_lib.validate(config)

  @parameterized.parameters(*_MANIFESTS)
  def test_the_batch_divides_over_the_devices_of_all_pods(self, path: pathlib.Path):
    _, job, container = self.load(path)
    pods = job["spec"]["completions"]
    devices = pods * container.get("resources", {}).get("limits", {}).get("google.com/tpu", 1)
    topology = job["spec"]["template"]["spec"].get("nodeSelector", {}).get(_TOPOLOGY)
    if topology is not None:
      self.assertEqual(devices, math.prod(map(int, topology.split("x"))))
    config = config_lib.read_config(["train", *container["args"]])
    config.checkpoint_dir = ""  # As above.
    mesh = simulated.make_mesh(model.mesh_sizes(config, devices), pods)
    options = data_keys.Options.read(config_lib.for_data(config))
    ((size, layout),) = wiring.layouts(options, mesh, options.schedule(), pods - 1).items()
    self.assertLen(layout.rows, size // pods)
    if config.dataset_type != "synthetic":
      self.assertGreaterEqual(config.vocab_size, _OLMO_VOCABULARY)

  def test_the_addresses_on_kubernetes_are_explicit(self):
    _, job, container = self.load(_FILES / "kubernetes.yaml")
    env = {entry["name"]: entry for entry in container["env"]}
    names = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    self.assertEqual(set(env), names)
    name = job["metadata"]["name"]
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    host = env["JAX_COORDINATOR_ADDRESS"]["value"].split(":")[0]
    self.assertEqual(host, f"{name}-0.{subdomain}")
    self.assertEqual(env["JAX_NUM_PROCESSES"]["value"], str(job["spec"]["completions"]))

  def test_the_job_of_the_fleet_guide_does_not_retry_what_cannot_succeed(self):
    guide = (_FILES.parent / "fleet.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    spec = yaml.safe_load(text)["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # What FailIndex needs.
    self.assertEqual((spec["completionMode"], pod["restartPolicy"]), ("Indexed", "Never"))
    self.assertGreater(spec["backoffLimitPerIndex"], 0)
    self.assertNotIn("backoffLimit", spec)  # Without it, failures are limited per part only.
    disrupted, failed = spec["podFailurePolicy"]["rules"]
    self.assertEqual(disrupted["action"], "Ignore")
    self.assertEqual((failed["action"], failed["onExitCodes"]["values"]), ("FailIndex", [2]))
    self.assertEqual(failed["onExitCodes"]["containerName"], container["name"])
    (command,) = container["args"]
    words = shlex.split(command.replace("$JOB_COMPLETION_INDEX", "0"))
    args = main.make_parser().parse_args(words[2:])  # After `exec maxtext-olmo`.
    self.assertEqual((args.part, args.of), (0, spec["completions"]))


class ScriptTest(parameterized.TestCase):

  @parameterized.parameters(*_SCRIPTS)
  def test_the_shell_finds_no_fault(self, path: pathlib.Path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
      subprocess.run(["shellcheck", "--shell=bash", "--severity=warning", str(path)], check=True)

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def run_script(self, name: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(_FILES / name), *args],
        env={**distributed.child_environment(), "PATH": _PATH, **env},
        cwd=self.dir,
        capture_output=True,
        text=True,
        check=False,
    )

  def requeues(self, code: int, state: str) -> int:
    """Runs a job of Slurm that ends with a code; returns how often it went back to the queue."""
    command = self.dir / "command"
    command.write_text(f"#!/bin/sh\nexit {code}\n")
    command.chmod(0o755)
    log = self.dir / "scontrol"
    log.unlink(missing_ok=True)
    done = self.run_script(
        "train.sbatch",
        SLURM_JOB_ID="4711",
        SLURM_NTASKS="2",
        STANDIN_PIDS=str(self.dir / "pids"),
        STANDIN_SCONTROL=str(log),
        STANDIN_STATE=state,
        STANDIN_COMMAND=str(command),
    )
    self.assertEqual(done.returncode, code, done.stderr)
    return log.read_text().split("\n").count("requeue 4711") if log.exists() else 0

  @parameterized.product(code=(0, 1, 2, 75, 137), state=("RUNNING", "COMPLETING"))
  def test_a_job_goes_back_to_the_queue_unless_it_is_done_wrong_or_cancelled(
      self, code: int, state: str
  ):
    expected = 1 if code not in (0, 2) and state == "RUNNING" else 0
    self.assertEqual(self.requeues(code, state), expected)

  def test_a_job_that_fails_goes_back_to_the_queue_five_times_between_preemptions(self):
    codes = [1, 137] + [75] * 7 + [1] * 6
    self.assertEqual([self.requeues(code, "RUNNING") for code in codes], [1] * 14 + [0])

  def test_a_job_that_cannot_count_its_failures_does_not_go_back_to_the_queue(self):
    (self.dir / "olmo-4711.failures").mkdir()
    self.assertEqual(self.requeues(1, "RUNNING"), 0)

  def test_arguments_reach_maxtext_as_they_were_given(self):
    done = self.run_script(
        "xpk_maxtext.sh",
        "first",
        "a=b c",
        "d='e'",
        CLUSTER="c",
        IMAGE="i",
        STANDIN_COMMAND="printf <%s>",
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("<train><base.yml><run_name=first><a=b c><d='e'>", done.stdout)
    self.assertIn(f"--restart-on-exit-codes={RESTART_CODE}\n", done.stdout)

  def test_the_batch_of_the_example_for_xpk_divides_over_its_slice(self):
    text = (_FILES / "xpk_maxtext.sh").read_text()
    keys = dict(re.findall(r"(\w+)=(\d+)\b", text.split("set -eu")[0]))
    (chips,) = re.findall(r"TPU_TYPE:-v5litepod-(\d+)", text)
    mesh = simulated.make_mesh({"data": int(chips)}, int(chips) // 4)
    # MaxText's default is 12 rows per device, too many for a model of this size and length.
    batch = int(chips) * int(keys["per_device_batch_size"])
    spec = layout_lib.partition_spec(mesh, ("data",))
    layout = layout_lib.BatchLayout(mesh, spec, batch, int(keys["max_target_length"]), process=0)
    self.assertLen(layout.rows, 4)

  def test_the_ssh_script_says_how_it_is_used(self):
    for args in ((), ("host",), ("--", "--config=tiny")):
      done = self.run_script("train_ssh.sh", *args)
      self.assertEqual(done.returncode, 2)
      self.assertIn("usage: ", done.stderr)

  def test_the_ssh_script_passes_arguments_on_as_they_were_given(self):
    done = self.run_script(
        "train_ssh.sh", "localhost", "--", "a=b c", "d='e'", STANDIN_COMMAND="printf <%s>"
    )
    self.assertEqual((done.returncode, done.stdout), (0, "<a=b c><d='e'>"), done.stderr)


class RunTest(ledger.LedgerTestCase):
  """Runs that the scripts start, stop and start again."""

  def start_script(
      self, name: str, *hosts: str, steps: int, size: int
  ) -> tuple[subprocess.Popen[bytes], pathlib.Path]:
    flags, env = self.prepare(steps, size=size)
    log = self.dir / f"log-{len(self.attempts)}"
    with open(log, "wb") as output:
      script = subprocess.Popen(
          ["bash", str(_FILES / name), *hosts, *flags],
          env={
              **env,
              "PATH": _PATH,
              "STANDIN_COMMAND": f"{sys.executable} -m {demo.__name__}",
              "STANDIN_PIDS": str(self.dir / "pids"),
              "STANDIN_SCONTROL": str(self.dir / "scontrol"),
              "STANDIN_STATE": "RUNNING",
              "SLURM_JOB_ID": "4711",
              "SLURM_NTASKS": "2",
              "JAX_COORDINATOR_PORT": str(distributed.free_port()),
              "PORT": str(distributed.free_port()),
          },
          cwd=self.dir,
          stdin=subprocess.DEVNULL,
          stdout=output,
          stderr=subprocess.STDOUT,
          start_new_session=True,
      )
    self.addCleanup(self.end, script)
    return script, log

  def end(self, script: subprocess.Popen[bytes]) -> None:
    """Ends a script that a failed test has left, and the tasks of `srun`."""
    if script.poll() is None:
      groups = [script.pid]
      if (self.dir / "pids").exists():
        groups += map(int, (self.dir / "pids").read_text().split())
      for group in groups:
        os.killpg(group, signal.SIGKILL)
      script.wait()

  def wait_for_lines(self, count: int, script: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    while self.lines() < count or "compiled and ran" not in log.read_text():
      self.assertIsNone(script.poll(), log.read_text())
      time.sleep(0.05)

  def test_a_job_of_slurm_is_preempted_and_continues_in_its_next_turn(self):
    script, log = self.start_script("train.sbatch", steps=1_000_000, size=8)
    self.wait_for_lines(20, script, log)
    # Slurm signals the process groups of all tasks, and may signal the script.
    for task in (self.dir / "pids").read_text().split():
      os.killpg(int(task), signal.SIGTERM)
    script.send_signal(signal.SIGTERM)
    self.assertEqual(script.wait(), RESTART_CODE, log.read_text())
    self.assertIn("2 devices of 2 processes", log.read_text())
    self.assertEqual((self.dir / "scontrol").read_text(), "requeue 4711\n")
    self.assertEqual(self.steps_done(), max(demo.read_ledger(self.attempts[-1][2])) + 1)
    script, log = self.start_script("train.sbatch", steps=self.steps_done() + 30, size=12)
    self.assertEqual(script.wait(), 0, log.read_text())
    self.assertEqual((self.dir / "scontrol").read_text(), "requeue 4711\n")
    self.check_ledger()

  def test_a_run_over_ssh_is_stopped_and_continues_on_fewer_hosts(self):
    hosts = ("127.0.0.1", "localhost", "--")
    script, log = self.start_script("train_ssh.sh", *hosts, steps=1_000_000, size=8)
    self.wait_for_lines(20, script, log)
    script.send_signal(signal.SIGTERM)
    self.assertEqual(script.wait(), RESTART_CODE, log.read_text())
    self.assertIn("2 devices of 2 processes", log.read_text())
    self.assertEqual(self.steps_done(), max(demo.read_ledger(self.attempts[-1][2])) + 1)
    hosts = ("127.0.0.1", "--")
    script, log = self.start_script("train_ssh.sh", *hosts, steps=self.steps_done() + 30, size=12)
    self.assertEqual(script.wait(), 0, log.read_text())
    self.check_ledger()


if __name__ == "__main__":
  absltest.main()
