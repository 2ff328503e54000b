"""Loss masks: files with one byte per token of a token file; 0 leaves the token out of the loss.

Masks are read with the same table of parts as tokens, and sent to the devices as one bit per token.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from collections.abc import Mapping

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import buffers
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments

_CHECKS = reader_lib.Checks(pad_id=0)
_MAX_CHECKS = 32  # Maximum number of concurrent requests for the sizes of remote files.


class MaskReader:
  """Reads the loss masks of rows.

  Args:
    files: Token files.
    reader: Reader of the mask files.
    pool: Pool of buffers.
    sizes: Sizes of mask files that the storage has found, by path.

  Attributes:
    reader: Reader of the mask files.
  """

  def __init__(
      self,
      files: token_files.TokenFiles,
      reader: reader_lib.FileReader,
      pool: buffers.BufferPool,
      sizes: Mapping[str, int] | None = None,
  ):
    self._files = files
    self.reader = reader
    self._pool = pool
    self._sizes = {} if sizes is None else sizes
    self._checked: frozenset[int] = frozenset()

  @classmethod
  def of(
      cls, source: row_source.RowSource, reader: reader_lib.Reader, pool: buffers.BufferPool
  ) -> MaskReader | None:
    """Returns a reader of the source's masks; None if the source has no masks."""
    if source.mask_paths is None:
      return None
    if not isinstance(reader, reader_lib.FileReader):
      raise errors.ConfigError("Loss masks need rows that are read from token files.")
    files, count = len(reader.files.paths), len(source.mask_paths)
    if count != files:
      raise errors.ConfigError(
          f"The row source has {count} mask files for {files} token files; each token file needs"
          " one."
      )
    masks = reader_lib.mask_reader(reader.files, source.mask_paths)
    return cls(reader.files, masks, pool, reader.mask_sizes)

  def read(
      self, parts: parts_lib.Parts, shape: tuple[int, int], masks: np.ndarray | None = None
  ) -> np.ndarray:
    """Returns the masks of rows as 32-bit words (rows, words).

    Args:
      parts: Parts of the rows.
      shape: Shape of the batch's tokens.
      masks: Masks that have been read already, but not padded; None reads the masks now.
    """
    new = frozenset(np.unique(parts.source).tolist()) - self._checked
    if len(new) > 1 and self.reader.wants_concurrency:
      with concurrent.futures.ThreadPoolExecutor(min(len(new), _MAX_CHECKS)) as pool:
        list(pool.map(self._check_size, sorted(new)))
    else:
      for source in new:
        self._check_size(source)
    self._checked |= new
    if masks is None:
      masks = self._pool.take(shape, np.uint8)
      self.reader.read(parts, masks, _CHECKS)
    else:
      self.reader.check(parts, masks, _CHECKS)
    return segments.pack_bits(masks)

  def _check_size(self, source: int) -> None:
    """Raises CorpusError unless a mask has one byte for each token of its token file."""
    files, path = self._files, self.reader.files.paths[source]
    expected = (files.size(source) - int(files.data_offsets[source])) // files.dtype.itemsize
    found = self._sizes[path] if path in self._sizes else files.storage.size(path)
    if found != expected:
      raise errors.CorpusError(
          f"The loss mask {path} has {found} bytes, expected {expected}: one for each token of"
          f" {files.paths[source]}. Create the mask again."
      )


def digest(source: row_source.RowSource, reader: reader_lib.Reader) -> str:
  """Returns a digest of the names and sizes of a source's mask files; empty without masks.

  The reader keeps the sizes of objects in stores, so that they are not requested again. From then
  on, a replaced object is an error.
  """
  if source.mask_paths is None or not isinstance(reader, reader_lib.FileReader):
    return ""
  paths, storage = source.mask_paths, reader.files.storage
  found, problems = scan.map_files(lambda i: storage.size(paths[i]), len(paths), workers=None)
  sizes = scan.all_or_error(found, problems, "Loss masks cannot be read")
  reader.mask_sizes.update((path, n) for path, n in zip(paths, sizes) if paths_lib.is_url(path))
  lines = "".join(f"{os.path.basename(path)} {size}\n" for path, size in zip(paths, sizes))
  return hashlib.sha256(lines.encode()).hexdigest()[:16]
