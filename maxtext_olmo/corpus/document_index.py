"""An open document index: the position of each document and, if stored, its name and hash."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from maxtext_olmo.corpus import document_hashes
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import CorpusError

HEADER_BYTES = 4096
_Layout = tuple[tuple[str, int], ...]  # The dtype and the count of each array.
REBUILD = "Build it again with `maxtext-olmo index documents`."


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
  """The documents of a corpus, by number. Its arrays are read from the file as needed.

  `build_documents` and `load_documents` return one:

  >>> import tempfile
  >>> from maxtext_olmo import build_documents, build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.array([5, 6, 0, 7, 0], "uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  ...   documents = build_documents(index, f"{folder}/index.documents", eos_id=0)
  ...   print(documents.num_documents, documents.lengths(np.array([0, 1])))
  2 [3 2]

  Attributes:
    path: Path of the document index file.
    fingerprint: Fingerprint of the corpus.
    eos_id: Token that ends a document in files without a boundary file.
    num_documents: Number of documents in all files.
    num_tokens: Number of tokens in all documents.
    num_files: Number of token files.
    num_boundary_files: Number of token files with a boundary file written by dolma.
    checksum: Checksum (hex) of the document positions; names and hashes do not affect it.
    names: Sizes of the stored names; None if no document has a name.
    hashes: Checksum of the stored hashes; empty if there are none.
    rule: Rule for where documents begin and end: `auto`, `eos` or `csv`.
    copy: Path of a local copy of the file, which is read instead; empty if there is none.
    storage: Storage that holds the document index file.
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
  rule: str = "auto"
  copy: str = dataclasses.field(default="", compare=False, repr=False)
  storage: Storage = dataclasses.field(default_factory=open_storage, compare=False, repr=False)

  def __getstate__(self) -> dict[str, Any]:
    # Leaves out cached arrays: each process opens the file again.
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @property
  def local_path(self) -> str | None:
    """Path of the local file that is read; None if the file is read from an object store."""
    return self.copy or (None if urls.is_url(self.path) else self.path)

  @property
  def size(self) -> int:
    """Size in bytes that the document index file must have."""
    return self._sections[-1][1]

  @functools.cached_property
  def _arrays(self) -> list[file_array.FileArray]:
    found, offset = [], HEADER_BYTES
    for _, _, layout in self._sections:
      for dtype, count in layout:
        found.append(
            file_array.FileArray(self.storage, self.copy or self.path, dtype, offset, count)
        )
        offset += count * np.dtype(dtype).itemsize
    return found

  @functools.cached_property
  def _sections(self) -> list[tuple[str, int, _Layout]]:
    """The checksum, end offset and array layout of each section: boundaries, names, hashes."""
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
    """The first document of each file, followed by the total number of documents."""
    return self._arrays[0].load()

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of each document (int64)."""
    return self._arrays[2][document_ids].astype(np.int64)

  def locate(self, document_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file id of each document, and its first token within that file (int64)."""
    # A file without documents has the same offset as the next file. The last of the equal offsets
    # belongs to the file that has the document.
    file_ids = np.searchsorted(self.file_offsets, document_ids, side="right") - 1
    return file_ids, self._arrays[1][document_ids].astype(np.int64)

  def within(self, file_id: int, first: int, count: int) -> np.ndarray:
    """Returns the documents that overlap tokens [first, first + count) of a file, in file order."""
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
    """Returns the name of each document, and the source of its text."""
    if self._names is None:
      return [document_names.NO_NAME] * len(document_ids)
    return self._names.describe(document_ids)

  @property
  def example_of_a_name(self) -> str:
    """A sentence with an example of a name, for errors.

    Empty if none of the first 1000 files begins with a document that has a name.
    """
    firsts = self.file_offsets[: min(self.num_files, 1000)]
    firsts = firsts[firsts < self.num_documents]
    for number, found in zip(firsts.tolist(), self.describe(firsts), strict=True):
      if found.name:
        return f" Document {number} has the name {found.name!r}."
    return ""

  def find_names(self, names: Sequence[str]) -> list[np.ndarray]:
    """Returns, for each name, the documents that have it, in ascending order."""
    if self._names is None:
      return [np.zeros(0, np.int64) for _ in names]
    return self._names.find(names)

  def find_hashes(self, hashes: Sequence[str]) -> list[np.ndarray]:
    """Returns, for each hash (32 hexadecimal digits), the documents that have it, ascending.

    Raises:
      ValueError: The document index has no hashes, or an argument is not a hash.
    """
    if not self.hashes:
      raise ValueError(
          f"{self.path} has no hashes. Build it again with `maxtext-olmo index documents --hashes"
          f" --boundaries {self.rule}`."
      )
    table = sorted_table.SortedTable(self._arrays[-1], document_hashes.WIDTH)
    found = document_hashes.find_hashes(table, hashes)
    if any(documents.size and documents.max() >= self.num_documents for documents in found):
      raise CorpusError(
          f"The hashes in the document index {self.path} are damaged: one refers to a document that"
          f" does not exist. {REBUILD}"
      )
    return [documents.astype(np.int64) for documents in found]

  @functools.cached_property
  def _names(self) -> document_names.DocumentNames | None:
    if self.names is None:
      return None
    return document_names.DocumentNames(self.path, self._arrays[3:10])

  def verify(self) -> None:
    """Reads the whole file and checks its checksums; raises CorpusError if one differs."""
    where = f" If only its copy {self.copy} is damaged, remove that." if self.copy else ""
    begin = HEADER_BYTES
    for expected, end, _ in self._sections:
      digest = xxhash.xxh3_128()
      for piece in self.storage.pieces(self.copy or self.path, begin, end - begin):
        digest.update(piece)
      if digest.hexdigest() != expected:
        raise CorpusError(
            f"The document index {self.path} is damaged: bytes {begin} to {end} have the checksum"
            f" {digest.hexdigest()}, but the header says {expected}. {REBUILD}{where}"
        )
      begin = end
