"""The names of Grain that have no stable API, in one place.

Everything that this package takes from `grain.experimental`, or from behind an underscore, is named
here and nowhere else, so that a new release of Grain breaks one file. `tests/grain_compat_test.py`
says for each name what stops working without it.

Classes that extend Grain's datasets also define or read `_element_spec`, `_parent` and `_parents`,
which are part of how Grain is extended.
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

# Raises ValueError if an iterator is closed; not a function, to save a call in each step.
assert_not_closed: Callable[[Any], None] = grain.DatasetIterator._assert_not_closed


def index_shuffle(index: int, max_index: int, seed: int, rounds: int) -> int:
  """Returns where `MapDataset.shuffle` puts an index of `[0, max_index]`."""
  from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

  return index_shuffle_module.index_shuffle(index, max_index, seed, rounds)
