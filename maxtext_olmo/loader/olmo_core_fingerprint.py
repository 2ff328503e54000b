"""OLMo-core's fingerprints of datasets, and explanations of why two of them differ.

OLMo-core hashes a text that describes the dataset, and stores the hash in its loader's state:

    class=NumpyFSLDatasetvocab_size=100278,pad_token_id=100277,eos_token_id=100257,
    dtype=<class 'numpy.uint32'>,max_target_sequence_length=8192,bos_token_id=None,
    path=part-00.npy,size=4096,path=part-01.npy,size=8192,

(all in one line). So the fingerprint covers the names and sizes of files, but neither their
directories nor their content. If an index gives the same text, it describes the data of the run
that saved the state.

If two hashes differ, they do not show why. `explain` therefore tries single changes (a different
value of a field, one file fewer, a different order of files) until one of them gives the hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus.storage import Storage

VERSION = "v2.0"  # OLMo-core's name for this version of the computation.
Release = Literal["2.5", "3.0"]
RELEASES: tuple[Release, ...] = ("3.0", "2.5")

_TRIED_SIZES = tuple(2**power for power in range(4, 21))
_TRIED_GROUPS = (2, 4, 8, 16, 32, 64)
# Leaving out each file in turn takes quadratic time: two seconds for this many files.
_MOST_FILES_TO_LEAVE_OUT = 5000


@dataclasses.dataclass(frozen=True)
class TokenizerIds:
  """The vocabulary size and the special token ids, which a fingerprint covers."""

  vocab_size: int
  pad_id: int
  eos_id: int
  bos_id: int | None = None


@dataclasses.dataclass(frozen=True)
class Dataset:
  """The properties of a dataset that its fingerprint covers.

  >>> ids = TokenizerIds(vocab_size=100, pad_id=1, eos_id=0)
  >>> dataset = Dataset("NumpyFSLDataset", {"vocab_size": 100}, (("data/part.npy", 8),))
  >>> dataset.text
  'class=NumpyFSLDatasetvocab_size=100,path=part.npy,size=8,'

  Attributes:
    name: Name of OLMo-core's class.
    fields: Fields and their values, in OLMo-core's order.
    files: Path and size in bytes of each file, in stream order.
  """

  name: str
  fields: dict[str, Any]
  files: tuple[tuple[str, int], ...]

  @property
  def text(self) -> str:
    """The text that is hashed."""
    return self._head + "".join(map(_file_text, self.files))

  @property
  def fingerprint(self) -> str:
    """The fingerprint."""
    return hashlib.sha256(self.text.encode()).hexdigest()

  @property
  def _head(self) -> str:
    return f"class={self.name}" + "".join(f"{name}={value}," for name, value in self.fields.items())

  def explain(self, found: str) -> str:
    """Returns a clause for an error message: which change of this dataset gives the hash `found`.

    Only single changes are tried. If none gives the hash, the clause says so.
    """
    for field, value, changed in self._with_other_fields():
      if changed.fingerprint == found:
        own = self.fields.get(field)
        return f"the run had {field}={value}, but this dataset has {field}={own}"
    if (place := self._find_reordered(found)) is not None:
      return place
    if (place := self._find_left_out(found)) is not None:
      return place
    return (
        "no single change of a field, a file or the order explains this, so there are several"
        f" changes, or a file has a different size; this dataset has {len(self.files)} files and"
        f" {', '.join(f'{name}={value}' for name, value in self.fields.items())}"
    )

  def _with_other_fields(self) -> Iterator[tuple[str, Any, Dataset]]:
    """Yields a field, a value that it might have had, and the dataset with that value."""
    fields = self.fields
    ids = sorted({0, 1, 2, *(v for n, v in fields.items() if n.endswith("_id") and v is not None)})
    vocabulary = fields["vocab_size"]
    tried: dict[str, Sequence[Any]] = {
        "vocab_size": (-(-vocabulary // 128) * 128, 100278, 100352, 50280, 50304),
        "dtype": [_dtype_text(name) for name in ("uint8", "uint16", "uint32", "uint64")],
        "bos_token_id": (None, *ids),
        "pad_token_id": ids,
        "eos_token_id": ids,
        "max_target_sequence_length": (None, *_TRIED_SIZES),
        "sequence_length": _TRIED_SIZES,
        "long_doc_strategy": ("truncate", "fragment"),
    }
    for name in fields:
      for value in tried.get(name, ()):
        if value != fields[name]:
          yield name, value, dataclasses.replace(self, fields={**fields, name: value})
    if "long_doc_strategy" in fields:
      optional = {
          "source_group_size": (1, *_TRIED_GROUPS),
          "use_array_if_local": (None, True, False),
      }
      for name, values in optional.items():
        for value in values:
          yield name, value, dataclasses.replace(self, fields=_with_optional(fields, name, value))

  def _find_reordered(self, found: str) -> str | None:
    ordered = tuple(sorted(self.files))
    if dataclasses.replace(self, files=ordered).fingerprint == found:
      return "the run read the files sorted by path, but this dataset has a different order"
    for place in range(len(self.files) - 1):
      if len(self.files) > _MOST_FILES_TO_LEAVE_OUT:
        break
      one, other = self.files[place : place + 2]
      swapped = (*self.files[:place], other, one, *self.files[place + 2 :])
      if dataclasses.replace(self, files=swapped).fingerprint == found:
        return f"the run read {other[0]} before {one[0]}"
    return None

  def _find_left_out(self, found: str) -> str | None:
    """Returns a clause if a dataset of the first n files, or of all files but one, has the hash."""
    texts = [_file_text(file).encode() for file in self.files]
    digest = hashlib.sha256(self._head.encode())
    prefixes = []
    for text in texts:
      prefixes.append(digest.copy())
      digest.update(text)
    for count, prefix in enumerate(prefixes):
      if prefix.hexdigest() == found:
        return (
            f"the run had only the first {count} of these {len(texts)} files, up to"
            f" {self.files[count - 1][0] if count else 'none'}"
        )
    if len(texts) > _MOST_FILES_TO_LEAVE_OUT:
      return None
    rest = b"".join(texts)
    for (path, _), text, prefix in zip(self.files, texts, prefixes):
      rest = rest[len(text) :]
      prefix.update(rest)
      if prefix.hexdigest() == found:
        return f"the run did not have the file {path}"
    return None


def windows(
    index: index_lib.OlmoNpyIndex, ids: TokenizerIds, *, release: Release = "3.0"
) -> Dataset:
  """Returns the dataset of fixed-length windows over an index, as OLMo-core fingerprints it.

  Args:
    index: Index of the corpus. If it uses only the beginnings of files, it is a source mixture.
    ids: Ids of the tokenizer.
    release: Release of OLMo-core; 2.5 includes files from which a mixture takes no tokens.
  """
  fields = {
      **_common(index, ids),
      "max_target_sequence_length": index.max_target_sequence_length,
      "bos_token_id": ids.bos_id,
  }
  if not index.has_heads:
    return Dataset("NumpyFSLDataset", fields, _files(index))
  width = index.token_dtype.itemsize
  files = tuple(
      (entry.path, entry.usable_tokens * width)
      for entry in index.files
      if entry.usable_tokens or release == "2.5"
  )
  return Dataset("NumpyFSLDatasetMixture", fields, files)


def padded(index: index_lib.OlmoNpyIndex, ids: TokenizerIds, row_length: int) -> Dataset:
  """Returns the dataset of an index's documents, one per row, as OLMo-core fingerprints it."""
  fields = {
      **_common(index, ids),
      "max_target_sequence_length": None,
      "bos_token_id": ids.bos_id,
      "sequence_length": row_length,
  }
  return Dataset("NumpyPaddedFSLDataset", fields, _files(index))


def packed(
    index: index_lib.OlmoNpyIndex,
    ids: TokenizerIds,
    row_length: int,
    *,
    long_documents: str = "truncate",
    group_size: int = 1,
    use_array_if_local: bool | None = None,
    boundary_hashes: Sequence[tuple[str, str]] = (),
    release: Release = "3.0",
) -> Dataset:
  """Returns the dataset of an index's documents, packed into rows, as OLMo-core fingerprints it.

  Args:
    index: Index of the corpus.
    ids: Ids of the tokenizer.
    row_length: Tokens per row.
    long_documents: What happens to documents longer than a row: `truncate` or `fragment`.
    group_size: Number of files that are packed together.
    use_array_if_local: OLMo-core's option of that name.
    boundary_hashes: Result of `hash_boundary_files`, if boundary files define the documents.
    release: Release of OLMo-core; 2.5 ignores `use_array_if_local` and `boundary_hashes`.
  """
  fields = {
      **_common(index, ids),
      "long_doc_strategy": long_documents,
      "bos_token_id": ids.bos_id,
      "sequence_length": row_length,
  }
  fields = _with_optional(fields, "source_group_size", group_size)
  if release != "2.5":
    fields = _with_optional(fields, "use_array_if_local", use_array_if_local)
    if boundary_hashes:
      fields["_metadata_fingerprint"] = tuple(boundary_hashes)
  return Dataset("NumpyPackedFSLDataset", fields, _files(index))


def hash_boundary_files(index: index_lib.OlmoNpyIndex, storage: Storage) -> list[tuple[str, str]]:
  """Returns the name of each token file, with the SHA-256 of the boundary file next to it."""
  hashes = []
  for i in range(len(index.files)):
    digest = hashlib.sha256()
    for piece in storage.pieces(boundaries.boundary_path(index.resolve(i))):
      digest.update(piece)
    hashes.append((os.path.basename(index.files[i].path), digest.hexdigest()))
  return hashes


def _common(index: index_lib.OlmoNpyIndex, ids: TokenizerIds) -> dict[str, Any]:
  return {
      "vocab_size": ids.vocab_size,
      "pad_token_id": ids.pad_id,
      "eos_token_id": ids.eos_id,
      "dtype": _dtype_text(index.dtype),
  }


def _dtype_text(name: str) -> str:
  return f"<class 'numpy.{name}'>"


def _with_optional(fields: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
  """Returns the fields with `name` set to `value`, or without it if `value` is its default.

  OLMo-core also leaves out optional fields that have their default values.
  """
  order = ("source_group_size", "use_array_if_local", "_metadata_fingerprint")
  default = 1 if name == "source_group_size" else None
  optional = {key: fields[key] for key in order if key in fields and key != name}
  if value != default:
    optional[name] = value
  rest = {key: kept for key, kept in fields.items() if key not in order}
  return {**rest, **{key: optional[key] for key in order if key in optional}}


def _files(index: index_lib.OlmoNpyIndex) -> tuple[tuple[str, int], ...]:
  return tuple((entry.path, index.expected_size(i)) for i, entry in enumerate(index.files))


def _file_text(file: tuple[str, int]) -> str:
  return f"path={os.path.basename(file[0])},size={file[1]},"
