"""Tests of measured processes: they answer, and they are ended when they take too much."""

import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from maxtext_olmo.cli import bench_children
from maxtext_olmo.cli import bench_corpus
from maxtext_olmo.cli import bench_plan


class BenchChildrenTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    directory = cls.enterClassContext(tempfile.TemporaryDirectory())
    corpus = bench_corpus.make(pathlib.Path(directory) / "c", megabytes=8, files=2)
    cls.corpus = {**corpus.spec(2048), "batch": 4}
    plan = bench_plan.INLINE.spec({}, filter=False, documents=False)
    cls.ours = {**cls.corpus, **plan}

  def test_an_answer_counts_time_processor_time_faults_and_memory(self):
    spec = {**self.corpus, **bench_plan.LIMIT.spec({}, filter=False, documents=False)}
    with bench_children.Child() as child:
      opened = child.ask(do="open", name="a", spec=spec)
      self.assertEqual(opened["shape"], [4, 2048])
      run = child.ask(do="run", name="a", batches=50)
    self.assertEqual(run["batches"], 50)
    self.assertBetween(run["halfway_seconds"], 0, run["seconds"])
    self.assertGreater(run["cpu_seconds"], 0)
    self.assertGreater(run["peak_bytes"], 10**7)

  def test_an_error_in_a_loader_is_the_reason_why_it_is_unavailable(self):
    with bench_children.Child() as child, self.assertRaisesRegex(
        bench_children.Unavailable, "FileNotFoundError"
    ):
      child.ask(do="open", name="a", spec={**self.corpus, "loader": "grain", "files": ["/none"]})

  def test_a_process_that_ends_is_noticed(self):
    with bench_children.Child() as child:
      child._process.kill()
      with self.assertRaisesRegex(bench_children.Unavailable, "the process has ended"):
        child.ask(do="open", name="a", spec=self.ours)
        child.ask(do="open", name="a", spec=self.ours)

  def test_a_process_that_takes_too_long_is_stopped(self):
    with bench_children.Child(patience=0.01) as child, self.assertRaisesRegex(
        bench_children.Unavailable, "stopped after"
    ):
      child.ask(do="open", name="a", spec=self.ours)

  def test_a_process_that_takes_too_much_memory_is_stopped(self):
    with bench_children.Child(most_bytes=1 << 20) as child, self.assertRaisesRegex(
        bench_children.Unavailable, "of memory"
    ):
      child.ask(do="open", name="a", spec=self.ours)

  def test_the_environment_may_say_where_an_interpreter_is(self):
    told = mock.patch.dict(os.environ, BENCH_PEERS_PYTHON="/no/python")
    with told, self.assertRaisesRegex(bench_children.Unavailable, "^no /no/python$"):
      bench_children.interpreter("peers")


if __name__ == "__main__":
  absltest.main()
