"""Where the documents of a corpus lie: a sidecar file next to the index, memory-mapped.

A document ends with its EOS token, which belongs to it, and at the end of a file; the next one begins there. With EOS = 0:

    tokens      5  6  0 | 7  0 | 0 | 8  9 (end of file)
    document    0         1      2   3

so documents cover their files without gaps, and two EOS in a row make a document of one token. Where dolma has left a
`part.csv.gz` next to `part.npy`, with the first and the end token of each document in a line, that says it instead, and
the tokens are not read.

The file has a header of JSON in its first 4096 bytes, then `file_offsets` (int64: which document is the first of a file),
`starts` (uint64: a document's first token in its file) and `lengths` (uint32). Opening it reads the header alone, and
access to a document touches the pages it is on: memory does not grow with the number of documents.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Mapping

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import scan
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

_FORMAT = "maxtext-olmo documents 1"
_HEADER_BYTES = 4096
_COPY_BYTES = 16 << 20
# A smaller file is checked whole when it is opened; a larger one with `verify`.
_CHECKED_AT_OPENING = 64 << 20
_REBUILD = "Build it again with `maxtext-olmo index documents`."


@dataclasses.dataclass(frozen=True)
class DocumentIndex:
  """The documents of a corpus, by number; what it holds is mapped, not loaded.

  Attributes:
    path: Of the sidecar file.
    fingerprint: Of the corpus.
    eos_id: What ended the documents that no boundary file named.
    num_documents: In all files.
    num_tokens: In all documents.
    num_boundary_files: Files whose documents dolma's boundary files gave.
    checksum: Of the arrays, as hex.
  """

  path: str
  fingerprint: str
  eos_id: int
  num_documents: int
  num_tokens: int
  num_files: int
  num_boundary_files: int
  checksum: str

  def __post_init__(self):
    object.__setattr__(self, "_maps", self._map())

  def __getstate__(self):
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def __setstate__(self, state):
    self.__dict__.update(state)
    object.__setattr__(self, "_maps", self._map())

  def _map(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found: list[np.ndarray] = []
    offset = _HEADER_BYTES
    for dtype, count in _layout(self.num_files, self.num_documents):
      if count:
        found.append(np.memmap(self.path, dtype, "r", offset, (count,)))
      else:
        found.append(np.zeros(0, dtype))
      offset += count * np.dtype(dtype).itemsize
    return found[0], found[1], found[2]

  @property
  def file_offsets(self) -> np.ndarray:
    """The first document of each file, and the number of all."""
    return self._maps[0]  # type: ignore[attr-defined]

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """How many tokens some documents have (int64)."""
    return self._maps[2][document_ids].astype(np.int64)  # type: ignore[attr-defined]

  def locate(self, document_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The file of each document, and its first token in it (int64)."""
    offsets, starts, _ = self._maps  # type: ignore[attr-defined]
    # Files without documents share their offset with the next one; the last of equals is the one that has it.
    file_ids = np.searchsorted(offsets, document_ids, side="right") - 1
    return file_ids, starts[document_ids].astype(np.int64)

  def verify(self) -> None:
    """Reads the whole file and compares its checksum."""
    found = _checksum(self.path)
    if found != self.checksum:
      raise CorpusError(
          f"The document index {self.path} is damaged: its arrays have the checksum {found}, its header says"
          f" {self.checksum}. {_REBUILD}"
      )


def default_path(index_path: str | os.PathLike[str]) -> str:
  """Where the documents of an index are kept unless said otherwise."""
  return os.fspath(index_path) + ".documents"


def load_documents(
    path: str | os.PathLike[str], index: index_lib.OlmoNpyIndex, eos_id: int | None = None
) -> DocumentIndex:
  """Opens a sidecar file that belongs to an index, and to an EOS where one is given."""
  path = os.fspath(path)
  try:
    with open(path, "rb") as file:
      header = file.read(_HEADER_BYTES)
    size = os.path.getsize(path)
  except OSError as error:
    raise CorpusError(
        f"Cannot read the document index {path}: {error.strerror}. `maxtext-olmo index documents` makes one."
    ) from error
  try:
    values = json.loads(header)
    if values.pop("format") != _FORMAT or values.pop("header") != _digest_of(values):
      raise ValueError("another format, or a header that was changed")
    needed = _HEADER_BYTES + sum(
        count * np.dtype(dtype).itemsize
        for dtype, count in _layout(values["num_files"], values["num_documents"])
    )
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise CorpusError(f"{path} is not a document index ({error}). {_REBUILD}") from error
  if size != needed:
    raise CorpusError(
        f"The document index {path} is damaged: expected {needed} bytes, found {size}. {_REBUILD}"
    )
  if values["fingerprint"] != index.fingerprint:
    raise CorpusError(
        f"The document index {path} belongs to another corpus: it was made for {values['fingerprint']}, the index is"
        f" {index.fingerprint}. {_REBUILD}"
    )
  if eos_id is not None and values["eos_id"] != eos_id:
    raise CorpusError(
        f"The document index {path} was made with EOS {values['eos_id']}, this run has olmo_eos_id={eos_id}. Set it"
        " back, or build the document index again with `maxtext-olmo index documents`."
    )
  documents = DocumentIndex(path=path, **values)
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
) -> DocumentIndex:
  """Finds all documents, reading each file once in bounded memory, and writes the sidecar file, atomically.

  Args:
    workers: Threads that read files; as many as cores unless given.
  """
  path = os.fspath(path)
  if eos_id < 0 or eos_id > np.iinfo(index.token_dtype).max:
    raise ConfigError(f"No token of {index.dtype} can be the EOS {eos_id}; set olmo_eos_id.")
  full = [paths.remap(index.resolve(i), path_remap) for i in range(len(index.files))]
  total = sum(entry.n_tokens for entry in index.files) * index.token_dtype.itemsize
  directory = os.path.dirname(path) or "."
  with tempfile.TemporaryDirectory(prefix=".documents_", dir=directory) as folder:
    with progress_bar("Finding documents", total, enabled=progress, unit="bytes") as advance:

      def find(i: int) -> tuple[int, bool]:
        entry = index.files[i]
        boundary = _boundary_file(full[i])
        if boundary is not None:
          spans = _spans_of_csv(boundary, entry.n_tokens)
        else:
          spans = _spans_of_tokens(full[i], entry, index.token_dtype, eos_id)
        count = 0
        with open(os.path.join(folder, str(i)), "wb") as file:
          for starts, lengths, read in spans:
            _check_lengths(lengths, full[i])
            np.stack([starts, lengths], axis=1).astype("<u8").tofile(file)
            count += len(starts)
            advance(read * index.token_dtype.itemsize)
        return count, boundary is not None

      results, problems = scan.map_files(
          find, len(full), workers=workers or os.cpu_count() or 1, block=1
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
        spans = np.memmap(os.path.join(folder, str(i)), "<u8", "r", shape=(count, 2))
        for start in range(0, count, _COPY_BYTES // 16):
          part = spans[start : start + _COPY_BYTES // 16, column]
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


def _spans_of_tokens(
    path: str, entry: index_lib.OlmoNpyFileEntry, dtype: np.dtype, eos_id: int
) -> Spans:
  begun, place = 0, 0  # where the open document began, and how many tokens have been read
  with scan.open_token_file(path) as file:
    file.seek(entry.data_offset)
    for piece in scan.pieces(file, path, alignment=dtype.itemsize):
      tokens = np.frombuffer(piece[: len(piece) // dtype.itemsize * dtype.itemsize], dtype)
      tokens = tokens[: entry.n_tokens - place]
      ends = np.flatnonzero(tokens == eos_id) + (place + 1)
      place += len(tokens)
      starts = np.concatenate([[begun], ends[:-1]])[: len(ends)]
      yield starts, ends - starts, len(tokens)
      begun = int(ends[-1]) if len(ends) else begun
  if place < entry.n_tokens:
    raise CorpusError(
        f"{path} is too short: expected {entry.n_tokens} tokens, found {place}. It was cut off or replaced after the"
        " index was built."
    )
  if begun < place:
    yield np.array([begun]), np.array([place - begun]), 0


def _boundary_file(path: str) -> str | None:
  """Dolma's boundary file of a token file, where there is one."""
  candidate = os.path.splitext(path)[0] + ".csv.gz"
  return candidate if not paths.is_url(path) and os.path.exists(candidate) else None


def _spans_of_csv(path: str, n_tokens: int) -> Spans:
  block: list[tuple[int, int]] = []
  before = 0
  try:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
      for number, line in enumerate(csv.reader(file), start=1):
        start, end = int(line[0]), int(line[1])
        if not before <= start <= end <= n_tokens:
          raise CorpusError(
              f"{path}:{number}: a document from token {start} to {end} does not lie behind the one before it (to"
              f" {before}) and within the {n_tokens} tokens of the file. Remove this boundary file to find the"
              " documents by their EOS."
          )
        block.append((start, end - start))
        before = end
        if len(block) == 1 << 16:
          spans = np.array(block, np.int64)
          yield spans[:, 0], spans[:, 1], 0
          block = []
  except (OSError, EOFError, ValueError, IndexError, UnicodeDecodeError) as error:
    if isinstance(error, CorpusError):
      raise
    raise CorpusError(
        f"The boundary file {path} cannot be read: {error}. Remove it to find the documents by their EOS."
    ) from error
  spans = np.array(block, np.int64).reshape(-1, 2)
  yield spans[:, 0], spans[:, 1], n_tokens


def _check_lengths(lengths: np.ndarray, path: str) -> None:
  if len(lengths) and int(lengths.max()) > np.iinfo(np.uint32).max:
    raise CorpusError(
        f"{path} has a document of {int(lengths.max())} tokens, more than fit 32 bits: is the EOS right?"
    )


def _layout(num_files: int, num_documents: int) -> tuple[tuple[str, int], ...]:
  return ("<i8", num_files + 1), ("<u8", num_documents), ("<u4", num_documents)


def _digest_of(values: dict) -> str:
  return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def _checksum(path: str) -> str:
  digest = xxhash.xxh3_128()
  with open(path, "rb") as file:
    file.seek(_HEADER_BYTES)
    while piece := file.read(_COPY_BYTES):
      digest.update(piece)
  return digest.hexdigest()
