"""Tests of `.npy` headers."""

import io
import os

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import npy_header
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError


def _saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
  stream = io.BytesIO()
  np.lib.format.write_array(stream, array, version=version)
  return stream.getvalue()


class _RawStream(io.BytesIO):
  """A stream that returns a byte at a time, as a socket may."""

  def read(self, size=-1):
    return super().read(min(size, 1))


def _with_shape(shape: str) -> bytes:
  header = f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}}}".encode()
  return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


class NpyHeaderTest(parameterized.TestCase):

  @parameterized.product(
      version=((1, 0), (2, 0), (3, 0)), dtype=("uint8", "uint16", "int32", "uint64")
  )
  def test_files_written_by_numpy_are_parsed(self, version, dtype):
    content = _saved(np.arange(5, dtype=dtype), version)
    self.assertEqual(npy_header.parse_npy_header(io.BytesIO(content)), (dtype, (5,)))
    header = npy_header.read_header(io.BytesIO(content), "x")
    self.assertEqual(content[header.data_offset :], np.arange(5, dtype=dtype).tobytes())

  def test_a_header_is_found_despite_short_reads(self):
    content = _saved(np.arange(5, dtype=np.uint16))
    self.assertEqual(npy_header.parse_npy_header(_RawStream(content)), ("uint16", (5,)))

  @parameterized.parameters(
      ("(-4,)", r"says shape \(-4,\); expected no negative"),
      ("(1e999,)", "cannot be read: shape is not valid"),
      ("(1.5,)", "cannot be read: shape is not valid"),
      ("('4',)", "cannot be read: shape is not valid"),
      ("None", "cannot be read: shape is not valid"),
      ("4", "cannot be read: shape is not valid"),
      ("(" * 3000 + "4" + ")" * 3000, "cannot be read"),
      ("__import__('os')", "cannot be read"),
  )
  def test_an_impossible_shape_is_an_error(self, shape, message):
    with self.assertRaisesRegex(CorpusError, f"(?s)^f .*{message}"):
      npy_header.read_header(io.BytesIO(_with_shape(shape)), "f")

  def test_a_huge_shape_does_not_fit_the_file(self):
    content = _with_shape("(10**400,)".replace("10**400", "1" + "0" * 400))
    header = npy_header.read_header(io.BytesIO(content), "f")
    with self.assertRaisesRegex(CorpusError, "f has a .npy header that says 1000+ tokens"):
      npy_header.check_header(header, np.dtype("<u4"), len(content), "f")

  def test_a_path_is_read(self):
    path = os.path.join(self.create_tempdir().full_path, "x.npy")
    np.save(path, np.arange(6, dtype=np.uint16))
    self.assertEqual(npy_header.read_npy_header_from_path(path), ("uint16", (6,)))

  def test_the_magic_is_recognised(self):
    self.assertTrue(npy_header.has_npy_magic(b"\x93NUMPY\x01\x00"))
    self.assertFalse(npy_header.has_npy_magic(b"\x93NUMP"))
    self.assertFalse(npy_header.has_npy_magic(b""))

  @parameterized.parameters(
      (b"tokens", r"^f has no \.npy header: expected it to begin with .*, found b'tokens'"),
      (b"\x93NUMPY\x09\x00", r"^f has a \.npy header of version 9; expected version 1, 2 or 3"),
      (b"\x93NUMPY", r"^f has a \.npy header of version None"),
      (
          b"\x93NUMPY\x01\x00\x20",
          r"^f begins like a \.npy file, but its header cannot be read: EOF",
      ),
      (b"\x93NUMPY\x01\x00\x20\x00{}", r"cannot be read: EOF.*expected 32 bytes got 2"),
      (b"\x93NUMPY\x01\x00\x02\x00{}", r"correct keys.*\. The file is damaged; copy it again"),
      (b"\x93NUMPY\x01\x00\x02\x00((", r"cannot be read: "),
      (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", r"cannot be read: EOF"),
  )
  def test_a_damaged_header_is_an_error(self, content, message):
    with self.assertRaisesRegex(CorpusError, f"(?s){message}"):
      npy_header.read_header(io.BytesIO(content), "f")

  @parameterized.parameters(
      (np.zeros(4, np.uint32), None),
      (np.zeros(4, np.int32), None),
      (np.zeros(4, np.uint16), r"says dtype uint16; expected uint32 or int32, little endian"),
      (np.zeros(4, np.float32), r"says dtype float32; expected uint32"),
      (np.zeros(4, ">u4"), r"says dtype uint32 \(big endian\); expected uint32"),
      (np.zeros((2, 2), np.uint32), r"says shape \(2, 2\); expected one dimension"),
      (np.uint32(3), r"says shape \(\); expected one dimension"),
  )
  def test_a_header_must_fit_the_corpus(self, array, message):
    content = _saved(np.asarray(array))
    header = npy_header.read_header(io.BytesIO(content), "f")
    check = lambda size: npy_header.check_header(header, np.dtype("<u4"), size, "f")  # noqa: E731
    if message is None:
      self.assertEqual(check(len(content)), 4)
      with self.assertRaisesRegex(
          CorpusError, "says 4 tokens of uint32; expected 144 bytes, found 143"
      ):
        check(len(content) - 1)
    else:
      with self.assertRaisesRegex(CorpusError, "^f has a .npy header that " + message):
        check(len(content))

  def test_fortran_order_is_refused(self):
    header = npy_header.NpyHeader(np.dtype("<u4"), (4,), True, 128)
    with self.assertRaisesRegex(CorpusError, "says Fortran order; expected C order"):
      npy_header.check_header(header, np.dtype("<u4"), 144, "f")

  def test_raw_files_are_counted_and_incomplete_tokens_rejected(self):
    path = self.create_tempfile("x", content=b"x" * 12, mode="wb").full_path
    self.assertEqual(npy_header.read_raw_metadata_from_path(path, "uint32"), ("uint32", (3,)))
    with self.assertRaisesRegex(
        CorpusError, "has 12 bytes; expected a multiple of 8 for uint64, but 4 bytes"
    ):
      npy_header.read_raw_metadata_from_path(path, "uint64")

  def test_token_dtypes(self):
    for name in npy_header.TOKEN_DTYPES:
      self.assertEqual(npy_header.token_dtype(name).name, name)
    self.assertEqual(npy_header.token_dtype(np.int16).name, "uint16")
    self.assertEqual(npy_header.token_dtype("<u4").name, "uint32")

  @parameterized.parameters("float32", ">u4", "nonsense", "bool", "i4,i4", r"\(1,i4", r"\(-1,\)i4")
  def test_other_dtypes_are_refused(self, dtype):
    with self.assertRaisesRegex(
        ConfigError, f"cannot have dtype '{dtype}': it must be one of uint8, uint16"
    ):
      npy_header.token_dtype(dtype.replace("\\", ""))


if __name__ == "__main__":
  absltest.main()
