"""The sort algorithms behind NumPy's default `argsort` of int64, step by step.

They are not stable: each leaves equal keys in a different order, which decides which of several
equally long documents OLMo-core packs first. The algorithms are:

    scalar    quicksort around the median of three, insertion sort up to 16, heap sort when too deep
    vector    quicksort around the median of a sample, in vectors of 4 (AVX2) or 8 (AVX-512) keys;
              parts of up to 256 by a bitonic network; `std::sort` of libstdc++ when too deep

Each function sorts `keys[first:end]` in place, and permutes `order` in the same way. All functions
are plain Python that numba can compile (`kernel.build_tie_sort`). Without numba they run on lists,
with the same result. None allocates memory: the caller provides scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable

Cells = list[int]  # Or an int64 array, if compiled.

SCRATCH = 512  # Size of each of the two scratch arrays of a sort: for keys and for `order`.
STACK = 1024  # Size of the stack in which a sort keeps the parts that are still unsorted.

_LARGEST = (1 << 63) - 1
_NETWORK = 256  # The longest part that a bitonic network sorts.
_SMALL = 16  # The longest part that insertion sort sorts.


def swap(keys: Cells, order: Cells, i: int, j: int) -> None:
  """Swaps two entries."""
  keys[i], keys[j] = keys[j], keys[i]
  order[i], order[j] = order[j], order[i]


def log2(number: int) -> int:
  """Returns the base-2 logarithm of a positive number, rounded down."""
  result = 0
  while number > 1:
    number >>= 1
    result += 1
  return result


def insertion_sort(keys: Cells, order: Cells, first: int, end: int) -> None:
  """Sorts a part by insertion, which keeps the order of equal keys."""
  for i in range(first + 1, end):
    key, number = keys[i], order[i]
    j = i
    while j > first and key < keys[j - 1]:
      keys[j], order[j] = keys[j - 1], order[j - 1]
      j -= 1
    keys[j], order[j] = key, number


def heap_sort(keys: Cells, order: Cells, first: int, end: int) -> None:
  """Sorts a part by heap sort, as NumPy does: an entry sinks until no child is larger."""
  size = end - first
  root = size // 2
  while size > 1:
    if root > 0:  # The heap is still being built.
      root -= 1
    else:
      size -= 1
      swap(keys, order, first, first + size)
    key, number = keys[first + root], order[first + root]
    parent = root
    child = 2 * parent + 1
    while child < size:
      if child + 1 < size and keys[first + child] < keys[first + child + 1]:
        child += 1
      if not key < keys[first + child]:
        break
      keys[first + parent], order[first + parent] = keys[first + child], order[first + child]
      parent, child = child, 2 * child + 1
    keys[first + parent], order[first + parent] = key, number


def standard_heap_sort(keys: Cells, order: Cells, first: int, end: int) -> None:
  """Sorts a part by heap sort, as libstdc++ does: a hole sinks to a leaf, then an entry rises."""
  size = end - first
  root = size // 2
  while size > 1:
    if root > 0:
      root -= 1
      key, number = keys[first + root], order[first + root]
    else:
      size -= 1
      key, number = keys[first + size], order[first + size]
      keys[first + size], order[first + size] = keys[first], order[first]
    hole = root
    child = 2 * hole + 2
    while child < size:
      if keys[first + child] < keys[first + child - 1]:
        child -= 1
      keys[first + hole], order[first + hole] = keys[first + child], order[first + child]
      hole, child = child, 2 * child + 2
    if child == size:  # The last parent has one child only.
      keys[first + hole], order[first + hole] = keys[first + child - 1], order[first + child - 1]
      hole = child - 1
    while hole > root:
      parent = (hole - 1) // 2
      if not keys[first + parent] < key:
        break
      keys[first + hole], order[first + hole] = keys[first + parent], order[first + parent]
      hole = parent
    keys[first + hole], order[first + hole] = key, number


def scalar_sort(keys: Cells, order: Cells, first: int, end: int, stack: Cells) -> None:
  """Sorts as NumPy does without vector instructions."""
  depth = 2 * log2(max(end - first, 1))
  left, right = first, end - 1
  top = 0
  while True:
    if depth < 0:
      heap_sort(keys, order, left, right + 1)
    else:
      while right - left > _SMALL - 1:
        middle = left + (right - left) // 2
        if keys[middle] < keys[left]:
          swap(keys, order, middle, left)
        if keys[right] < keys[middle]:
          swap(keys, order, right, middle)
        if keys[middle] < keys[left]:
          swap(keys, order, middle, left)
        pivot = keys[middle]
        i, j = left, right - 1
        swap(keys, order, middle, j)
        while True:
          i += 1
          while keys[i] < pivot:
            i += 1
          j -= 1
          while pivot < keys[j]:
            j -= 1
          if i >= j:
            break
          swap(keys, order, i, j)
        swap(keys, order, i, right - 1)
        depth -= 1
        if i - left < right - i:
          stack[top], stack[top + 1] = i + 1, right
          right = i - 1
        else:
          stack[top], stack[top + 1] = left, i - 1
          left = i + 1
        stack[top + 2] = depth
        top += 3
      insertion_sort(keys, order, left, right + 1)
    if top == 0:
      return
    top -= 3
    left, right, depth = stack[top], stack[top + 1], stack[top + 2]


def standard_sort(keys: Cells, order: Cells, first: int, end: int, stack: Cells) -> None:
  """Sorts as `std::sort` of libstdc++ does, and uses only the second half of the stack."""
  depth = 2 * log2(max(end - first, 1))
  begin, stop = first, end
  bottom = STACK // 2
  top = bottom
  while True:
    while stop - begin > _SMALL:
      if depth == 0:
        standard_heap_sort(keys, order, begin, stop)
        break
      depth -= 1
      # The median of three entries becomes the pivot, and is moved to the beginning.
      a, b, c = begin + 1, begin + (stop - begin) // 2, stop - 1
      if keys[a] < keys[b]:
        if keys[b] < keys[c]:
          median = b
        elif keys[a] < keys[c]:
          median = c
        else:
          median = a
      elif keys[a] < keys[c]:
        median = a
      elif keys[b] < keys[c]:
        median = c
      else:
        median = b
      swap(keys, order, begin, median)
      pivot = keys[begin]
      i, j = begin + 1, stop
      while True:
        while keys[i] < pivot:
          i += 1
        j -= 1
        while pivot < keys[j]:
          j -= 1
        if not i < j:
          break
        swap(keys, order, i, j)
        i += 1
      stack[top], stack[top + 1], stack[top + 2] = i, stop, depth
      top += 3
      stop = i
    if top == bottom:
      break
    top -= 3
    begin, stop, depth = stack[top], stack[top + 1], stack[top + 2]
  insertion_sort(keys, order, first, end)


def compare(keys: Cells, order: Cells, low: int, high: int) -> None:
  """Puts the smaller of two keys first; equal keys stay where they are."""
  if keys[high] < keys[low]:
    swap(keys, order, low, high)


def sort_vectors(keys: Cells, order: Cells, size: int, lanes: int) -> None:
  """Sorts each group of `lanes` keys among the first `size` keys by the network for that width."""
  for base in range(0, size, lanes):
    for four in range(base, base + lanes, 4):
      compare(keys, order, four, four + 1)
      compare(keys, order, four + 2, four + 3)
      compare(keys, order, four, four + 3)
      compare(keys, order, four + 1, four + 2)
      compare(keys, order, four, four + 1)
      compare(keys, order, four + 2, four + 3)
    if lanes == 8:
      for i in range(4):
        compare(keys, order, base + i, base + 7 - i)
      for distance in (2, 1):
        for i in range(8):
          if not i & distance:
            compare(keys, order, base + i, base + i + distance)


def network_sort(
    keys: Cells,
    order: Cells,
    first: int,
    end: int,
    lanes: int,
    spare_keys: Cells,
    spare_order: Cells,
) -> None:
  """Sorts a part of up to 256 keys by the bitonic network of whole vectors."""
  count = end - first
  size = lanes
  while size < count:
    size *= 2
  for i in range(size):
    if i < count:
      spare_keys[i], spare_order[i] = keys[first + i], order[first + i]
    else:
      spare_keys[i], spare_order[i] = _LARGEST, 0
  sort_vectors(spare_keys, spare_order, size, lanes)
  block = 2 * lanes
  while block <= size:
    for base in range(0, size, block):
      for i in range(block // 2):
        compare(spare_keys, spare_order, base + i, base + block - 1 - i)
    distance = block // 4
    while distance > 0:
      for base in range(0, size, 2 * distance):
        for i in range(base, base + distance):
          compare(spare_keys, spare_order, i, i + distance)
      distance //= 2
    block *= 2
  for i in range(count):
    keys[first + i], order[first + i] = spare_keys[i], spare_order[i]


def partition(
    keys: Cells,
    order: Cells,
    left: int,
    right: int,
    pivot: int,
    lanes: int,
    spare_keys: Cells,
    spare_order: Cells,
) -> int:
  """Moves the keys below the pivot to the left; returns where the other keys begin.

  The first and the last block are kept in scratch memory until the end, which frees room on both
  sides. Each other block is taken from the side with less free room, and its keys are divided
  between both sides.
  """
  wide = right - left > 32 * lanes
  width = 4 * lanes if wide else lanes
  for _ in range((right - left) % width):
    if keys[left] >= pivot:
      right -= 1
      swap(keys, order, left, right)
    else:
      left += 1
  if left == right:
    return left
  low, high = left, right  # Where the next keys go: upwards from `low`, downwards from `high`.
  blocks = (right - left) // width
  # Scratch memory: the first block, the last block, and the block that is being divided.
  held = min(blocks, 2)
  for i in range(width):
    spare_keys[i], spare_order[i] = keys[left + i], order[left + i]
    if held == 2:
      spare_keys[width + i] = keys[right - width + i]
      spare_order[width + i] = order[right - width + i]
  left += width
  right -= width
  for step in range(blocks):
    if step < blocks - held:
      if high - right < left - low:
        right -= width
        source = right
      else:
        source = left
        left += width
      begin = 2 * width
      for i in range(width):
        spare_keys[begin + i], spare_order[begin + i] = keys[source + i], order[source + i]
    else:
      begin = (step - (blocks - held)) * width
    for base in range(begin, begin + width, lanes):
      below = 0
      for i in range(base, base + lanes):
        if spare_keys[i] < pivot:
          below += 1
      # Eight lanes keep their order on both sides; four lanes are reversed on the right.
      place = high - lanes + below if lanes == 8 else high - 1
      for i in range(base, base + lanes):
        if spare_keys[i] < pivot:
          keys[low], order[low] = spare_keys[i], spare_order[i]
          low += 1
        else:
          keys[place], order[place] = spare_keys[i], spare_order[i]
          place += 1 if lanes == 8 else -1
      high -= lanes - below
  return low


def vector_sort(
    keys: Cells,
    order: Cells,
    first: int,
    end: int,
    lanes: int,
    stack: Cells,
    spare_keys: Cells,
    spare_order: Cells,
) -> None:
  """Sorts as NumPy 2.3 or later does with vector instructions; leaves sorted keys unchanged."""
  ascending = True
  for i in range(first + 1, end):
    if keys[i] < keys[i - 1]:
      ascending = False
      break
  if ascending:
    return
  stack[0], stack[1], stack[2] = first, end, 2 * log2(end - first)
  top = 3
  while top > 0:
    top -= 3
    left, right, depth = stack[top], stack[top + 1], stack[top + 2]
    if depth <= 0:
      standard_sort(keys, order, left, right, stack)
      continue
    if right - left <= _NETWORK:
      network_sort(keys, order, left, right, lanes, spare_keys, spare_order)
      continue
    stride = (right - 1 - left) // lanes
    for i in range(lanes):
      spare_keys[i], spare_order[i] = keys[left + (i + 1) * stride], 0
    insertion_sort(spare_keys, spare_order, 0, lanes)
    pivot = spare_keys[lanes // 2]
    smallest, largest = keys[left], keys[left]
    for i in range(left, right):
      smallest, largest = min(smallest, keys[i]), max(largest, keys[i])
    middle = partition(keys, order, left, right, pivot, lanes, spare_keys, spare_order)
    if pivot != largest:
      stack[top], stack[top + 1], stack[top + 2] = middle, right, depth - 1
      top += 3
    if pivot != smallest:
      stack[top], stack[top + 1], stack[top + 2] = left, middle, depth - 1
      top += 3


def tie_sort(
    keys: Cells, order: Cells, lanes: int, stack: Cells, spare_keys: Cells, spare_order: Cells
) -> None:
  """Sorts all keys in vectors of 4 or 8 lanes, or without vectors if `lanes` is 0.

  The last three arguments are scratch memory: `stack` has the size `STACK`, the others `SCRATCH`.
  """
  if lanes == 0:
    scalar_sort(keys, order, 0, len(keys), stack)
  else:
    vector_sort(keys, order, 0, len(keys), lanes, stack, spare_keys, spare_order)


# The functions that `tie_sort` calls, directly or indirectly.
HELPERS: tuple[Callable[..., object], ...] = (
    swap, log2, insertion_sort, heap_sort, standard_heap_sort, scalar_sort, standard_sort, compare,
    sort_vectors, network_sort, partition, vector_sort,
)  # fmt: skip
