"""Tests of checksums of whole files and of pieces."""

import hashlib

import xxhash
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from maxtext_olmo.corpus import checksums
from maxtext_olmo.errors import ConfigError


class ChecksumsTest(parameterized.TestCase):

  def test_whole_files_have_the_sums_of_the_algorithms(self):
    for name, expected in (
        ("sha256", hashlib.sha256(b"abc").hexdigest()),
        ("xxh3", xxhash.xxh3_128_hexdigest(b"abc")),
    ):
      digest = checksums.new_hash(name)
      digest.update(b"a")
      digest.update(b"bc")
      self.assertEqual(digest.hexdigest(), expected)

  @given(st.binary(max_size=50), st.lists(st.integers(0, 50), max_size=4), st.integers(1, 20))
  def test_the_sum_of_pieces_does_not_depend_on_how_bytes_are_added(self, data, cuts, size):
    digest = checksums.new_hash(f"xxh3-pieces-{size}")
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in zip(bounds, bounds[1:]):
      digest.update(data[start:end])
    sums = [xxhash.xxh3_128_hexdigest(data[at : at + size]) for at in range(0, len(data), size)]
    self.assertEqual(digest.hexdigest(), checksums.join_pieces(sums))

  def test_names(self):
    self.assertEqual(checksums.full_name("xxh3"), "xxh3")
    self.assertEqual(checksums.full_name("xxh3-pieces"), "xxh3-pieces-268435456")
    self.assertEqual(checksums.piece_bytes("xxh3-pieces-5"), 5)
    self.assertIsNone(checksums.piece_bytes("xxh3"))

  @parameterized.parameters("", "md5", "xxh3-pieces-0", "xxh3-pieces-x")
  def test_an_unknown_name_is_an_error(self, name):
    with self.assertRaisesRegex(ConfigError, "must be one of xxh3, sha256, xxh3-pieces"):
      checksums.new_hash(name)


if __name__ == "__main__":
  absltest.main()
