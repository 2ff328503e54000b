"""The only module that imports names from Grain that have no stable API.

These are names in `grain.experimental` and names that begin with an underscore. A new release of
Grain can therefore break one file at most. `tests/grain_compat_test.py` says for each name what
stops working without it.

There is one exception: subclasses of Grain's datasets in other modules define or read
`_element_spec`, `_parent` and `_parents`, because Grain is extended through these names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain
from grain.experimental import BestFitPackIterDataset as BestFitPackIterDataset
from grain.experimental import ConcatThenSplitIterDataset as ConcatThenSplitIterDataset
from grain.experimental import FirstFitPackIterDataset as FirstFitPackIterDataset
from grain.experimental import FlatMapIterDataset as FlatMapIterDataset
from grain.experimental import FlatMapTransform as FlatMapTransform
from grain.experimental import RepeatIterDataset as RepeatIterDataset
from grain.experimental import ShapeDtypeStruct as ShapeDtypeStruct
from grain.experimental import ThreadPrefetchIterDataset as ThreadPrefetchIterDataset
from grain.experimental import get_element_spec as get_element_spec

# Raises ValueError if an iterator is closed. An alias saves a function call in each step.
assert_not_closed: Callable[[Any], None] = grain.DatasetIterator._assert_not_closed


def index_shuffle(index: int, max_index: int, seed: int, rounds: int) -> int:
  """Returns the index of the element that `MapDataset.shuffle` puts at place `index`.

  Both are from 0 to `max_index`.
  """
  from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

  return index_shuffle_module.index_shuffle(index, max_index, seed, rounds)
