"""`maxtext-olmo plan --hosts`."""

import json
import pathlib

from absl.testing import absltest

from tests.cli import runner
from tests.inspection import fleets


class PlanFleetTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.create_tempdir().full_path
    self.index = fleets.write_index(
        f"{folder}/index.json", files=120, instances=10**9, base="gs://bucket/x"
    )

  def plan(self, *args):
    return runner.run("plan", self.index, "--batch-size", "4096", *args)

  def test_the_plan_of_a_thousand_hosts_names_what_breaks_first(self):
    code, out, err = self.plan("--hosts", "1024", "--tokens-per-second", "1e6")
    self.assertEqual(code, 1, err)
    self.assertIn("1,024 hosts with 4,096 devices; steps of 4,096 × 8 tokens", out)
    self.assertIn("First to break: requests per second to the store, all hosts.", out)
    for name in ("rows per step", "bytes per second", "memory of the data path", "open files"):
      self.assertIn(name, out)

  def test_a_fleet_within_all_limits_says_what_is_closest(self):
    code, out, err = self.plan("--hosts", "16", "--tokens-per-second", "1e4")
    self.assertEqual(code, 0, err)
    self.assertIn("Nothing breaks. The closest limit: ", out)

  def test_json_has_the_figures_and_the_limits(self):
    code, out, err = self.plan("--hosts", "16", "--tokens-per-second", "1e4", "--json")
    self.assertEqual(code, 0, err)
    found = json.loads(out)
    self.assertEqual(found["figures"]["rows_per_host"], 256)
    self.assertGreater(found["figures"]["memory_bytes"], 0)
    self.assertAlmostEqual(found["figures"]["dollars"], found["figures"]["requests"] / 1e6 * 0.4)
    self.assertEqual(found["limits"][0]["used"], max(limit["used"] for limit in found["limits"]))

  def test_a_config_is_planned_with_its_own_batch(self):
    config = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tiny.py"
    code, out, err = runner.run(
        "plan",
        str(config),
        "--config.dataset_type=olmo_grain",
        f"--config.olmo_index_path={self.index}",
        "--config.max_target_length=8",
        "--config.global_batch_size_to_load=64",
        "--hosts",
        "4",
        "--tokens-per-second",
        "1e4",
        "--json",
    )
    self.assertEqual(code, 0, err)
    self.assertEqual(json.loads(out)["figures"]["rows_per_host"], 16)

  def test_a_mesh_and_limits_can_be_given(self):
    code, out, err = self.plan(
        *("--hosts", "16", "--tokens-per-second", "1e4", "--json"),
        *("--mesh", "tensor=8", "data=8", "--host-memory-gib", "1", "--open-files", "4096"),
        *("--store-reads-per-second", "9", "--latency-ms", "5"),
    )
    self.assertEqual(code, 1, err)
    found = json.loads(out)
    self.assertEqual(found["figures"]["copies"], 1.0)  # By default, rows are split over all axes.
    allowed = {limit["name"]: limit["allowed"] for limit in found["limits"]}
    self.assertEqual(allowed["requests per second to the store, all hosts"], 9)
    self.assertEqual(allowed["memory per host"], 2**30)

  def test_invalid_arguments_are_one_line_on_stderr(self):
    for args, message in (
        (("--hosts", "4"), "needs --tokens-per-second"),
        (("--hosts", "0", "--tokens-per-second", "1"), "--hosts × --devices-per-host"),
        (("--hosts", "4", "--tokens-per-second", "1", "--mesh", "data"), "is not AXIS=SIZE"),
        (("--hosts", "3", "--tokens-per-second", "1"), "does not divide over the mesh"),
        (("--hosts", "4", "--tokens-per-second", "1", "--svg", "x"), "leave out --hosts"),
        (("--hosts", "4", "--tokens-per-second", "1", "--latency-ms", "-1"), "not be negative"),
    ):
      code, _, err = self.plan(*args)
      self.assertEqual(code, 2)
      self.assertIn(message, err)
      self.assertLen(err.splitlines(), 1)


if __name__ == "__main__":
  absltest.main()
