"""Documents inside a window: segment ids and positions.

An end-of-sequence token (EOS) ends its document and belongs to it; the token after it begins the
next one. A window may begin and end in the middle of a document. With EOS = 0:

    tokens        5  6  0  7  0  0  8  9
    segment_ids   1  1  1  2  2  3  4  4
    positions     0  1  2  0  1  0  0  1

Segment 0 is left to padding. Both functions take one window, or any stack of windows along the
last axis.
"""

from __future__ import annotations

import numpy as np


def segment_ids(tokens: np.ndarray, eos_id: int) -> np.ndarray:
  """For each token, 1 + the number of EOS before it in its window, as int32."""
  tokens = np.asarray(tokens)
  segments = np.ones(tokens.shape, np.int32)
  np.cumsum(tokens[..., :-1] == int(eos_id), axis=-1, dtype=np.int32, out=segments[..., 1:])
  segments[..., 1:] += 1
  return segments


def positions(tokens: np.ndarray, eos_id: int) -> np.ndarray:
  """For each token, its place in its document as far as the window shows it, as int32."""
  tokens = np.asarray(tokens)
  places = np.arange(tokens.shape[-1], dtype=np.int32)
  starts = np.zeros(tokens.shape, np.int32)  # where the token's document begins
  np.multiply(tokens[..., :-1] == int(eos_id), places[1:], out=starts[..., 1:])
  np.maximum.accumulate(starts, axis=-1, out=starts)
  return np.subtract(places, starts, out=starts)
