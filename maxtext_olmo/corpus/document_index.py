"""An open document index: where each document lies, and, if it was kept, its name and hash."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import xxhash

from maxtext_olmo.corpus import document_hashes
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.errors import CorpusError

HEADER_BYTES = 4096
_Layout = tuple[tuple[str, int], ...]  # The dtype and the count of each array.
REBUILD = "Build it again with `maxtext-olmo index documents`."


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
  """The documents of a corpus, by number; its arrays are read as they are needed.

  Attributes:
    path: Of the sidecar file.
    fingerprint: Of the corpus.
    eos_id: The token that ends a document where there is no boundary file.
    num_documents: In all files.
    num_tokens: In all documents.
    num_boundary_files: How many files have a boundary file of dolma.
    checksum: Of where documents lie, as hex; the same with and without names and hashes.
    names: The sizes of the names; None if no document has one.
    hashes: The checksum of the hashes; empty if there are none.
    storage: Where the sidecar file is read from.
  """

  path: str
  fingerprint: str
  eos_id: int
  num_documents: int
  num_tokens: int
  num_files: int
  num_boundary_files: int
  checksum: str
  names: document_names.NameSizes | None = None
  hashes: str = ""
  storage: Storage = dataclasses.field(default_factory=LocalStorage, compare=False, repr=False)

  def __getstate__(self):
    # The files are opened again in each process.
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @property
  def size(self) -> int:
    """How many bytes the file must have."""
    return self._sections[-1][1]

  @functools.cached_property
  def _arrays(self) -> list[file_array.FileArray]:
    found, offset = [], HEADER_BYTES
    for _, _, layout in self._sections:
      for dtype, count in layout:
        found.append(file_array.FileArray(self.storage, self.path, dtype, offset, count))
        offset += count * np.dtype(dtype).itemsize
    return found

  @functools.cached_property
  def _sections(self) -> list[tuple[str, int, _Layout]]:
    """The checksum, the end and the arrays of each section: boundaries, names, hashes."""
    count = self.num_documents
    boundaries = (("<i8", self.num_files + 1), ("<u8", count), ("<u4", count))
    layouts: list[tuple[str, _Layout]] = [(self.checksum, boundaries)]
    if self.names is not None:
      layouts.append((self.names.checksum, self.names.layout(count)))
    if self.hashes:
      layouts.append((self.hashes, (("<u8", document_hashes.WIDTH * count),)))
    found, end = list[tuple[str, int, _Layout]](), HEADER_BYTES
    for checksum, layout in layouts:
      end += sum(count * np.dtype(dtype).itemsize for dtype, count in layout)
      found.append((checksum, end, layout))
    return found

  @functools.cached_property
  def file_offsets(self) -> np.ndarray:
    """The first document of each file, then the number of all documents."""
    return self._arrays[0].load()

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """Returns how many tokens each document has (int64)."""
    return self._arrays[2][document_ids].astype(np.int64)

  def locate(self, document_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file of each document, and its first token in it (int64)."""
    # Files without documents share their offset with the next file; the last of equals has the
    # document.
    file_ids = np.searchsorted(self.file_offsets, document_ids, side="right") - 1
    return file_ids, self._arrays[1][document_ids].astype(np.int64)

  def within(self, file_id: int, first: int, count: int) -> np.ndarray:
    """Returns the documents that have a token of a range of a file, in their order there."""
    offsets, (_, starts, lengths) = self.file_offsets, self._arrays[:3]
    documents = range(int(offsets[file_id]), int(offsets[file_id + 1]))

    def start(document: int) -> int:
      return int(starts[np.array([document])][0])

    # Starts ascend, so only the last document that begins before the range can reach into it.
    begin = bisect.bisect_right(documents, first, key=start) - 1
    end = bisect.bisect_left(documents, first + count, key=start)
    found = documents.start + np.arange(max(0, begin), end)
    size = lengths[found].astype(np.int64)
    return found[(size > 0) & (starts[found].astype(np.int64) + size > first)]

  def describe(self, document_ids: np.ndarray) -> list[document_names.DocumentName]:
    """Returns what each document is called, and where its text came from."""
    if self._names is None:
      return [document_names.NO_NAME] * len(document_ids)
    return self._names.describe(document_ids)

  def find_names(self, names: Sequence[str]) -> list[np.ndarray]:
    """Returns the documents that have each of some names, ascending."""
    if self._names is None:
      return [np.zeros(0, np.int64) for _ in names]
    return self._names.find(names)

  def find_hashes(self, hashes: Sequence[str]) -> list[np.ndarray]:
    """Returns the documents that have each of some hashes (32 hexadecimal digits), ascending.

    Raises:
      ValueError: The document index has no hashes, or this is none.
    """
    if not self.hashes:
      raise ValueError(
          f"{self.path} has no hashes: build it again with `maxtext-olmo index documents --hashes`."
      )
    table = sorted_table.SortedTable(self._arrays[-1], document_hashes.WIDTH)
    found = document_hashes.find_hashes(table, hashes)
    if any(documents.size and documents.max() >= self.num_documents for documents in found):
      raise CorpusError(
          f"The hashes in the document index {self.path} are damaged: one has a document that is"
          f" not there. {REBUILD}"
      )
    return [documents.astype(np.int64) for documents in found]

  @functools.cached_property
  def _names(self) -> document_names.DocumentNames | None:
    if self.names is None:
      return None
    return document_names.DocumentNames(self.path, self._arrays[3:10])

  def verify(self) -> None:
    """Reads the whole file and compares its checksums."""
    begin = HEADER_BYTES
    for expected, end, _ in self._sections:
      digest = xxhash.xxh3_128()
      for piece in self.storage.pieces(self.path, begin, end - begin):
        digest.update(piece)
      if digest.hexdigest() != expected:
        raise CorpusError(
            f"The document index {self.path} is damaged: bytes {begin} to {end} have the checksum"
            f" {digest.hexdigest()}, its header says {expected}. {REBUILD}"
        )
      begin = end
