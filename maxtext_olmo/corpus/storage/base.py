"""The `Storage` protocol: the only way the library reads the files of a corpus.

Token files, boundary files, indexes, manifests and the headers of document sidecars come through
it, so that they may lie on a disk, on a mount or in an object store.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from maxtext_olmo.errors import CorpusError

PIECE_BYTES = 16 << 20
# Of a file that is read into memory: an index, a manifest, a boundary file.
LARGEST_WHOLE = 8 << 30


class Pinned(NamedTuple):
  """Open descriptors for code that reads by itself.

  Attributes:
    descriptors: int32, one per file of the list of paths; those of files that were not asked for
      may be -1. They stay open while this object is referenced.
    files: the objects that keep the descriptors open.
  """

  descriptors: np.ndarray
  files: Sequence[object]


def reason(error: CorpusError) -> str:
  """Returns why a file could not be read, without path and remedy where it could not be opened."""
  cause = error.__cause__
  if isinstance(cause, OSError) and cause.filename is not None and cause.strerror:
    return cause.strerror
  return str(error)


@runtime_checkable
class Storage(Protocol):
  """Reads files by path; can be pickled, shared by threads, and used after a fork.

  All methods that fail raise a CorpusError that names the file, and the byte range where there is
  one; where there is no file, a MissingFileError.
  """

  @property
  def wants_concurrency(self) -> bool:
    """Whether reads have so much latency that many should be in flight at once."""

  def size(self, path: str) -> int:
    """Returns the size of a file in bytes.

    From then on, `fill` and `pin` of this storage, of its copies and of those pickled from it raise
    a CorpusError where the file has been replaced, as far as the storage can tell.
    """

  def exists(self, path: str) -> bool:
    """Returns whether there is a file at `path`."""

  def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
    """Returns `size` bytes from `offset`, or the rest of the file where `size` is None.

    Opens the file anew, so it sees a file that has replaced an older one. A file that ends before
    `offset + size` is a CorpusError.
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
    """Reads many byte ranges into one buffer; may keep the files open for later calls.

    Range i is `sizes[i]` bytes at byte `offsets[i]` of `paths[sources[i]]`, and is written to
    `out[places[i] : places[i] + sizes[i]]`. Consecutive ranges that are neighbours both in the file
    and in `out` are joined into one read.

    Args:
      out: uint8, one dimension, contiguous. Bytes that no range covers are left as they are.
    """

  def pin(self, paths: Sequence[str], sources: np.ndarray) -> Pinned | None:
    """Returns the descriptors of the files that `sources` names by their numbers in `paths`.

    Fastest where `paths` is the same object in every call. Returns None where the storage has no
    descriptors, or where more files are needed than may be open: use `fill` then.
    """

  def close(self) -> None:
    """Lets go of open files and connections; the storage stays usable."""
