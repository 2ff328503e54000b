import pathlib
import threading

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.order import seen
from maxtext_olmo.order import stream as stream_lib
from tests import corpora


def _tokens(index, windows):
  """Returns the (path, token) pairs of some windows."""
  found = set()
  for window in np.asarray(windows).tolist():
    files, offsets = index.locate(np.array([window * index.chunk_size]))
    path, first = index.resolve(int(files[0])), int(offsets[0]) // 2
    found |= {(path, first + token) for token in range(index.window)}
  return found


class SeenTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(directory)
    self.base = index_lib.load_index(path)
    self.directory = directory
    corpora.write_tokens(directory / "more" / "new.npy", 90, seed=8)

  def other(self, length, files=(3, 0)):
    entries = [(str(self.directory / "more" / "new.npy"), "new")]
    entries += [(self.base.resolve(file), "old") for file in files]
    return index_lib.build_index(
        entries, length, tokenizer="test", dtype="uint16", base=str(self.directory)
    )

  def seen_file(self, index, length=50, order="feistel", **settings):
    stream = stream_lib.train_stream(self.base, order=order, seed=3, **settings)
    split = seen.split_like(index, self.base, stream.split)
    parts = [seen.Part(self.base, stream, length)]
    key = [length, order, index.fingerprint, str(settings)]
    return seen.SeenFile(str(self.directory), key, index, split, lambda: parts), stream

  @parameterized.product(length=(3, 8, 13, 20), held_out=(0, 9))
  def test_windows_that_overlap_what_was_seen_are_marked(self, length, held_out):
    other = self.other(length)
    file, stream = self.seen_file(other, held_out_instances=held_out)
    bitmap = file.open()
    was_seen = _tokens(self.base, stream.instance_ids(np.arange(50)))
    held = _tokens(self.base, stream.split.held_out_windows)
    windows = file.split.train_ids(np.arange(file.split.num_train))
    everything = range(other.num_windows)
    self.assertEqual(windows.tolist(), [w for w in everything if not _tokens(other, [w]) & held])
    expected = [i for i, w in enumerate(windows.tolist()) if not _tokens(other, [w]) & was_seen]
    self.assertEqual(bitmap.select(np.arange(bitmap.num_remaining)).tolist(), expected)

  def test_every_copy_of_a_file_that_is_listed_twice_is_marked(self):
    other = self.other(8, files=(0, 3, 0))
    file, stream = self.seen_file(other, held_out_instances=9)
    gone = _tokens(self.base, stream.instance_ids(np.arange(50)))
    gone |= _tokens(self.base, stream.split.held_out_windows)
    bitmap = file.open()
    left = file.split.train_ids(bitmap.select(np.arange(bitmap.num_remaining)))
    expected = [w for w in range(other.num_windows) if not _tokens(other, [w]) & gone]
    self.assertEqual(left.tolist(), expected)

  def test_files_that_have_moved_are_other_files(self):
    same, moved = self.other(8), self.other(8, files=(0,))
    digests = {seen.SharedFiles(self.base, index).digest for index in (same, self.other(8), moved)}
    self.assertLen(digests, 2)

  def test_a_whole_epoch_marks_everything(self):
    for order in ("feistel", "sequential"):
      file, stream = self.seen_file(self.base, length=200, order=order, held_out_instances=9)
      self.assertGreater(200, stream.split.num_train)
      self.assertEqual(file.open().num_remaining, 0)

  def test_a_damaged_bitmap_is_built_again(self):
    file, _ = self.seen_file(self.base)
    remaining = file.open().num_remaining
    path = pathlib.Path(file.path)
    path.write_bytes(path.read_bytes()[:-1])
    self.assertEqual(file.open().num_remaining, remaining)

  def test_building_can_be_stopped(self):
    stop = threading.Event()
    stop.set()
    file, _ = self.seen_file(self.base)
    with self.assertRaises(InterruptedError):
      file.open(stop)
    self.assertFalse(pathlib.Path(file.path).exists())

  def test_an_index_that_is_all_held_out_is_refused(self):
    other = self.other(300, files=(0,))
    split = stream_lib.Split.of_index(self.base, 100)
    with self.assertRaisesRegex(errors.ConfigError, "none remains for training"):
      seen.split_like(other, self.base, split)


if __name__ == "__main__":
  absltest.main()
