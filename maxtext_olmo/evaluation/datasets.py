"""Grain datasets that turn rows of any length into batches of a few shapes, the same on all hosts.

Rows are sorted by length over all requests, cut into global batches, and then divided among hosts:

    lengths, sorted            9 9 8 8 | 5 5 5 4 | 3 2 . .      . is a filler row
    padded, a batch at a time  9 9 9 9 | 5 5 5 5 | 3 3 3 3
    host 0 of 2                9 9       5 5       3 3
    host 1 of 2                    9 9       5 5       3 3

Every host knows all lengths, so hosts agree on the shape of each step without communication.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from maxtext_olmo import errors
from maxtext_olmo import grain_compat

T = TypeVar("T")
Sample = dict[str, Any]


class CompleteLLMIndexedBatch(grain.transforms.Map):
  """Adds the missing fields of an `LLMIndexedBatch` to rows; "idx" is the index of the request.

  By default, a row is one document, whatever tokens it holds: positions are consecutive, and there
  is no document border inside the row. Fields that the row already has are kept.

  >>> made = CompleteLLMIndexedBatch().map(
  ...     {"inputs": np.array([[1, 2]]), "targets": np.array([[1, 2]]), "idx": np.array(0)})
  >>> {name: array.tolist() for name, array in made.items()} == {
  ...     "inputs": [[1, 2]], "targets": [[1, 2]],
  ...     "document_idx": [1], "inputs_position": [[0, 1]],
  ...     "targets_position": [[0, 1]], "sequence_idx": [0],
  ...     "_document_borders": [[False, False]]}
  True
  """

  @staticmethod
  def map(item: Sample) -> Sample:
    """Returns a dict with all fields; `document_idx` is the index of the request plus 1."""
    made = {name: value for name, value in item.items() if name != "idx"}
    rows, length = made["inputs"].shape
    numbers = np.asarray(item["idx"], np.int32) + np.int32(1)
    made["document_idx"] = np.array(np.broadcast_to(numbers, (rows,)))
    made.setdefault("sequence_idx", np.zeros(rows, np.int32))
    for name in ("inputs_position", "targets_position"):
      made.setdefault(name, np.tile(np.arange(length, dtype=np.int32), (rows, 1)))
    made.setdefault("_document_borders", np.zeros((rows, length), np.bool_))
    return made


def empty_llm_indexed_sample() -> Sample:
  """Returns a filler row: one token of padding, with `document_idx` 0, which means no request.

  >>> {name: (array.shape, array.dtype.name) for name, array in empty_llm_indexed_sample().items()
  ...  if name in ("inputs", "document_idx")}
  {'inputs': ((1, 1), 'int32'), 'document_idx': ((1,), 'int32')}
  """
  sample: Sample = {
      f"{side}{part}": np.zeros((1, 1), np.int32)
      for side in ("inputs", "targets")
      for part in ("", "_position", "_segmentation")
  }
  sample["_document_borders"] = np.zeros((1, 1), np.bool_)
  for name in ("document_idx", "sequence_idx"):
    sample[name] = np.zeros(1, np.int32)
  return sample


def token_length(item: Sample) -> int:
  """Returns the number of tokens in the `inputs` of an item, for use as a sort key.

  >>> token_length({"inputs": np.array([[1, 2, 3]])})
  3
  """
  return int(item["inputs"].shape[1])


class _Wrapped(grain.MapDataset[T], Generic[T]):
  """A base class of datasets that wrap another dataset; subclasses implement `_get`.

  As in all Grain datasets, `dataset[index]` takes the index modulo the length, so that the dataset
  repeats. `_get` is called with an index below the length.
  """

  def __init__(self, dataset: grain.MapDataset[T]):
    super().__init__(dataset)
    self.dataset = dataset

  def __len__(self) -> int:
    return len(self.dataset)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return self.slice(index)
    if not len(self):
      raise errors.OrderError(f"{type(self).__name__} is empty, so it has no element {index}.")
    return self._get(int(index) % len(self))

  @property
  def _element_spec(self) -> Any:
    """The result of `grain.experimental.get_element_spec`."""
    return grain_compat.get_element_spec(self.dataset)

  @abc.abstractmethod
  def _get(self, index: int) -> Any:
    """Returns the element at an index in [0, length)."""


class PadBatchDataset(_Wrapped[T]):
  """Appends padding elements until all batches are full.

  Args:
    dataset: The dataset to pad.
    multiple_of: The length is rounded up to a multiple of this; usually the global batch size.
    min_length: The minimum length, also rounded up to the multiple.
    pad_elem: The element to append.

  >>> three = grain.MapDataset.source([3, 1, 2])
  >>> padded = PadBatchDataset(three, multiple_of=4, min_length=0, pad_elem=0)
  >>> padded[3]
  0
  >>> len(padded)
  4
  """

  def __init__(
      self, dataset: grain.MapDataset[T], multiple_of: int, min_length: int, pad_elem: Any
  ):
    super().__init__(dataset)
    self.multiple_of = _positive("multiple_of", multiple_of)
    self.min_length = min_length
    self.pad_elem = pad_elem

  def __len__(self) -> int:
    return round_up(max(len(self.dataset), self.min_length), self.multiple_of)

  def _get(self, index: int) -> Any:
    return self.dataset[index] if index < len(self.dataset) else self.pad_elem


def _pad_batch_multiple(
    batch: Sequence[np.ndarray],
    multiple_of: int = 64,
    axis: int = 1,
    pad_value: int | float = 0,
    batch_size_pad: int | None = None,
) -> np.ndarray:
  """Pads arrays along one axis to a common length, and concatenates them along axis 0.

  Args:
    batch: Arrays of the same rank; scalars are stacked, and arrays without the axis to pad are only
      concatenated.
    multiple_of: The common length is rounded up to a multiple of this.
    axis: The axis to pad, usually the sequence axis.
    pad_value: The value to pad with.
    batch_size_pad: The minimum number of rows of the result; added rows hold `pad_value`.

  >>> rows = [np.array([[1, 2]]), np.array([[11, 12, 13]])]
  >>> _pad_batch_multiple(rows, multiple_of=4, axis=1).tolist()
  [[1, 2, 0, 0], [11, 12, 13, 0]]
  """
  arrays = [np.asarray(array) for array in batch]
  if arrays[0].ndim == 0:
    joined = np.stack(arrays)
  elif arrays[0].ndim <= axis:
    joined = np.concatenate(arrays)
  else:
    length = round_up(max(array.shape[axis] for array in arrays), multiple_of)
    joined = np.concatenate([_pad(array, axis, length, pad_value) for array in arrays])
  if batch_size_pad is not None and len(joined) < batch_size_pad:
    joined = _pad(joined, 0, batch_size_pad, pad_value)
  return joined


class PadSequenceInBatchDataset(_Wrapped[Sample]):
  """Pads each element to the longest length in its batch, rounded up, without making the batch.

  The elements can then be distributed to several hosts. Elements are flat dicts; arrays with two
  axes are padded at the end of the second axis, and other values are unchanged.

  Args:
    dataset: The dataset to pad. Every `batch_size` elements form a batch; the last may be smaller.
    batch_size: The global batch size.
    multiple_of: The padded length is rounded up to a multiple of this.
    pad_value: The value to pad with.

  >>> padded = PadSequenceInBatchDataset(grain.MapDataset.source(
  ...     [{"a": np.array([[3, 1, 5]])},
  ...      {"a": np.array([[2, 4]])},
  ...      {"a": np.array([[2, 4, 3, 3]])},
  ...      {"a": np.array([[2, 4]])}]
  ... ), batch_size=2, multiple_of=3)
  >>> [element["a"].tolist() for element in padded]
  [[[3, 1, 5]], [[2, 4, 0]], [[2, 4, 3, 3, 0, 0]], [[2, 4, 0, 0, 0, 0]]]
  """

  def __init__(
      self,
      dataset: grain.MapDataset[Sample],
      batch_size: int,
      multiple_of: int = 64,
      pad_value: int | float = 0,
  ):
    super().__init__(dataset)
    self.batch_size = _positive("batch_size", batch_size)
    self.multiple_of = _positive("multiple_of", multiple_of)
    self.pad_value = pad_value
    self._longest: dict[int, dict[str, int]] = {}

  def _get(self, index: int) -> Sample:
    group = index // self.batch_size
    if group not in self._longest:
      self._longest[group] = self._read_longest(group)
    lengths = self._longest[group]
    return {
        name: _pad(value, 1, lengths[name], self.pad_value) if name in lengths else value
        for name, value in self.dataset[index].items()
    }

  @property
  def _element_spec(self) -> Any:
    """The spec of the wrapped dataset, with None for sequence lengths, which differ by batch."""
    return {
        name: grain_compat.ShapeDtypeStruct((spec.shape[0], None), spec.dtype)
        if len(spec.shape) == 2
        else spec
        for name, spec in super()._element_spec.items()
    }

  def _read_longest(self, group: int) -> dict[str, int]:
    first = group * self.batch_size
    longest: dict[str, int] = {}
    for i in range(first, min(first + self.batch_size, len(self))):
      for name, value in self.dataset[i].items():
        if _is_sequence(value):
          longest[name] = max(longest.get(name, 0), value.shape[1])
    return {name: round_up(length, self.multiple_of) for name, length in longest.items()}


class SortedDataset(_Wrapped[T]):
  """The elements of a dataset, sorted by a key; the sort is stable.

  Args:
    dataset: The dataset to sort; each element is read once for its key, and again on access.
    key: Returns the sort key of an element.
    reverse: Whether the largest key comes first.

  >>> SortedDataset(grain.MapDataset.source([3, 1, 2]), lambda x: x)[0]
  1
  >>> SortedDataset(grain.MapDataset.source([3, 1, 2]), lambda x: x, reverse=True)[0]
  3
  >>> SortedDataset(grain.MapDataset.source(
  ...     [{"inputs": np.array([[1, 2, 3]])},
  ...      {"inputs": np.array([[1, 2]])}]), token_length)[0]
  {'inputs': array([[1, 2]])}
  """

  def __init__(self, dataset: grain.MapDataset[T], key: Callable[[T], Any], reverse: bool = False):
    super().__init__(dataset)
    self.key = key
    keys = [key(dataset[i]) for i in range(len(dataset))]
    self._order = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)

  def _get(self, index: int) -> T:
    element: T = self.dataset[self._order[index]]
    return element


class MultihostSortedRemapDataset(_Wrapped[T]):
  """Reorders a sorted dataset so that each host can read its rows of all batches as one slice.

  Without reordering, the slices of the hosts would be sorted too, but in the same step, each host
  would have a batch of a different length:

      dataset                       1 2 3 4 5 6 7 8
      slices of two hosts           1 2 3 4        5 6 7 8
      their batches of two          [1 2] [3 4]    [5 6] [7 8]     step 0 has 1 2 5 6
      wanted                        [1 2] [5 6]    [3 4] [7 8]     step 0 has 1 2 3 4

  Args:
    dataset: A sorted dataset whose length is a multiple of the global batch size.
    global_batch_size: Rows per batch, over all hosts.
    dataloader_host_count: The number of hosts that share a batch.

  >>> ds = MultihostSortedRemapDataset(
  ...     grain.MapDataset.source([1, 2, 3, 4, 5, 6, 7, 8]),
  ...     global_batch_size=4, dataloader_host_count=2)
  >>> host_slices = [slice(0, 4), slice(4, 8)]
  >>> [list(ds.slice(host_slices[0]).batch(2)), list(ds.slice(host_slices[1]).batch(2))]
  [[array([1, 2]), array([5, 6])], [array([3, 4]), array([7, 8])]]
  """

  def __init__(
      self, dataset: grain.MapDataset[T], global_batch_size: int, dataloader_host_count: int
  ):
    super().__init__(dataset)
    self.global_batch_size = _positive("global_batch_size", global_batch_size)
    self.dataloader_host_count = _positive("dataloader_host_count", dataloader_host_count)
    if global_batch_size % dataloader_host_count:
      raise errors.ConfigError(
          f"A global batch of {global_batch_size} rows does not divide over"
          f" {dataloader_host_count} hosts; choose a multiple of {dataloader_host_count}."
      )
    if len(dataset) % global_batch_size:
      raise errors.ConfigError(
          f"{len(dataset)} elements are not a whole number of batches of {global_batch_size}. Pad"
          " them with PadBatchDataset first."
      )

  def _get(self, index: int) -> T:
    local_batch = self.global_batch_size // self.dataloader_host_count
    host, place = divmod(index, len(self) // self.dataloader_host_count)
    step, row = divmod(place, local_batch)
    element: T = self.dataset[step * self.global_batch_size + host * local_batch + row]
    return element


def round_up(number: int, multiple: int) -> int:
  """Returns `number` rounded up to a multiple of `multiple`."""
  return -(-number // multiple) * multiple


def _is_sequence(value: Any) -> bool:
  return isinstance(value, np.ndarray) and value.ndim == 2


def _pad(array: np.ndarray, axis: int, length: int, value: int | float) -> np.ndarray:
  if array.shape[axis] == length:
    return array
  shape = list(array.shape)
  shape[axis] = length
  padded = np.full(shape, value, array.dtype)
  padded[tuple(slice(size) for size in array.shape)] = array
  return padded


def _positive(name: str, value: int) -> int:
  if value < 1:
    raise errors.ConfigError(f"{name}={value} must be positive.")
  return value
