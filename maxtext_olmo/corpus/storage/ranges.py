"""Byte ranges to read, joined into requests.

Ranges that touch in a file, such as the chunks of a window or consecutive documents, become one
request of up to 8 MiB. Ranges with a gap between them stay separate: windows in random order are
far apart, and the bytes in between would be paid for and discarded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_BYTES = 8 << 20


class Copy(NamedTuple):
  """A copy to make: bytes [start, start + size) of the object, to `place` in the output."""

  start: int
  size: int
  place: int


class Request(NamedTuple):
  """A request for bytes [start, end) of file `source`, and where to copy parts of the response."""

  source: int
  start: int
  end: int
  copies: list[Copy]


def check_output(out: np.ndarray, sizes: np.ndarray, places: np.ndarray) -> None:
  """Raises ValueError if ranges do not fit into a contiguous uint8 array with one dimension."""
  if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
    raise ValueError("`out` must be a contiguous array of uint8 with one dimension.")
  if len(sizes) and (sizes.min() < 0 or places.min() < 0 or (places + sizes).max() > len(out)):
    raise ValueError(f"A range lies outside the {len(out)} bytes of `out`.")


def plan_requests(
    sources: np.ndarray,
    offsets: np.ndarray,
    sizes: np.ndarray,
    places: np.ndarray,
    most_bytes: int = MOST_BYTES,
) -> list[Request]:
  """Returns the requests that read byte ranges, in the order in which the ranges were given.

  >>> array = np.array
  >>> for request in plan_requests(array([0, 0, 1]), array([8, 0, 8]), array([8] * 3),
  ...                              array([0, 8, 16])):
  ...   print(request.source, request.start, request.end, len(request.copies))
  0 0 16 2
  1 8 16 1
  """
  order = np.lexsort((offsets, sources))
  order = order[sizes[order] > 0]
  if not len(order):
    return []
  if not _need_joining(sources[order], offsets[order], sizes[order], most_bytes):
    order.sort()
    columns = (sources[order], offsets[order], sizes[order], places[order])
    return [
        Request(source, offset, offset + size, [Copy(offset, size, place)])
        for source, offset, size, place in zip(*(column.tolist() for column in columns))
    ]
  return _join(order, sources, offsets, sizes, places, most_bytes)


def _need_joining(
    sources: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, most_bytes: int
) -> bool:
  """Returns whether any of the sorted ranges touch or are too long for one request."""
  touch = (sources[1:] == sources[:-1]) & (offsets[1:] <= offsets[:-1] + sizes[:-1])
  return bool(touch.any() or sizes.max() > most_bytes)


def _join(
    order: np.ndarray,
    sources: np.ndarray,
    offsets: np.ndarray,
    sizes: np.ndarray,
    places: np.ndarray,
    most_bytes: int,
) -> list[Request]:
  """Joins ranges that touch, and splits those that are too long; `order` sorts the ranges."""
  ranges = zip(
      order.tolist(),
      sources[order].tolist(),
      offsets[order].tolist(),
      sizes[order].tolist(),
      places[order].tolist(),
  )
  requests: list[tuple[int, Request]] = []
  for number, source, offset, size, place in ranges:
    while size > 0:
      first, last = requests[-1] if requests else (0, None)
      end = min(offset + size, offset + most_bytes)
      if last is not None and last.source == source and last.start <= offset <= last.end:
        end = min(offset + size, last.start + most_bytes)
        if end > offset:
          last.copies.append(Copy(offset, end - offset, place))
          joined = last._replace(end=max(last.end, end))
          requests[-1] = (min(first, number), joined)
      if last is None or requests[-1][1] is last:
        end = min(offset + size, offset + most_bytes)
        requests.append((number, Request(source, offset, end, [Copy(offset, end - offset, place)])))
      done = end - offset
      offset, size, place = offset + done, size - done, place + done
  requests.sort(key=lambda item: item[0])
  return [request for _, request in requests]
