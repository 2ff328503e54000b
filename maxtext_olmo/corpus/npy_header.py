"""The `.npy` header that may come before the tokens of a file.

OLMo's own files have no header, even though they are named `.npy`.

raw file     | token 0 | token 1 | …
.npy file    | \x93NUMPY, version, header length | {'descr': '<u4', …} | token 0 | token 1 | …
                                                                       ↑ data offset
"""

import dataclasses
import io
import os
from typing import BinaryIO

import numpy as np

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

NPY_MAGIC = b"\x93NUMPY"
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64")

# NumPy writes a header of 118 bytes for a flat array; no valid header comes near this size.
MAX_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class NpyHeader:
  """A parsed header: the type of the array, and the byte offset of its data."""

  dtype: np.dtype
  shape: tuple[int, ...]
  fortran_order: bool
  data_offset: int


def token_dtype(dtype: str | np.dtype | type) -> np.dtype:
  """Returns the little-endian unsigned dtype of token files; treats signed dtypes as unsigned."""
  try:
    parsed = np.dtype(dtype)
  except Exception:  # NumPy parses the string, and may raise any error of Python's parser.
    parsed = None
  if parsed is not None and parsed.kind in "iu" and parsed.newbyteorder("<") == parsed:
    return np.dtype(f"<u{parsed.itemsize}")
  raise ConfigError(
      f"Token files cannot have dtype {dtype!r}: it must be one of {', '.join(TOKEN_DTYPES)},"
      " little endian."
  )


def has_npy_magic(first_bytes: bytes) -> bool:
  """Returns whether a file that begins with these bytes has a `.npy` header."""
  return first_bytes[: len(NPY_MAGIC)] == NPY_MAGIC


def read_header(stream: BinaryIO, where: str) -> NpyHeader:
  """Reads the header at the beginning of a stream; `where` names the file in errors."""
  start = _read_up_to(stream, 8)
  if not has_npy_magic(start):
    raise CorpusError(
        f"{where} has no .npy header: expected it to begin with {NPY_MAGIC!r}, found"
        f" {start[:6]!r}. OLMo's own files have none; read them as raw tokens."
    )
  version = start[6] if len(start) == 8 else None
  if version not in (1, 2, 3):
    raise CorpusError(
        f"{where} has a .npy header of version {version}; expected version 1, 2 or 3."
    )
  # Version 3 differs from 2 only in the encoding of field names, which tokens do not have.
  npy = np.lib.format
  read = npy.read_array_header_1_0 if version == 1 else npy.read_array_header_2_0
  try:
    shape, fortran_order, dtype = read(stream)
  except Exception as error:  # NumPy may raise any error of Python's parser.
    raise CorpusError(
        f"{where} begins like a .npy file, but its header cannot be read: {error}. The file is"
        " damaged; copy it again."
    ) from error
  if any(length < 0 for length in shape):
    raise CorpusError(
        f"{where} has a .npy header that says shape {shape}; expected no negative length. The file"
        " is damaged; copy it again."
    )
  return NpyHeader(dtype, shape, fortran_order, stream.tell())


def _read_up_to(stream: BinaryIO, size: int) -> bytes:
  """Reads `size` bytes, or fewer at the end of the stream.

  This takes a loop, because `read` of a raw stream may return fewer bytes at any time.
  """
  data = b""
  while len(data) < size and (more := stream.read(size - len(data))):
    data += more
  return data


def check_header(header: NpyHeader, dtype: np.dtype, size_bytes: int, where: str) -> int:
  """Checks a header and returns its number of tokens; raises CorpusError if a check fails."""
  descr, wanted = header.dtype, f"{dtype.name} or int{8 * dtype.itemsize}"
  if descr.kind not in "iu" or descr.itemsize != dtype.itemsize or descr.newbyteorder("<") != descr:
    order = " (big endian)" if descr.kind in "iu" and descr.newbyteorder("<") != descr else ""
    raise CorpusError(
        f"{where} has a .npy header that says dtype {descr.name}{order}; expected {wanted}, little"
        " endian. All files of a corpus must have the same dtype: build the index with the right"
        " one, or convert the file."
    )
  if len(header.shape) != 1:
    raise CorpusError(
        f"{where} has a .npy header that says shape {header.shape}; expected one dimension. Save"
        " it flat."
    )
  if header.fortran_order:
    raise CorpusError(f"{where} has a .npy header that says Fortran order; expected C order.")
  expected = header.data_offset + header.shape[0] * dtype.itemsize
  if expected != size_bytes:
    raise CorpusError(
        f"{where} has a .npy header that says {header.shape[0]} tokens of {dtype.name}; expected"
        f" {expected} bytes, found {size_bytes}. The file is damaged; copy it again."
    )
  return header.shape[0]


def parse_npy_header(stream: BinaryIO) -> tuple[str, tuple[int, ...]]:
  """Returns the dtype's name and the shape in a `.npy` header."""
  header = read_header(stream, "The stream")
  return header.dtype.name, header.shape


def read_npy_header_from_path(
    path: str | os.PathLike[str], *, storage: Storage | None = None
) -> tuple[str, tuple[int, ...]]:
  """Returns the dtype's name and the shape from the header of a `.npy` file."""
  name = urls.without_secrets(path)
  storage = open_storage() if storage is None else storage
  first = storage.read(name, 0, min(storage.size(name), MAX_BYTES))
  header = read_header(io.BytesIO(first), name)
  return header.dtype.name, header.shape


def read_raw_metadata_from_path(
    path: str | os.PathLike[str], dtype: str, *, storage: Storage | None = None
) -> tuple[str, tuple[int, ...]]:
  """Returns the dtype and shape of a file without a header; raises if the last token is cut off."""
  itemsize, name = token_dtype(dtype).itemsize, urls.without_secrets(path)
  storage = open_storage() if storage is None else storage
  size = storage.size(name)
  if size % itemsize:
    raise CorpusError(
        f"{name} has {size} bytes; expected a multiple of {itemsize} for {dtype}, but"
        f" {size % itemsize} bytes are left over. The file is truncated, or its dtype is different:"
        " copy it again, or give the right dtype."
    )
  return dtype, (size // itemsize,)
