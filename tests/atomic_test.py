"""Tests of atomic files."""

import os
import pathlib
import pickle
import resource
import stat
import subprocess
import sys
import threading

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import atomic
from maxtext_olmo import errors
from tests import distributed

STARTS_PROCESSES = True


class AtomicTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def test_a_file_takes_its_name_only_when_it_is_whole(self):
    path = self.dir / "x"
    with atomic.atomic_writer(path) as file:
      file.write(b"ab")
      self.assertFalse(path.exists())
    self.assertEqual(path.read_bytes(), b"ab")
    self.assertEqual(os.listdir(self.dir), ["x"])

  def test_an_error_leaves_the_old_file_and_nothing_else(self):
    path = self.dir / "x"
    path.write_text("old")
    with self.assertRaisesRegex(RuntimeError, "broken off"), atomic.atomic_writer(path) as file:
      file.write(b"new")
      raise RuntimeError("broken off")
    self.assertEqual(path.read_text(), "old")
    self.assertEqual(os.listdir(self.dir), ["x"])

  def test_a_complete_file_is_moved_to_its_name(self):
    (self.dir / "x").write_text("new")
    atomic.move(self.dir / "x", self.dir / "a" / "b" / "y")
    self.assertEqual((self.dir / "a" / "b" / "y").read_text(), "new")
    (self.dir / "x").write_text("newer")
    with self.assertRaisesRegex(errors.WriteError, "not a regular file"):
      atomic.move(self.dir / "x", self.dir / "a" / "b")
    atomic.move(self.dir / "x", self.dir / "a" / "b" / "y")
    self.assertEqual((self.dir / "a" / "b" / "y").read_text(), "newer")
    with self.assertRaisesRegex(errors.WriteError, "Cannot write .*z: No such file"):
      atomic.move(self.dir / "x", self.dir / "z")

  def test_a_lock_is_held_by_one_at_a_time(self):
    path = self.dir / "new" / "x"
    steps = []

    def wait_for_lock():
      with atomic.locked(path):
        steps.append("second")

    with atomic.locked(path) as held:
      self.assertTrue(held)
      thread = threading.Thread(target=wait_for_lock)
      thread.start()
      steps.append("first")
    thread.join()
    self.assertEqual(steps, ["first", "second"])

  def test_a_lock_that_is_a_fifo_is_an_error_and_not_a_hang(self):
    os.mkfifo(self.dir / "x.lock")
    with self.assertRaises(OSError), atomic.locked(self.dir / "x"):
      pass

  def test_text_is_written_as_utf8_and_replaces(self):
    path = self.dir / "x"
    atomic.write_atomically(path, b"old")
    atomic.write_atomically(path, "ä")
    self.assertEqual(path.read_bytes(), "ä".encode())

  def test_others_may_read_the_file_as_the_umask_says(self):
    before = os.umask(0o022)
    self.addCleanup(os.umask, before)
    atomic.write_atomically(self.dir / "x", "")
    self.assertEqual(stat.S_IMODE((self.dir / "x").stat().st_mode), 0o644)

  @parameterized.named_parameters(
      ("directory", os.mkdir),
      ("fifo", os.mkfifo),
      ("link_to_device", lambda path: os.symlink("/dev/null", path)),
      ("link_to_itself", lambda path: os.symlink(path, path)),
  )
  def test_only_a_regular_file_is_replaced_or_appended_to(self, make):
    path = str(self.dir / "x")
    make(path)
    before = os.lstat(path)
    with self.assertRaisesRegex(errors.WriteError, "Cannot write .*x: "):
      atomic.write_atomically(path, "new")
    with self.assertRaisesRegex(errors.WriteError, "Cannot write .*x: "):
      atomic.LineWriter(path)
    self.assertEqual(os.lstat(path).st_ino, before.st_ino)
    self.assertEqual(os.listdir(self.dir), ["x"])

  def test_an_impossible_path_is_a_typed_error(self):
    (self.dir / "file").write_text("")
    for path in (self.dir / "a\0b", self.dir / "file" / "x", self.dir / ("x" * 300), "/proc/x"):
      with self.assertRaisesRegex(errors.WriteError, "Cannot write "):
        atomic.write_atomically(path, "new")
      with self.assertRaisesRegex(errors.WriteError, "Cannot write "):
        atomic.LineWriter(path)

  def test_an_error_of_the_block_stays_what_it_is(self):
    with self.assertRaises(errors.CorpusError), atomic.atomic_writer(self.dir / "x"):
      raise errors.MissingFileError("no such file")
    self.assertEmpty(os.listdir(self.dir))

  def test_a_full_disk_is_a_typed_error_with_the_free_space_that_leaves_nothing(self):
    # A limit on the size of files refuses a write as a full disk does, and needs no root.
    found = subprocess.run(
        [sys.executable, "-c", _WRITES, str(self.dir)],
        # Python 3.11 keeps bytecode that the limit has cut off, and then cannot import the module.
        env={**distributed.child_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
        check=False,
    )
    self.assertEqual(found.returncode, 0, found.stderr)
    lines = found.stdout.splitlines()
    self.assertLen(lines, 6)
    for line in lines:
      self.assertRegex(
          line, "Cannot write .*: File too large.* bytes of free space. Free some space"
      )
    self.assertCountEqual(os.listdir(self.dir), ["lines", "old", "orders", "tokens.npy"])
    self.assertEqual((self.dir / "old").read_text(), "old")
    self.assertLessEqual({n.split(".")[-1] for n in os.listdir(self.dir / "orders")}, {"lock"})

  def test_lines_are_appended_after_an_incomplete_line(self):
    path = self.dir / "deep" / "x"
    writer = atomic.LineWriter(path)
    writer.write("a")
    writer.close()
    with path.open("a") as file:
      file.write("hal")
    writer = atomic.LineWriter(path)
    writer.write("b")
    writer.write("c")
    writer.close()
    self.assertEqual(path.read_text(), "a\nhal\nb\nc\n")

  def test_the_error_survives_pickling_and_is_an_os_error(self):
    error = pickle.loads(pickle.dumps(errors.WriteError("Cannot write x")))
    self.assertIsInstance(error, OSError)
    self.assertEqual(str(error), "Cannot write x")


_WRITES = """
import os, sys
import numpy as np
from maxtext_olmo import atomic, errors
from maxtext_olmo.corpus import documents, index_builder
from maxtext_olmo.order import consumed, stored

directory = sys.argv[1]
path = os.path.join(directory, "old")
atomic.write_atomically(path, "old")
lines = atomic.LineWriter(os.path.join(directory, "lines"))

def fill_lines():
  for _ in range(200):
    lines.write("x" * 100)

index = index_builder.build_index(
    [(f"/nowhere/{i}", "a") for i in range(200)], 4, tokenizer="t", dtype="uint16",
    header_reader=lambda path: ("uint16", (4000,)),
)
tokens = os.path.join(directory, "tokens.npy")
np.zeros(4000, np.uint16).tofile(tokens)
small = index_builder.build_index([(tokens, "a")], 4, tokenizer="t", dtype="uint16")
for act in (
    lambda: atomic.write_atomically(path, bytes(20_000)),
    fill_lines,
    lambda: consumed.write_consumed(path, np.zeros(100_000, bool), "f"),
    stored.OrderFile("olmo_core", 10_000, 0, 0, 1, os.path.join(directory, "orders")).open,
    lambda: index_builder.save_index(index, path),
    lambda: documents.build_documents(small, path, 0),
):
  try:
    act()
  except errors.WriteError as error:
    print(error)
"""


if __name__ == "__main__":
  absltest.main()
