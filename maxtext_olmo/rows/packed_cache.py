"""The packing of an OLMo-core run, read from the cache files in its working directory.

OLMo-core stores how it packed each group of files. So if the cache files of a run are available,
its packing can be rebuilt without knowing how its machine sorted equally long documents. Each group
has three files, arrays of uint64 without a header, with the same hash H in their names:

    document-indices-S-H.npy        first token and end of each document, in packing order
    instance-offsets-S-H.npy        first entry and end of each row in the next file
    documents-by-instance-S-H.npy   the documents of row 0, of row 1, …, by index in the first file

S is the sequence length. The hash covers full paths, which usually differ on this machine. So a
group is recognised by its documents: the first file must list exactly the documents that are found
in the token files.
"""

from __future__ import annotations

import glob
import os

import numpy as np
import xxhash

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.rows import packed_group
from maxtext_olmo.rows import parts as parts_lib

_FOLDER = "dataset-common"
_DOCUMENTS, _ROWS, _BY_ROW = "document-indices", "instance-offsets", "documents-by-instance"


class PackedCache:
  """The cache files of an OLMo-core run.

  Args:
    directory: The `work_dir` of the run's dataset, or its subdirectory `dataset-common`.
    row_length: Number of tokens per row.
  """

  def __init__(self, directory: str, row_length: int):
    self.directory = directory
    self._found = {
        _digest(_read(path, 2)): path for path in _files(directory, _DOCUMENTS, row_length)
    }
    if not self._found:
      raise errors.ConfigError(
          f"olmo_packing_cache_dir={directory!r} has no files {_DOCUMENTS}-{row_length}-*.npy."
          " Expected the work_dir of a run of OLMo-core with this sequence length."
      )

  def pack(self, documents: packed_group.Documents, group: int) -> parts_lib.Parts:
    """Returns the rows of a group as the run packed them.

    Args:
      documents: The documents of the group, cut to the row length.
      group: Number of the group, for messages.
    """
    starts = documents.offset + documents.first
    spans = np.stack([starts, starts + documents.length], axis=1)
    if not len(spans):
      return packed_group.table(documents, np.zeros(1, np.int64))
    path = self._found.get(_digest(spans))
    if path is None:
      raise errors.CorpusError(
          f"None of the {len(self._found)} packings in {self.directory} belongs to file group"
          f" {group}: none has exactly the {len(spans)} documents of this group. Check the order of"
          " the files (source_permutation_seed), olmo_source_group_size, olmo_long_documents,"
          " olmo_boundaries and the ids of the special tokens."
      )
    ordered = _read(path, 2)
    which = np.empty(len(spans), np.int64)
    which[_order(ordered)] = _order(spans)  # Both list the same documents, in different orders.
    rows = _read(path.replace(_DOCUMENTS, _ROWS), 2)
    by_row = _read(path.replace(_DOCUMENTS, _BY_ROW), 1)[:, 0]
    bounds = np.concatenate([[0], rows[:, 1]])
    if not (
        np.array_equal(bounds[:-1], rows[:, 0])
        and np.array_equal(np.sort(by_row), np.arange(len(spans)))
        and bounds[-1] == len(spans)
    ):
      raise errors.CorpusError(
          f"The packing that belongs to {path} is damaged: its rows do not contain each of its"
          f" {len(spans)} documents exactly once. Copy the run's cache files again."
      )
    return packed_group.table(documents.take(which[by_row]), bounds)


def stamp(directory: str, row_length: int) -> list[tuple[str, int, int]]:
  """Returns the name, size and modification time of each cache file, to detect replaced files."""
  found = []
  for kind in (_DOCUMENTS, _ROWS, _BY_ROW):
    for path in _files(directory, kind, row_length):
      stat = os.stat(path)
      found.append((os.path.basename(path), stat.st_size, stat.st_mtime_ns))
  return found


def _files(directory: str, kind: str, row_length: int) -> list[str]:
  inner = os.path.join(directory, _FOLDER)
  folder = glob.escape(inner if os.path.isdir(inner) else directory)
  return sorted(glob.glob(os.path.join(folder, f"{kind}-{row_length}-*.npy")))


def _read(path: str, width: int) -> np.ndarray:
  data = open_storage().read(path)
  if len(data) % (8 * width):
    raise errors.CorpusError(
        f"{path} has {len(data)} bytes, expected a multiple of {8 * width}. Copy the file again."
    )
  return np.frombuffer(data, "<u8").astype(np.int64).reshape(-1, width)


def _digest(spans: np.ndarray) -> str:
  """Returns a digest of documents that does not depend on their order."""
  return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(spans[_order(spans)], "<i8").tobytes())


def _order(spans: np.ndarray) -> np.ndarray:
  return np.lexsort((spans[:, 1], spans[:, 0]))
