"""Builds an index from token files, and reads and writes index files.

An index file is JSON, with one line per token file, and is checked completely when it is read. Two
formats can be read: "2", this project's, with paths relative to a base; and "1", MaxText's, with
full paths but neither sizes nor data offsets. Only format 2 is written.
"""

import dataclasses
import json
import os
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from maxtext_olmo.corpus import paths
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus import scan_objects
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.index import INDEX_FORMAT_VERSION
from maxtext_olmo.corpus.index import OlmoNpyFileEntry
from maxtext_olmo.corpus.index import OlmoNpyIndex as OlmoNpyIndex
from maxtext_olmo.corpus.index import check_lengths
from maxtext_olmo.corpus.index import make_index
from maxtext_olmo.corpus.index import maxtext_fingerprint
from maxtext_olmo.corpus.index import split_belongs
from maxtext_olmo.corpus.index_changes import keep_split as keep_split
from maxtext_olmo.corpus.npy_header import token_dtype
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError

_REBUILD = "Build the index again with `maxtext-olmo index build`, or copy it again."

HeaderReader = Callable[[str], tuple[str, tuple[int, ...]]]
T = TypeVar("T")


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
    npy_headers: bool = False,
) -> OlmoNpyIndex:
  """Scans every file once and builds the index of a corpus.

  >>> import numpy as np, tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.arange(11, dtype="uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  >>> index.total_instances  # 4 + 4 tokens; the remaining 3 are not used.
  2

  Args:
    paths_and_labels: (path, label) of each token file, in stream order; relative paths are relative
      to `base`.
    sequence_length: Number of tokens per instance.
    tokenizer: Name of the tokenizer, which becomes part of the fingerprint.
    header_reader: Function from a path to (dtype, shape), for files that this machine cannot open.
      The dtype that it returns replaces `dtype`.
    dtype: Dtype of the files; a `.npy` header must agree with it.
    base: Directory that stored paths are relative to; by default the common directory of the files.
    max_target_sequence_length: Longest sequence length that a later stage may use.
    checksums: Algorithm of the checksums to record, "xxh3", "sha256" or "xxh3-pieces"; None
      records none. To compute them, all files are read completely.
    workers: Number of threads that scan files.
    progress: Whether to show a progress bar.
    extends: Older index that this corpus extends; its held-out split is kept.
    storage: Storage that holds the files; `open_storage()` by default.
    npy_headers: Whether to look for `.npy` headers in a store, with a small read per object.
      Headers of local files are always detected.

  Raises:
    CorpusError: A file is missing or damaged, or the corpus does not extend `extends`.
  """
  storage = open_storage() if storage is None else storage
  check_lengths(sequence_length, max_target_sequence_length)
  given = [(urls.without_secrets(path), label) for path, label in paths_and_labels]
  if not given:
    raise CorpusError("There are no files to index: paths_and_labels is empty.")
  names = [path for path, _ in given]
  base = extends.base if base is None and extends is not None else base
  if base is None:
    full = [paths.absolute(path) for path in names]
    base = paths.common_base(full)
  else:
    base = paths.absolute(base)
    names = full = [paths.join(base, path) for path in names]

  if header_reader is not None:
    dtype, infos = _infos_from_reader(header_reader, names, full, storage, workers)
  else:
    settings: dict[str, Any] = {"workers": workers, "progress": progress}
    wanted = token_dtype(dtype)
    known = scan_objects.scan_objects(full, wanted, storage, npy_headers=npy_headers, **settings)
    infos = scan.scan_files(full, wanted, storage, known=known, **settings)
  unplaced = [
      OlmoNpyFileEntry(
          path=paths.relative_to(base, path),
          label=label,
          n_tokens=info.n_tokens,
          n_instances=0,
          instance_offset=0,
          size_bytes=info.size_bytes,
          data_offset=info.data_offset,
          etag=info.etag,
      )
      for path, (_, label), info in zip(full, given, infos)
  ]
  index = make_index(
      unplaced,
      sequence_length,
      dtype=token_dtype(dtype).name,
      tokenizer=tokenizer,
      base=base,
      max_target_sequence_length=max_target_sequence_length,
  )
  if checksums is not None:
    # Imported here, because starting a run needs an index, but nothing that computes checksums.
    from maxtext_olmo.corpus import checksum_files

    index = checksum_files.add_checksums(
        index, checksums, workers=workers, progress=progress, storage=storage
    )
  return index if extends is None else keep_split(index, extends)


def _infos_from_reader(
    header_reader: HeaderReader,
    names: Sequence[str],
    full: Sequence[str],
    storage: Storage,
    workers: int | None,
) -> tuple[str, list[scan.FileInfo]]:
  """Returns the dtype and the sizes that `header_reader` reports.

  Raises CorpusError if a file exists on this machine and has a different number of tokens.
  """
  results, errors = scan.map_files(lambda i: header_reader(names[i]), len(names), workers=workers)
  headers = scan.all_or_error(results, errors, "Token files cannot be indexed")
  dtype = token_dtype(headers[0][0])
  infos = []
  for path, (name, shape) in zip(full, headers):
    if token_dtype(name) != dtype:
      raise CorpusError(
          f"All files of a corpus must have the same dtype: {full[0]} has {dtype.name}, {path} has"
          f" {name}."
      )
    if len(shape) != 1:
      raise CorpusError(f"{path} has shape {tuple(shape)}; expected one dimension.")
    info = scan.FileInfo(shape[0] * dtype.itemsize, data_offset=0, n_tokens=int(shape[0]))
    if not paths.is_url(path) and storage.exists(path):
      info = scan.scan_file(path, dtype, storage)
      if info.n_tokens != shape[0]:
        raise CorpusError(
            f"{path}: the header reader reports {shape[0]} tokens of {dtype.name}, but the file has"
            f" {info.n_tokens}."
        )
    infos.append(info)
  return dtype.name, infos


def save_index(index: OlmoNpyIndex, path: str | os.PathLike[str]) -> None:
  """Writes an index file atomically."""
  writing.write_file(path, dump_index(index))


def dump_index(index: OlmoNpyIndex) -> str:
  """Returns the text of an index file."""
  values = index.to_json_dict()
  files = values.pop("files")
  head = json.dumps(values, indent=2)
  lines = ",\n".join(f"    {json.dumps(entry)}" for entry in files)
  return head.removesuffix("\n}") + f',\n  "files": [\n{lines}\n  ]\n}}\n'


def load_index(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
) -> OlmoNpyIndex:
  """Reads and checks an index file, in this project's format or MaxText's.

  >>> import numpy as np, tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.arange(11, dtype="uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  ...   index.save(f"{folder}/index.json")
  ...   load_index(f"{folder}/index.json") == index
  True

  Args:
    path: Path of the index file.
    base: Directory of the token files, if they have moved since the index was built.
    storage: Storage that holds the index and, for an index in MaxText's format, the token files;
      `open_storage()` by default.

  Raises:
    CorpusError: The index is missing, damaged or of an unknown format.
  """
  name = urls.without_secrets(path)
  storage = open_storage() if storage is None else storage
  try:
    text = storage.read(name)
  except CorpusError as error:
    raise type(error)(
        f"Cannot read the index {name}: {reason(error).rstrip('.')}. `maxtext-olmo index build`"
        " makes one."
    ) from error
  return parse_index(text, name, None if base is None else paths.absolute(base), storage)


def parse_index(
    text: str | bytes, name: str, base: str | None = None, storage: Storage | None = None
) -> OlmoNpyIndex:
  """Parses the text of an index file, which errors refer to as `name`."""
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:  # Not JSON, not even text, or nested too deep.
    raise CorpusError(f"The index {name} is not valid JSON: {error}. {_REBUILD}") from error
  if not isinstance(values, dict) or not isinstance(values.get("files"), list):
    raise CorpusError(
        f"The index {name} is not an index: expected an object with `files`. {_REBUILD}"
    )
  version = values.get("format_version")
  try:
    if version == INDEX_FORMAT_VERSION:
      index = _load_own(name, values)
      return index if base is None else _with_base(index, base)
    if version == "1":
      return _load_maxtext(name, values, base, storage or open_storage())
  except ConfigError as error:  # The file has values that no index can have.
    raise CorpusError(f"The index {name} is damaged: {error} {_REBUILD}") from error
  raise CorpusError(
      f"The index {name} has format_version {version!r}; expected {INDEX_FORMAT_VERSION!r}, or"
      " MaxText's '1'. Build it again with `maxtext-olmo index build`, or install the version that"
      " wrote it."
  )


def _load_own(name: str, values: dict[str, Any]) -> OlmoNpyIndex:
  annotations = values.pop("annotations", None)  # The first releases wrote none.
  index = _parse(name, values)
  # Derive the index again from the values that the fingerprint covers, to check all others.
  itemsize = token_dtype(index.dtype).itemsize
  again = make_index(
      [
          dataclasses.replace(entry, n_tokens=(entry.size_bytes - entry.data_offset) // itemsize)
          for entry in index.files
      ],
      index.sequence_length,
      dtype=index.dtype,
      tokenizer=index.tokenizer,
      base=index.base,
      max_target_sequence_length=index.max_target_sequence_length,
  )
  if again.fingerprint != index.fingerprint:
    raise CorpusError(_fingerprint_differs(name, index.fingerprint, again.fingerprint))
  _check_numbers(name, again, index)
  if not split_belongs(index):
    raise CorpusError(
        f"The index {name} is damaged: the split key {index.split_key!r} over"
        f" {index.split_windows} windows matches neither its list of files nor any beginning of"
        f" that list. {_REBUILD}"
    )
  if annotations not in (None, index.annotations):
    raise CorpusError(
        f"The index {name} is damaged or was edited by hand: its labels and checksums have the hash"
        f" {index.annotations}, but the index records {annotations}. {_REBUILD}"
    )
  return index


def _with_base(index: OlmoNpyIndex, base: str) -> OlmoNpyIndex:
  """Returns the index with a new base. Drops ETags, which are valid only at the old base."""
  files = index.files
  if base != index.base and any(entry.etag for entry in files):
    files = tuple(dataclasses.replace(entry, etag=None) for entry in files)
  return dataclasses.replace(index, base=base, files=files)


def _load_maxtext(
    name: str, values: dict[str, Any], base: str | None, storage: Storage
) -> OlmoNpyIndex:
  """Reads MaxText's format, which has full paths and token counts only."""
  raw = _parse(name, values)
  entries = raw.files
  expected = maxtext_fingerprint(raw)
  if raw.fingerprint != expected:
    raise CorpusError(_fingerprint_differs(name, raw.fingerprint, expected))

  dtype = token_dtype(raw.dtype)
  old_full = [paths.absolute(entry.path) for entry in entries]
  old_base = paths.common_base(old_full)
  new_base = old_base if base is None else base
  relative = [paths.relative_to(old_base, path) for path in old_full]
  full = [paths.join(new_base, path) for path in relative]

  def data_offset(i: int) -> int:
    # Files that are in a store, or missing on this machine, are assumed to be raw. The size check
    # detects files with a header.
    if paths.is_url(full[i]) or not storage.exists(full[i]):
      return 0
    return scan.scan_file(full[i], dtype, storage).data_offset

  results, errors = scan.map_files(data_offset, len(full), workers=None)
  offsets = scan.all_or_error(results, errors, f"Token files of the index {name} cannot be used")
  placed = [
      dataclasses.replace(
          entry, path=path, data_offset=offset, size_bytes=offset + entry.n_tokens * dtype.itemsize
      )
      for entry, path, offset in zip(entries, relative, offsets)
  ]
  index = make_index(
      placed, raw.sequence_length, dtype=dtype.name, tokenizer=raw.tokenizer, base=new_base
  )
  _check_numbers(name, index, raw)
  return index


def _check_numbers(name: str, derived: OlmoNpyIndex, stored: OlmoNpyIndex) -> None:
  """Checks the counts that the fingerprint omits because they can be derived from other values."""

  def compare(what: str, expected: int, found: int) -> None:
    if expected != found:
      raise CorpusError(
          f"The index {name} is damaged: {what} must be {expected}, found {found}. {_REBUILD}"
      )

  for mine, theirs in zip(derived.files, stored.files):
    for field in ("n_tokens", "n_instances", "instance_offset"):
      compare(f"{field} of {theirs.path}", getattr(mine, field), getattr(theirs, field))
  for field in ("total_instances", "total_tokens"):
    compare(field, getattr(derived, field), getattr(stored, field))


def _parse(name: str, values: dict[str, Any]) -> OlmoNpyIndex:
  entries = [
      _make(OlmoNpyFileEntry, _ENTRY_TYPES, entry, f"file {place} of the index {name}")
      for place, entry in enumerate(values["files"])
  ]
  where = f"the index {name}"
  return _make(OlmoNpyIndex, _INDEX_TYPES, {**values, "files": tuple(entries)}, where)


def _make(cls: type[T], types: dict[str, Any], values: Any, where: str) -> T:
  """Makes a data class from JSON values, after checking the type of each value."""
  if not isinstance(values, dict):
    found = reprlib.repr(values)
    raise CorpusError(f"Expected an object for {where}, found {found}. {_REBUILD}")
  for field, value in values.items():
    expected = types.get(field)
    if expected is None:
      raise CorpusError(
          f"Unknown field {field!r} in {where}. If a newer version wrote it, install that version."
      )
    if not isinstance(value, expected) or not _is_possible(value):
      raise CorpusError(f"{field!r} cannot be {reprlib.repr(value)} in {where}. {_REBUILD}")
  try:
    return cls(**values)
  except TypeError as error:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = ", ".join(name for name in required if name not in values)
    raise CorpusError(f"Missing in {where}: {missing}. {_REBUILD}") from error


def _is_possible(value: Any) -> bool:
  """Returns whether a value of the right type is valid in an index."""
  if isinstance(value, int):
    return not isinstance(value, bool) and 0 <= value < 1 << 63
  return not isinstance(value, str) or paths.is_valid(value)


def _types(cls: type) -> dict[str, Any]:
  """Returns the type that the JSON value of each field must have."""
  return {f.name: tuple if f.name == "files" else f.type for f in dataclasses.fields(cls)}


_ENTRY_TYPES = _types(OlmoNpyFileEntry)
_INDEX_TYPES = _types(OlmoNpyIndex)


def _fingerprint_differs(name: str, found: str, expected: str) -> str:
  return (
      f"The index {name} is damaged or was edited by hand: its content has the fingerprint"
      f" {expected}, but the index records {found}. {_REBUILD}"
  )
