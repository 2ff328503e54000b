"""Tests of maxtext_olmo.trainers.doctor_host: what the checks of one host find."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import resource
import shutil
from unittest import mock

from absl.testing import absltest

from maxtext_olmo.trainers import doctor_host
from tests import corpora
from tests.trainers.tiny import train_cases


class DoctorHostTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.index_path, _ = corpora.write_corpus(self.dir, sequence_length=16)

  def config(self, **changes):
    values = {"dataset_type": "olmo_grain", "olmo_index_path": self.index_path, **changes}
    return train_cases.make_config(vocab_size=100, **values)

  def levels(self, config) -> dict[str, str]:
    return {found.check: found.level for found in doctor_host.check_host(config)[0]}

  def finding(self, config, check: str) -> doctor_host.Finding:
    return next(f for f in doctor_host.check_host(config)[0] if f.check == check)

  def test_a_host_in_order_is_ok_everywhere(self):
    expected = ("versions", "code", "config", "index", "storage", "descriptors")
    self.assertEqual(self.levels(self.config()), dict.fromkeys(expected, "ok"))

  def test_without_a_config_the_rest_is_checked(self):
    self.assertEqual(set(self.levels(None)), {"versions", "code", "descriptors"})

  def test_a_run_on_synthetic_data_has_no_index(self):
    self.assertNotIn("index", self.levels(train_cases.make_config()))

  def test_an_invalid_config_is_wrong_and_names_the_keys(self):
    found = self.finding(self.config(head_dim=3), "config")
    self.assertEqual(found.level, "wrong")
    self.assertIn("head_dim=3 must be even", found.found)
    self.assertEqual(self.finding(self.config(head_dim=3), "descriptors").level, "ok")

  def test_an_index_of_another_sequence_length_is_wrong(self):
    found, _ = doctor_host.check_host(self.config(max_target_length=8))
    self.assertIn(("wrong", "index"), [(f.level, f.check) for f in found])
    self.assertIn("change max_target_length or the index", [f.remedy for f in found])

  def test_credentials_in_a_finding_are_not_shown(self):
    error = RuntimeError("GET https://host/x?X-Amz-Signature=secret failed")
    found = doctor_host.Finding("wrong", "storage", doctor_host.one_line(error))
    self.assertEqual(found.found, "GET https://host/x?*** failed")

  def test_an_error_of_any_type_is_a_finding_after_those_before_it(self):
    before = doctor_host.Finding("ok", "storage", "read")

    def check():
      yield before
      raise ImportError("no\n  such module")

    found = doctor_host.run_check("storage", "install it", check)
    error = doctor_host.Finding("wrong", "storage", "ImportError: no such module", "install it")
    self.assertEqual(found, [before, error])

  def test_an_index_that_cannot_be_read_is_wrong(self):
    pathlib.Path(self.index_path).write_text("not an index")
    found, facts = doctor_host.check_host(self.config())
    self.assertEqual([f.level for f in found if f.check == "index"], ["wrong"])
    self.assertEqual(facts["indexes"], {"olmo_index_path": "unreadable"})

  def test_the_index_of_the_evaluation_and_those_of_stages_are_checked_too(self):
    other, _ = corpora.write_corpus(self.dir / "other", tokens_per_file=(400,), sequence_length=16)
    config = self.config(
        olmo_eval_index_path=other,
        eval_interval=5,
        olmo_stages=({"from_step": 3, "olmo_index_path": other},),
    )
    findings, facts = doctor_host.check_host(config)
    self.assertLen([found for found in findings if found.check == "index"], 2)
    fingerprints = facts["indexes"]
    self.assertEqual(
        list(fingerprints), ["olmo_index_path", "olmo_eval_index_path", "olmo_stages: stage 1"]
    )
    self.assertLen(set(fingerprints.values()), 2)

  def test_a_file_of_another_size_is_wrong(self):
    path = next((self.dir / "data").iterdir())
    os.truncate(path, 2)
    found = self.finding(self.config(), "storage")
    self.assertEqual(found.level, "wrong")
    self.assertIn(path.name, found.found)

  def test_a_store_that_cannot_be_reached_is_wrong(self):
    config = self.config(
        olmo_path_remap_from=str(self.dir / "data"),
        olmo_path_remap_to="s3://bucket/data",
        olmo_storage_endpoint="http://127.0.0.1:1",
        olmo_storage_anonymous=True,
    )
    with mock.patch.object(doctor_host, "PATIENCE_SECONDS", 0.5):
      self.assertEqual(self.levels(config)["storage"], "wrong")

  def test_too_few_descriptors_are_a_warning_with_the_number_to_set(self):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    index_path, _ = corpora.write_corpus(
        self.dir / "many", tokens_per_file=(16,) * 400, sequence_length=16
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    found = self.finding(self.config(olmo_index_path=index_path), "descriptors")
    self.assertEqual(found.level, "warning")
    self.assertIn("500 file descriptors for 400 files", found.found)
    self.assertIn("ulimit -n 534", found.remedy)

  def test_a_version_outside_the_bounds_is_a_warning(self):
    bounds = ["jax<0.1,>=0.0.1", "numpy>=99", "rich>=1", 'grain>=9; python_version >= "3.99"']
    with mock.patch.object(importlib.metadata, "requires", return_value=bounds):
      found = self.finding(None, "versions")
    self.assertEqual(found.level, "warning")
    self.assertRegex(found.found, r"; jax \S+ is not <0.1; numpy \S+ is not >=99$")

  def test_a_checkout_that_is_not_installed_has_no_bounds(self):
    error = importlib.metadata.PackageNotFoundError()
    with mock.patch.object(importlib.metadata, "requires", side_effect=error):
      self.assertEqual(self.finding(None, "versions").level, "ok")

  def test_facts_do_not_depend_on_the_place_of_a_process(self):
    first = doctor_host.check_host(self.config(process_id=0, num_processes=1))[1]
    second = doctor_host.check_host(self.config())[1]
    self.assertEqual(first, second)
    other = doctor_host.check_host(self.config(learning_rate=0.5))[1]
    self.assertNotEqual(first["config"], other["config"])

  def test_facts_do_not_depend_on_keys_that_may_differ_between_hosts(self):
    other = shutil.copy(self.index_path, self.dir / "other.json")
    facts = [
        doctor_host.check_host(
            self.config(
                olmo_index_path=path,
                olmo_spool_dir=str(self.dir / name),
                grain_worker_count=workers,
                olmo_stages=({"from_step": from_step, "olmo_index_path": path},),
            )
        )[1]
        for path, name, workers, from_step in (
            (self.index_path, "a", 0, 3),
            (str(other), "b", 2, 3),
            (self.index_path, "a", 0, 4),
        )
    ]
    self.assertEqual(facts[0], facts[1])
    self.assertEqual(facts[0]["config"]["olmo_stages"], [{"from_step": 3}])
    self.assertNotEqual(facts[0]["config"], facts[2]["config"])

  def test_accelerators_that_jax_does_not_use_are_found(self):
    (self.dir / "nvidia0").touch()
    pattern = str(self.dir / "nvidia[0-9]*")
    with mock.patch.object(doctor_host, "ACCELERATORS", (pattern,)):
      with mock.patch.dict(os.environ, {"JAX_PLATFORMS": ""}):
        self.assertEqual(doctor_host.unused_accelerators("cpu"), [str(self.dir / "nvidia0")])
        self.assertEmpty(doctor_host.unused_accelerators("gpu"))
      with mock.patch.dict(os.environ, {"JAX_PLATFORMS": "cpu"}):
        self.assertEmpty(doctor_host.unused_accelerators("cpu"))


if __name__ == "__main__":
  absltest.main()
