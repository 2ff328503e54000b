"""The document index: where each document of a corpus lies, in a sidecar file.

A document ends with its EOS token, which belongs to it, or at the end of its file; the next one
begins there. With EOS = 0:

    tokens      5  6  0 | 7  0 | 0 | 8  9 (end of file)
    document    0         1      2   3

so documents cover their files without gaps, and two EOS in a row make a document of one token.
Where dolma has left a `part.csv.gz` next to `part.npy`, whose lines begin with the first and the
end token of each document, that is used instead, and the tokens are not read. It must account for
the file up to its last token.

The file has a JSON header in its first 4096 bytes, then `file_offsets` (int64: the first document
of each file), `starts` (uint64: a document's first token in its file) and `lengths` (uint32).
Opening it reads only the header, and looking up documents reads only their numbers: memory does not
grow with the number of documents.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import json
import os
import reprlib
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

_FORMAT = "maxtext-olmo documents 1"
_HEADER_BYTES = 4096
# A smaller file is checked whole when it is opened; a larger one with `verify`.
_CHECKED_AT_OPENING = 64 << 20
_REBUILD = "Build it again with `maxtext-olmo index documents`."
_USE_EOS = "Copy it again, or remove it to find the documents by their EOS."


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
    checksum: Of the arrays, as hex.
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
  storage: Storage = dataclasses.field(default_factory=LocalStorage, compare=False, repr=False)

  def __getstate__(self) -> dict[str, Any]:
    # The files are opened again in each process.
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @functools.cached_property
  def _arrays(self) -> list[file_array.FileArray]:
    found, offset = [], _HEADER_BYTES
    for dtype, count in _layout(self.num_files, self.num_documents):
      found.append(file_array.FileArray(self.storage, self.path, dtype, offset, count))
      offset += count * np.dtype(dtype).itemsize
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
    offsets, (_, starts, lengths) = self.file_offsets, self._arrays
    documents = range(int(offsets[file_id]), int(offsets[file_id + 1]))

    def start(document: int) -> int:
      return int(starts[np.array([document])][0])

    # Starts ascend, so only the last document that begins before the range can reach into it.
    begin = bisect.bisect_right(documents, first, key=start) - 1
    end = bisect.bisect_left(documents, first + count, key=start)
    found = documents.start + np.arange(max(0, begin), end)
    size = lengths[found].astype(np.int64)
    return found[(size > 0) & (starts[found].astype(np.int64) + size > first)]

  def verify(self) -> None:
    """Reads the whole file and compares its checksum."""
    digest = xxhash.xxh3_128()
    for piece in self.storage.pieces(self.path, _HEADER_BYTES):
      digest.update(piece)
    if digest.hexdigest() != self.checksum:
      raise CorpusError(
          f"The document index {self.path} is damaged: its arrays have the checksum"
          f" {digest.hexdigest()}, its header says {self.checksum}. {_REBUILD}"
      )


def default_path(index_path: str | os.PathLike[str]) -> str:
  """Returns where the document index of an index is kept by default."""
  return os.fspath(index_path) + ".documents"


def load_documents(
    path: str | os.PathLike[str],
    index: index_lib.OlmoNpyIndex,
    eos_id: int | None = None,
    *,
    storage: Storage | None = None,
) -> DocumentIndex:
  """Opens a sidecar file, which must belong to the index and, where one is given, to the EOS.

  Args:
    storage: where the file is read from; local files unless given.
  """
  path = os.fspath(path)
  storage = LocalStorage() if storage is None else storage
  try:
    size = storage.size(path)
    header = storage.read(path, 0, min(size, _HEADER_BYTES))
  except CorpusError as error:
    raise type(error)(
        f"Cannot read the document index {path}: {reason(error).rstrip('.')}."
        " `maxtext-olmo index documents` makes one."
    ) from error
  try:
    values = json.loads(header)
    if values.pop("format") != _FORMAT or values.pop("header") != _digest_of(values):
      raise ValueError("another format, or a header that was changed")
    wrong = {name: value for name, value in values.items() if not _fits(name, value)}
    if wrong:
      raise ValueError(f"values of the wrong type in its header: {wrong}")
    needed = _HEADER_BYTES + sum(
        count * np.dtype(dtype).itemsize
        for dtype, count in _layout(values["num_files"], values["num_documents"])
    )
    documents = DocumentIndex(path=path, storage=storage, **values)
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise CorpusError(f"{path} is not a document index ({error}). {_REBUILD}") from error
  if size != needed:
    raise CorpusError(
        f"The document index {path} is damaged: expected {needed} bytes, found {size}. {_REBUILD}"
    )
  if values["fingerprint"] != index.fingerprint or values["num_files"] != len(index.files):
    raise CorpusError(
        f"The document index {path} belongs to another corpus: it was made for"
        f" {values['fingerprint']}, the index is {index.fingerprint}. {_REBUILD}"
    )
  if eos_id is not None and values["eos_id"] != eos_id:
    raise CorpusError(
        f"The document index {path} was made with EOS {values['eos_id']}, this run has"
        f" olmo_eos_id={eos_id}. Set it back, or build the document index again with"
        " `maxtext-olmo index documents`."
    )
  if size <= _CHECKED_AT_OPENING:
    documents.verify()
  return documents


def build_documents(
    index: index_lib.OlmoNpyIndex,
    path: str | os.PathLike[str],
    eos_id: int,
    *,
    path_remap: Mapping[str, str] | None = None,
    workers: int | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> DocumentIndex:
  """Finds all documents, reading each file once in bounded memory, and writes the sidecar file.

  Args:
    path: Of the sidecar file, which is local and written atomically.
    workers: Threads that read files; as many as cores unless given.
    storage: Where token files and boundary files are read from; local files unless given.
  """
  path = os.fspath(path)
  if eos_id < 0 or eos_id > np.iinfo(index.token_dtype).max:
    raise ConfigError(f"No token of {index.dtype} can be the EOS {eos_id}; set olmo_eos_id.")
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  total = sum(entry.n_tokens for entry in index.files) * index.token_dtype.itemsize
  directory = os.path.dirname(path) or "."
  with contextlib.ExitStack() as stack:
    with atomic.write_errors(path):
      folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".documents_", dir=directory))
    with progress_bar("Finding documents", total, enabled=progress, unit="bytes") as advance:

      def find(i: int) -> tuple[int, bool]:
        entry = index.files[i]
        boundary = os.path.splitext(files.paths[i])[0] + ".csv.gz"
        has_boundary = files.storage.exists(boundary)
        if has_boundary:
          spans = _spans_of_csv(files.storage, boundary, entry.n_tokens)
        else:
          spans = _spans_of_tokens(files, i, entry.n_tokens, eos_id)
        count = 0
        part = os.path.join(folder, str(i))
        with atomic.write_errors(part), open(part, "wb") as file:
          for starts, lengths, read in spans:
            _check_lengths(lengths, files.paths[i])
            file.write(np.stack([starts, lengths], axis=1).astype("<u8").tobytes())
            count += len(starts)
            advance(read * index.token_dtype.itemsize)
        return count, has_boundary

      results, problems = scan.map_files(
          find, len(index.files), workers=workers or available_cores(), block=1
      )
    found = scan.all_or_error(results, problems, "Documents cannot be found")
    return _assemble(path, folder, index, eos_id, found)


def _assemble(
    path: str,
    folder: str,
    index: index_lib.OlmoNpyIndex,
    eos_id: int,
    found: list[tuple[int, bool]],
) -> DocumentIndex:
  counts = [count for count, _ in found]
  offsets = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
  tokens = 0
  spans = LocalStorage()
  digest = xxhash.xxh3_128()
  with atomic.atomic_writer(path) as file:
    file.write(b" " * _HEADER_BYTES)

    def put(values: np.ndarray) -> None:
      data = values.tobytes()
      digest.update(data)
      file.write(data)

    put(offsets)
    for column, dtype in ((0, "<u8"), (1, "<u4")):
      for i, count in enumerate(counts):
        if not count:
          continue
        for piece in spans.pieces(os.path.join(folder, str(i))):
          part = np.frombuffer(piece, "<u8").reshape(-1, 2)[:, column]
          tokens += int(part.sum()) if column else 0
          put(part.astype(dtype))
    values = {
        "fingerprint": index.fingerprint,
        "eos_id": eos_id,
        "num_documents": int(offsets[-1]),
        "num_tokens": tokens,
        "num_files": len(counts),
        "num_boundary_files": sum(by_csv for _, by_csv in found),
        "checksum": digest.hexdigest(),
    }
    header = json.dumps({"format": _FORMAT, "header": _digest_of(values), **values}).encode()
    file.seek(0)
    file.write(header.ljust(_HEADER_BYTES - 1) + b"\n")
  return DocumentIndex(path=path, **values)  # type: ignore[arg-type]


Spans = Iterator[tuple[np.ndarray, np.ndarray, int]]  # starts, lengths, tokens read for them


def _spans_of_tokens(files: TokenFiles, file_id: int, n_tokens: int, eos_id: int) -> Spans:
  begun, place = 0, 0  # where the open document began, and how many tokens have been read
  for piece in files.storage.pieces(
      files.paths[file_id],
      int(files.data_offsets[file_id]),
      n_tokens * files.dtype.itemsize,
      scan.CHUNK_BYTES,
  ):
    tokens = np.frombuffer(piece, files.dtype)
    ends = np.flatnonzero(tokens == eos_id) + (place + 1)
    place += len(tokens)
    starts = np.concatenate([[begun], ends[:-1]])[: len(ends)]
    yield starts, ends - starts, len(tokens)
    begun = int(ends[-1]) if len(ends) else begun
  if begun < place:
    yield np.array([begun]), np.array([place - begun]), 0


def _spans_of_csv(storage: Storage, path: str, n_tokens: int) -> Spans:
  """Yields the documents of a boundary file, which must reach the end of the token file.

  Tokens between documents belong to none, as in OLMo-core; dolma leaves none.
  """
  block: list[tuple[int, int]] = []
  end, outside = 0, 0
  for number, line in enumerate(_csv_lines(storage, path), start=1):
    before = end
    try:
      start, end = int(line[0]), int(line[1])
    except (ValueError, IndexError):
      start, end = -1, -1
    if not before <= start <= end <= n_tokens:
      raise CorpusError(
          f"{path}:{number}: expected the first token and the end of a document after token"
          f" {before} and within the {n_tokens} tokens of the file, found"
          f" {reprlib.repr(','.join(line[:2]))}. {_USE_EOS}"
      )
    block.append((start, end - start))
    outside += start - before
    if len(block) == 1 << 16:
      spans = np.array(block, np.int64)
      yield spans[:, 0], spans[:, 1], 0
      block = []
  if end != n_tokens:
    raise CorpusError(
        f"The boundary file {path} ends with a document up to token {end}, but the token file has"
        f" {n_tokens} tokens: it is cut off, or belongs to another file. {_USE_EOS}"
    )
  if outside:
    logging.warning(
        "%s: %d of %d tokens lie between documents and are left out.", path, outside, n_tokens
    )
  spans = np.array(block, np.int64).reshape(-1, 2)
  yield spans[:, 0], spans[:, 1], n_tokens


def _csv_lines(storage: Storage, path: str) -> Iterator[list[str]]:
  data = storage.read(path)
  try:
    with gzip.open(io.BytesIO(data), "rt", encoding="utf-8", newline="") as file:
      yield from csv.reader(file)
  except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
    raise CorpusError(f"The boundary file {path} cannot be read: {error}. {_USE_EOS}") from error


def _check_lengths(lengths: np.ndarray, path: str) -> None:
  if len(lengths) and int(lengths.max()) > np.iinfo(np.uint32).max:
    raise CorpusError(
        f"{path} has a document of {int(lengths.max())} tokens, more than fit 32 bits: is the EOS"
        " right?"
    )


def _layout(num_files: int, num_documents: int) -> tuple[tuple[str, int], ...]:
  return ("<i8", num_files + 1), ("<u8", num_documents), ("<u4", num_documents)


def _fits(name: str, value: Any) -> bool:
  """Returns whether a value of the header has the type of its field."""
  return isinstance(value, str if name in ("fingerprint", "checksum") else int)


def _digest_of(values: dict[str, Any]) -> str:
  return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
