"""The document index: a sidecar file with the position of each document of a corpus.

A document ends with an EOS token, which belongs to it, or at the end of its file. The next document
begins right after it. With EOS = 0:

    tokens      5  6  0 | 7  0 | 0 | 8  9 (end of file)
    document    0         1      2   3

Documents therefore cover their files without gaps, and an EOS right after another EOS is a document
of one token.
A boundary file next to the token file (`boundaries`) takes precedence: its documents and names are
used, and the tokens are not read.

This rule is called `auto`. OLMo-core's document datasets follow two other rules: `eos` ignores
boundary files and drops tokens after the last EOS of a file; `csv` requires a boundary file for
each token file.

The file has a JSON header in its first 4096 bytes, and then up to three sections, each with a
checksum in the header:

    boundaries   `file_offsets` (int64: the first document of each file), `starts` (uint64: a
                 document's first token in its file) and `lengths` (uint32)
    names        if there are any (`document_names`)
    hashes       if asked for (`document_hashes`)

Opening the file loads only the header, and looking up documents loads only their entries, so memory
use does not grow with the number of documents. Format 1, which has neither names nor hashes, can
still be read. Building the index again writes format 2, with the same boundaries and the same
boundary checksum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash

from maxtext_olmo import atomic
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import document_hashes
from maxtext_olmo.corpus import document_header
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus import document_work
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import sorted_table
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.document_index import HEADER_BYTES
from maxtext_olmo.corpus.document_index import REBUILD
from maxtext_olmo.corpus.document_index import DocumentIndex as DocumentIndex
from maxtext_olmo.corpus.document_work import BoundaryFile
from maxtext_olmo.corpus.document_work import FoundInFile
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import local_copy
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.corpus.work import pieces as pieces_lib
from maxtext_olmo.corpus.work import run as run_lib
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.corpus.work.pieces import Piece
from maxtext_olmo.corpus.work.pieces import SourceFile
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

# Files up to this size are checked completely when they are opened; larger ones only by `verify`.
_CHECKED_AT_OPENING = 64 << 20
_COPY_BYTES = 1 << 20
RULES = ("auto", "eos", "csv")
_PROBLEM = "Documents cannot be found"


def default_path(index_path: str | os.PathLike[str], rule: str = "auto") -> str:
  """Returns the default path of the document index for an index and a rule."""
  suffix = "" if rule == "auto" else f".{rule}"
  return f"{urls.without_secrets(index_path)}.documents{suffix}"


def load_documents(
    path: str | os.PathLike[str],
    index: index_lib.OlmoNpyIndex,
    eos_id: int | None = None,
    *,
    rule: str = "auto",
    storage: Storage | None = None,
    cache_dir: str | None = None,
    download: bool = True,
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
    rule: Rule that the document index must have been built with.
    storage: Storage that holds the sidecar file; `open_storage()` by default.
    cache_dir: Directory for a local copy if `path` is a URL. None reads the object itself, which
      takes about two requests per document.
    download: Whether to download a missing copy. If not, a copy is used only if there is one.

  Raises:
    CorpusError: The file is missing or damaged, or was built for another corpus, EOS or rule.
    WriteError: The local copy cannot be written.
  """
  path = urls.without_secrets(path)
  storage = open_storage() if storage is None else storage
  try:
    file = (
        path
        if cache_dir is None
        else local_copy.local_path(path, storage, cache_dir, download=download)
    )
    size = storage.size(file)
    header = storage.read(file, 0, min(size, HEADER_BYTES))
  except CorpusError as error:
    raise type(error)(
        f"Cannot read the document index {path}: {reason(error).rstrip('.')}."
        " `maxtext-olmo index documents` makes one."
    ) from error
  try:
    values = document_header.read(header)
    copy = "" if file == path else file
    documents = DocumentIndex(path=path, copy=copy, storage=storage, **values)
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
  if documents.rule != rule:
    raise CorpusError(
        f"The document index {path} was made with the rule {documents.rule!r}, but this run needs"
        f" {rule!r}. Set olmo_documents_path to another file, or remove this one."
    )
  if size <= _CHECKED_AT_OPENING:
    documents.verify()
  return documents


def build_documents(
    index: index_lib.OlmoNpyIndex,
    path: str | os.PathLike[str],
    eos_id: int,
    *,
    rule: str = "auto",
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
    rule: Rule for where documents begin and end: `auto`, `eos` or `csv`.
    hashes: Whether to store a hash of each document's tokens.
    path_remap: Prefix → replacement, for paths that begin differently on this machine.
    workers: Number of threads that read files; one per core by default.
    progress: Whether to show a progress bar.
    storage: Storage that holds the token files and boundary files; `open_storage()` by
      default.
  """
  path = urls.without_secrets(path)
  options = WorkOptions(workers=workers)
  with _temporary_directory(path) as folder:
    outcome = find_documents(
        index,
        eos_id,
        dataclasses.replace(options, results=os.path.join(folder, "results")),
        rule=rule,
        hashes=hashes,
        path_remap=path_remap,
        progress=progress,
        storage=storage,
    )
    return write_documents(index, path, eos_id, outcome, rule=rule, hashes=hashes)


def find_documents(
    index: index_lib.OlmoNpyIndex,
    eos_id: int,
    options: WorkOptions,
    *,
    rule: str = "auto",
    hashes: bool = False,
    path_remap: Mapping[str, str] | None = None,
    progress: bool = False,
    storage: Storage | None = None,
    piece_bytes: int = pieces_lib.PIECE_BYTES,
) -> run_lib.Outcome:
  """Finds the documents of all pieces of a corpus, or of a part, on one machine or on many.

  Args:
    index: Index of the corpus.
    eos_id: Token that ends a document.
    options: How the work is done.
    rule: Rule for where documents begin and end: `auto`, `eos` or `csv`.
    hashes: Whether to hash each document's tokens.
    path_remap: Prefix → replacement, for paths that begin differently on this machine.
    progress: Whether to show a progress bar.
    storage: Storage that holds the token files and boundary files; `open_storage()` by default.
    piece_bytes: Size of a piece in bytes.
  """
  if rule not in RULES:
    raise ConfigError(f"The rule for documents must be one of {', '.join(RULES)}, got {rule!r}.")
  if eos_id < 0 or eos_id > np.iinfo(index.token_dtype).max:
    raise ConfigError(
        f"The EOS {eos_id} is not a valid {index.dtype} token id. Set olmo_eos_id to the id of the"
        " tokenizer's EOS."
    )
  sources = pieces_lib.source_files(index, path_remap=path_remap)
  work = document_work.DocumentWork(eos_id, hashes, storage=storage)

  def items_of(i: int) -> Sequence[Piece | BoundaryFile]:
    source = sources[i]
    boundary = boundaries.boundary_path(source.path)
    if rule != "eos" and work.files.exists(boundary):
      return [BoundaryFile(source, boundary)]
    if rule == "csv":
      raise CorpusError(f"{source.path} has no boundary file; expected {boundary}.")
    return pieces_lib.cut(source, piece_bytes)

  found, problems = scan.map_files(items_of, len(sources), workers=None)
  items = scan.all_or_error(found, problems, _PROBLEM)
  return run_lib.run_work(
      work,
      [item for some in items for item in some],
      options,
      fingerprint=index.fingerprint,
      description="Finding documents",
      progress=progress,
  )


def write_documents(
    index: index_lib.OlmoNpyIndex,
    path: str | os.PathLike[str],
    eos_id: int,
    outcome: run_lib.Outcome,
    *,
    rule: str = "auto",
    hashes: bool = False,
) -> DocumentIndex:
  """Writes the document index from what `find_documents` returned for all pieces.

  Args:
    index: Index of the corpus.
    path: Path or URL of the sidecar file, which is written atomically.
    eos_id: The EOS that `find_documents` was given.
    outcome: What it returned.
    rule: The rule that it was given.
    hashes: Whether it was told to hash the documents.
  """
  path = urls.without_secrets(path)
  failures = {failure.item.file: failure.error for failure in reversed(outcome.failures)}
  errors = [failures[file] for file in sorted(failures)]
  scan.all_or_error([None] * len(index.files), errors, _PROBLEM)
  outcome.check(_PROBLEM)
  with _temporary_directory(path) as folder:
    sources = {item.file: item.source for item in outcome.items}
    tail = rule == "auto"

    def by_file() -> Iterator[tuple[SourceFile, Iterator[tuple[Any, Mapping[str, Any]]]]]:
      for file, results in itertools.groupby(outcome, key=lambda pair: pair[0].file):
        yield sources[file], results

    def spans() -> Iterator[tuple[np.ndarray, np.ndarray]]:
      for source, results in by_file():
        yield from document_work.file_spans(source, results, tail=tail)

    found = [document_work.join_file(folder, *one, tail=tail) for one in by_file()]
    return _assemble(path, folder, index, eos_id, rule, found, spans, hashes)


@contextlib.contextmanager
def _temporary_directory(path: str) -> Iterator[str]:
  """Creates a temporary directory next to `path`; for a URL, where the system has them."""
  directory = None if urls.is_url(path) else os.path.dirname(path) or "."
  with contextlib.ExitStack() as stack:
    with atomic.write_errors(path):
      temporary = tempfile.TemporaryDirectory(
          prefix=".documents_", dir=directory, ignore_cleanup_errors=True
      )
    yield stack.enter_context(temporary)


def _assemble(
    path: str,
    folder: str,
    index: index_lib.OlmoNpyIndex,
    eos_id: int,
    rule: str,
    found: list[FoundInFile],
    spans: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]],
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
    # In the file, all lengths follow all starts. Keeping them avoids a third pass over the results.
    with atomic.write_errors(folder), tempfile.TemporaryFile(dir=folder) as spool:
      for starts, lengths in spans():
        tokens += int(lengths.sum())
        put(starts.astype("<u8"))
        spool.write(lengths.astype("<u4").data)
      spool.seek(0)
      while some := spool.read(_COPY_BYTES):
        put(np.frombuffer(some, "<u4"))
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
    if rule != "auto":  # Without this field, earlier versions can read the file.
      values["rule"] = rule
    if named or any(one.sources for one in found):
      put, checksum = _checked_writer(file)
      sizes = document_names.write_names(folder, counts, named, put)
      values["names"] = {**dataclasses.asdict(sizes), "checksum": checksum()}
    if hashes:
      put, checksum = _checked_writer(file)
      paths = functools.partial(document_work.hash_path, folder)
      records = document_hashes.records(counts, paths)
      for block in sorted_table.sort_records(records, folder):
        put(block)
      values["hashes"] = checksum()
    file.seek(0)
    file.write(document_header.write(values))
  return DocumentIndex(path=path, **document_header.with_sizes(values))


def _checked_writer(file: BinaryIO) -> tuple[Callable[[np.ndarray], None], Callable[[], str]]:
  """Returns a function that writes arrays, and one that returns the checksum so far."""
  digest = xxhash.xxh3_128()

  def put(values: np.ndarray) -> None:
    data = np.ascontiguousarray(values).data
    digest.update(data)
    file.write(data)

  return put, digest.hexdigest
