"""Keys for which a quicksort is slow, found by letting it compare keys that are not fixed yet.

After M. D. McIlroy, "A Killer Adversary for Quicksort": of two keys without a value, one gets the
next value when they are compared, preferably the one that is likely to be the pivot.
"""

from collections.abc import Callable
from typing import Any


def defeat(sort: Callable[[list[Any], list[int], int, int], None], count: int) -> list[int]:
  """Returns keys that make `sort(keys, order, first, end)` divide them as unevenly as it can."""
  values: dict[int, int] = {}
  pivot = -1

  class Key:

    def __init__(self, number: int):
      self.number = number

    def __lt__(self, other: "Key") -> bool:
      nonlocal pivot
      if self.number not in values and other.number not in values:
        fixed = self if self.number == pivot else other
        values[fixed.number] = len(values)
      for key in (self, other):
        if key.number not in values:
          pivot = key.number
      return values.get(self.number, count) < values.get(other.number, count)

  sort([Key(number) for number in range(count)], list(range(count)), 0, count)
  return [values.get(number, count) for number in range(count)]
