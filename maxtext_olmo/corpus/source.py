"""Grain data sources over a corpus: instance id → tokens, and document number → tokens."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NoReturn

import grain
import numpy as np

from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import OrderError

_INT32_VOCABULARY = 2**31


class _CorpusSource(grain.sources.RandomAccessDataSource):
  """An index and its token files; safe to use from several threads, to pickle and to fork.

  Args:
    index: Index of the corpus.
    path_remap: prefix → replacement, for full paths that begin differently on this machine; the
      longest matching prefix applies.
    max_open_files: Number of files that stay open per process if no `storage` is given; None keeps
      as many open as the process can spare.
    storage: Storage that holds the files; `open_storage()` by default.
  """

  def __init__(
      self,
      index: OlmoNpyIndex,
      *,
      path_remap: Mapping[str, str] | None = None,
      max_open_files: int | None = None,
      storage: Storage | None = None,
  ):
    self.index = index
    self._path_remap = dict(path_remap or {})
    self.files = TokenFiles.of_index(
        index, path_remap=path_remap, storage=storage, max_open_files=max_open_files
    )

  def __getstate__(self) -> dict[str, Any]:
    # Of `files`, only the storage is pickled: the paths would double the size of the pickle, and
    # can be derived from the index.
    return {**self.__dict__, "files": self.files.storage}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self.files = TokenFiles.of_index(
        self.index, path_remap=self._path_remap, storage=state["files"]
    )


class OlmoNpyDataSource(_CorpusSource):
  """The instances of a corpus, by id, as records with `tokens`, `instance_id` and `file_id`.

  >>> import tempfile
  >>> from maxtext_olmo import build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.arange(11, dtype="uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  ...   OlmoNpyDataSource(index)[1]
  {'tokens': array([4, 5, 6, 7], dtype=uint32), 'instance_id': 1, 'file_id': 0}
  """

  def __len__(self) -> int:
    return self.index.total_instances

  def __getitem__(self, instance_id: int) -> dict[str, Any]:
    ids = np.array([operator.index(instance_id)])
    file_ids, _ = self.index.locate(ids)
    return {
        "tokens": self.read(ids)[0],
        "instance_id": int(ids[0]),
        "file_id": int(file_ids[0]),
    }

  def read(self, instance_ids: np.ndarray) -> np.ndarray:
    """Returns the tokens of several instances, one row each, in the dtype of the files."""
    file_ids, offsets = self.index.locate(instance_ids)
    out = np.empty((len(file_ids), self.index.sequence_length), self.index.token_dtype)
    sizes = np.full(len(out), out.itemsize * out.shape[1], np.int64)
    raw = out.reshape(-1).view(np.uint8)
    places = np.arange(len(out)) * sizes
    self.files.storage.fill(self.files.paths, file_ids, offsets, sizes, raw, places)
    return out

  def _resolve_path(self, path: str) -> str:
    """Returns the path of a file on this machine, given its path in the index."""
    return paths_lib.remap(paths_lib.join(self.index.base, path), self._path_remap)

  def __repr__(self) -> str:
    """Returns a text that identifies the corpus on any host; Grain compares it on restore."""
    return (
        f"OlmoNpyDataSource(fingerprint={self.index.fingerprint!r},"
        f" sequence_length={self.index.sequence_length}, dtype={self.index.dtype!r})"
    )


class OlmoDocumentSource(_CorpusSource):
  """The documents of a corpus, by number, as records with `inputs` and `document_id`.

  An EOS belongs to the document it ends.

  >>> import tempfile
  >>> from maxtext_olmo import build_documents, build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.array([5, 6, 0, 7, 0], "uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  ...   documents = build_documents(index, f"{folder}/index.documents", eos_id=0)
  ...   OlmoDocumentSource(index, documents)[1]
  {'inputs': array([7, 0], dtype=int32), 'document_id': 1}

  Args:
    index: Index of the corpus.
    documents: Document index of the corpus (`build_documents`, `load_documents`).
    vocab_size: Token ids at or above this raise an error; 0 checks only that ids fit in int32.
    **kwargs: As for `OlmoNpyDataSource`: `path_remap`, `max_open_files`, `storage`.
  """

  def __init__(
      self,
      index: OlmoNpyIndex,
      documents: documents_lib.DocumentIndex,
      *,
      vocab_size: int = 0,
      **kwargs: Any,
  ):
    super().__init__(index, **kwargs)
    self.documents = documents
    self._vocab_size = vocab_size

  def __len__(self) -> int:
    return self.documents.num_documents

  def __getitem__(self, document_id: int) -> dict[str, Any]:
    document_id = operator.index(document_id)
    if not 0 <= document_id < len(self):
      raise OrderError(
          f"Document {document_id} does not exist: the corpus has {len(self)} documents, counted"
          " from 0."
      )
    ids = np.array([document_id])
    length = self.documents.lengths(ids)
    tokens = np.empty(int(length[0]), np.int32)
    self.read_parts(ids, np.zeros(1, np.int64), length, [tokens])
    return {"inputs": tokens, "document_id": document_id}

  def lengths(self, document_ids: np.ndarray) -> np.ndarray:
    """Returns the number of tokens of each document."""
    return self.documents.lengths(document_ids)

  def read_parts(
      self, document_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: list[np.ndarray]
  ) -> int:
    """Reads tokens [start, start + length) of document i into the int32 array `out[i]`.

    Returns:
      The number of bytes read.
    """
    dtype = self.index.token_dtype
    itemsize = dtype.itemsize
    file_ids, first_tokens = self.documents.locate(document_ids)
    offsets = self.files.data_offsets[file_ids] + (first_tokens + starts) * itemsize
    limit = self._vocab_size or _INT32_VOCABULARY
    buffer = np.empty(int(lengths.max(initial=0)), dtype)
    for i, target in enumerate(out):
      count = int(lengths[i])
      if not count:
        continue
      # Four-byte tokens are read in place, others through a buffer of their own dtype.
      tokens = target.view(dtype) if itemsize == 4 else buffer[:count]
      raw = tokens.view(np.uint8)
      self.files.storage.fill(
          self.files.paths,
          file_ids[i : i + 1],
          offsets[i : i + 1],
          np.array([len(raw)]),
          raw,
          np.zeros(1, np.int64),
      )
      if int(tokens.max()) >= limit:
        self._out_of_vocabulary(tokens, int(document_ids[i]), int(starts[i]), limit)
      if itemsize != 4:
        target[:] = tokens
    return int(lengths.sum()) * itemsize

  def where(self, document_id: int, token: int = 0) -> str:
    """Returns the file and the byte offset of a token of a document, for messages."""
    file_ids, first_tokens = self.documents.locate(np.array([document_id]))
    return self.files.where(int(file_ids[0]), int(first_tokens[0]) + token)

  def labels(self) -> dict[str, list[tuple[int, int]]]:
    """Returns, for each label, the ranges [first, end) of its documents, one range per file."""
    offsets = self.documents.file_offsets.tolist()
    found: dict[str, list[tuple[int, int]]] = {}
    for i, entry in enumerate(self.index.files):
      found.setdefault(entry.label, []).append((offsets[i], offsets[i + 1]))
    return found

  def _out_of_vocabulary(
      self, tokens: np.ndarray, document_id: int, start: int, limit: int
  ) -> NoReturn:
    place = int(np.argmax(tokens >= limit))
    raise CorpusError(
        f"Token id {tokens[place]} of document {document_id} is outside the vocabulary of {limit}:"
        f" {self.where(document_id, start + place)}. Either vocab_size is wrong, the dtype of the"
        f" file is not {self.index.dtype}, or the file is damaged: run `maxtext-olmo verify` on the"
        " index."
    )

  def __repr__(self) -> str:
    """Returns a text that identifies the documents on any host; Grain compares it on restore."""
    return (
        f"OlmoDocumentSource(fingerprint={self.index.fingerprint!r},"
        f" documents={self.documents.num_documents}, eos_id={self.documents.eos_id})"
    )
