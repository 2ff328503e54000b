"""Tests of reading bytes from local files."""

import concurrent.futures
import contextlib
import copy
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

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

STARTS_PROCESSES = True


def _open_paths(directory: pathlib.Path) -> list[str]:
  """Returns the files below a directory that this process has open."""
  found = []
  for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # Closed since it was listed.
      found.append(os.readlink(f"/proc/self/fd/{fd}"))
  return sorted(path for path in found if path.startswith(str(directory)))


def _open_files_below(directory: pathlib.Path) -> int:
  return len(_open_paths(directory))


def _fill(storage, paths, sources, offsets, width) -> bytes:
  """Reads ranges of `width` bytes, one after the other."""
  count = len(sources)
  out = np.zeros(count * width, np.uint8)
  sizes = np.full(count, width)
  storage.fill(paths, np.array(sources), np.array(offsets), sizes, out, np.arange(count) * width)
  return out.tobytes()


def _read_in_child(storage, paths, file_ids, offsets, width, queue) -> None:
  queue.put((storage.max_open_files, _fill(storage, paths, file_ids, offsets, width)))


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
      ranges=st.lists(
          st.tuples(st.integers(0, 9), st.integers(0, 900), st.integers(0, 100)), max_size=40
      ),
      gap=st.integers(0, 3),
      shuffle=st.randoms(),
      max_open_files=st.integers(1, 12),
  )
  @hypothesis.settings(max_examples=100, deadline=None)
  def test_each_place_receives_the_requested_bytes(self, ranges, gap, shuffle, max_open_files):
    expected, places = bytearray(b"x" * gap), []
    for source, offset, size in ranges:
      places.append(len(expected))
      expected += self.contents[source][offset : offset + size] + b"x" * gap
    lines = [(*line, place) for line, place in zip(ranges, places)]
    shuffle.shuffle(lines)
    sources, offsets, sizes, places = np.array(lines, np.int64).reshape(-1, 4).T
    out = np.full(len(expected), ord("x"), np.uint8)
    storage = storage_lib.LocalStorage(max_open_files)
    storage.fill(self.paths, sources.astype(np.int32), offsets, sizes, out, places)
    self.assertEqual(out.tobytes(), bytes(expected))

  @parameterized.parameters(("0 to 1005", 0), ("995 to 1005", 1))
  def test_ranges_adjacent_in_file_and_buffer_are_one_read(self, expected, gap):
    sources, offsets = np.array([0, 0, 1, 0]), np.array([0, 10, 30, 995])
    sizes = np.array([10, 985, 10, 10])
    places = np.array([0, 10, 1100, 995 + gap])
    # The message names the range of the read that failed, which passes the end of the file.
    with self.assertRaisesRegex(CorpusError, f"expected bytes {expected}"):
      storage_lib.LocalStorage().fill(
          self.paths, sources, offsets, sizes, np.zeros(1200, np.uint8), places
      )

  def test_no_more_files_stay_open_than_allowed(self):
    storage = storage_lib.LocalStorage(3)
    _fill(storage, self.paths, range(10), [0] * 10, 4)
    self.assertEqual(_open_files_below(self.dir), 3)
    del storage
    self.assertEqual(_open_files_below(self.dir), 0)

  def test_the_least_recently_used_file_is_closed_first(self):
    storage = storage_lib.LocalStorage(2)
    for source in (0, 1, 0, 2):
      _fill(storage, self.paths, [source], [0], 4)
    self.assertEqual(_open_paths(self.dir), [self.paths[0], self.paths[2]])

  def test_many_threads_read_correctly_with_two_open_files(self):
    storage = storage_lib.LocalStorage(2)
    barrier = threading.Barrier(8)

    def hammer(seed: int) -> int:
      rng = np.random.default_rng(seed)
      barrier.wait()
      most = 0
      for _ in range(150):
        file_ids, offsets = rng.integers(0, 10, 16), rng.integers(0, 900, 16)
        if _fill(storage, self.paths, file_ids, offsets, 64) != self._expected(
            file_ids, offsets, 64
        ):
          raise AssertionError("wrong bytes")
        most = max(most, _open_files_below(self.dir))
      return most

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      most = max(pool.map(hammer, range(8)))
    # Two in the cache, and those of each thread: the file it reads, and one that it opens or
    # closes.
    self.assertLessEqual(most, 2 + 2 * 8)
    self.assertEqual(_open_files_below(self.dir), 2)

  @parameterized.parameters("fork", "spawn")
  def test_a_child_process_reads_too(self, method):
    storage = storage_lib.LocalStorage(2)
    for source in (0, 1):
      _fill(storage, self.paths, [source], [0], 4)
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    file_ids, offsets = np.array([0, 5, 0, 9]), np.array([7, 1, 2, 3])
    # Held as by a thread that is opening a file; no public call stays in there.
    with storage._files._lock:
      child = context.Process(
          target=_read_in_child, args=(storage, self.paths, file_ids, offsets, 50, queue)
      )
      child.start()
      result = queue.get()
      child.join()
    self.assertEqual(result, (2, self._expected(file_ids, offsets, 50)))
    self.assertEqual(child.exitcode, 0)
    self.assertEqual(_fill(storage, self.paths, [1], [0], 4), self.contents[1][:4])

  def test_pickling_keeps_the_limit_and_no_files(self):
    storage = storage_lib.LocalStorage(7)
    _fill(storage, self.paths, [0], [0], 4)
    again = pickle.loads(pickle.dumps(storage))
    self.assertEqual(again.max_open_files, 7)
    self.assertEqual(_open_paths(self.dir), self.paths[:1])
    self.assertEqual(_fill(again, self.paths, [0], [0], 4), self.contents[0][:4])
    self.assertEqual(repr(again), "LocalStorage(max_open_files=7)")
    self.assertIsInstance(again, storage_lib.Storage)
    self.assertIsNone(pickle.loads(pickle.dumps(storage_lib.LocalStorage())).max_open_files)

  def test_ranges_beyond_four_gigabytes(self):
    path = self.dir / "big"
    with open(path, "wb") as file:
      file.seek((6 << 30) - 3)
      file.write(b"end")
    storage = storage_lib.LocalStorage()
    found = _fill(storage, [str(path)], [0, 0], [(6 << 30) - 4, 0], 4)
    self.assertEqual(found, b"\0end\0\0\0\0")
    self.assertEqual(storage.read(str(path), (6 << 30) - 4), b"\0end")
    self.assertEqual(storage.size(str(path)), 6 << 30)

  def test_a_short_file_is_an_error_with_range_and_size(self):
    message = (
        r"0\.npy is too short: expected bytes 990 to 1054, but it ends at byte 1000\. It was"
        r" truncated or replaced"
    )
    storage = storage_lib.LocalStorage()
    with self.assertRaisesRegex(CorpusError, message):
      _fill(storage, self.paths, [0, 0], [990, 0], 64)
    with self.assertRaisesRegex(CorpusError, message):
      storage.read(self.paths[0], 990, 64)
    with self.assertRaisesRegex(CorpusError, message):
      list(storage.pieces(self.paths[0], 0, 1054, piece_bytes=990))

  def test_a_file_truncated_while_it_is_open_is_an_error(self):
    storage = storage_lib.LocalStorage()
    _fill(storage, self.paths, [0], [500], 64)
    os.truncate(self.paths[0], 510)
    with self.assertRaisesRegex(CorpusError, "expected bytes 500 to 564, but it ends at byte 510"):
      _fill(storage, self.paths, [0], [500], 64)

  @parameterized.parameters(1, 7, 100, 1000, 5000)
  def test_pieces_concatenate_to_the_result_of_read(self, piece_bytes):
    storage = storage_lib.LocalStorage()
    for offset, size in ((0, None), (300, None), (1000, None), (2000, None), (17, 400), (17, 0)):
      end = None if size is None else offset + size
      expected = self.contents[0][offset:end]
      self.assertEqual(storage.read(self.paths[0], offset, size), expected)
      pieces = list(storage.pieces(self.paths[0], offset, size, piece_bytes))
      self.assertEqual(b"".join(pieces), expected)
      self.assertTrue(all(len(piece) == piece_bytes for piece in pieces[:-1]))
      self.assertTrue(all(pieces))
    self.assertEqual(_open_files_below(self.dir), 0)

  def test_read_sees_a_file_that_replaced_another(self):
    storage = storage_lib.LocalStorage()
    _fill(storage, self.paths, [0], [0], 4)
    storage.read(self.paths[0])
    (self.dir / "new").write_bytes(b"new")
    os.replace(self.dir / "new", self.paths[0])
    self.assertEqual(storage.read(self.paths[0]), b"new")

  def test_exists_and_size(self):
    storage = storage_lib.LocalStorage()
    self.assertTrue(storage.exists(self.paths[3]))
    self.assertFalse(storage.exists("/no/x"))
    self.assertEqual(storage.size(self.paths[3]), 1030)
    self.assertFalse(storage.wants_concurrency(self.paths))

  def test_pinned_descriptors_stay_open_while_they_are_held(self):
    storage = storage_lib.LocalStorage(2)
    pinned = storage.pin(self.paths, np.array([4, 7, 4]))
    _fill(storage, self.paths, range(4), [0] * 4, 4)
    self.assertEqual(pinned.descriptors.dtype, np.int32)
    found = [os.pread(fd, 4, 0) for fd in pinned.descriptors[[4, 7, 4]].tolist()]
    self.assertEqual(found, [self.contents[i][:4] for i in (4, 7, 4)])
    del pinned
    self.assertEqual(_open_files_below(self.dir), 2)
    self.assertIsNone(storage.pin(self.paths, np.arange(3)))
    with self.assertRaisesRegex(CorpusError, "^Cannot open /no/x: No such file"):
      storage.pin(["/no/x"], np.array([0]))

  def test_a_missing_file_is_an_error_that_says_what_to_do(self):
    storage = storage_lib.LocalStorage()
    for read in (
        lambda: _fill(storage, ["/no/x"], [0], [0], 4),
        lambda: storage.read("/no/x"),
        lambda: list(storage.pieces("/no/x")),
    ):
      with self.assertRaisesRegex(
          CorpusError, "^Cannot open /no/x: No such file or directory. If the corpus has moved"
      ):
        read()
    with self.assertRaisesRegex(
        CorpusError, "^Cannot find the size of /no/x: No such file or directory. If the corpus"
    ):
      storage.size("/no/x")

  def test_a_missing_file_is_a_file_not_found_error_too(self):
    for read in (storage_lib.LocalStorage().size, storage_lib.LocalStorage().read):
      with self.assertRaises(FileNotFoundError) as raised:
        read("/no/x")
      self.assertIsInstance(pickle.loads(pickle.dumps(raised.exception)), CorpusError)

  def test_a_file_too_large_for_memory_is_not_read_whole(self):
    path = self.dir / "sparse"
    with open(path, "wb") as file:
      file.truncate(1 << 40)
    storage = storage_lib.LocalStorage()
    with self.assertRaisesRegex(CorpusError, f"^{path} has {1 << 40} bytes"):
      storage.read(str(path))
    self.assertEqual(storage.read(str(path), 7, 2), bytes(2))

  def test_a_path_that_is_not_a_regular_file_is_rejected(self):
    os.mkfifo(self.dir / "fifo")
    storage = storage_lib.LocalStorage()
    for path in (str(self.dir), str(self.dir / "fifo"), "/dev/zero"):
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        _fill(storage, [path], [0], [2], 4)
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        storage.read(path, 2, 4)
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        storage.pin([path], np.array([0]))
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        storage.size(path)

  @parameterized.parameters("a\0b", "\ud800")
  def test_an_impossible_file_name_is_rejected(self, path):
    storage = storage_lib.LocalStorage()
    for read in (
        lambda: storage.size(path),
        lambda: storage.read(path),
        lambda: storage.pin([path], np.array([0])),
        lambda: _fill(storage, [path], [0], [0], 4),
    ):
      with self.assertRaisesRegex(CorpusError, "is not a path"):
        read()
    self.assertFalse(storage.exists(path))

  def test_a_file_that_cannot_be_looked_for_may_exist(self):
    with self.assertRaisesRegex(CorpusError, "Cannot look for .*: File name too long"):
      storage_lib.LocalStorage().exists(str(self.dir / ("x" * 300)))

  @parameterized.named_parameters(
      ("itself", lambda storage: storage),
      ("a_copy", copy.copy),
      ("one_in_a_worker", lambda storage: pickle.loads(pickle.dumps(storage))),
  )
  def test_a_file_replaced_after_its_size_was_read_is_rejected(self, of):
    storage = storage_lib.LocalStorage()
    for path in self.paths:
      storage.size(path)
    storage = of(storage)
    replacement = self.dir / "replacement"
    replacement.write_bytes(bytes(len(self.contents[3])))
    status = os.stat(self.paths[3])
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(replacement, self.paths[3])
    with self.assertRaisesRegex(CorpusError, r"3\.npy was replaced or changed"):
      _fill(storage, self.paths, [3], [0], 4)
    with self.assertRaisesRegex(CorpusError, r"3\.npy was replaced or changed"):
      storage.pin(self.paths, np.array([2, 3]))
    self.assertEqual(_fill(storage, self.paths, [2], [0], 4), self.contents[2][:4])

  def test_a_file_that_was_only_linked_or_made_read_only_is_the_same(self):
    storage = storage_lib.LocalStorage()
    storage.size(self.paths[0])
    os.link(self.paths[0], self.dir / "link")
    os.chmod(self.paths[0], 0o400)
    self.assertEqual(_fill(storage, self.paths, [0], [0], 4), self.contents[0][:4])

  def test_a_file_that_is_opened_again_must_be_the_same(self):
    first, second = (str(self.dir / name) for name in ("first", "second"))
    for path in (first, second):
      pathlib.Path(path).write_bytes(bytes(64))
    storage = storage_lib.LocalStorage(max_open_files=1)
    _fill(storage, [first, second], [0, 1], [0, 0], 4)
    replacement = self.dir / "replacement"
    replacement.write_bytes(b"x" * 64)
    os.replace(replacement, first)
    for read in (
        lambda: _fill(storage, [first, second], [0], [0], 4),
        lambda: storage.pin([first, second], np.array([0])),
    ):
      with self.assertRaisesRegex(CorpusError, "first was replaced or changed while it was in use"):
        read()
    _fill(storage, [first, second], [1], [0], 4)

  def test_close_closes_the_files_and_the_storage_remains_usable(self):
    path = self.dir / "file"
    path.write_bytes(b"abcdefgh")
    storage = storage_lib.LocalStorage()
    for _ in range(2):
      self.assertEqual(_fill(storage, [str(path)], [0], [2], 4), b"cdef")
      self.assertEqual(_open_files_below(self.dir), 1)
      storage.close()
      self.assertEqual(_open_files_below(self.dir), 0)

  def test_the_cache_frees_its_descriptors_when_they_run_out(self):
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
        "storage, out, zero = LocalStorage(1000), np.zeros(8, np.uint8), np.zeros(1, np.int64)\n"
        "def read(i):\n"
        "  storage.fill(paths, np.array([i]), zero, np.array([8]), out, zero)\n"
        "  assert (out == i).all()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "for i in list(range(30)) * 2: read(i)\n"
        "storage = LocalStorage(1000)\n"
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
      (np.zeros(8, np.uint16),),
      (np.zeros((2, 4), np.uint8),),
      (np.zeros(16, np.uint8)[::2],),
  )
  def test_the_buffer_must_be_plain_bytes(self, out):
    zero = np.zeros(1, np.int64)
    with self.assertRaisesRegex(ValueError, "contiguous array of uint8 with one dimension"):
      storage_lib.LocalStorage().fill(self.paths, zero, zero, np.array([4]), out, zero)

  @parameterized.parameters((4, 5), (-1, 4), (0, -1))
  def test_ranges_must_fit_the_buffer(self, place, size):
    zero = np.zeros(1, np.int64)
    with self.assertRaisesRegex(ValueError, "outside the 8 bytes"):
      storage_lib.LocalStorage().fill(
          self.paths, zero, zero, np.array([size]), np.zeros(8, np.uint8), np.array([place])
      )

  def test_at_least_one_file_must_be_open(self):
    with self.assertRaisesRegex(ConfigError, "max_open_files must be at least 1, got 0"):
      storage_lib.LocalStorage(0)


if __name__ == "__main__":
  absltest.main()
