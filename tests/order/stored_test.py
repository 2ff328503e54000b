"""Tests of the stored orders, against outputs of the real OLMo-core."""

import dataclasses
import hashlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.order import permutations
from maxtext_olmo.order import schedule as schedule_lib
from maxtext_olmo.order import stored
from tests import distributed

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
_CASES = {case["name"]: case for case in json.loads((_TESTDATA / "fsl_order.json").read_text())}


def _descriptors():
  return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


class StoredOrderTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.cache = self.create_tempdir().full_path

  def make(self, name="olmo_core", **kwargs):
    return permutations.make_order(name, cache_dir=self.cache, **kwargs)

  def of_case(self, case):
    shuffle = case.get("shuffle", True)
    return self.make(
        "olmo_core" if shuffle else "sequential",
        num_instances=case["n_instances"],
        seed=case["seed"],
        chunk_size=case["chunk_size"],
    )

  @parameterized.named_parameters((name, case) for name, case in _CASES.items())
  def test_the_order_is_olmo_cores(self, case):
    ids = self.of_case(case).ids(case["epoch"] - 1, np.arange(case["n_instances"]))
    self.assertLen(ids, case["global_indices_len"])
    digest = hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
    self.assertEqual(digest, case["global_indices_sha256"])

  @parameterized.named_parameters((name, case) for name, case in _CASES.items())
  def test_batches_and_the_dropped_tail_are_olmo_cores(self, case):
    order = self.of_case(case)
    size = case["global_batch_size"] // case["sequence_length"]
    schedule = schedule_lib.BatchSchedule.constant(size).within(order.epochs)
    first = (case["epoch"] - 1) * case["total_batches"]
    for rank in case["ranks"]:
      self.assertEqual(rank["n_batches"], case["total_batches"])
      for step, expected in enumerate(rank["steps"]):
        ids = order.at(schedule.start(first + step) + np.arange(size))
        self.assertEqual(ids[rank["rank"] :: rank["world"]].tolist(), expected)
    self.assertEqual(schedule.start(first + case["total_batches"]) % case["n_instances"], 0)

  def test_the_maxtext_order_is_the_documented_one(self):
    order = self.make("maxtext", num_instances=12, seed=7)
    # The formula is default_rng(first 8 bytes, little endian, of
    # sha256("olmo-shuffle:7:2")).permutation(12).
    np.testing.assert_array_equal(
        order.ids(2, np.arange(12)), np.random.default_rng(5869221157303042828).permutation(12)
    )

  def test_a_worker_reads_the_same_and_trusts_what_its_parent_verified(self):
    order = self.make(num_instances=100, seed=1)
    order.prepare(150)
    text = pickle.dumps(order)
    self.assertLess(len(text), 1000)
    copy = pickle.loads(text)
    self.assertEqual(list(copy._trusted), [1])
    np.testing.assert_array_equal(copy.ids(1, np.arange(100)), order.ids(1, np.arange(100)))
    self.assertEqual(repr(copy), repr(order))

  def test_only_two_epochs_stay_open(self):
    order = self.make(num_instances=10, seed=1)
    order.at(np.arange(50))
    self.assertEqual(list(order._arrays), [3, 4])

  def test_the_file_of_an_epoch_is_built_when_it_is_first_needed(self):
    order = self.make(num_instances=10, seed=1)
    order.ids(0, np.arange(10))
    self.assertTrue(os.path.exists(order.file(0).path))
    self.assertFalse(os.path.exists(order.file(1).path))
    order.prepare(10)
    before = os.stat(order.file(1).path)
    order.at(np.arange(10, 20))
    after = os.stat(order.file(1).path)
    self.assertEqual((before.st_ino, before.st_mtime_ns), (after.st_ino, after.st_mtime_ns))

  def test_truncation_while_in_use_is_an_error_that_names_the_bytes(self):
    count = 2_000_000
    order = self.make(num_instances=count, seed=1)
    before = order.ids(0, np.arange(count - 1000, count))
    os.truncate(order.file(0).path, 5000)
    with self.assertRaisesRegex(
        errors.OrderError, "epoch0.order changed while it was in use: bytes 8000096 to 8004096"
    ):
      order.ids(0, np.arange(count - 1000, count))
    # A new run builds it again.
    order = self.make(num_instances=count, seed=1)
    np.testing.assert_array_equal(order.ids(0, np.arange(count - 1000, count)), before)

  def test_closing_releases_the_descriptors(self):
    order = self.make(num_instances=100, seed=1)
    order.at(np.arange(200))
    order.close()
    self.assertNotIn(
        self.cache, " ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors())
    )
    order.at(np.arange(200))

  def test_a_negative_seed_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "seed of 0 or more, got -1"):
      self.make(num_instances=10, seed=-1)

  def test_two_orders_use_different_files(self):
    makes = dict(num_instances=12, seed=1)
    orders = [self.make(**makes), self.make(**makes, chunk_size=2), self.make("maxtext", **makes)]
    self.assertLen({order.file(0).path for order in orders}, 3)
    self.assertIsInstance(orders[2], stored.MaxTextOrder)


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
from maxtext_olmo.order import stored
array, found = stored.OrderFile(**json.loads(sys.argv[1])).open()
print(found[0], *array.load()[[0, -1]])
"""


class OrderFilesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.file = stored.OrderFile("olmo_core", 1000, 34521, 1, 1, self.directory)
    self.expected = stored.shuffled(1000, 34523)

  def open(self, trusted=None):
    array, found = self.file.open(trusted)
    np.testing.assert_array_equal(array.load(), self.expected)
    return found

  def test_it_is_built_when_it_is_first_needed_and_used_from_then_on(self):
    self.assertEmpty(os.listdir(self.directory))
    found = self.open()
    self.assertEqual(self.open(), found)
    names = sorted(os.listdir(self.directory))
    ends = ("", ".lock", ".verified")
    self.assertEqual(names, [os.path.basename(self.file.path) + end for end in ends])

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
      ("no_checksum", lambda data: data.replace(b'"checksum"', b'"checksun"')),
      ("deeply_nested", lambda data: b"[" * 4096 + data[4096:]),
  )
  def test_a_wrong_file_is_rebuilt(self, change):
    self.open()
    path = pathlib.Path(self.file.path)
    good = path.read_bytes()
    path.write_bytes(change(good))
    self.open()
    self.assertEqual(path.read_bytes(), good)

  def test_a_flipped_bit_in_any_byte_of_the_header_is_found(self):
    self.open()
    path = pathlib.Path(self.file.path)
    good = path.read_bytes()
    for place in range(good.index(b"}") + 1):
      damaged = bytearray(good)
      damaged[place] ^= 1 << place % 8
      path.write_bytes(damaged)
      self.open()
      self.assertEqual(path.read_bytes(), good)

  def damage(self):
    """Changes a number in the file, and returns the id that the file has now."""
    with open(self.file.path, "r+b") as file:
      file.seek(5000)
      file.write(bytes(4))
    stat = os.stat(self.file.path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

  @parameterized.parameters("parameter", "mark")
  def test_the_checksum_of_a_verified_file_is_not_computed_again(self, by):
    self.open()
    now = self.damage()
    if by == "mark":
      pathlib.Path(self.file.path + ".verified").write_text(json.dumps(now))
    array, found = self.file.open(now if by == "parameter" else None)
    self.assertEqual(found, now)
    # The damage is not detected, so the checksum was not computed.
    self.assertNotEqual(array.load().tolist(), self.expected.tolist())

  def test_a_verified_file_that_changes_is_verified_again_even_if_its_time_is_set_back(self):
    found = self.open()
    self.damage()
    os.utime(self.file.path, ns=(found[2], found[2]))
    self.open(found)

  @parameterized.named_parameters(
      ("directory", os.mkdir),
      ("fifo", os.mkfifo),
      ("link_to_itself", lambda path: os.symlink(path, path)),
      ("other_content", lambda path: pathlib.Path(path).write_bytes(bytes(5000))),
  )
  def test_without_a_usable_mark_the_checksum_is_computed(self, make):
    self.open()
    mark = self.file.path + ".verified"
    os.unlink(mark)
    make(mark)
    self.damage()
    self.open()

  def test_two_processes_that_start_together_build_once(self):
    self.file = dataclasses.replace(self.file, n=3_000_000)
    description = json.dumps(dataclasses.asdict(self.file))
    results = {child.communicate()[0] for child in [_python(_OPEN, description) for _ in range(3)]}
    # One inode: if two processes had built it, the second rename would have changed the inode.
    self.assertLen(results, 1)
    self.assertTrue(results.pop().strip())

  def test_a_killed_builder_leaves_no_usable_file(self):
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
from maxtext_olmo.order import stored
file = stored.OrderFile(**json.loads(sys.argv[1]))
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

  @parameterized.named_parameters(
      ("directory", os.mkdir),
      ("fifo", os.mkfifo),
      ("link_to_itself", lambda path: os.symlink(path, path)),
  )
  def test_what_is_not_a_regular_file_is_refused_and_left_alone(self, make):
    make(self.file.path)
    before = os.lstat(self.file.path)
    with self.assertRaisesRegex(errors.WriteError, "Cannot write .*order: .*olmo_order_cache_dir"):
      self.file.open()
    self.assertEqual(os.lstat(self.file.path), before)

  def test_a_lock_that_is_a_fifo_is_an_error_and_not_a_hang(self):
    os.mkfifo(self.file.path + ".lock")
    with self.assertRaisesRegex(errors.ConfigError, "olmo_order_cache_dir"):
      self.file.open()

  def test_a_directory_with_a_nul_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "olmo_order_cache_dir"):
      dataclasses.replace(self.file, directory="a\0b").open()

  def test_the_default_is_the_users_cache_directory(self):
    self.assertEndsWith(stored.default_cache_dir(), "maxtext_olmo/orders")


_GOLDEN = pathlib.Path(__file__).parents[1] / "testdata" / "fsl_permutations.json"


def _digest(numbers):
  return hashlib.sha256(numbers.astype("<u4").tobytes()).hexdigest()


class ShuffleTest(parameterized.TestCase):

  @parameterized.named_parameters(("numpy", stored.shuffled), ("python", stored.with_python))
  def test_each_implementation_gives_the_order_of_olmo_core(self, shuffled):
    for case in json.loads(_GOLDEN.read_text()):
      if shuffled is stored.with_python and case["n"] > 100_000:
        continue
      numbers = shuffled(case["n"], case["seed"] + case["epoch"])
      self.assertEqual(_digest(numbers), case["sha256_uint32_le"], case)
      self.assertEqual(numbers[:16].tolist(), case["first16"])

  def test_draws_continue_across_blocks(self):
    # More draws than one block of raw outputs has.
    expected = stored.shuffled(400_000, 5)
    np.testing.assert_array_equal(stored.with_python(400_000, 5), expected)

  def test_the_installed_numpy_still_shuffles_as_it_did(self):
    with self.assertNoLogs(level="WARNING"):
      stored.shuffled(10, 1)

  def test_a_numpy_with_another_shuffle_is_detected_and_not_used(self):
    # In a separate process, whose NumPy shuffles differently.
    code = (
        "import numpy as np\n"
        "from maxtext_olmo.order import stored\n"
        "class Other(np.random.Generator):\n"
        "  def shuffle(self, x): x[:] = np.roll(x, 1)\n"
        "np.random.Generator = Other\n"
        "print(stored.shuffled(10, 1).tolist())\n"
    )
    golden = next(c for c in json.loads(_GOLDEN.read_text()) if c["n"] == 10 and c["seed"] == 0)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=distributed.child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    self.assertEqual(done.stdout.strip(), str(golden["first16"]))
    self.assertIn("shuffles differently", done.stderr)

  @parameterized.parameters(0, (1 << 32) - 1)
  def test_sizes_that_uint32_cannot_hold_are_refused(self, n):
    with self.assertRaisesRegex(errors.OrderError, "must have 1 to 2"):
      stored.shuffled(n, 0)


if __name__ == "__main__":
  absltest.main()
