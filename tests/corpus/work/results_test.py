"""Tests of result files."""

import os
import pathlib
import threading

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import results
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import WriteError
from tests import object_server

_RESULT = {
    "text": "ä",
    "none": None,
    "number": np.int64(5),
    "ends": np.arange(6, dtype="<u4").reshape(2, 3),
    "empty": np.zeros((0, 2), "<u8"),
}


def _encoded(result) -> bytes:
  return b"".join(results.encode(result))


class EncodingTest(absltest.TestCase):

  def test_a_result_survives(self):
    found = results.decode(_encoded(_RESULT))
    self.assertEqual((found["text"], found["none"], found["number"]), ("ä", None, 5))
    for name in ("ends", "empty"):
      np.testing.assert_array_equal(found[name], _RESULT[name])
      self.assertEqual(found[name].dtype, _RESULT[name].dtype)

  def test_a_change_or_a_loss_of_any_byte_is_found(self):
    data = _encoded(_RESULT)
    for place in range(len(data)):
      with self.assertRaises(ValueError):
        results.decode(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
      with self.assertRaises(ValueError):
        results.decode(data[:place])

  def test_other_values_are_an_error(self):
    with self.assertRaisesRegex(TypeError, "JSON values and arrays, got object"):
      results.encode({"x": object()})


class NamesTest(parameterized.TestCase):

  def test_the_folder_depends_on_corpus_version_and_settings(self):
    folders = {
        results.work_folder(*values)
        for values in (
            ("a", "w", 1, {"x": 1}),
            ("b", "w", 1, {"x": 1}),
            ("a", "v", 1, {"x": 1}),
            ("a", "w", 2, {"x": 1}),
            ("a", "w", 1, {"x": 2}),
        )
    }
    self.assertLen(folders, 5)

  @parameterized.parameters("", "a/b", "a b", "a@b", "x" * 101)
  def test_a_key_must_fit_into_a_file_name(self, key):
    with self.assertRaises(ValueError):
      results.check_key(key)


class ResultFilesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path, "x.work")
    self.files = results.ResultFiles(str(self.root), "w-1")
    self.name = results.result_name("0-0-5", "abc")

  def test_results_are_listed_read_in_order_and_removed(self):
    self.assertEmpty(self.files.names())
    other = results.result_name("1", "abc", failed=True)
    self.files.write(self.name, {"x": 1})
    self.files.write(other, {"x": 2})
    self.assertEqual(self.files.names(), {self.name, other})
    found = list(self.files.read_all([other, "gone@a.ok", self.name]))
    self.assertEqual(found, [{"x": 2}, None, {"x": 1}])
    self.files.discard()
    self.assertFalse(self.root.exists())

  def test_a_directory_of_the_user_and_foreign_files_stay(self):
    files = results.ResultFiles(str(self.root.parent / "mine"), "w-1")
    files.write(self.name, {})
    foreign = self.root.parent / "mine" / "w-1" / "notes.txt"
    foreign.touch()
    self.assertEqual(files.names(), {self.name})
    files.discard()
    self.assertTrue(foreign.exists())

  def test_a_damaged_result_counts_as_missing_and_is_removed(self):
    for data in (b"", b"x", _encoded({"x": 1})[:-1]):
      self.files.write(self.name, {"x": 1})
      (self.root / "w-1" / self.name).write_bytes(data)
      self.assertEqual(list(self.files.read_all([self.name])), [None])
      self.assertEmpty(self.files.names())

  def test_what_killed_writers_left_is_not_listed_and_removed_at_the_end(self):
    self.files.write(self.name, {"x": 1})
    (self.root / "w-1" / ".1234.tmp").touch()
    self.assertEqual(self.files.names(), {self.name})
    self.files.discard()
    self.assertFalse(self.root.exists())

  def test_results_can_be_written_while_another_command_discards_them(self):
    def discard():
      for _ in range(5):
        self.files.discard()

    for _ in range(200):
      other = threading.Thread(target=discard)
      other.start()
      while other.is_alive():
        self.files.write(self.name, {"x": 1})
    self.files.write(self.name, {"x": 1})
    self.assertEqual(list(self.files.read_all([self.name])), [{"x": 1}])

  def test_a_place_that_cannot_be_written_is_an_error_that_names_it(self):
    self.root.write_text("a file")
    with self.assertRaisesRegex(WriteError, "Cannot write .*x.work/w-1/"):
      self.files.write(self.name, {"x": 1})

  def test_a_web_server_is_refused(self):
    with self.assertRaisesRegex(ConfigError, "a web server cannot list"):
      results.ResultFiles("https://host/x", "w-1").names()

  def test_a_bucket_holds_results(self):
    server = self.enter_context(object_server.ObjectServer())
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    files = results.ResultFiles("s3://b/results/", "w-1")
    files.write(self.name, _RESULT)
    self.assertEqual(list(server.objects), [f"b/results/w-1/{self.name}"])
    (found,) = files.read_all([self.name])
    np.testing.assert_array_equal(found["ends"], _RESULT["ends"])
    files.remove([self.name])
    self.assertEmpty(server.objects)

  def test_memory_holds_results(self):
    memory = results.MemoryResults()
    memory.write("a", {"x": 1})
    self.assertEqual(memory.names(), {"a"})
    self.assertEqual(list(memory.read_all(["a", "b"])), [{"x": 1}, None])
    memory.remove(["a", "b"])
    self.assertEmpty(memory.names())

  def test_a_result_is_visible_only_when_it_is_complete(self):
    self.files.write(self.name, {"x": np.zeros(1000)})
    self.assertEqual(os.listdir(self.root / "w-1"), [self.name])


if __name__ == "__main__":
  absltest.main()
