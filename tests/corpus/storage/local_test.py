"""Tests of reading bytes from local files."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus.storage import local as storage_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

STARTS_PROCESSES = True


def _open_files_below(directory: pathlib.Path) -> int:
  count = 0
  for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # Closed since it was listed.
      count += os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory))
  return count


def _read_in_child(storage, paths, file_ids, offsets, width, queue) -> None:
  out = np.zeros((len(file_ids), width), np.uint8)
  storage.fill(paths, file_ids, offsets, out)
  queue.put((storage.max_open_files, out.tobytes()))


class LocalStorageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    rng = np.random.default_rng(0)
    self.contents = [rng.bytes(1000 + 10 * i) for i in range(10)]
    self.paths = []
    for i, content in enumerate(self.contents):
      (self.dir / f"{i}.npy").write_bytes(content)
      self.paths.append(str(self.dir / f"{i}.npy"))

  def _expected(self, file_ids, offsets, width) -> bytes:
    return b"".join(self.contents[f][o : o + width] for f, o in zip(file_ids, offsets))

  @hypothesis.given(
      rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 900)), max_size=40),
      width=st.integers(0, 100),
      max_open_files=st.integers(1, 12),
  )
  @hypothesis.settings(max_examples=100, deadline=None)
  def test_rows_hold_the_bytes_asked_for(self, rows, width, max_open_files):
    file_ids = np.array([f for f, _ in rows], np.int64)
    offsets = np.array([o for _, o in rows], np.int64)
    out = np.zeros((len(rows), width), np.uint8)
    storage_lib.LocalStorage(max_open_files).fill(self.paths, file_ids, offsets, out)
    self.assertEqual(out.tobytes(), self._expected(file_ids, offsets, width))

  def test_neighbours_in_the_file_and_in_the_batch_are_read_together(self):
    file_ids = np.array([0, 0, 0, 1, 0, 0])
    offsets = np.array([0, 10, 20, 30, 40, 30])
    out = np.zeros((6, 10), np.uint8)
    storage_lib.LocalStorage().fill(self.paths, file_ids, offsets, out)
    self.assertEqual(out.tobytes(), self._expected(file_ids, offsets, 10))

  def test_no_more_files_stay_open_than_allowed(self):
    storage = storage_lib.LocalStorage(3)
    out = np.zeros((10, 4), np.uint8)
    storage.fill(self.paths, np.arange(10), np.zeros(10, np.int64), out)
    self.assertEqual(_open_files_below(self.dir), 3)
    del storage
    self.assertEqual(_open_files_below(self.dir), 0)

  def test_the_least_recently_used_file_is_closed_first(self):
    storage = storage_lib.LocalStorage(2)
    out = np.zeros((1, 4), np.uint8)
    for file_id in (0, 1, 0, 2):
      storage.fill(self.paths, np.array([file_id]), np.array([0]), out)
    self.assertEqual(list(storage._files._files), [self.paths[0], self.paths[2]])

  def test_many_threads_with_two_open_files_read_what_is_there(self):
    storage = storage_lib.LocalStorage(2)
    barrier = threading.Barrier(8)

    def hammer(seed: int) -> int:
      rng = np.random.default_rng(seed)
      barrier.wait()
      most = 0
      for _ in range(150):
        file_ids, offsets = rng.integers(0, 10, 16), rng.integers(0, 900, 16)
        out = np.zeros((16, 64), np.uint8)
        storage.fill(self.paths, file_ids, offsets, out)
        if out.tobytes() != self._expected(file_ids, offsets, 64):
          raise AssertionError("wrong bytes")
        most = max(most, _open_files_below(self.dir))
      return most

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      most = max(pool.map(hammer, range(8)))
    # Two in the cache, and what each thread holds: the file it reads, and one that it opens or lets
    # go of.
    self.assertLessEqual(most, 2 + 2 * 8)
    self.assertEqual(_open_files_below(self.dir), 2)

  @parameterized.parameters("fork", "spawn")
  def test_a_child_process_reads_too(self, method):
    storage = storage_lib.LocalStorage(2)
    out = np.zeros((1, 4), np.uint8)
    for file_id in (0, 1):
      storage.fill(self.paths, np.array([file_id]), np.array([0]), out)
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    file_ids, offsets = np.array([0, 5, 0, 9]), np.array([7, 1, 2, 3])
    # Held, as a thread that is in the middle of a read would hold it.
    with storage._files._lock:
      child = context.Process(
          target=_read_in_child, args=(storage, self.paths, file_ids, offsets, 50, queue)
      )
      child.start()
      result = queue.get()
      child.join()
    self.assertEqual(result, (2, self._expected(file_ids, offsets, 50)))
    self.assertEqual(child.exitcode, 0)
    storage.fill(self.paths, np.array([1]), np.array([0]), out)
    self.assertEqual(out.tobytes(), self.contents[1][:4])

  def test_pickling_keeps_the_limit_and_no_files(self):
    storage = storage_lib.LocalStorage(7)
    storage.fill(self.paths, np.array([0]), np.array([0]), np.zeros((1, 4), np.uint8))
    again = pickle.loads(pickle.dumps(storage))
    self.assertEqual(again.max_open_files, 7)
    self.assertEmpty(again._files._files)
    self.assertEqual(repr(again), "LocalStorage(max_open_files=7)")
    self.assertIsInstance(again, storage_lib.Storage)
    self.assertIsNone(pickle.loads(pickle.dumps(storage_lib.LocalStorage())).max_open_files)

  def test_ranges_beyond_four_gigabytes(self):
    path = self.dir / "big"
    with open(path, "wb") as file:
      file.seek((6 << 30) - 3)
      file.write(b"end")
    out = np.zeros((2, 4), np.uint8)
    storage = storage_lib.LocalStorage()
    storage.fill([str(path)], np.array([0, 0]), np.array([(6 << 30) - 4, 0]), out)
    self.assertEqual(out.tobytes(), b"\0end\0\0\0\0")
    self.assertEqual(storage.size(str(path)), 6 << 30)

  @parameterized.parameters(1, 2)
  def test_a_short_file_is_an_error_with_range_and_size(self, rows):
    offsets = np.array([990, 0])[:rows]
    with self.assertRaisesRegex(
        CorpusError,
        r"0\.npy is too short: bytes 990 to 1054 were expected, but it ends at byte 1000\. It was"
        r" cut off or replaced",
    ):
      storage_lib.LocalStorage().fill(
          self.paths, np.zeros(rows, np.int64), offsets, np.zeros((rows, 64), np.uint8)
      )

  def test_a_file_truncated_while_it_is_open_is_an_error(self):
    storage = storage_lib.LocalStorage()
    out = np.zeros((1, 64), np.uint8)
    storage.fill(self.paths, np.array([0]), np.array([500]), out)
    os.truncate(self.paths[0], 510)
    with self.assertRaisesRegex(
        CorpusError, "bytes 500 to 564 were expected, but it ends at byte 510"
    ):
      storage.fill(self.paths, np.array([0]), np.array([500]), out)

  def test_a_missing_file_is_an_error_that_says_what_to_do(self):
    storage = storage_lib.LocalStorage()
    with self.assertRaisesRegex(
        CorpusError, "^Cannot open /no/x: No such file or directory. If the corpus has moved"
    ):
      storage.fill(["/no/x"], np.array([0]), np.array([0]), np.zeros((1, 4), np.uint8))
    with self.assertRaisesRegex(
        CorpusError, "^Cannot look at /no/x: No such file or directory. If the corpus"
    ):
      storage.size("/no/x")

  def test_what_cannot_be_read_is_an_error_with_the_range(self):
    with self.assertRaisesRegex(
        CorpusError, "^Cannot read bytes 2 to 6 of .*: Is a directory. Check the disk"
    ):
      storage_lib.LocalStorage().fill(
          [str(self.dir)], np.array([0]), np.array([2]), np.zeros((1, 4), np.uint8)
      )

  def test_where_descriptors_run_out_the_cache_gives_its_own_back_first(self):
    paths = []
    for i in range(30):
      path = self.dir / f"many-{i}"
      path.write_bytes(bytes([i] * 8))
      paths.append(str(path))
    code = (
        "import resource, numpy as np\n"
        "from maxtext_olmo.corpus.storage.local import LocalStorage\n"
        "from maxtext_olmo.errors import CorpusError\n"
        f"paths = {paths!r}\n"
        "storage, out = LocalStorage(1000), np.zeros((1, 8), np.uint8)\n"
        "def read(i):\n"
        "  storage.fill(paths, np.array([i]), np.array([0]), out)\n"
        "  assert (out == i).all()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "for i in list(range(30)) * 2: read(i)\n"
        "storage._files.forget()\n"
        "others = []\n"
        "try:\n"
        "  while True: others.append(open(paths[0]))\n"
        "except OSError: pass\n"
        "try: read(3)\n"
        "except CorpusError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn("Too many open files. Set olmo_max_open_files", done.stdout)

  @parameterized.parameters(
      (np.zeros((2, 4), np.uint16),),
      (np.zeros(8, np.uint8),),
      (np.zeros((4, 2), np.uint8).T,),
  )
  def test_the_buffer_must_be_plain_bytes(self, out):
    with self.assertRaisesRegex(
        ValueError, "must be a C-ordered array of uint8 with two dimensions"
    ):
      storage_lib.LocalStorage().fill(self.paths, np.array([0, 0]), np.array([0, 0]), out)

  def test_at_least_one_file_must_be_open(self):
    with self.assertRaisesRegex(ConfigError, "max_open_files must be at least 1, got 0"):
      storage_lib.LocalStorage(0)


if __name__ == "__main__":
  absltest.main()
