"""Tests of worker processes."""

import os
import signal
import subprocess
import sys
import time

import grain
import numpy as np
from absl.testing import absltest

from maxtext_olmo.rows import workers
from tests import distributed

STARTS_PROCESSES = True


def _element(i):
  return {"i": np.array(i), "pid": np.array(os.getpid()), "large": np.zeros(1 << 18)}


def _opened():
  dataset = grain.MapDataset.range(10**6).map(_element)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
  return iter(workers.in_workers(dataset.to_iter_dataset(options), workers=2, ahead=1))


def run_until_killed():
  """Prints the numbers of its workers, and waits for the end with their queues full."""
  elements = _opened()
  print(*sorted({int(next(elements)["pid"]) for _ in range(4)}), flush=True)
  time.sleep(3600)


class WorkersTest(absltest.TestCase):

  def test_an_iterator_that_nobody_closed_leaves_without_noise(self):
    code = (
        "import sys\n"
        "import jax, numpy as np, maxtext_olmo\n"
        "from tests import corpora\n"
        "path, _ = corpora.write_corpus(sys.argv[1])\n"
        "config = maxtext_olmo.get_config()\n"
        "config.update(olmo_index_path=path, max_target_length=8, global_batch_size_to_load=4)\n"
        "config.update(vocab_size=1000, checkpoint_dir='')\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))\n"
        "train = maxtext_olmo.create_data_iterator(config, mesh)[0]\n"
        "next(train)\n"
    )
    done = distributed.run_python(code, self.create_tempdir().full_path)
    self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
    self.assertNotIn("Exception", done.stderr)
    self.assertNotIn("Traceback", done.stderr)

  def test_workers_take_turns_in_a_script_that_parses_no_flags(self):
    code = (
        "from tests.rows import workers_test\n"
        "elements = workers_test._opened()\n"
        "found = [next(elements) for _ in range(6)]\n"
        "elements.close()\n"
        "print([int(e['i']) for e in found], len({int(e['pid']) for e in found}))\n"
    )
    done = distributed.run_python(code)
    self.assertEqual(done.stdout, "[0, 1, 2, 3, 4, 5] 2\n", done.stderr)

  def test_workers_end_when_their_trainer_is_killed(self):
    code = "from tests.rows import workers_test; workers_test.run_until_killed()"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        env=distributed.child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
      pids = [int(pid) for pid in trainer.stdout.readline().split()]
      os.kill(trainer.pid, signal.SIGKILL)
    self.assertLen(pids, 2)
    for _ in range(
        2400
    ):  # They are given two minutes to notice, so that a failure is one and not a hang.
      left = [pid for pid in pids if _is_alive(pid)]
      if not left:
        break
      time.sleep(0.05)
    self.assertEmpty(left)


def _is_alive(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


if __name__ == "__main__":
  absltest.main()
