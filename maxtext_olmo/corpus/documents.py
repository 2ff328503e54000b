"""The document index: a sidecar file with the position of each document of a corpus.

A document ends with its EOS token, which belongs to it, or at the end of its file; the next one
begins there. With EOS = 0:

    tokens      5  6  0 | 7  0 | 0 | 8  9 (end of file)
    document    0         1      2   3

So documents cover their files without gaps, and two consecutive EOS make a document of one token.
A boundary file next to the token file (`boundaries`) takes precedence: its documents and names are
used, and the tokens are not read.

The file has a JSON header in its first 4096 bytes, and then up to three sections, each with a
checksum in the header:

    boundaries   `file_offsets` (int64: the first document of each file), `starts` (uint64: a
                 document's first token in its file) and `lengths` (uint32)
    names        if there are any (`document_names`)
    hashes       if asked for (`document_hashes`)

Opening it reads only the header, and looking up documents reads only their entries: memory does not
grow with the number of documents. Format 1, which has neither names nor hashes, can still be read;
building the index again writes format 2, with the same boundaries and the same checksum of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo.cores import available_cores
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import document_hashes
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.document_index import HEADER_BYTES
from maxtext_olmo.corpus.document_index import REBUILD
from maxtext_olmo.corpus.document_index import DocumentIndex as DocumentIndex
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

_FORMAT_1 = "maxtext-olmo documents 1"
_FORMAT = "maxtext-olmo documents 2"
# Files up to this size are checked completely when they are opened; larger ones by `verify`.
_CHECKED_AT_OPENING = 64 << 20
_SPAN_BYTES = 16  # A document in the temporary files: its first token and its length.


def default_path(index_path: str | os.PathLike[str]) -> str:
  """Returns the default path of the document index that belongs to an index."""
  return urls.without_secrets(index_path) + ".documents"


def load_documents(
    path: str | os.PathLike[str],
    index: index_lib.OlmoNpyIndex,
    eos_id: int | None = None,
    *,
    storage: Storage | None = None,
) -> DocumentIndex:
  """Opens a document index and checks that it belongs to the corpus.

  >>> import tempfile
  >>> from maxtext_olmo import build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.array([5, 6, 0, 7, 0], "uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  ...   built = build_documents(index, f"{folder}/index.documents", eos_id=0)
  ...   load_documents(f"{folder}/index.documents", index).num_documents
  2

  Args:
    path: Path of the sidecar file.
    index: Index of the corpus.
    eos_id: EOS that the document index must have been built with; None accepts any.
    storage: Storage that holds the sidecar file; local files by default.

  Raises:
    CorpusError: The file is missing or damaged, or belongs to another corpus or EOS.
  """
  path = urls.without_secrets(path)
  storage = open_storage() if storage is None else storage
  try:
    size = storage.size(path)
    header = storage.read(path, 0, min(size, HEADER_BYTES))
  except CorpusError as error:
    raise type(error)(
        f"Cannot read the document index {path}: {reason(error).rstrip('.')}."
        " `maxtext-olmo index documents` makes one."
    ) from error
  try:
    values = _read_header(header)
    documents = DocumentIndex(path=path, storage=storage, **values)
    needed = documents.size
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise CorpusError(f"{path} is not a document index ({error}). {REBUILD}") from error
  if size != needed:
    raise CorpusError(
        f"The document index {path} is damaged: expected {needed} bytes, found {size}. {REBUILD}"
    )
  if values["fingerprint"] != index.fingerprint or values["num_files"] != len(index.files):
    raise CorpusError(
        f"The document index {path} belongs to another corpus: it was built for"
        f" {values['fingerprint']}, but the index is {index.fingerprint}. {REBUILD}"
    )
  if eos_id is not None and values["eos_id"] != eos_id:
    raise CorpusError(
        f"The document index {path} was made with EOS {values['eos_id']}, but this run has"
        f" olmo_eos_id={eos_id}. Set olmo_eos_id={values['eos_id']}, or build the document index"
        " again with `maxtext-olmo index documents`."
    )
  if size <= _CHECKED_AT_OPENING:
    documents.verify()
  return documents


def build_documents(
    index: index_lib.OlmoNpyIndex,
    path: str | os.PathLike[str],
    eos_id: int,
    *,
    hashes: bool = False,
    path_remap: Mapping[str, str] | None = None,
    workers: int | None = None,
    progress: bool = False,
    storage: Storage | None = None,
) -> DocumentIndex:
  """Finds all documents of a corpus and writes the document index.

  Reads each file once, in bounded memory.

  >>> import tempfile
  >>> from maxtext_olmo import build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.array([5, 6, 0, 7, 0], "uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  ...   build_documents(index, f"{folder}/index.documents", eos_id=0).num_documents
  2

  Args:
    index: Index of the corpus.
    path: Path or URL of the sidecar file, which is written atomically.
    eos_id: Token that ends a document.
    hashes: Whether to store a hash of each document's tokens; reads all tokens once more.
    path_remap: prefix → replacement, for paths that begin differently on this machine.
    workers: Number of threads that read files; one per core by default.
    progress: Whether to show a progress bar.
    storage: Storage that holds the token files and boundary files; `open_storage()` by
      default.
  """
  path = urls.without_secrets(path)
  if eos_id < 0 or eos_id > np.iinfo(index.token_dtype).max:
    raise ConfigError(
        f"The EOS {eos_id} is not a valid {index.dtype} token id. Set olmo_eos_id to the id of the"
        " tokenizer's EOS."
    )
  files = TokenFiles.of_index(index, path_remap=path_remap, storage=storage)
  total = sum(entry.n_tokens for entry in index.files) * index.token_dtype.itemsize
  # For a document index in a store, the parts are collected where temporary files are.
  directory = None if urls.is_url(path) else os.path.dirname(path) or "."
  with contextlib.ExitStack() as stack:
    with atomic.write_errors(path):
      folder = stack.enter_context(
          tempfile.TemporaryDirectory(
              prefix=".documents_", dir=directory, ignore_cleanup_errors=True
          )
      )
    with progress_bar("Finding documents", total, enabled=progress, unit="bytes") as advance:

      def find(i: int) -> _Found:
        entry, width = index.files[i], index.token_dtype.itemsize
        boundary = boundaries.boundary_path(files.paths[i])
        has_boundary = files.storage.exists(boundary)
        part = os.path.join(folder, str(i))
        count = 0
        with atomic.write_errors(part), document_names.NameSpool(folder, i) as names:
          if has_boundary:
            spans = _spans_of_csv(files.storage, boundary, entry.n_tokens, names)
          else:
            spans = _spans_of_tokens(files, i, entry.n_tokens, eos_id)
          with open(part, "wb") as file:
            for starts, lengths, read in spans:
              _check_lengths(lengths, files.paths[i])
              file.write(np.stack([starts, lengths], axis=1).astype("<u8").tobytes())
              count += len(starts)
              advance(read * width)
        return _Found(count, has_boundary, names.named, names.num_sources)

      workers = workers or available_cores()
      results, problems = scan.map_files(find, len(index.files), workers=workers, block=1)
    found = scan.all_or_error(results, problems, "Documents cannot be found")
    if hashes:
      _hash(index, files, folder, found, workers=workers, progress=progress)
    return _assemble(path, folder, index, eos_id, found, hashes)


@dataclasses.dataclass(frozen=True)
class _Found:
  """The documents found in a token file: their number, where they came from, and their names."""

  documents: int
  by_boundaries: bool
  named: int
  sources: int


def _hash(
    index: index_lib.OlmoNpyIndex,
    files: TokenFiles,
    folder: str,
    found: list[_Found],
    *,
    workers: int,
    progress: bool,
) -> None:
  """Writes the hashes of each file's documents to a temporary file."""
  total = sum(entry.n_tokens for entry in index.files) * index.token_dtype.itemsize
  with progress_bar("Hashing documents", total, enabled=progress, unit="bytes") as advance:

    def hash_file(i: int) -> None:
      path = os.path.join(folder, _hash_name(i))
      spans, n_tokens = _spans(folder, i, found[i].documents), index.files[i].n_tokens
      document_hashes.hash_documents(files, i, n_tokens, spans, path, advance)

    _, problems = scan.map_files(hash_file, len(found), workers=workers, block=1)
  scan.all_or_error([None] * len(found), problems, "Documents cannot be hashed")


def _assemble(
    path: str,
    folder: str,
    index: index_lib.OlmoNpyIndex,
    eos_id: int,
    found: list[_Found],
    hashes: bool,
) -> DocumentIndex:
  counts = [one.documents for one in found]
  offsets = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
  tokens = 0
  named = sum(one.named for one in found)
  with writing.open_output(path) as file:
    file.write(b" " * HEADER_BYTES)
    put, checksum = _checked_writer(file)
    put(offsets)
    for column, dtype in ((0, "<u8"), (1, "<u4")):
      for i, count in enumerate(counts):
        for block in _spans(folder, i, count):
          tokens += int(block[:, 1].sum()) if column else 0
          put(block[:, column].astype(dtype))
    values: dict[str, Any] = {
        "fingerprint": index.fingerprint,
        "eos_id": eos_id,
        "num_documents": int(offsets[-1]),
        "num_tokens": tokens,
        "num_files": len(counts),
        "num_boundary_files": sum(one.by_boundaries for one in found),
        "checksum": checksum(),
        "names": None,
        "hashes": "",
    }
    if named or any(one.sources for one in found):
      put, checksum = _checked_writer(file)
      sizes = document_names.write_names(folder, counts, named, put)
      values["names"] = {**dataclasses.asdict(sizes), "checksum": checksum()}
    if hashes:
      put, checksum = _checked_writer(file)
      records = document_hashes.records(folder, counts, _hash_name)
      for block in sorted_table.sort_records(records, folder):
        put(block)
      values["hashes"] = checksum()
    header = json.dumps({"format": _FORMAT, "header": _digest_of(values), **values}).encode()
    file.seek(0)
    file.write(header.ljust(HEADER_BYTES - 1) + b"\n")
  return DocumentIndex(path=path, **_with_sizes(values))


def _checked_writer(file: BinaryIO) -> tuple[Callable[[np.ndarray], None], Callable[[], str]]:
  """Returns a function that writes arrays, and one that returns the checksum of what it wrote."""
  digest = xxhash.xxh3_128()

  def put(values: np.ndarray) -> None:
    data = values.tobytes()
    digest.update(data)
    file.write(data)

  return put, digest.hexdigest


def _spans(folder: str, number: int, count: int) -> Iterator[np.ndarray]:
  """Yields blocks of rows (first token, length), one row per document of a file."""
  if count:
    for piece in LocalStorage().pieces(os.path.join(folder, str(number))):
      yield np.frombuffer(piece, "<u8").reshape(-1, 2)


def _hash_name(number: int) -> str:
  return f"{number}.hashes"


Spans = Iterator[tuple[np.ndarray, np.ndarray, int]]  # starts, lengths, tokens read for them


def _spans_of_tokens(files: TokenFiles, file_id: int, n_tokens: int, eos_id: int) -> Spans:
  begun, place = 0, 0  # start of the current document, and number of tokens read
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


def _spans_of_csv(
    storage: Storage, path: str, n_tokens: int, names: document_names.NameSpool
) -> Spans:
  """Yields the documents of a boundary file, and spools their names."""
  for some in boundaries.read_boundaries(storage, path, n_tokens):
    names.add(some)
    yield some.starts, some.lengths, 0
  yield np.zeros(0, np.int64), np.zeros(0, np.int64), n_tokens


def _check_lengths(lengths: np.ndarray, path: str) -> None:
  if len(lengths) and int(lengths.max()) > np.iinfo(np.uint32).max:
    raise CorpusError(
        f"{path} has a document of {int(lengths.max())} tokens; the length must fit in 32 bits."
        " Check olmo_eos_id."
    )


def _read_header(header: bytes) -> dict[str, Any]:
  """Returns the values of a header; raises ValueError, KeyError or TypeError if it is invalid."""
  values = json.loads(header)
  version = values.pop("format")
  if version not in (_FORMAT_1, _FORMAT) or values.pop("header") != _digest_of(values):
    raise ValueError("it has another format, or its header was changed")
  if version == _FORMAT_1:
    values |= {"names": None, "hashes": ""}
  sizes = values["names"]
  checked = {**values, **{f"names.{name}": value for name, value in (sizes or {}).items()}}
  del checked["names"]
  if wrong := {name: value for name, value in checked.items() if not _fits(name, value)}:
    raise ValueError(f"values of the wrong type in its header: {wrong}")
  return _with_sizes(values)


def _with_sizes(values: dict[str, Any]) -> dict[str, Any]:
  """Returns the values of a header as the arguments of `DocumentIndex`."""
  sizes = values["names"]
  return {**values, "names": None if sizes is None else document_names.NameSizes(**sizes)}


def _fits(name: str, value: Any) -> bool:
  """Returns whether a value of the header has the type of its field."""
  if name in ("fingerprint", "checksum", "hashes", "names.checksum"):
    return isinstance(value, str)
  return isinstance(value, int) and value >= 0


def _digest_of(values: dict[str, Any]) -> str:
  return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
