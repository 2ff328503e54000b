import gc
import os
import pathlib
import shutil
import threading

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import cores
from maxtext_olmo import errors
from maxtext_olmo.loader import delivery
from tests import corpora
from tests import distributed
from tests import workers as workers_lib
from tests.loader import cases


def setUpModule():
  cases.compile_fast()


class PrefetchTest(cases.LoaderCase):

  def test_threads_leave_a_core_to_the_trainer(self):
    threads = delivery.Prefetch().threads
    self.assertBetween(threads, 1, 2)
    self.assertLess(threads, max(2, cores.available_cores()))

  @parameterized.parameters(0, 1, 3)
  def test_batches_sent_ahead_change_neither_batches_nor_state(self, depth):
    expected = cases.take_inputs(self.train(olmo_device_prefetch=0, olmo_prefetch_batches=0), 8)
    iterator = self.train(olmo_device_prefetch=depth)
    for step, inputs in enumerate(expected):
      self.assertEqual(iterator.get_state()["position"], 4 * step)
      np.testing.assert_array_equal(np.asarray(next(iterator)["inputs"]), inputs)
    state = iterator.get_state()
    following = cases.take_inputs(iterator, 2)
    iterator.set_state(state)
    np.testing.assert_array_equal(cases.take_inputs(iterator, 2), following)

  def test_batches_that_are_kept_never_change(self):
    iterator = self.train()
    kept = [next(iterator) for _ in range(25)]
    copies = [jax.tree.map(lambda x: np.array(x, copy=True), batch) for batch in kept]
    cases.take_inputs(iterator, 60)
    for batch, copy in zip(kept, copies):
      for name, array in batch.items():
        np.testing.assert_array_equal(np.asarray(array), copy[name], err_msg=name)

  def test_a_dropped_iterator_leaves_no_threads(self):
    before = set(threading.enumerate())
    for values in (self.defaults, {**cases.DOCUMENTS, "global_batch_size_to_load": 4}):
      config = cases.data_config(olmo_index_path=self.index_path, **values)
      iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
      next(iterator)
      del iterator
    gc.collect()
    for thread in set(threading.enumerate()) - before:
      if thread.name.startswith("olmo-"):
        thread.join(60)
        self.assertFalse(thread.is_alive(), thread.name)

  def test_a_program_that_ends_without_closing_its_iterators_prints_nothing(self):
    code = f"""
import jax, numpy as np, maxtext_olmo

STARTS_PROCESSES = True
config = maxtext_olmo.get_config()
config.update(olmo_index_path={self.index_path!r}, max_target_length=8, vocab_size=100)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
held = [maxtext_olmo.create_data_iterator(config, mesh)[0] for _ in range(3)]
next(held[0]), held[1].start_prefetch()
held[0].itself = held[0]
print("done")
"""
    done = distributed.run_python(code)
    self.assertEqual((done.returncode, done.stdout.strip()), (0, "done"), done.stderr)
    self.assertNotIn("Exception ignored", done.stderr)
    self.assertNotIn("Error", done.stderr)


class FailureTest(cases.LoaderCase):
  """Tests of an iterator whose files are damaged while it runs."""

  def setUp(self):
    super().setUp()
    directory = self.create_tempdir().full_path
    shutil.copytree(self.directory, directory, dirs_exist_ok=True)
    self.index_path, _ = corpora.write_corpus(directory)
    self.file = pathlib.Path(directory, "data", "part-003.npy")

  @parameterized.product(workers=(0, 1), on_device=(0, 1))
  def test_after_an_error_the_same_step_is_tried_again(self, workers, on_device):
    expected = cases.take_inputs(self.train(), 40)
    content, times = self.file.read_bytes(), os.stat(self.file)
    with workers_lib.started_quickly():
      iterator = self.train(grain_worker_count=workers, olmo_device_prefetch=on_device)
      next(iterator)
      os.truncate(self.file, 64)
      with self.assertRaisesRegex(errors.CorpusError, r"part-003\.npy"):
        cases.take_inputs(iterator, 40)
      self.file.write_bytes(content)
      os.utime(self.file, ns=(times.st_atime_ns, times.st_mtime_ns))  # As a restored copy has it.
      step = iterator.step
      self.assertGreaterEqual(step, 1)
      got = cases.take_inputs(iterator, 40 - step)
    np.testing.assert_array_equal(got, expected[step:])


if __name__ == "__main__":
  absltest.main()
