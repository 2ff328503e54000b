"""Tests of stored orders' files: built once, whole or not there, and checked."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.order import order_files
from maxtext_olmo.order import shuffle
from tests import distributed

STARTS_PROCESSES = True


def _python(code, *args):
  return subprocess.Popen(
      [sys.executable, "-c", code, *map(str, args)],
      env=distributed.child_environment(),
      stdout=subprocess.PIPE,
      text=True,
  )


_OPEN = """
import json, sys
from maxtext_olmo.order import order_files
array, found = order_files.OrderFile(**json.loads(sys.argv[1])).open()
print(found[0], int(array[0]), int(array[-1]))
"""


class OrderFilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.file = order_files.OrderFile("olmo_core", 1000, 34521, 1, 1, self.directory)
    self.expected = shuffle.shuffled(1000, 34523)

  def open(self, trusted=None):
    array, found = self.file.open(trusted)
    np.testing.assert_array_equal(array, self.expected)
    return found

  def test_it_is_built_when_it_is_first_needed_and_used_from_then_on(self):
    self.assertEmpty(os.listdir(self.directory))
    found = self.open()
    self.assertEqual(self.open(), found)
    names = sorted(os.listdir(self.directory))
    self.assertEqual(names, [os.path.basename(self.file.path) + end for end in ("", ".lock")])

  def test_the_header_says_what_it_is(self):
    self.open()
    data = pathlib.Path(self.file.path).read_bytes()
    self.assertLen(data, 4096 + 4 * 1000)
    header = json.loads(data[:4096])
    self.assertEqual(
        {k: header[k] for k in ("kind", "n", "seed", "epoch", "chunk", "version")},
        {"kind": "olmo_core", "n": 1000, "seed": 34521, "epoch": 1, "chunk": 1, "version": 1},
    )
    self.assertStartsWith(header["checksum"], "xxh3:")

  def test_maxtext_seeds_by_a_hash(self):
    # The first 8 bytes, little endian, of sha256("olmo-shuffle:7:2").
    self.assertEqual(
        dataclasses.replace(self.file, kind="maxtext", seed=7, epoch=2).shuffle_seed,
        5869221157303042828,
    )

  @parameterized.named_parameters(
      ("torn", lambda data: data[:5000]),
      ("longer", lambda data: data + b"1234"),
      ("empty", lambda data: b""),
      ("another_order", lambda data: data.replace(b'"seed": 34521', b'"seed": 34522')),
      ("another_version", lambda data: data.replace(b'"version": 1', b'"version": 2')),
      ("damaged", lambda data: data[:6000] + bytes([data[6000] ^ 1]) + data[6001:]),
      ("no_header", lambda data: bytes(4096) + data[4096:]),
      ("a_json_list", lambda data: b"[]".ljust(4096) + data[4096:]),
  )
  def test_a_wrong_file_is_built_anew(self, change):
    self.open()
    path = pathlib.Path(self.file.path)
    good = path.read_bytes()
    path.write_bytes(change(good))
    self.open()
    self.assertEqual(path.read_bytes(), good)

  def test_a_verified_file_is_trusted_until_it_changes(self):
    found = self.open()
    data = bytearray(pathlib.Path(self.file.path).read_bytes())
    data[5000] ^= 1
    with open(self.file.path, "r+b") as file:
      file.write(data)
    os.utime(self.file.path, ns=(found[2], found[2]))
    # The same inode, size and time: its checksum is not computed again, so the damage goes unseen.
    array, _ = self.file.open(found)
    self.assertNotEqual(array.tolist(), self.expected.tolist())
    os.utime(self.file.path, ns=(found[2], found[2] + 1))
    self.open(found)

  def test_two_processes_that_start_together_build_once(self):
    self.file = dataclasses.replace(self.file, n=3_000_000)
    description = json.dumps(dataclasses.asdict(self.file))
    results = {child.communicate()[0] for child in [_python(_OPEN, description) for _ in range(3)]}
    # One inode: had two of them built, the second rename would have brought another.
    self.assertLen(results, 1)
    self.assertTrue(results.pop().strip())

  def test_a_builder_that_was_killed_leaves_nothing_that_counts(self):
    self.file = dataclasses.replace(self.file, n=30_000_000)
    child = _python(_OPEN, json.dumps(dataclasses.asdict(self.file)))
    pattern = f".{os.path.basename(self.file.path)}.*.tmp"
    while child.poll() is None and not list(pathlib.Path(self.directory).glob(pattern)):
      time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    if not os.path.exists(self.file.path):  # The kill came before the rename.
      self.assertLen(list(pathlib.Path(self.directory).glob(pattern)), 1)
    array, _ = self.file.open()
    self.assertLen(array, self.file.n)
    self.assertEmpty(list(pathlib.Path(self.directory).glob(pattern)))

  def test_building_takes_the_memory_of_one_array_and_reading_none(self):
    code = """
import json, re, sys
import numpy as np
from maxtext_olmo.order import order_files
file = order_files.OrderFile(**json.loads(sys.argv[1]))
def memory(field):
  return int(re.search(field + r':\\s+(\\d+)', open('/proc/self/status').read())[1])
open('/proc/self/clear_refs', 'w').write('5')  # resets VmHWM
base = memory('VmHWM')
array, _ = file.open()
built = memory('VmHWM') - base
before = memory('RssAnon')
for start in range(0, file.n, 1 << 16):
  array[np.arange(start, min(start + 1024, file.n))].astype(np.int64)
print(json.dumps([built, memory('RssAnon') - before]))
"""
    self.file = dataclasses.replace(self.file, n=16_000_000)
    child = _python(code, json.dumps(dataclasses.asdict(self.file)))
    built, read = json.loads(child.communicate()[0])
    one_array = 4 * self.file.n / 1024
    self.assertBetween(built, 0.5 * one_array, 1.3 * one_array)
    self.assertLess(read, 0.1 * one_array)

  def test_a_directory_that_cannot_be_written_is_a_config_error(self):
    blocked = os.path.join(self.directory, "file")
    pathlib.Path(blocked).write_text("")
    with self.assertRaisesRegex(errors.ConfigError, "olmo_order_cache_dir"):
      dataclasses.replace(self.file, directory=os.path.join(blocked, "cache")).open()

  def test_the_default_is_the_users_cache_directory(self):
    self.assertEndsWith(order_files.default_cache_dir(), "maxtext_olmo/orders")


if __name__ == "__main__":
  absltest.main()
