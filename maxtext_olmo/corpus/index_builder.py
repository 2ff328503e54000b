"""Building an index, and the names that belong to it.

The classes are in `index`, the JSON in `index_file`; everything can be imported from here.
"""

import os
from collections.abc import Callable, Sequence

from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.index import INDEX_FORMAT_VERSION
from maxtext_olmo.corpus.index import OlmoNpyFileEntry
from maxtext_olmo.corpus.index import OlmoNpyIndex
from maxtext_olmo.corpus.index import check_lengths
from maxtext_olmo.corpus.index import compute_fingerprint
from maxtext_olmo.corpus.index import global_to_local
from maxtext_olmo.corpus.index import keep_split
from maxtext_olmo.corpus.index import make_index
from maxtext_olmo.corpus.index_file import load_index
from maxtext_olmo.corpus.npy_header import has_npy_magic
from maxtext_olmo.corpus.npy_header import parse_npy_header
from maxtext_olmo.corpus.npy_header import read_npy_header_from_path
from maxtext_olmo.corpus.npy_header import read_raw_metadata_from_path
from maxtext_olmo.corpus.npy_header import token_dtype
from maxtext_olmo.corpus.storage import LocalStorage
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.errors import CorpusError

__all__ = [
    "INDEX_FORMAT_VERSION",
    "OlmoNpyFileEntry",
    "OlmoNpyIndex",
    "build_index",
    "compute_fingerprint",
    "global_to_local",
    "has_npy_magic",
    "keep_split",
    "load_index",
    "parse_npy_header",
    "read_npy_header_from_path",
    "read_raw_metadata_from_path",
]

HeaderReader = Callable[[str], tuple[str, tuple[int, ...]]]


def build_index(
    paths_and_labels: Sequence[tuple[str, str]],
    sequence_length: int,
    *,
    tokenizer: str,
    header_reader: HeaderReader | None = None,
    dtype: str = "uint32",
    base: str | os.PathLike[str] | None = None,
    max_target_sequence_length: int | None = None,
    checksums: str | None = None,
    workers: int | None = None,
    progress: bool = False,
    extends: OlmoNpyIndex | None = None,
    storage: Storage | None = None,
) -> OlmoNpyIndex:
  """Scans every file once and builds the index of a corpus.

  Args:
    paths_and_labels: (path, label) of each token file, in the order of the stream; relative paths
      count from `base`.
    header_reader: path → (dtype, shape), for files that cannot be opened from here; its dtype is
      used instead of `dtype`.
    dtype: of the files; a file with a `.npy` header must agree with it.
    base: the directory that stored paths are relative to; the files' common directory unless given.
    max_target_sequence_length: the longest window that a later stage may ask for.
    checksums: "xxh3" or "sha256" to record a checksum of each file, which reads all of it.
    workers: threads that scan files.
    extends: an older index that this corpus continues; its held-out split is kept.
    storage: where the files are read from; local files unless given.
  """
  storage = LocalStorage() if storage is None else storage
  check_lengths(sequence_length, max_target_sequence_length)
  given = [(os.fspath(path), label) for path, label in paths_and_labels]
  if not given:
    raise CorpusError("There are no files to index: paths_and_labels is empty.")
  names = [path for path, _ in given]
  if base is None and extends is not None:
    base = extends.base
  if base is None:
    full = [paths.absolute(path) for path in names]
    base = paths.common_base(full)
  else:
    base = paths.absolute(base)
    names = full = [paths.join(base, path) for path in names]

  if header_reader is not None:
    dtype, infos = _infos_from_reader(header_reader, names, full, storage, workers)
  else:
    infos = scan.scan_files(full, token_dtype(dtype), storage, workers=workers, progress=progress)
  sums: Sequence[str | None] = [None] * len(full)
  if checksums is not None:
    sizes = [info.size_bytes for info in infos]
    sums = scan.checksum_files(full, sizes, checksums, storage, workers=workers, progress=progress)

  unplaced = [
      OlmoNpyFileEntry(
          path=paths.relative_to(base, path),
          label=label,
          n_tokens=info.n_tokens,
          n_instances=0,
          instance_offset=0,
          size_bytes=info.size_bytes,
          data_offset=info.data_offset,
          checksum=checksum,
      )
      for path, (_, label), info, checksum in zip(full, given, infos, sums)
  ]
  index = make_index(
      unplaced,
      sequence_length,
      dtype=token_dtype(dtype).name,
      tokenizer=tokenizer,
      base=base,
      max_target_sequence_length=max_target_sequence_length,
  )
  return index if extends is None else keep_split(index, extends)


def _infos_from_reader(
    header_reader: HeaderReader,
    names: Sequence[str],
    full: Sequence[str],
    storage: Storage,
    workers: int | None,
) -> tuple[str, list[scan.FileInfo]]:
  """Returns what the caller's reader says of the files; those that exist here must agree."""
  results, errors = scan.map_files(lambda i: header_reader(names[i]), len(names), workers=workers)
  headers = scan.all_or_error(results, errors, "Token files cannot be indexed")
  dtype = token_dtype(headers[0][0])
  infos = []
  for path, (name, shape) in zip(full, headers):
    if token_dtype(name) != dtype:
      raise CorpusError(
          f"All files of a corpus have one dtype: {full[0]} has {dtype.name}, {path} has {name}."
      )
    if len(shape) != 1:
      raise CorpusError(f"{path} has shape {tuple(shape)}; expected one dimension.")
    info = scan.FileInfo(shape[0] * dtype.itemsize, data_offset=0, n_tokens=int(shape[0]))
    if storage.exists(path):
      info = scan.scan_file(path, dtype, storage)
      if info.n_tokens != shape[0]:
        raise CorpusError(
            f"{path}: the header reader says {shape[0]} tokens of {dtype.name}, the file holds"
            f" {info.n_tokens}."
        )
    infos.append(info)
  return dtype.name, infos
