"""Tests of the spool directory: what is put is found, within the limit, whatever happens."""

import errno
import fcntl
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from unittest import mock

import hypothesis
import numpy as np
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus.storage import spool as spool_lib
from maxtext_olmo.corpus.storage import spool_file

STARTS_PROCESSES = True

_MIB = 1 << 20


def names_of(numbers, size=1000, path="s3://bucket/a"):
  """Returns the names of ranges of one file, one per number."""
  numbers = np.asarray(numbers, np.int64)
  digests = np.array([spool_file.file_digest(path, "v1")], np.uint64)
  return spool_file.make_names(
      digests, 0 * numbers, numbers * size, np.full(len(numbers), size, np.int64)
  )


def data_of(numbers, size=1000):
  """Returns the bytes of these ranges, one after the other, and their places."""
  rows = [np.random.default_rng(int(n)).integers(0, 256, size, np.uint8) for n in numbers]
  return np.concatenate([np.zeros(0, np.uint8), *rows]), size * np.arange(len(numbers))


def files_in(directory):
  """Returns the complete files of a spool."""
  return sorted(pathlib.Path(directory).glob("*.spool"))


def size_of(directory):
  """Returns the size of all files of a spool."""
  return sum(f.stat().st_size for f in pathlib.Path(directory).iterdir() if f.name != "lock")


def _can_lock(file):
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  fcntl.flock(file, fcntl.LOCK_UN)
  return True


class SpoolTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def _spool(self, limit=32 * _MIB):
    return spool_lib.Spool(self.directory, limit)

  def _put(self, spool, numbers, size=1000, **kwargs):
    return spool.put(names_of(numbers, size), *data_of(numbers, size), **kwargs)

  def _check(self, spool, numbers, size=1000):
    """Reads ranges, checks those that are found, and returns their numbers."""
    out = np.zeros(size * len(numbers), np.uint8)
    served = spool.read(names_of(numbers, size), out, size * np.arange(len(numbers)))
    expected, _ = data_of(numbers, size)
    for i in np.flatnonzero(served).tolist():
      np.testing.assert_array_equal(
          out[i * size : (i + 1) * size], expected[i * size : (i + 1) * size]
      )
    return [n for n, found in zip(numbers, served) if found]

  @hypothesis.settings(deadline=None, max_examples=40)
  @hypothesis.given(
      st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=20, unique=True), max_size=8),
      st.sampled_from([1, 17, 1000, 8192]),
  )
  def test_ranges_are_read_as_they_were_put(self, groups, size):
    with tempfile.TemporaryDirectory() as directory:
      spool = spool_lib.Spool(directory, 32 * _MIB)
      for i, group in enumerate(groups):
        self.assertTrue(self._put(spool, group, size))
        if i % 2:
          spool.flush()
      put = sorted({number for group in groups for number in group})
      self.assertEqual(self._check(spool, list(range(51)), size), put)
      spool.close()
      self.assertEqual(
          self._check(spool_lib.Spool(directory, 32 * _MIB), list(range(51)), size), put
      )

  def test_another_version_size_or_file_is_another_range(self):
    spool = self._spool()
    self._put(spool, [1])
    numbers = np.array([1])
    for path, version, size in (
        ("s3://bucket/b", "v1", 1000),
        ("s3://bucket/a", "v2", 1000),
        ("s3://bucket/a", "v1", 999),
    ):
      digests = np.array([spool_file.file_digest(path, version)], np.uint64)
      names = spool_file.make_names(digests, 0 * numbers, numbers * 1000, np.array([size]))
      self.assertFalse(spool.read(names, np.zeros(1000, np.uint8), np.zeros(1, np.int64))[0])

  def test_a_copy_of_another_range_is_not_taken_for_it(self):
    # The name is part of the checksum, so even a table that points to other bytes is noticed.
    spool = self._spool()
    self._put(spool, [1, 2])
    spool.close()
    (path,) = files_in(self.directory)
    content = bytearray(path.read_bytes())
    content[0:1016], content[1016:2032] = content[1016:2032], content[0:1016]
    path.write_bytes(content)
    self.assertEqual(self._check(self._spool(), [1, 2]), [])

  def test_other_processes_see_a_file_once_it_is_complete(self):
    writer, reader = self._spool(), self._spool()
    self.assertEqual(self._check(reader, [1]), [])
    self._put(writer, [1])
    self.assertEqual(self._check(writer, [1]), [1])
    time.sleep(0.2)  # Longer than between two listings.
    self.assertEqual(self._check(reader, [1]), [])
    writer.flush()
    time.sleep(0.2)
    self.assertEqual(self._check(reader, [1]), [1])

  def test_flush_leaves_a_young_file_open(self):
    spool = self._spool()
    self._put(spool, [1])
    spool.flush(older_than=3600)
    self.assertEmpty(files_in(self.directory))
    spool.flush()
    self.assertLen(files_in(self.directory), 1)

  def test_the_limit_holds_and_what_was_released_goes_first(self):
    spool = self._spool(limit=4 * _MIB)
    size, per_step = 8000, 8
    for step in range(120):  # 7.7 MB in total.
      numbers = list(range(step * per_step, (step + 1) * per_step))
      self.assertTrue(self._put(spool, numbers, size, step=step), f"step {step}")
      spool.release(step - 10)
      self.assertLessEqual(size_of(self.directory), 4 * _MIB)
    kept = self._check(spool, list(range(120 * per_step)), size)
    self.assertContainsSubset(range(110 * per_step, 120 * per_step), kept)
    self.assertNotIn(0, kept)
    self.assertEqual(kept, list(range(kept[0], 120 * per_step)))

  def test_nothing_that_is_needed_is_deleted(self):
    spool = self._spool(limit=2 * _MIB)
    put = 0
    while self._put(spool, [put], 8000, step=put):
      put += 1
    self.assertGreater(put, 150)
    self.assertFalse(spool.reserve(9000))
    self.assertEqual(self._check(spool, list(range(put)), 8000), list(range(put)))
    spool.release(100)
    self.assertTrue(spool.reserve(9000))

  def test_files_of_a_process_that_has_ended_are_kept_for_a_minute(self):
    first = self._spool(limit=2 * _MIB)
    put = 0
    while self._put(first, [put], 8000, step=put):
      put += 1
    first.close()
    second = self._spool(limit=2 * _MIB)
    self.assertFalse(second.reserve(9000))
    for path in files_in(self.directory):
      os.utime(path, (time.time() - 61,) * 2)
    self.assertTrue(second.reserve(9000))

  def test_claimed_files_are_not_deleted_however_old(self):
    first = self._spool(limit=2 * _MIB)
    put = 0
    while self._put(first, [put], 8000, step=put):
      put += 1
    first.close()
    second = self._spool(limit=2 * _MIB)
    self.assertTrue(second.claim(names_of(range(put), 8000), step=7).all())
    for path in files_in(self.directory):
      os.utime(path, (time.time() - 61,) * 2)
    self.assertFalse(second.reserve(9000))
    second.release(8)
    self.assertTrue(second.reserve(9000))

  def test_a_full_spool_does_not_keep_files_for_single_ranges(self):
    first = self._spool(limit=4 * _MIB)
    put = 0
    while self._put(first, [put], 8000, step=put):
      put += 1
    first.release()
    first.flush()
    self.assertTrue(first.reserve(1000))
    # Every eighth range lies in all of the files.
    scattered = list(range(8, put, 8))
    kept = first.claim(names_of(scattered, 8000), step=1)
    self.assertLess(kept.mean(), 0.5)

  def test_claims_in_a_spool_with_room_keep_every_file(self):
    spool = self._spool()
    for number in range(64):
      self._put(spool, [number])
      spool.flush()
    self.assertTrue(spool.claim(names_of(range(64)), step=0).all())

  def test_ranges_that_may_not_displace_others_are_refused_when_it_is_full(self):
    spool = self._spool(limit=2 * _MIB)
    put = 0
    while self._put(spool, [put], 8000, may_delete=False):
      put += 1
    spool.flush()
    spool.release()
    for path in files_in(self.directory):
      os.utime(path, (1, 1))
    self.assertFalse(self._put(spool, [put], 8000, may_delete=False))
    self.assertTrue(self._put(spool, [put], 8000))

  def _fill(self, spool, numbers):
    """Puts ranges ahead until there is no room; returns how many were put."""
    for count, number in enumerate(numbers):
      if not self._put(spool, [number], 8000, step=number):
        return count
    raise AssertionError("The spool never became full.")

  def test_processes_with_different_ranges_have_equal_shares(self):
    first, second = self._spool(limit=4 * _MIB), self._spool(limit=4 * _MIB)
    for spool, number in ((first, 0), (second, 10**6)):
      self.assertTrue(self._put(spool, [number], 8000, step=number))
    one = self._fill(first, range(1, 10**6))
    other = self._fill(second, range(10**6 + 1, 2 * 10**6))
    self.assertGreater(one, 200)
    self.assertAlmostEqual(other / one, 1, delta=0.1)

  def test_a_process_that_comes_late_has_its_share_once_the_first_has_used_half_of_its_files(self):
    first, second = self._spool(limit=4 * _MIB), self._spool(limit=4 * _MIB)
    whole = self._fill(first, range(10**6))
    self.assertEqual(self._fill(second, range(10**6, 2 * 10**6)), 0)
    put = [whole, 0]
    for step in range(whole // 2 + 20):
      first.release(step)
      put[0] += self._fill(first, range(put[0], 10**6))
      put[1] += self._fill(second, range(10**6 + put[1], 2 * 10**6))
    self.assertAlmostEqual(put[1] / (whole / 2), 1, delta=0.1)
    self.assertAlmostEqual((put[0] - step) / (whole / 2), 1, delta=0.1)

  def test_processes_with_the_same_ranges_use_the_whole_spool_together(self):
    alone = self._fill(spool_lib.Spool(self.create_tempdir().full_path, 4 * _MIB), range(10**6))
    spools = [self._spool(limit=4 * _MIB), self._spool(limit=4 * _MIB)]
    ahead, turns_without_room = 0, 0
    while turns_without_room < 2:
      spool, other = spools
      added = self._fill(spool, range(ahead, 10**6))
      spool.flush()
      for number in range(ahead, ahead + added):
        while not other.claim(names_of([number], 8000), step=number).all():
          time.sleep(0.01)  # Until it lists the directory again.
      ahead += added
      turns_without_room = 0 if added else turns_without_room + 1
      spools.reverse()
    self.assertGreater(ahead, 0.9 * alone)

  def test_a_process_that_closed_the_spool_leaves_its_share_to_the_others(self):
    first, second = self._spool(limit=4 * _MIB), self._spool(limit=4 * _MIB)
    self.assertTrue(self._put(second, [10**6], 8000, step=0))
    half = self._fill(first, range(10**6))
    second.close()
    self.assertGreater(self._fill(first, range(half, 10**6)), 0.8 * half)

  def test_ranges_that_are_too_large_are_not_kept(self):
    spool = self._spool()
    size = spool.max_range_bytes + 1
    self.assertTrue(self._put(spool, [1], size))
    self.assertEqual(self._check(spool, [1], size), [])
    self.assertTrue(self._put(spool, [1], size - 1))
    self.assertEqual(self._check(spool, [1], size - 1), [1])

  def test_a_damaged_range_is_deleted_and_can_be_put_again(self):
    spool = self._spool()
    self._put(spool, list(range(5)))
    spool.close()
    (path,) = files_in(self.directory)
    content = bytearray(path.read_bytes())
    content[2500] ^= 1
    path.write_bytes(content)
    with self.assertLogs(level="WARNING") as logs:
      self.assertNotIn(2, self._check(self._spool(), list(range(5))))
    self.assertIn("damaged", logs.output[0])
    self.assertFalse(path.exists())
    again = self._spool()
    self._put(again, [2])
    self.assertEqual(self._check(again, [2]), [2])

  def test_files_cut_at_any_byte_are_deleted_or_complete(self):
    spool = self._spool()
    self._put(spool, [1, 2], 50)
    spool.close()
    (path,) = files_in(self.directory)
    content = path.read_bytes()
    for end in range(len(content)):
      path.write_bytes(content[:end])
      with self.assertLogs(level="WARNING"):
        self.assertEqual(self._check(self._spool(), [1, 2], 50), [])
      self.assertFalse(path.exists())

  def test_bytes_that_were_never_written_are_noticed(self):
    # After a power failure, a file may have its size but not its content.
    spool = self._spool()
    self._put(spool, [1, 2])
    spool.close()
    (path,) = files_in(self.directory)
    content = path.read_bytes()
    for zeros in ((0, 1500), (1200, len(content)), (0, len(content))):
      broken = bytearray(content)
      broken[slice(*zeros)] = bytes(zeros[1] - zeros[0])
      path.write_bytes(broken)
      self.assertNotIn(1 if zeros[0] == 0 else 2, self._check(self._spool(), [1, 2]))

  def test_a_deleted_file_is_a_miss(self):
    spool = self._spool()
    self._put(spool, [1])
    spool.close()
    self.assertEqual(self._check(spool, [1]), [1])
    spool.close()
    files_in(self.directory)[0].unlink()
    self.assertEqual(self._check(spool, [1]), [])
    self.assertFalse(spool.off)

  def test_an_emptied_directory_does_not_turn_it_off(self):
    spool = self._spool()
    self._put(spool, [1])
    for path in pathlib.Path(self.directory).iterdir():
      path.unlink()
    spool.flush()
    self._put(spool, [2])
    spool.flush()
    self.assertEqual(self._check(self._spool(), [1, 2]), [2])

  def test_a_disk_that_fails_turns_it_off_with_one_warning(self):
    spool = self._spool()
    self._put(spool, [1])
    spool.flush()
    for path in pathlib.Path(self.directory).iterdir():
      path.unlink()
    os.rmdir(self.directory)
    with self.assertLogs(level="WARNING") as logs:
      for number in range(2, 5):
        self.assertFalse(self._put(spool, [number]))
      self._check(spool, [7])
      spool.flush()
      spool.renew()
      spool.release()
      spool.claim(names_of([1]), 0)
      spool.close()
    self.assertLen(logs.output, 1)
    self.assertIn("turned off", logs.output[0])
    self.assertTrue(spool.off)

  def test_a_directory_that_cannot_be_made_turns_it_off(self):
    path = os.path.join(self.directory, "file")
    pathlib.Path(path).write_text("")
    with self.assertLogs(level="WARNING") as logs:
      spool = spool_lib.Spool(os.path.join(path, "spool"), _MIB)
    self.assertLen(logs.output, 1)
    self.assertTrue(spool.off)
    self.assertFalse(self._put(spool, [1]))

  def test_a_full_disk_turns_it_off_with_one_warning(self):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", self.directory], capture_output=True
    )
    if mounted.returncode:
      self.skipTest(f"No tmpfs can be mounted: {mounted.stderr.decode()}")
    try:
      spool = self._spool()
      with self.assertLogs(level="WARNING") as logs:
        put = 0
        while self._put(spool, [put], 8000):
          put += 1
        self.assertFalse(self._put(spool, [put], 8000))
        self.assertEqual(self._check(spool, [0], 8000), [])
      self.assertLen(logs.output, 1)
      self.assertIn(os.strerror(errno.ENOSPC), logs.output[0])
      self.assertEmpty(list(pathlib.Path(self.directory).glob("*.part")))
      spool.close()
    finally:
      subprocess.run(["umount", "-l", self.directory], check=True)

  def test_locks_work_as_over_nfs(self):
    # No NFS server can be started here. Its exclusive locks need files that are open for writing.
    plain = fcntl.flock

    def flock(fd, operation):
      access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
      if operation & fcntl.LOCK_EX and access == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
      plain(fd, operation)

    with mock.patch.object(fcntl, "flock", flock):
      first, second = self._spool(), self._spool()
      self.assertTrue(self._put(first, [1], step=1))
      self.assertTrue(self._put(second, [2], step=1))
      first.close()
      second.close()
    self.assertEqual(self._check(self._spool(), [1, 2]), [1, 2])

  def test_a_disk_that_fails_while_ranges_are_put_turns_it_off_with_one_warning(self):
    spool = self._spool()
    self._put(spool, [1])

    class Names(np.ndarray):
      """Names of ranges; the disk fails, and `read` notices, when `put` looks for their place."""

      def __array_function__(self, function, types, args, kwargs):
        if function is np.searchsorted:
          shutil.rmtree(spool.directory)
          spool.read(names_of([7]), np.zeros(1000, np.uint8), np.zeros(1, np.int64))
        return super().__array_function__(function, types, args, kwargs)

    with self.assertLogs(level="WARNING") as logs:
      self.assertFalse(spool.put(names_of([2]).view(Names), *data_of([2])))
    self.assertLen(logs.output, 1)
    self.assertTrue(spool.off)

  def test_a_read_only_disk_turns_it_off(self):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,ro", "tmpfs", self.directory],
        capture_output=True,
    )
    if mounted.returncode:
      self.skipTest(f"No tmpfs can be mounted: {mounted.stderr.decode()}")
    try:
      with self.assertLogs(level="WARNING") as logs:
        spool = self._spool()
        self.assertFalse(self._put(spool, [1]))
      self.assertIn(os.strerror(errno.EROFS), logs.output[0])
    finally:
      subprocess.run(["umount", "-l", self.directory], check=True)

  def test_copies_in_other_processes_share_the_directory(self):
    spool = self._spool()
    self._put(spool, [1])
    spool.flush()
    self.assertEqual(self._check(pickle.loads(pickle.dumps(spool)), [1]), [1])

  def test_a_forked_child_may_use_it(self):
    spool = self._spool()
    self._put(spool, [1])
    spool.flush()
    self._put(spool, [2])
    child = os.fork()
    if not child:
      found = False
      try:
        found = self._check(spool, [1, 2]) == [1] and self._put(spool, [3])
        spool.close()
      finally:
        os._exit(0 if found else 1)
    self.assertEqual(os.waitpid(child, 0)[1], 0)
    spool.close()
    self.assertEqual(self._check(self._spool(), [1, 2, 3]), [1, 2, 3])

  def test_a_child_forked_while_a_file_is_begun_does_not_keep_the_lock(self):
    for number in range(5000):  # Looking at these files takes a while, during which it is locked.
      pathlib.Path(self.directory, f"{number}.spool").touch()
    spool = self._spool()
    self._put(spool, [0])
    spool.flush()
    with open(os.path.join(self.directory, "lock"), "r+b") as lock:
      begins = threading.Thread(target=self._put, args=(spool, [1]))
      begins.start()
      while _can_lock(lock) and begins.is_alive():
        pass
      end, other_end = os.pipe()
      child = os.fork()
      if not child:
        os.close(other_end)
        os.read(end, 1)  # Until the parent closes the pipe.
        os._exit(0)
    os.close(end)
    begins.join()
    spool.flush()
    begins = threading.Thread(target=self._put, args=(spool, [2]))
    begins.start()
    begins.join(timeout=20)
    waits = begins.is_alive()
    os.close(other_end)
    os.waitpid(child, 0)
    begins.join()
    self.assertFalse(waits)

  def test_threads_may_put_and_read_at_once(self):
    spool = self._spool(limit=3 * _MIB)
    failures = []

    def work(first):
      try:
        for number in range(first, first + 150):
          self._put(spool, [number], 4000, step=number)
          self._check(spool, [number, first, max(0, number - 3)], 4000)
          if number % 20 == 0:
            spool.flush()
          spool.release(number - 5)
      except BaseException as error:
        failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEmpty(failures)
    self.assertFalse(spool.off)


_WRITER = textwrap.dedent("""
    import sys
    from tests.corpus.storage import spool_test
    from maxtext_olmo.corpus.storage import spool as spool_lib

    directory, limit, first, count = sys.argv[1], *map(int, sys.argv[2:])
    spool = spool_lib.Spool(directory, limit)
    print("started", flush=True)
    for step in range(first, first + count):
      numbers = list(range(8 * step, 8 * step + 8))
      spool.put(spool_test.names_of(numbers, 4000), *spool_test.data_of(numbers, 4000), step=step)
      spool.release(step - 4)
      if step % 3 == 0:
        spool.flush()
    spool.close()
    """)


class ProcessesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path

  def _start(self, limit, first, count):
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, self.directory, *map(str, (limit, first, count))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    return process

  def _check_all(self, count):
    """Checks every range that is there, and returns their number."""
    spool = spool_lib.Spool(self.directory, 1 << 30)
    numbers = list(range(count))
    out = np.zeros(4000 * count, np.uint8)
    served = spool.read(names_of(numbers, 4000), out, 4000 * np.arange(count))
    expected, _ = data_of(numbers, 4000)
    same = (out.reshape(-1, 4000) == expected.reshape(-1, 4000)).all(1)
    np.testing.assert_array_equal(same, served)
    return int(served.sum())

  def test_two_processes_share_one_limit(self):
    limit = 3 * _MIB
    processes = [self._start(limit, first, 200) for first in (0, 200)]
    largest = 0
    while any(process.poll() is None for process in processes):
      try:
        largest = max(largest, size_of(self.directory))
      except FileNotFoundError:
        continue
      time.sleep(0.005)
    for process in processes:
      self.assertEqual(process.communicate()[1], b"")
      self.assertEqual(process.returncode, 0)
    self.assertBetween(largest, _MIB, limit)
    self.assertGreater(self._check_all(3200), 300)

  def test_the_share_of_a_killed_process_is_free_again(self):
    process = self._start(4 * _MIB, 10**6, 10**6)
    while not list(pathlib.Path(self.directory).glob("*.spool")):
      self.assertIsNone(process.poll(), "the process ended early")
      time.sleep(0.005)
    spool = spool_lib.Spool(self.directory, 4 * _MIB)

    def fill(first):
      numbers = range(first, 10**6)
      return next(
          n for n in numbers if not spool.put(names_of([n], 4000), *data_of([n], 4000), step=n)
      )

    half = fill(0)
    self.assertLess(half * 4000, 2 * _MIB)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for path in files_in(self.directory):
      os.utime(path, (time.time() - 61,) * 2)
    self.assertGreater(fill(half), 1.8 * half)

  def test_what_a_killed_process_completed_is_used_and_the_rest_is_removed(self):
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2):
      process = self._start(64 * _MIB, 0, 2000)
      time.sleep(delay)
      process.send_signal(signal.SIGKILL)
      process.communicate()
      self._check_all(400)
    # The next process that writes removes what the killed ones left.
    spool = spool_lib.Spool(self.directory, 64 * _MIB)
    self.assertTrue(spool.put(names_of([99999]), *data_of([99999])))
    self.assertLen(list(pathlib.Path(self.directory).glob("*.part")), 1)
    spool.close()
    self.assertEmpty(list(pathlib.Path(self.directory).glob("*.part")))


if __name__ == "__main__":
  absltest.main()
