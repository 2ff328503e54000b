"""Tests of reading bytes from local files."""

import concurrent.futures
import contextlib
import gc
import multiprocessing
import os
import pathlib
import pickle
import resource
import subprocess
import sys
import threading

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import local
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from tests import distributed

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
  def test_each_place_holds_the_bytes_asked_for(self, ranges, gap, shuffle, max_open_files):
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
  def test_neighbours_in_the_file_and_in_the_buffer_are_one_read(self, expected, gap):
    sources, offsets = np.array([0, 0, 1, 0]), np.array([0, 10, 30, 995])
    sizes = np.array([10, 985, 10, 10])
    places = np.array([0, 10, 1100, 995 + gap])
    # The message names the range of the read that failed, which passes the end of the file.
    with self.assertRaisesRegex(CorpusError, f"bytes {expected} were expected"):
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

  def test_many_threads_with_two_open_files_read_what_is_there(self):
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
    # Two in the cache, and what each thread holds: the file it reads, and one that it opens or lets
    # go of.
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
    # Held, as a thread that is opening a file would hold it; no public call stays in there.
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
        r"0\.npy is too short: bytes 990 to 1054 were expected, but it ends at byte 1000\. It was"
        r" cut off or replaced"
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
    with self.assertRaisesRegex(
        CorpusError, "bytes 500 to 564 were expected, but it ends at byte 510"
    ):
      _fill(storage, self.paths, [0], [500], 64)

  @parameterized.parameters(1, 7, 100, 1000, 5000)
  def test_pieces_make_up_what_read_returns(self, piece_bytes):
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
    self.assertFalse(storage.wants_concurrency)

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

  def test_what_is_no_regular_file_is_refused(self):
    os.mkfifo(self.dir / "fifo")
    storage = storage_lib.LocalStorage()
    for path in (str(self.dir), str(self.dir / "fifo"), "/dev/zero"):
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        _fill(storage, [path], [0], [2], 4)
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        storage.read(path, 2, 4)
      with self.assertRaisesRegex(CorpusError, f"^{path} is not a regular file"):
        storage.pin([path], np.array([0]))

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

  def test_closing_closes_the_files_and_leaves_it_usable(self):
    path = self.dir / "file"
    path.write_bytes(b"abcdefgh")
    storage = storage_lib.LocalStorage()
    for _ in range(2):
      self.assertEqual(_fill(storage, [str(path)], [0], [2], 4), b"cdef")
      self.assertEqual(_open_files_below(self.dir), 1)
      storage.close()
      self.assertEqual(_open_files_below(self.dir), 0)

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


_COUNT = 12


class OpenFilesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.paths = [str(self.dir / f"{i}.npy") for i in range(_COUNT)]
    for i, path in enumerate(self.paths):
      pathlib.Path(path).write_bytes(bytes([i]))

  def _open_here(self):
    names = []
    for name in os.listdir("/proc/self/fd"):
      try:
        names.append(os.readlink(f"/proc/self/fd/{name}"))
      except OSError:
        continue
    return sum(name.startswith(str(self.dir)) for name in names)

  def _check(self, pinned, sources):
    descriptors = pinned.descriptors[sources].tolist()
    self.assertEqual([os.pread(fd, 1, 0)[0] for fd in descriptors], list(sources))

  def test_sources_get_the_descriptors_of_their_files(self):
    files, rng = local.OpenFiles(None), np.random.default_rng(0)
    for _ in range(20):
      sources = rng.integers(0, _COUNT, 8)
      self._check(files.pin(self.paths, sources), sources)
    self.assertEqual(self._open_here(), len(files))

  def test_where_all_files_may_be_open_none_is_opened_twice(self):
    files = local.OpenFiles(None)
    everything = np.arange(_COUNT)
    first = files.pin(self.paths, everything).descriptors.copy()
    np.testing.assert_array_equal(files.pin(self.paths, everything).descriptors, first)
    self.assertEqual(self._open_here(), _COUNT)

  def test_files_that_are_open_already_are_taken_over(self):
    files = local.OpenFiles(None)
    alone = [files.get(path).fd for path in self.paths[:4]]
    pinned = files.pin(self.paths, np.array([0, 3, 5]))
    self.assertEqual(pinned.descriptors[[0, 3]].tolist(), [alone[0], alone[3]])
    self.assertEqual(self._open_here(), 5)

  def test_where_some_may_be_open_the_others_are_closed_once_nobody_holds_them(self):
    files = local.OpenFiles(5)
    held = files.pin(self.paths, np.array([0, 1, 2, 3, 0]))
    for first in range(4, 10, 2):
      sources = np.array([first, first + 1])
      self._check(files.pin(self.paths, sources), sources)
    self._check(held, [0, 1, 2, 3, 0])
    del held
    self.assertEqual(self._open_here(), 5)

  def test_more_files_than_may_be_open_are_refused(self):
    self.assertIsNone(local.OpenFiles(2).pin(self.paths, np.arange(3)))

  def test_another_list_of_paths_is_another_corpus(self):
    files = local.OpenFiles(None)
    files.pin(self.paths, np.arange(_COUNT))
    descriptors = files.pin(self.paths[::-1], np.array([0, 1])).descriptors.tolist()
    found = [os.pread(fd, 1, 0)[0] for fd in descriptors[:2]]
    self.assertEqual(found, [_COUNT - 1, _COUNT - 2])

  def test_a_missing_file_is_named(self):
    files = local.OpenFiles(None)
    with self.assertRaisesRegex(FileNotFoundError, "/no/x"):
      files.pin([*self.paths, "/no/x"], np.array([0, _COUNT]))

  def test_those_without_a_number_share_what_the_process_can_spare(self):
    one = local.OpenFiles(None)
    gc.collect()
    before = local._room_for(one)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    self.assertLessEqual(before, 0.75 * soft)
    other = local.OpenFiles(None)
    other.pin(self.paths, np.arange(_COUNT))
    self.assertEqual(local._room_for(one), before - _COUNT)
    del other
    gc.collect()
    self.assertEqual(local._room_for(one), before)

  def test_a_low_limit_of_the_process_is_kept_and_files_are_opened_again(self):
    # Ten names for each file.
    many = [f"{self.dir}/{'./' * k}{i}.npy" for i in range(_COUNT) for k in range(10)]
    code = (
        "import os, resource, numpy as np\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from maxtext_olmo.corpus.storage import local\n"
        f"many = {many!r}\n"
        "files = local.OpenFiles(None)\n"
        "for step in range(60):\n"
        "  ids = (np.arange(8) + 8 * step) % len(many)\n"
        "  pinned = files.pin(many, ids)\n"
        "  for fd, i in zip(pinned.descriptors[ids].tolist(), ids.tolist()):\n"
        "    if os.pread(fd, 1, 0)[0] != i // 10: raise SystemExit('wrong file')\n"
        "print(len(many), len(files), len(os.listdir('/proc/self/fd')))\n"
    )
    done = distributed.run_python(code)
    self.assertEqual(done.returncode, 0, done.stderr)
    many, kept, held = map(int, done.stdout.split())
    self.assertEqual(many, 10 * _COUNT)
    self.assertBetween(kept, 16, 48)
    self.assertLess(held, 64)

  def test_where_descriptors_run_out_while_not_all_files_fit_nothing_is_pinned(self):
    code = (
        "import resource, numpy as np\n"
        "from maxtext_olmo.corpus.storage import local\n"
        f"paths = {self.paths!r}\n"
        "files = local.OpenFiles(len(paths) - 1)\n"
        "others = []\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "try:\n"
        "  while True: others.append(open(paths[0]))\n"
        "except OSError: pass\n"
        "del others[:2]\n"
        "print(files.pin(paths, np.arange(6)))\n"
        "print((files.pin(paths, np.arange(2)).descriptors >= 0).sum())\n"
    )
    done = distributed.run_python(code)
    self.assertEqual(done.stdout, "None\n2\n", done.stderr)

  def test_where_descriptors_run_out_all_files_are_dropped(self):
    code = (
        "import errno, resource, numpy as np\n"
        "from maxtext_olmo.corpus.storage import local\n"
        f"paths = {self.paths!r}\n"
        "files = local.OpenFiles(1000)\n"
        "files.pin(paths, np.arange(6))\n"
        "others = []\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "try:\n"
        "  while True: others.append(open(paths[0]))\n"
        "except OSError: pass\n"
        "while files.pin(paths, np.array([7, 8])) is None: print('again')\n"
        "print(len(files))\n"
    )
    done = distributed.run_python(code)
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout, "again\n2\n")

  def test_threads_share_a_table(self):
    files, wrong = local.OpenFiles(None), []
    ready = threading.Barrier(6)

    def work(seed):
      rng = np.random.default_rng(seed)
      ready.wait()
      for _ in range(200):
        sources = rng.integers(0, _COUNT, 6)
        pinned = files.pin(self.paths, sources)
        got = [os.pread(fd, 1, 0)[0] for fd in pinned.descriptors[sources].tolist()]
        wrong.extend([got] if got != sources.tolist() else [])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEmpty(wrong)
    self.assertEqual(self._open_here(), _COUNT)


if __name__ == "__main__":
  absltest.main()
