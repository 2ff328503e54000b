"""The `Storage` protocol: the only way the library reads the files of a corpus.

Token files, boundary files, indexes, manifests and document indexes are read through it, so that
they may be on a disk, on a mount or in an object store.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from maxtext_olmo.errors import CorpusError

PIECE_BYTES = 16 << 20
# Size of the largest file that is read whole, such as an index, a manifest or a boundary file.
LARGEST_WHOLE = 8 << 30


class Pinned(NamedTuple):
  """Open file descriptors, for code that reads the files without calling the storage.

  Attributes:
    descriptors: One descriptor per path (int32); may be -1 for files that were not requested. The
      descriptors stay open while this object is referenced.
    files: Objects that keep the descriptors open.
  """

  descriptors: np.ndarray
  files: Sequence[object]


def reason(error: CorpusError) -> str:
  """Returns why a file could not be read.

  For an operating system error, this is only the system's text, such as "Permission denied".
  """
  cause = error.__cause__
  if isinstance(cause, OSError) and cause.filename is not None and cause.strerror:
    return cause.strerror
  return str(error)


def too_large(path: str, size: int) -> CorpusError:
  """Returns the error for a file that is far too large to be read into memory at once."""
  return CorpusError(
      f"{path} has {size} bytes, which is too large to read into memory at once; expected at most"
      f" {LARGEST_WHOLE} for an index, a manifest or a boundary file. Check that it is the right"
      " file."
  )


@runtime_checkable
class Storage(Protocol):
  """Reads files by path. It can be pickled and shared between threads.

  A method that fails raises a CorpusError that names the file and the byte range, if there is one;
  a missing file raises a MissingFileError.

  >>> from maxtext_olmo import LocalStorage
  >>> isinstance(LocalStorage(), Storage)
  True
  """

  def wants_concurrency(self, paths: Sequence[str]) -> int:
    """Returns how many reads of these files should be in flight; 0 if one at a time is fastest."""

  def expect(self, path: str, size: int, etag: str | None = None) -> None:
    """Sets the size and ETag that later reads check, if the storage supports such checks."""

  def size(self, path: str) -> int:
    """Returns the size of a file in bytes.

    From then on, `fill` and `pin` raise a CorpusError if the file has been replaced, as far as the
    storage can detect it. This also holds for pickled copies of this storage.
    """

  def exists(self, path: str) -> bool:
    """Returns whether there is a file at `path`."""

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest of the file if `size` is None.

    Always reopens the file, so if the file has been replaced, the bytes are those of the new file.
    Raises CorpusError if the file ends before `offset + size`.
    """

  def pieces(
      self, path: str, offset: int = 0, size: int | None = None, piece_bytes: int = PIECE_BYTES
  ) -> Iterator[bytes]:
    """Yields the bytes that `read` would return, in pieces; the last may be short."""

  def fill(
      self,
      paths: Sequence[str],
      sources: np.ndarray,
      offsets: np.ndarray,
      sizes: np.ndarray,
      out: np.ndarray,
      places: np.ndarray,
  ) -> None:
    """Reads several byte ranges into one buffer; may keep the files open for later calls.

    Range i is `sizes[i]` bytes at byte `offsets[i]` of `paths[sources[i]]`, and is written to
    `out[places[i] : places[i] + sizes[i]]`. Consecutive ranges that are adjacent both in the file
    and in `out` are merged into one read.

    Args:
      out: Contiguous uint8 array with one dimension. Bytes that no range covers are unchanged.
    """

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> Pinned | None:
    """Returns open descriptors of the files `paths[i]` for each i in `sources`.

    Fastest if `paths` is the same object in every call. Returns None if the storage has no
    descriptors, or if more files are needed than may be open at once; use `fill` then.
    """

  def close(self) -> None:
    """Closes open files and connections; the storage remains usable."""
