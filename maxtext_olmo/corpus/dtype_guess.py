"""Guesses the dtype of a token file without a header from samples of its bytes."""

from __future__ import annotations

import numpy as np

from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.work.pieces import SourceFile

_SAMPLES = 16
_SAMPLE_BYTES = 4096
# Fewer groups of eight bytes than this prove nothing.
_ENOUGH_GROUPS = 32


def likelier_dtype(storage: Storage, source: SourceFile) -> str | None:
  """Returns the dtype that samples of a file look like; None if it is the dtype of the index."""
  itemsize = source.token_dtype.itemsize
  groups = source.n_tokens * itemsize // 8
  # Samples are groups of eight bytes, counted from the first token, so that each place in a group
  # always has the same meaning.
  width = min(groups * 8, _SAMPLE_BYTES)
  starts = np.unique(np.linspace(0, groups - width // 8, _SAMPLES).astype(np.int64)) * 8
  sample = np.empty(len(starts) * width, np.uint8)
  storage.fill(
      (source.path,),
      np.zeros(len(starts), np.int64),
      starts + source.data_offset,
      np.full(len(starts), width),
      sample,
      np.arange(len(starts)) * width,
  )
  return likelier_dtype_of_bytes(sample, itemsize)


def likelier_dtype_of_bytes(sample: np.ndarray, itemsize: int) -> str | None:
  """Returns the dtype that a sample looks like; None if it has `itemsize` bytes or is unclear.

  A file does not name its dtype, but its bytes reveal it. Token ids are far below 2^24, so in a
  file of 4-byte tokens every fourth byte is zero, and so are most third bytes:

      byte       0   1   2   3   4   5   6   7
      uint32     ..  ..  0   0   ..  ..  0   0        two tokens
      uint64     ..  ..  0   0   0   0   0   0        one token
      uint16     ..  ..  ..  ..  ..  ..  ..  ..       four tokens
      uint16     ..  0   ..  0   ..  0   ..  0        four tokens of a tiny vocabulary

  If tokens are read as a wider dtype than their own, the ids are far above any vocabulary.

  Args:
    sample: Bytes of the file (uint8) in groups of eight, each beginning at a token.
    itemsize: Number of bytes per token according to the index.
  """
  groups = sample[: len(sample) // 8 * 8].reshape(-1, 8)
  groups = groups[groups.any(axis=1)]  # Zeros (padding, sparse files) are valid in every dtype.
  if len(groups) < _ENOUGH_GROUPS:
    return None
  zeros = (groups == 0).mean(axis=0)
  empty = zeros > 0.999
  guess = None
  if empty[4:].all():
    guess = 8
  elif empty[[3, 7]].all() and zeros[[2, 6]].min() > 0.5:
    guess = 4
  elif zeros[1::2].min() > 0.9 and zeros[::2].max() < 0.5:
    guess = 2
  elif itemsize >= 4 and zeros[[3, 7]].max() < 0.5:
    guess = 2  # Or 1: as wider tokens, most ids would be above 2^24.
  return None if guess is None or guess == itemsize else f"uint{8 * guess}"
