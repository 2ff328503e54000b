"""Tests of the harness that runs functions in several JAX processes."""

import os
import signal

import jax
from absl.testing import absltest
from jax.experimental import multihost_utils

from tests import distributed

STARTS_PROCESSES = True

_HERE = "tests.distributed_test:"


def numbers(offset: int) -> tuple[int, int, list[int]]:
  """Returns what each process sees of the others."""
  gathered = multihost_utils.process_allgather(jax.numpy.int32(offset + jax.process_index()))
  return jax.process_index(), jax.device_count(), gathered.tolist()


def fail(process: int | None) -> None:
  """Raises on one process, or on all."""
  if process in (None, jax.process_index()):
    raise ValueError(f"from {jax.process_index()}")
  multihost_utils.sync_global_devices("a process that never comes")


def die(process: int) -> None:
  """Dies on one process while the others wait for it."""
  if process == jax.process_index():
    os.kill(os.getpid(), signal.SIGKILL)
  multihost_utils.sync_global_devices("a process that never comes")


class DistributedTest(absltest.TestCase):

  def test_results_come_in_the_order_of_the_processes(self):
    results = distributed.run(_HERE + "numbers", processes=3, devices=2, args=(10,))
    self.assertEqual(results, [(p, 6, [10, 11, 12]) for p in range(3)])

  def test_an_error_on_all_is_reported_for_all(self):
    with self.assertRaises(distributed.DistributedError) as raised:
      distributed.run(_HERE + "fail", args=(None,))
    self.assertEqual([str(f.error) for f in raised.exception.failures], ["from 0", "from 1"])

  def test_an_error_on_one_ends_the_others(self):
    with self.assertRaisesRegex(distributed.DistributedError, "ValueError: from 1"):
      distributed.run(_HERE + "fail", args=(1,))

  def test_a_death_is_reported(self):
    with self.assertRaisesRegex(distributed.DistributedError, "ended with code -9"):
      distributed.run(_HERE + "die", args=(1,))


if __name__ == "__main__":
  absltest.main()
