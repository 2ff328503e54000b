"""Tests of the pool of reusable memory."""

import gc
import os
import pickle
import threading

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.rows import buffers

STARTS_PROCESSES = True


class BufferPoolTest(parameterized.TestCase):

  @parameterized.parameters(((64, 1024), "uint32"), ((3, 5), "uint8"), ((0, 7), "uint16"))
  def test_arrays_are_page_aligned(self, shape, dtype):
    array = buffers.BufferPool().take(shape, dtype)
    self.assertEqual((array.shape, array.dtype), (shape, np.dtype(dtype)))
    self.assertTrue(array.flags.writeable and array.flags.c_contiguous)
    if array.size:
      self.assertEqual(array.ctypes.data % 4096, 0)

  def test_a_cleared_pool_allocates_new_memory(self):
    pool = buffers.BufferPool()
    kept, dropped = pool.take((4, 1024), np.uint32), pool.take((4, 1024), np.uint32)
    del dropped
    pool.clear()
    pool.take((4, 1024), np.uint32)
    self.assertEqual(pool.made, 3)
    kept[:] = 7
    self.assertFalse(np.shares_memory(kept, pool.take((4, 1024), np.uint32)))

  def test_memory_returns_once_the_last_view_is_gone(self):
    pool = buffers.BufferPool()
    array = pool.take((8, 1024), np.uint32)
    address, view = array.ctypes.data, array[2:3, 5:].view(np.int32)
    del array
    self.assertNotEqual(pool.take((8, 1024), np.uint32).ctypes.data, address)
    del view
    taken = [pool.take((8, 1024), np.uint32) for _ in range(2)]
    self.assertIn(address, [array.ctypes.data for array in taken])
    self.assertEqual(pool.made, 2)

  def test_memory_that_a_jax_array_shares_is_not_used_again_before_it_is_gone(self):
    pool = buffers.BufferPool()
    device = jax.devices("cpu")[0]
    kept = []
    for i in range(20):
      array = pool.take((8, 1024), np.int32)
      array[:] = i
      kept.append(jax.device_put(array, device))
      del array
    for i, array in enumerate(kept):
      self.assertTrue((np.asarray(array) == i).all())
    shared = {array.unsafe_buffer_pointer() for array in kept}
    del array, kept
    gc.collect()
    self.assertIn(pool.take((8, 1024), np.int32).ctypes.data, shared)

  def test_a_donated_array_leaves_the_memory_to_its_other_holders(self):
    pool = buffers.BufferPool()
    array = pool.take((8, 1024), np.int32)
    array[:] = 7
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    result = add(jax.device_put(array, jax.devices("cpu")[0]))
    self.assertTrue((np.asarray(result) == 8).all())
    self.assertTrue((array == 7).all())

  def test_threads_never_get_the_same_memory(self):
    pool = buffers.BufferPool()
    wrong = []

    def work(number):
      for _ in range(300):
        array = pool.take((16, 64), np.int64)
        array[:] = number
        if not (array == number).all():
          wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEmpty(wrong)
    # Each thread may hold the previous array while it takes the next.
    self.assertLessEqual(pool.made, 8)

  def test_only_some_memory_is_kept(self):
    pool = buffers.BufferPool(max_free=2)
    arrays = [pool.take((4,), np.uint8) for _ in range(10)]
    del arrays
    again = [pool.take((4,), np.uint8) for _ in range(10)]
    self.assertEqual(pool.made, 10 + len(again) - 2)

  def test_pickling_takes_no_memory_along(self):
    pool = buffers.BufferPool()
    array = pool.take((4,), np.uint8)
    self.assertLess(len(pickle.dumps(pool)), 200)
    self.assertEqual(pickle.loads(pickle.dumps(pool)).made, 0)
    del array

  def test_a_forked_child_has_its_own_memory(self):
    pool = buffers.BufferPool()
    array = pool.take((1024,), np.uint8)
    array[:] = 1
    child = os.fork()
    if child == 0:
      taken = pool.take((1024,), np.uint8)
      taken[:] = 2
      array[0] = 3
      os._exit(0 if taken.ctypes.data != array.ctypes.data and (array[1:] == 1).all() else 1)
    self.assertEqual(os.waitpid(child, 0)[1], 0)
    self.assertTrue((array == 1).all())


if __name__ == "__main__":
  absltest.main()
