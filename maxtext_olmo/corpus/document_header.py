"""The header of a document index: JSON with the format, the index's fields and their checksum."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus.document_index import HEADER_BYTES

_FORMAT_1 = "maxtext-olmo documents 1"
_FORMAT = "maxtext-olmo documents 2"


def write(values: dict[str, Any]) -> bytes:
  """Returns a header of HEADER_BYTES bytes."""
  header = json.dumps({"format": _FORMAT, "header": _digest_of(values), **values}).encode()
  return header.ljust(HEADER_BYTES - 1) + b"\n"


def read(header: bytes) -> dict[str, Any]:
  """Returns the values of a header; raises ValueError, KeyError or TypeError if it is invalid."""
  values = json.loads(header)
  version = values.pop("format")
  if version not in (_FORMAT_1, _FORMAT) or values.pop("header") != _digest_of(values):
    raise ValueError("its format is unknown, or its header was changed")
  if version == _FORMAT_1:
    values |= {"names": None, "hashes": ""}
  sizes = values["names"]
  checked = {**values, **{f"names.{name}": value for name, value in (sizes or {}).items()}}
  del checked["names"]
  if wrong := {name: value for name, value in checked.items() if not _fits(name, value)}:
    raise ValueError(f"values of the wrong type in its header: {wrong}")
  return with_sizes(values)


def with_sizes(values: dict[str, Any]) -> dict[str, Any]:
  """Converts the values of a header to the arguments of `DocumentIndex`."""
  sizes = values["names"]
  return {**values, "names": None if sizes is None else document_names.NameSizes(**sizes)}


def _fits(name: str, value: Any) -> bool:
  """Returns whether a value of the header has the type of its field."""
  if name in ("fingerprint", "checksum", "hashes", "names.checksum", "rule"):
    return isinstance(value, str)
  return isinstance(value, int) and value >= 0


def _digest_of(values: dict[str, Any]) -> str:
  return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
