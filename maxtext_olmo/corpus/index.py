"""The index: the token files of a corpus, and the location of each instance.

Each file is cut into instances of S tokens, and instances are numbered consecutively across the
files:

    S = 4          file 0 (11 tokens)       file 1 (3)   file 2 (9 tokens)
    tokens         0123 4567 89.            ...          0123 4567 8
    instance id    0    1    (rest unused)               2    3    (rest unused)

With a `max_target_sequence_length` M (a multiple of S), files are first cut into windows of M
tokens, and each window into M / S instances. A later stage with a different S then sees the same
tokens, and the corpus keeps its fingerprint.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.npy_header import token_dtype
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import OrderError

INDEX_FORMAT_VERSION = "2"


@dataclasses.dataclass(frozen=True, slots=True)
class OlmoNpyFileEntry:
  """One token file: its location, its instances, and the values used to verify it.

  >>> entry = OlmoNpyFileEntry("part.npy", "wiki", n_tokens=11, n_instances=2, instance_offset=0)
  >>> entry.label
  'wiki'

  Attributes:
    path: Path relative to the base of the index, or absolute if the file is outside it.
    label: Label of the file, which mixtures refer to.
    n_tokens: Number of complete tokens in the file, used or not.
    n_instances: Number of instances in the file.
    instance_offset: Id of the file's first instance.
    size_bytes: Size of the whole file, including a header and an incomplete token at the end.
    data_offset: Number of bytes before the first token.
    checksum: `<algorithm>:<hex>` of the file (see `checksums`); None if it was not computed.
    etag: ETag of the object, if the index was built from the file's URL. It is valid only at that
      URL, and is not part of the fingerprint.
    head_tokens: Number of tokens, from the start of the file, to cut into instances; None uses the
      whole file. Only source mixtures set it.
    piece_sums: The sums (hex) of the pieces that the checksum was made from, one after the other;
      None if there is at most one.
  """

  path: str
  label: str
  n_tokens: int
  n_instances: int
  instance_offset: int
  size_bytes: int = 0
  data_offset: int = 0
  checksum: str | None = None
  etag: str | None = None
  head_tokens: int | None = None
  piece_sums: str | None = None

  @property
  def usable_tokens(self) -> int:
    """Number of tokens to cut into instances: the head, or the whole file."""
    return self.n_tokens if self.head_tokens is None else self.head_tokens


@dataclasses.dataclass(frozen=True)
class OlmoNpyIndex:
  """The token files of a corpus in order, the location of their instances, and a fingerprint.

  `build_index` and `load_index` return one:

  >>> import tempfile
  >>> from maxtext_olmo import build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.arange(11, dtype="uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  >>> index.total_instances, index.total_tokens
  (2, 11)
  >>> index.locate(np.array([1]))  # The file and the byte offset of instance 1.
  (array([0]), array([16]))

  Attributes:
    format_version: Version of the file format.
    sequence_length: Number of tokens per instance.
    dtype: Name of the dtype of the token files.
    tokenizer: Name of the tokenizer.
    files: Token files, in stream order.
    total_instances: Number of instances in all files.
    total_tokens: Number of tokens in all files, used or not.
    fingerprint: Hash of everything that decides which tokens an instance holds.
    base: Directory that the paths are relative to; not part of the fingerprint.
    max_target_sequence_length: Longest sequence length that a later stage may use; None if the
      sequence length is fixed.
    split_key: Key (hex) that selects the held-out windows; unchanged when files are appended.
    split_windows: Number of windows in the corpus when the split key was made.
  """

  format_version: str
  sequence_length: int
  dtype: str
  tokenizer: str
  files: tuple[OlmoNpyFileEntry, ...]
  total_instances: int
  total_tokens: int
  fingerprint: str = ""
  base: str = ""
  max_target_sequence_length: int | None = None
  split_key: str = ""
  split_windows: int = 0

  @property
  def window(self) -> int:
    """Number of tokens per window: `max_target_sequence_length` if set, else `sequence_length`."""
    return self.max_target_sequence_length or self.sequence_length

  @property
  def chunk_size(self) -> int:
    """Number of instances per window. The order keeps the instances of a window together."""
    return self.window // self.sequence_length

  @property
  def num_windows(self) -> int:
    """Number of windows in the corpus."""
    return self.total_instances // self.chunk_size

  @property
  def has_heads(self) -> bool:
    """Whether only the beginnings of some files are used, as in a source mixture."""
    return any(entry.head_tokens is not None for entry in self.files)

  @functools.cached_property
  def token_dtype(self) -> np.dtype:
    """The NumPy dtype of the files, little endian."""
    return token_dtype(self.dtype)

  @functools.cached_property
  def _starts(self) -> np.ndarray:
    return np.array([entry.instance_offset for entry in self.files], np.int64)

  @functools.cached_property
  def _first_bytes(self) -> np.ndarray:
    """For each file, an offset (possibly negative) to which `id * _instance_bytes` is added.

    The sum is the byte at which the instance `id` begins in the file.
    """
    offsets = np.array([entry.data_offset for entry in self.files], np.int64)
    first: np.ndarray = offsets - self._starts * self._instance_bytes
    return first

  @property
  def _instance_bytes(self) -> int:
    return self.sequence_length * self.token_dtype.itemsize

  def __getstate__(self) -> dict[str, Any]:
    """Omits cached values, which are cheap to derive again, to keep pickles for workers small."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def resolve(self, file_id: int) -> str:
    """Returns the full path of a file, before any remapping."""
    return paths_lib.join(self.base, self.files[file_id].path)

  def expected_size(self, file_id: int) -> int:
    """Returns the size in bytes that a file must have."""
    entry = self.files[file_id]
    return entry.size_bytes or entry.data_offset + entry.n_tokens * self.token_dtype.itemsize

  def locate(self, instance_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the file id and the byte offset in that file (both int64) of each instance."""
    ids = np.asarray(instance_ids)
    if not ids.size:
      return np.zeros(ids.shape, np.int64), np.zeros(ids.shape, np.int64)
    if ids.dtype.kind not in "iu":
      raise OrderError(f"Instance ids must be integers, found an array of {ids.dtype.name}.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= self.total_instances:
      raise OrderError(
          f"Instance {low if low < 0 else high} does not exist: the corpus has"
          f" {self.total_instances} instances of {self.sequence_length} tokens, counted from 0."
      )
    ids = ids.astype(np.int64, copy=False)
    # A file without instances has the same start as the next file. The last of the equal starts
    # belongs to the file that has the instance.
    file_ids = np.searchsorted(self._starts, ids, side="right") - 1
    return file_ids, self._first_bytes[file_ids] + ids * self._instance_bytes

  def with_sequence_length(self, sequence_length: int) -> "OlmoNpyIndex":
    """Returns the same corpus, with the same fingerprint, cut into instances of a new length."""
    if sequence_length == self.sequence_length:
      return self
    if self.max_target_sequence_length is None:
      raise CorpusError(
          f"The index has a sequence length of {self.sequence_length}, but {sequence_length} was"
          f" requested. Set max_target_length={self.sequence_length}, or build an index for the"
          " length you want (`maxtext-olmo index build --sequence-length`). One index serves"
          " several lengths only if it was built with --max-target-sequence-length."
      )
    check_lengths(sequence_length, self.max_target_sequence_length)
    files = _lay_out(self.files, sequence_length, self.max_target_sequence_length)
    return dataclasses.replace(
        self, sequence_length=sequence_length, files=files, total_instances=_count(files)
    )

  @property
  def annotations(self) -> str:
    """A hash of the labels and checksums, which the fingerprint does not cover."""
    sums = [[e.label, e.checksum, *([e.piece_sums] if e.piece_sums else [])] for e in self.files]
    lines = json.dumps(sums)
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"

  def to_json_dict(self) -> dict[str, Any]:
    """Returns the JSON object that is stored for the index."""
    values = self.__getstate__() | {"annotations": self.annotations}
    values["files"] = [
        {name: value for name in _ENTRY_FIELDS if (value := getattr(entry, name)) is not None}
        for entry in self.files
    ]
    return values

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the index atomically as JSON, with one line per token file."""
    from maxtext_olmo.corpus import index_builder

    index_builder.save_index(self, path)


_ENTRY_FIELDS = tuple(field.name for field in dataclasses.fields(OlmoNpyFileEntry))


def make_index(
    entries: Sequence[OlmoNpyFileEntry],
    sequence_length: int,
    *,
    dtype: str,
    tokenizer: str,
    base: str,
    max_target_sequence_length: int | None = None,
) -> OlmoNpyIndex:
  """Makes an index: numbers the instances, and computes the fingerprint and the split key."""
  check_lengths(sequence_length, max_target_sequence_length)
  files = _lay_out(entries, sequence_length, max_target_sequence_length)
  fingerprint = compute_fingerprint(
      sequence_length,
      dtype,
      tokenizer,
      files,
      max_target_sequence_length=max_target_sequence_length,
  )
  total = _count(files)
  return OlmoNpyIndex(
      format_version=INDEX_FORMAT_VERSION,
      sequence_length=sequence_length,
      dtype=dtype,
      tokenizer=tokenizer,
      files=files,
      total_instances=total,
      total_tokens=sum(entry.n_tokens for entry in files),
      fingerprint=fingerprint,
      base=base,
      max_target_sequence_length=max_target_sequence_length,
      # Derived, not random: every index of this corpus holds out the same windows.
      split_key=_split_key(fingerprint),
      split_windows=total * sequence_length // (max_target_sequence_length or sequence_length),
  )


def compute_fingerprint(
    sequence_length: int,
    dtype: str,
    tokenizer: str,
    files: Sequence[OlmoNpyFileEntry],
    *,
    max_target_sequence_length: int | None = None,
) -> str:
  """Returns a hash of everything that decides which tokens an instance holds.

  The base is not included, so a corpus keeps its fingerprint when it moves.
  """
  window = max_target_sequence_length or sequence_length
  *_, fingerprint = _prefix_fingerprints(window, dtype, tokenizer, files)
  return fingerprint


def maxtext_fingerprint(index: OlmoNpyIndex) -> str:
  """Returns the fingerprint that MaxText would compute, to detect damage."""
  fields = ["1", str(index.sequence_length), index.dtype, index.tokenizer]
  for entry in index.files:
    fields += [entry.path, str(entry.n_tokens)]
  # File names that are not valid UTF-8 contain lone surrogates here.
  text = "".join(field + "\0" for field in fields).encode(errors="surrogatepass")
  return "sha256:" + hashlib.sha256(text).hexdigest()


def split_belongs(index: OlmoNpyIndex) -> bool:
  """Returns whether the split key belongs to this corpus or to one that it extends."""
  return any(
      windows_of_prefix(index, count) == index.split_windows
      and _split_key(fingerprint) == index.split_key
      for count, fingerprint in enumerate(_prefixes_of(index))
  )


def find_prefix(index: OlmoNpyIndex, fingerprint: str) -> int | None:
  """Returns n if the first n files form a corpus with this fingerprint, otherwise None."""
  found = enumerate(_prefixes_of(index))
  return next((count for count, prefix in found if prefix == fingerprint), None)


def windows_of_prefix(index: OlmoNpyIndex, num_files: int) -> int:
  """Returns the number of windows in the first `num_files` files."""
  # The offset of the last file is the number of instances in all files before it.
  last = index.files[max(0, num_files - 1) : num_files]
  return _count(last) // index.chunk_size


def _prefixes_of(index: OlmoNpyIndex) -> Iterator[str]:
  return _prefix_fingerprints(index.window, index.dtype, index.tokenizer, index.files)


def _prefix_fingerprints(
    window: int, dtype: str, tokenizer: str, files: Sequence[OlmoNpyFileEntry]
) -> Iterator[str]:
  """Yields the fingerprints of the corpora made of the first 0, 1, 2, … files."""
  digest = hashlib.sha256(
      f"maxtext-olmo corpus {INDEX_FORMAT_VERSION}\nwindow {window}\ndtype {dtype}\n"
      f"tokenizer {json.dumps(tokenizer)}\n".encode()
  )
  yield f"sha256:{digest.hexdigest()}"
  for f in files:
    # Entries from MaxText have no size; it follows from the number of tokens.
    size = f.size_bytes or (f.n_tokens and f.data_offset + f.n_tokens * token_dtype(dtype).itemsize)
    head = "" if f.head_tokens is None else f" head {f.head_tokens}"
    digest.update(f"{json.dumps(f.path)} {size} {f.data_offset}{head}\n".encode())
    yield f"sha256:{digest.hexdigest()}"


def _split_key(fingerprint: str) -> str:
  return hashlib.sha256(f"split of {fingerprint}".encode()).hexdigest()


def global_to_local(index: OlmoNpyIndex, instance_id: int) -> tuple[int, int]:
  """Returns the id of the file that holds an instance, and the instance's first token in it.

  >>> import tempfile
  >>> from maxtext_olmo import build_index
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   np.arange(11, dtype="uint32").tofile(f"{folder}/part.npy")
  ...   index = build_index([("part.npy", "wiki")], 4, tokenizer="none", base=folder)
  >>> global_to_local(index, 1)
  (0, 4)
  """
  file_ids, offsets = index.locate(np.array([instance_id]))
  file_id = int(file_ids[0])
  offset = int(offsets[0]) - index.files[file_id].data_offset
  return file_id, offset // index.token_dtype.itemsize


def check_lengths(sequence_length: int, longest: int | None) -> None:
  """Raises ConfigError if a corpus cannot be cut into these lengths."""
  if sequence_length < 1:
    raise ConfigError(f"sequence_length must be positive, got {sequence_length}.")
  if longest is not None and (longest < sequence_length or longest % sequence_length):
    raise ConfigError(
        f"max_target_sequence_length must be a multiple of sequence_length, got {longest} and"
        f" {sequence_length}."
    )


def _lay_out(
    entries: Sequence[OlmoNpyFileEntry], sequence_length: int, longest: int | None
) -> tuple[OlmoNpyFileEntry, ...]:
  """Assigns each file as many instances as fit, numbered consecutively across the files."""
  window = longest or sequence_length
  offset, files = 0, []
  for entry in entries:
    if entry.usable_tokens > entry.n_tokens:
      raise CorpusError(
          f"{entry.path} has a head of {entry.head_tokens} tokens, but the file has"
          f" {entry.n_tokens}. Build the index again."
      )
    count = entry.usable_tokens // window * (window // sequence_length)
    files.append(dataclasses.replace(entry, n_instances=count, instance_offset=offset))
    offset += count
  return tuple(files)


def _count(files: Sequence[OlmoNpyFileEntry]) -> int:
  return files[-1].instance_offset + files[-1].n_instances if files else 0
