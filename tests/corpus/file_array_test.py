"""Arrays in files."""

import os
import pathlib
import pickle

import numpy as np
from absl.testing import absltest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus.storage import LocalStorage


class FileArrayTest(absltest.TestCase):

  def _write(self, numbers: np.ndarray, load_up_to: int = 0) -> file_array.FileArray:
    offset = 100
    self.path = os.path.join(self.create_tempdir().full_path, "numbers")
    pathlib.Path(self.path).write_bytes(bytes(offset) + numbers.tobytes() + b"after")
    return file_array.FileArray(
        LocalStorage(),
        self.path,
        numbers.dtype.str,
        offset,
        len(numbers),
        block_bytes=32,
        load_up_to=load_up_to,
    )

  @settings(deadline=None, max_examples=50)
  @given(st.integers(1, 300), st.sampled_from(["<u4", "<u8", "<i8"]), st.data())
  def test_any_places_return_the_numbers_there(self, count, dtype, data):
    numbers = np.random.default_rng(count).integers(0, 2**31, count).astype(dtype)
    array = self._write(numbers, data.draw(st.sampled_from([0, 1 << 20])))
    places = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=60)), np.int64)
    np.testing.assert_array_equal(array[places], numbers[places])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(array))[places], numbers[places])
    np.testing.assert_array_equal(array.load(), numbers)
    self.assertLen(array, count)

  def test_truncation_while_in_use_is_an_error_that_names_the_bytes(self):
    array = self._write(np.arange(1000, dtype="<u4"))
    self.assertEqual(array[np.array([999])].tolist(), [999])
    os.truncate(self.path, 300)
    self.assertEqual(array[np.array([3])].tolist(), [3])
    with self.assertRaisesRegex(
        errors.CorpusError, "numbers is too short: expected bytes 4068 to 4100, .* at byte 300"
    ):
      array[np.array([999])]

  def test_a_place_outside_the_array_is_an_error(self):
    array = self._write(np.arange(10, dtype="<u4"))
    for place in (-1, 10):
      with self.assertRaisesRegex(errors.OrderError, "has 10 values"):
        array[np.array([place])]


if __name__ == "__main__":
  absltest.main()
