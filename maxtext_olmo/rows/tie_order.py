"""The order in which OLMo-core packs documents: longest first, with ties as NumPy's sort left them.

OLMo-core sorts by `np.argsort(-lengths)`, whose default sort is not stable. Which of several
equally long documents comes first depends on the CPU and the version of NumPy. Here, each possible
order has a name and is computed in the same way on every machine:

    avx512   NumPy 2.3 or later on a CPU with AVX-512; emulated, never tested against such a CPU
    avx2     NumPy 2.3 or later on a CPU with AVX2 but not AVX-512; NumPy 2.0 to 2.2 differ only if
             the lengths are sorted already, because they sort them again
    scalar   any NumPy without vector sorts, such as NumPy 1.26 on a CPU without AVX-512
    stable   equally long documents in the order of the files; no run of OLMo-core has this order

The number of rows and the lengths in each row are the same for all orders: only equally long
documents change places.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from maxtext_olmo import compiled
from maxtext_olmo import errors
from maxtext_olmo.rows import tie_sort

TIES = ("avx512", "avx2", "scalar", "stable")
_LANES = {"avx512": 8, "avx2": 4, "scalar": 0}
# Sorting this many documents in Python takes longer than loading the compiled function.
_COMPILE_AFTER = 20_000


def longest_first(lengths: np.ndarray, ties: str) -> np.ndarray:
  """Returns the numbers of documents (int64) in the order in which OLMo-core packs them.

  Args:
    lengths: Number of tokens of each document.
    ties: The order of equally long documents, one of `TIES`.

  Example:
    >>> longest_first(np.array([3, 5, 3, 7]), "stable").tolist()
    [3, 1, 0, 2]
  """
  if ties not in TIES:
    raise errors.ConfigError(f"Unknown order of ties {ties!r}: choose from {', '.join(TIES)}.")
  keys = -np.asarray(lengths, np.int64)
  if ties == "stable":
    return np.argsort(keys, kind="stable")
  lanes, count = _LANES[ties], len(keys)
  sort = _COMPILED.get(count)
  if sort is None and count >= _COMPILE_AFTER and _COMPILED.wait():
    sort = _COMPILED.ready
  if sort is not None:
    order = np.arange(count)
    sort(keys, order, lanes, *(np.zeros(size, np.int64) for size in _SCRATCH))
    return order
  cells = list(range(count))
  tie_sort.tie_sort(keys.tolist(), cells, lanes, *([0] * size for size in _SCRATCH))
  return np.array(cells, np.int64)


def compile_sort() -> bool:
  """Waits until the sorts are compiled; returns False if they cannot be compiled."""
  return _COMPILED.wait()


def _build() -> Callable[..., None]:
  from maxtext_olmo.rows import kernel

  return kernel.build_tie_sort()


_SCRATCH = (tie_sort.STACK, tie_sort.SCRATCH, tie_sort.SCRATCH)
_COMPILED = compiled.Background(_build, after=_COMPILE_AFTER, what="Sorting documents")
