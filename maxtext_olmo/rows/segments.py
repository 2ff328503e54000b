"""Segments: the tokens of a row that belong to one document, and each token's position in it.

The host finds where segments begin, by the rule of the row source. This example has EOS = 0, and a
row of two parts (5 6 0 and 7 0 0 8) and one column of padding:

    tokens       5  6  0  7  0  0  8  ·
    by part      1  1  1  2  2  2  2  0      a segment for each part
    after EOS    1  1  1  2  2  3  4  0      an EOS ends its segment and belongs to it
    at EOS       1  1  2  2  3  4  4  0      an EOS begins a segment, as its first context token

With a BOS, `after_eos` begins a segment only if a BOS follows the EOS. OLMo-core treats the
padding of a packed row as tokens, so its rules also divide the padding into segments.
`part_and_padding` begins a segment at each part, and applies the rule `after_eos` only to the
padding.

Segment 0 is padding. Positions count from the beginning of the segment. The devices receive one bit
per token, which says whether a segment begins there (`pack_bits`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo.rows import parts as parts_lib

_WORD_BITS = 32
# Compiling occupies another core for a second, which pays off only after this many tokens.
_COMPILE_AFTER_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class SegmentRule:
  """The rule for where segments begin.

  Attributes:
    begins: `nowhere` (a row is one segment), `part`, `after_eos`, `at_eos`, or
      `part_and_padding`.
    eos_id: The token that ends a document, if the rule needs it.
    bos_id: The token that must follow an EOS for the EOS to end a document; -1 if any may follow.
  """

  begins: Literal["nowhere", "part", "after_eos", "at_eos", "part_and_padding"] = "nowhere"
  eos_id: int = -1
  bos_id: int = -1


def segment_starts(
    tokens: np.ndarray, used: np.ndarray, rule: SegmentRule, parts: parts_lib.Parts | None = None
) -> np.ndarray:
  """Returns whether a segment begins at each token, as bool (rows, length); False in column 0.

  Args:
    tokens: Token ids (rows, length).
    used: For each row, the number of tokens that segments cover.
    rule: Rule for where segments begin.
    parts: Parts of the rows; needed by the rules `part` and `part_and_padding`.
  """
  starts = np.zeros(tokens.shape, np.bool_)
  if rule.begins == "nowhere" or not tokens.size:
    return starts
  by_part = rule.begins in ("part", "part_and_padding")
  if by_part and parts is None:
    raise ValueError(f"The segment rule {rule.begins!r} needs the parts of the rows.")
  if by_part and parts is not None:
    starts[parts.row, parts.column] = True
    if rule.begins == "part_and_padding":
      _divide_padding(starts, tokens, rule, parts.used)
    starts[:, 0] = False
    return starts
  if rule.begins == "at_eos":
    np.equal(tokens[:, 1:], rule.eos_id, out=starts[:, 1:])
  else:
    np.equal(tokens[:, :-1], rule.eos_id, out=starts[:, 1:])
    if rule.bos_id >= 0:
      starts[:, 1:] &= tokens[:, 1:] == rule.bos_id
  length = tokens.shape[1]
  if (used < length).any():
    starts &= np.arange(length) < used[:, np.newaxis]
  return starts


def start_bits(
    tokens: np.ndarray, used: np.ndarray, rule: SegmentRule, parts: parts_lib.Parts | None = None
) -> np.ndarray:
  """Returns the packed bits of `segment_starts`, if possible without making its boolean array."""
  if rule.begins == "after_eos" and rule.bos_id < 0 and tokens.dtype.kind == "u":
    mark_after = _compiled(tokens.itemsize).get(tokens.size)
    if mark_after is not None and rule.eos_id <= np.iinfo(tokens.dtype).max:
      rows, length = tokens.shape
      words = np.zeros((rows, num_words(length)), "<u4")
      mark_after(tokens, tokens.dtype.type(rule.eos_id), words)
      return words if (used == length).all() else words & bits_below(used, length)
  return pack_bits(segment_starts(tokens, used, rule, parts))


def compile_start_bits(dtype: Any = np.uint32) -> bool:
  """Waits until `start_bits` is compiled for a dtype; returns False if it cannot be compiled."""
  return _compiled(np.dtype(dtype).itemsize).wait()


@functools.cache
def _compiled(itemsize: int) -> compiled.Background[Callable[[np.ndarray, Any, np.ndarray], None]]:
  def build() -> Callable[[np.ndarray, Any, np.ndarray], None]:
    from maxtext_olmo.rows import kernel

    return kernel.build_mark_after(itemsize)

  return compiled.Background(build, after=_COMPILE_AFTER_TOKENS, what="Finding segments")


def _divide_padding(
    starts: np.ndarray, tokens: np.ndarray, rule: SegmentRule, used: np.ndarray
) -> None:
  """Begins a segment after each EOS in the padding and, without a BOS, where the padding begins."""
  length = tokens.shape[1]
  for row in np.flatnonzero((used > 0) & (used < length)).tolist():
    padding = tokens[row, used[row] - 1 :]
    begins = padding[:-1] == rule.eos_id
    if rule.bos_id >= 0:
      begins &= padding[1:] == rule.bos_id
    else:
      begins[0] = True
    starts[row, used[row] :] = begins


def segments_and_positions(starts: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns each token's segment, from 1, and position in the segment, as int32; 0 in padding.

  Example:
    >>> starts = np.array([[False, False, True, False, False]])
    >>> [a.tolist() for a in segments_and_positions(starts, np.array([4]))]
    [[[1, 1, 2, 2, 0]], [[0, 1, 0, 1, 0]]]
  """
  rows, length = starts.shape
  if not starts.size:
    return np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
  begins = starts.copy()
  begins[:, 0] = True
  padded = np.flatnonzero(used < length)
  begins[padded, used[padded]] = True
  places = np.flatnonzero(begins)
  row, column = np.divmod(places, length)
  lengths = np.diff(places, append=rows * length)
  first = np.searchsorted(row, np.arange(rows))  # Where each row's segments begin among `places`.
  is_token = column < used[row]
  numbers = np.where(is_token, np.arange(1, len(places) + 1) - first[row], 0).astype(np.int32)
  segments = np.repeat(numbers, lengths)
  positions = np.arange(rows * length, dtype=np.int32)
  positions -= np.repeat(places.astype(np.int32), lengths)
  positions *= segments != 0
  return segments.reshape(rows, length), positions.reshape(rows, length)


def pack_bits(flags: np.ndarray) -> np.ndarray:
  """Packs flags (rows, length) into 32-bit words (rows, words), the first into the lowest bit.

  Flags are booleans or bytes; any byte but 0 counts as true.
  """
  rows, length = flags.shape
  words = num_words(length)
  packed = np.zeros((rows, 4 * words), np.uint8)
  packed[:, : -(-length // 8)] = np.packbits(flags, axis=1, bitorder="little")
  return packed.view("<u4")


def bits_below(used: np.ndarray, length: int) -> np.ndarray:
  """Returns the packed bits of rows in which exactly the first `used` flags are set.

  Example:
    >>> bits_below(np.array([3, 40]), 64).tolist()
    [[7, 0], [4294967295, 255]]
  """
  words = np.full((len(used), num_words(length)), 2**_WORD_BITS - 1, "<u4")
  # Few rows of a batch have padding, so a loop over these rows is cheap.
  for row in np.flatnonzero(used < _WORD_BITS * words.shape[1]).tolist():
    whole, rest = divmod(int(used[row]), _WORD_BITS)
    words[row, whole:] = 0
    if rest:
      words[row, whole] = (1 << rest) - 1
  return words


def num_words(length: int) -> int:
  """Returns the number of words into which `pack_bits` packs a row of the given length."""
  return -(-length // _WORD_BITS)


def unpack_bits(words: np.ndarray, length: int) -> np.ndarray:
  """Returns the booleans that `pack_bits` packed."""
  octets = np.ascontiguousarray(words).view(np.uint8)
  return np.unpackbits(octets, axis=1, count=length, bitorder="little").view(np.bool_)
