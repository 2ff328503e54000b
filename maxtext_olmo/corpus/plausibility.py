"""Do the data look like the dtype that the index declares?

A file does not say, but its bytes give it away. A token id is far below 2^24, so in files of 4-byte
tokens every fourth byte is zero, and the third mostly:

    byte       0   1   2   3   4   5   6   7
    uint32     ..  ..  0   0   ..  ..  0   0        two tokens
    uint64     ..  ..  0   0   0   0   0   0        one token
    uint16     ..  ..  ..  ..  ..  ..  ..  ..       four tokens
    uint16     ..  0   ..  0   ..  0   ..  0        four tokens of a tiny vocabulary

Read as a wider dtype than they have, ids come out far above any vocabulary.
"""

import numpy as np

# Fewer groups of eight bytes than this prove nothing.
_ENOUGH = 32


def likelier_dtype(sample: np.ndarray, itemsize: int) -> str | None:
  """The dtype that a sample rather looks like than one of `itemsize` bytes; None if it fits.

  Args:
    sample: uint8; begins where a token begins, in groups of eight bytes.
  """
  groups = sample[: len(sample) // 8 * 8].reshape(-1, 8)
  groups = groups[groups.any(axis=1)]  # Zeros fit every dtype: padding, or holes in a sparse file.
  if len(groups) < _ENOUGH:
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
    guess = 2  # Or 1: most ids would be above 2^24.
  return None if guess is None or guess == itemsize else f"uint{8 * guess}"
