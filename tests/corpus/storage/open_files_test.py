"""Tests of the cache of open files."""

import gc
import os
import pathlib
import resource
import threading

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus.storage import open_files
from tests import distributed

STARTS_PROCESSES = True

_COUNT = 12


class FileIdTest(absltest.TestCase):

  def test_files_differ_by_size_or_time_or_by_both_inode_and_change_time(self):
    file = open_files.FileId(size=10, mtime_ns=20, inode=30, ctime_ns=40)
    self.assertTrue(file.matches(file))
    # A mount of an object store that assigned a new inode.
    self.assertTrue(file.matches(file._replace(inode=31)))
    # Another mode, or another link.
    self.assertTrue(file.matches(file._replace(ctime_ns=41)))
    self.assertFalse(file.matches(file._replace(inode=31, ctime_ns=41)))
    self.assertFalse(file.matches(file._replace(size=11)))
    self.assertFalse(file.matches(file._replace(mtime_ns=21)))


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
    files, rng = open_files.OpenFiles(None), np.random.default_rng(0)
    for _ in range(20):
      sources = rng.integers(0, _COUNT, 8)
      self._check(files.pin(self.paths, sources), sources)
    self.assertEqual(self._open_here(), len(files))

  def test_no_file_is_opened_twice_if_all_may_be_open(self):
    files = open_files.OpenFiles(None)
    everything = np.arange(_COUNT)
    first = files.pin(self.paths, everything).descriptors.copy()
    np.testing.assert_array_equal(files.pin(self.paths, everything).descriptors, first)
    self.assertEqual(self._open_here(), _COUNT)

  def test_files_that_are_already_open_are_reused(self):
    files = open_files.OpenFiles(None)
    alone = [files.get(path).fd for path in self.paths[:4]]
    pinned = files.pin(self.paths, np.array([0, 3, 5]))
    self.assertEqual(pinned.descriptors[[0, 3]].tolist(), [alone[0], alone[3]])
    self.assertEqual(self._open_here(), 5)

  def test_files_beyond_the_limit_are_closed_once_unreferenced(self):
    files = open_files.OpenFiles(5)
    held = files.pin(self.paths, np.array([0, 1, 2, 3, 0]))
    for first in range(4, 10, 2):
      sources = np.array([first, first + 1])
      self._check(files.pin(self.paths, sources), sources)
    self._check(held, [0, 1, 2, 3, 0])
    del held
    self.assertEqual(self._open_here(), 5)

  def test_pinning_more_files_than_may_be_open_returns_none(self):
    self.assertIsNone(open_files.OpenFiles(2).pin(self.paths, np.arange(3)))

  def test_another_list_of_paths_is_another_corpus(self):
    files = open_files.OpenFiles(None)
    files.pin(self.paths, np.arange(_COUNT))
    descriptors = files.pin(self.paths[::-1], np.array([0, 1])).descriptors.tolist()
    found = [os.pread(fd, 1, 0)[0] for fd in descriptors[:2]]
    self.assertEqual(found, [_COUNT - 1, _COUNT - 2])

  def test_a_missing_file_is_named(self):
    files = open_files.OpenFiles(None)
    with self.assertRaisesRegex(FileNotFoundError, "/no/x"):
      files.pin([*self.paths, "/no/x"], np.array([0, _COUNT]))

  def test_caches_without_a_limit_share_what_the_process_can_spare(self):
    one = open_files.OpenFiles(None)
    gc.collect()
    before = open_files._room_for(one)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    self.assertLessEqual(before, 0.75 * soft)
    other = open_files.OpenFiles(None)
    other.pin(self.paths, np.arange(_COUNT))
    self.assertEqual(open_files._room_for(one), before - _COUNT)
    del other
    gc.collect()
    self.assertEqual(open_files._room_for(one), before)

  def test_a_low_process_limit_is_respected_and_files_are_reopened(self):
    # Ten names for each file.
    many = [f"{self.dir}/{'./' * k}{i}.npy" for i in range(_COUNT) for k in range(10)]
    code = (
        "import os, resource, numpy as np\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from maxtext_olmo.corpus.storage import open_files\n"
        f"many = {many!r}\n"
        "files = open_files.OpenFiles(None)\n"
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

  def test_nothing_is_pinned_if_descriptors_run_out_and_not_all_files_fit(self):
    code = (
        "import resource, numpy as np\n"
        "from maxtext_olmo.corpus.storage import open_files\n"
        f"paths = {self.paths!r}\n"
        "files = open_files.OpenFiles(len(paths) - 1)\n"
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

  def test_all_files_are_dropped_if_descriptors_run_out(self):
    code = (
        "import errno, resource, numpy as np\n"
        "from maxtext_olmo.corpus.storage import open_files\n"
        f"paths = {self.paths!r}\n"
        "files = open_files.OpenFiles(1000)\n"
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
    files, wrong = open_files.OpenFiles(None), []
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
