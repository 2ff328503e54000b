"""Tests of the migration of a run from MaxText's own loader."""

import collections
import dataclasses
import os
import pathlib

import numpy as np
import yaml
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import history_file
from maxtext_olmo.order import schedule
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.order import timeline
from maxtext_olmo.trainers.maxtext import loader_history as history
from maxtext_olmo.trainers.maxtext import migrate
from tests.trainers.maxtext import runs

STARTS_PROCESSES = True

_INSTANCES = 101


def setUpModule():
  runs.set_up_module()


def _checkpoint(directory: pathlib.Path, label: int) -> None:
  folder = directory / "checkpoints" / str(label)
  folder.mkdir(parents=True)
  (folder / "commit_success.txt").write_text("done")


class MigrateTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(self.directory, _INSTANCES)
    _checkpoint(self.directory, 9)
    self.config = self._write(per_device_batch_size=2, grain_worker_count=0)

  def _write(self, name: str = "run.yml", **values) -> str:
    path = self.directory / name
    content = {
        "base_config": "base.yml",
        "dataset_type": "olmo_grain",
        "olmo_index_path": str(self.directory / "index.json"),
        "max_target_length": runs.LENGTH,
        "data_shuffle_seed": 5,
        **values,
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)

  def _migrate(self, **kwargs) -> migrate.Migration:
    return migrate.migrate(
        kwargs.pop("config", self.config), str(self.directory / "checkpoints"), **kwargs
    )

  def _left(self, done: migrate.Migration) -> list[int]:
    written = yaml.safe_load(pathlib.Path(done.config_path).read_text())
    stream = stream_lib.train_stream(
        index_lib.load_index(written["olmo_index_path"]),
        order="feistel",
        seed=5,
        consumed_path=written["olmo_consumed_path"],
    )
    return stream.instance_ids(np.arange(done.num_remaining + _INSTANCES)).tolist()

  @parameterized.parameters((1, 2, ()), (2, 4, ()), (2, 4, ("3", "7,hosts=4")), (4, 4, ("5",)))
  def test_the_rest_of_the_epoch_has_what_the_run_has_not_seen_each_once(
      self, hosts, devices, restarts
  ):
    done = self._migrate(hosts=hosts, devices=devices, restarts=restarts)
    seen = set(np.flatnonzero(done.found.counts))
    left = self._left(done)
    rest = left[: done.num_remaining]
    self.assertLen(rest, _INSTANCES - len(seen))
    self.assertEqual(set(rest), set(range(_INSTANCES)) - seen)
    self.assertCountEqual(left[done.num_remaining :], range(_INSTANCES))
    self.assertEqual(done.found.num_rows, 10 * devices * 2)

  def test_the_config_builds_on_the_run_and_anchors_the_step(self):
    done = self._migrate(devices=2)
    written = yaml.safe_load(pathlib.Path(done.config_path).read_text())
    self.assertEqual(written["base_config"], self.config)
    self.assertEqual((written["initial_step"], written["olmo_initial_position"]), (10, 0))
    self.assertEqual(done.config_path, str(self.directory / "run-migrated.yml"))
    self.assertEqual(done.consumed_path, str(self.directory / "index.json.consumed-9"))

  def test_more_than_an_epoch_leaves_what_was_not_seen_more_often_than_that(self):
    _checkpoint(self.directory, 29)
    done = self._migrate(devices=2)
    self.assertEqual((done.label, done.found.num_rows, done.found.num_epochs), (29, 120, 1))
    self.assertEqual(done.num_remaining, 2 * _INSTANCES - 120)
    self.assertEqual((done.found.num_repeated, done.found.num_missing), (0, 0))

  def test_arguments_of_the_run_override_its_config(self):
    expected = self._migrate(devices=2)
    other = self._write("other.yml", per_device_batch_size=1, data_shuffle_seed=7)
    arguments = ["per_device_batch_size=2", "data_shuffle_seed=5", "grain_worker_count=0"]
    done = self._migrate(config=other, devices=2, arguments=arguments)
    np.testing.assert_array_equal(done.found.counts, expected.found.counts)
    with self.assertRaisesRegex(errors.ConfigError, "'seed' is not KEY=VALUE"):
      self._migrate(devices=2, arguments=["seed"])

  def test_a_config_that_does_not_exist_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "There is no config none.yml here"):
      self._migrate(config="none.yml", devices=2)

  def test_an_older_checkpoint_can_be_chosen(self):
    _checkpoint(self.directory, 4)
    done = self._migrate(devices=2, label=4)
    self.assertEqual(done.found.num_rows, 20)
    with self.assertRaisesRegex(errors.ResumeError, "no committed checkpoint 5; its latest is 9"):
      self._migrate(devices=2, label=5)

  def test_half_a_row_per_device_counts_the_rows_that_were_trained_on(self):
    config = self._write("half.yml", per_device_batch_size=0.5, grain_worker_count=0)
    done = self._migrate(config=config, devices=4)
    self.assertEqual(done.found.num_rows, 20)
    with self.assertRaisesRegex(errors.ConfigError, "below 1 on several hosts"):
      self._migrate(config=config, devices=4, hosts=2)

  def test_logs_tell_the_starts(self):
    log = self.directory / "run.log"
    loader = "OLMo grain loader: index=i total_instances=101 shard=0/2 per_host_batch=4 seq=16"
    log.write_text(
        f"{loader} resumed_step=0 initial_step=0\n"
        f"{loader} resumed_step=6 initial_step=24\n"
        "restoring from this run's directory step 6\n"
    )
    done = self._migrate(logs=[str(log)])
    self.assertEqual(
        [part.start for part in done.parts],
        [history.Start(-1, 0, 2, 4, 0), history.Start(6, 6, 2, 4, 0)],
    )
    same = self._migrate(hosts=2, devices=4, restarts=["6"])
    np.testing.assert_array_equal(done.found.counts, same.found.counts)

  @parameterized.parameters(
      ({"dataset_type": "grain"}, {"devices": 2}, "not 'olmo_grain'"),
      ({"olmo_index_path": ""}, {"devices": 2}, "olmo_index_path is not set"),
      ({"enable_rampup_batch_size": True}, {"devices": 2}, "enable_rampup_batch_size"),
      ({"expansion_factor_real_data": 2}, {"devices": 2}, "expansion_factor_real_data"),
      ({"max_target_length": 32}, {"devices": 2}, "max_target_length=32"),
      ({"base_config": "other.yml"}, {"devices": 2}, "other.yml"),
      ({}, {}, "set --devices"),
      ({}, {"devices": 3, "hosts": 4}, "6 rows cannot be divided among 4 hosts"),
      ({}, {"devices": 2, "restarts": ["5,rows=3"]}, "is not LABEL"),
      ({}, {"devices": 2, "restarts": ["last"]}, "is not LABEL"),
      ({}, {"devices": 2, "logs": ["x"]}, "not both"),
  )
  def test_a_run_that_cannot_be_migrated_is_an_error(self, values, kwargs, message):
    config = self._write("bad.yml", grain_worker_count=0, **{"per_device_batch_size": 2, **values})
    with self.assertRaisesRegex(errors.ConfigError, message):
      self._migrate(config=config, **kwargs)

  def test_logs_without_a_start_and_files_that_are_no_config_are_errors(self):
    log = self.directory / "empty.log"
    log.write_text("nothing\n")
    with self.assertRaisesRegex(errors.ConfigError, "No line of MaxText's olmo_grain loader"):
      self._migrate(logs=[str(log)])
    for text, message in (
        ("- 1\n", "has no keys"),
        ("a: [\n", "not YAML"),
        ("[" * 100_000, "not YAML"),
    ):
      path = self.directory / "no.yml"
      path.write_text(text)
      with self.assertRaisesRegex(errors.ConfigError, message):
        self._migrate(config=str(path), devices=2)

  def test_a_run_without_checkpoints_or_already_migrated_is_refused(self):
    with self.assertRaisesRegex(errors.ResumeError, "no committed checkpoint"):
      migrate.migrate(self.config, str(self.directory / "none"), devices=2)
    item = self.directory / "checkpoints" / "9" / "iter"
    item.mkdir()
    (item / "process_0.json").write_text('{"identity": {}}')
    with self.assertRaisesRegex(errors.ResumeError, "is already migrated"):
      self._migrate(devices=2)
    item.rename(self.directory / "moved")
    self._migrate(devices=2)

  def test_a_checkpoint_that_the_history_covers_is_refused(self):
    entry = timeline.Entry(
        step=9,
        position=0,
        sequence_length=16,
        schedule=schedule.BatchSchedule.constant(4),
        identity={"fingerprint": "f"},
        content={},
    )
    checkpoints = self.directory / "checkpoints"
    history_file.write(checkpoints, timeline.Timeline((entry,)), 9)
    with self.assertRaisesRegex(errors.ResumeError, "Checkpoint 9 .*is already migrated"):
      self._migrate(devices=2)
    (checkpoints / history_file.NAME).unlink()
    later = dataclasses.replace(entry, step=10)  # A run that began after the checkpoint.
    history_file.write(checkpoints, timeline.Timeline((later,)), 10)
    self._migrate(devices=2)


@runs.needs_maxtext
class InTheTrainerTest(absltest.TestCase):

  def test_a_run_of_maxtexts_own_loader_continues_with_unseen_instances(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    runs.write_corpus(directory, _INSTANCES)
    args = ("per_device_batch_size=4", "data_shuffle_seed=5")
    before = runs.start(directory, *args, "steps=6", install=False).wait().steps()
    again = runs.start(directory, *args, "steps=14", install=False).wait().steps()
    self.assertEqual(before[5].ids, again[6].ids, "MaxText's own loader replays a batch.")
    before.update(again)
    config = directory / "run.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "base_config": "base.yml",
                "dataset_type": "olmo_grain",
                "olmo_index_path": str(directory / "index.json"),
                "max_target_length": runs.LENGTH,
                "data_shuffle_seed": 5,
                "per_device_batch_size": 4,
                "grain_worker_count": 0,
            }
        )
    )
    done = migrate.migrate(
        str(config), str(directory / "run" / "checkpoints"), devices=1, restarts=["5"]
    )
    seen = collections.Counter(i for step in before.values() for i in step.ids)
    self.assertEqual({i: int(c) for i, c in enumerate(done.found.counts) if c}, dict(seen))
    self.assertEqual((done.found.num_repeated, done.num_remaining), (4, _INSTANCES - 52))
    after = {}
    for steps in (20, 30):  # With a restart, which now repeats nothing.
      run = runs.start(directory, *args, f"steps={steps}", config=done.config_path).wait()
      after.update(run.steps())
    ids = [i for step in sorted(after) for i in after[step].ids]
    self.assertEqual(sorted(after), list(range(14, 30)))
    rest = ids[: done.num_remaining]
    self.assertCountEqual(rest, set(range(_INSTANCES)) - set(seen))
    self.assertLen(set(ids[done.num_remaining :]), len(ids) - done.num_remaining)
    self.assertLess(os.path.getsize(done.consumed_path), 1000)


if __name__ == "__main__":
  absltest.main()
