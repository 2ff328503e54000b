"""Tests of doing one item in a worker."""

import dataclasses
import os
import pickle
from typing import ClassVar

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import identity
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.corpus.work import tasks
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import MissingFileError
from tests import object_server
from tests.corpus.work import sample_work
from tests.corpus.work.sample_work import SumWork


@dataclasses.dataclass(frozen=True)
class ChangingWork(SumWork):
  """Changes the file that it reads."""

  def __call__(self, item):
    result = super().__call__(item)
    os.utime(item.source.path, ns=(7, 7))
    return result


@dataclasses.dataclass(frozen=True)
class BuggyWork(tasks.Work):
  """Has a bug."""

  name: ClassVar[str] = "buggy"
  version: ClassVar[int] = 1

  def __call__(self, item):
    return {}[item.key]


@dataclasses.dataclass(frozen=True)
class UnusableWork(BuggyWork):
  """Needs a package that is not installed."""

  def __call__(self, item):
    raise ConfigError("Install the package.")


class TasksTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.index = sample_work.write_corpus(self.create_tempdir().full_path)
    self.piece = sample_work.pieces(self.index)[0]
    self.results = results_lib.MemoryResults()
    self.identity = identity.combined_now(LocalStorage(), self.piece.inputs)

  def do(self, work):
    done = tasks.do_item(work, self.results, self.piece, self.identity)
    (result,) = self.results.read_all([done.text])
    return done, result

  def test_a_result_is_written_under_the_name_that_is_returned(self):
    done, result = self.do(SumWork())
    self.assertEqual(done.status, "ok")
    tokens = np.fromfile(self.piece.source.path, np.uint16)[: self.piece.count]
    self.assertEqual(result["sum"], tokens.sum())

  def test_a_file_that_changes_before_or_during_the_work_fails_the_item(self):
    done, result = self.do(ChangingWork())
    self.assertEqual(done.status, "failed")
    self.assertRegex(result["reason"], "part-000.npy changed during this run, or differs between")
    self.assertEqual(self.do(SumWork())[0].status, "failed")

  def test_a_bug_fails_the_item_and_names_it(self):
    done, result = self.do(BuggyWork())
    self.assertEqual(done.status, "failed")
    self.assertRegex(result["reason"], "^tokens 0 to 512 of .*part-000.npy: KeyError: '0-0-512'$")

  def test_a_failure_keeps_the_kind_of_its_error(self):
    os.unlink(self.piece.source.path)
    self.identity = identity.combined_now(LocalStorage(), self.piece.inputs)
    _, record = self.do(SumWork())
    failure = tasks.Failure.from_record(self.piece, record)
    self.assertIsInstance(failure.error, MissingFileError)
    self.assertIsInstance(failure.error.__cause__, OSError)
    self.assertRegex(failure.reason, "part-000.npy: No such file or directory$")

  def test_a_work_is_done_elsewhere_as_here_and_kept_for_the_next_item(self):
    results = results_lib.ResultFiles(self.create_tempdir().full_path, "w")
    context = tasks.make_context(SumWork(scale=3), results)
    for _ in range(2):
      arrived = pickle.loads(pickle.dumps(context))
      done = tasks.do_item_elsewhere(arrived, self.piece, self.identity)
      self.assertEqual(done.status, "ok")
      (result,) = results.read_all([done.text])
      self.assertEqual(result["sum"], self.do(SumWork(scale=3))[1]["sum"])
    # The second copy was not used: it has opened no storage.
    self.assertNotIn("files", vars(arrived.work))

  def test_tasks_of_two_drivers_write_to_the_store_of_their_own_driver(self):
    contexts, servers = [], []
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    for scale in (1, 2):
      servers.append(self.enter_context(object_server.ObjectServer()))
      stores.use_by_default(stores.StoreOptions(servers[-1].url, "here", anonymous=True))
      results = results_lib.ResultFiles("s3://b/r", f"w{scale}")
      contexts.append(tasks.make_context(SumWork(scale=scale), results))
    stores.use_by_default(stores.StoreOptions())
    for context in (*contexts, *contexts):  # Each twice: the worker keeps both.
      done = tasks.do_item_elsewhere(context, self.piece, self.identity)
      self.assertEqual(done.status, "ok")
    for scale, server in zip((1, 2), servers):
      self.assertEqual([name.split("/")[2] for name in server.objects], [f"w{scale}"])

  def test_a_machine_that_is_set_up_wrongly_stops_the_work_without_failing_the_item(self):
    done = tasks.do_item(UnusableWork(), self.results, self.piece, self.identity)
    self.assertEqual(done, tasks.Done("unusable", "Install the package."))
    self.assertEmpty(self.results.names())

  def test_a_worker_with_another_version_of_the_work_stops_it(self):
    context = tasks.make_context(SumWork(), self.results)
    done = tasks.do_item_elsewhere(
        dataclasses.replace(context, version=7), self.piece, self.identity
    )
    self.assertEqual(done.status, "unusable")
    self.assertRegex(done.text, "A worker has version 1 of the work 'sum', but the driver has 7.")

  def test_a_work_of_a_script_is_refused(self):
    type_of_script = dataclasses.dataclass(frozen=True)(
        type("ScriptWork", (SumWork,), {"__module__": "__main__"})
    )
    with self.assertRaisesRegex(ConfigError, "ScriptWork is defined in a script"):
      tasks.make_context(type_of_script(), self.results)

  def test_settings_are_the_fields_without_the_storage(self):
    self.assertNotIn("storage", SumWork(storage=LocalStorage()).settings)
    self.assertEqual(SumWork(scale=4).settings["scale"], 4)


if __name__ == "__main__":
  absltest.main()
