"""Mixtures of the labels of a corpus, with shares in epochs, weights or tokens.

    olmo_mixture={"wikipedia": 2.0, "stack-edu_*": 0.5}, olmo_mixture_unit="epochs"

Each label is shuffled separately and repeats without end; `Interleave` says which label is at a
position. So every instance of a label appears once per epoch of the label, independently of the
other labels, and if one pass takes half of a label, the next pass takes the other half.

A name in the mixture is a label, or a pattern of labels with `*` and `?`. A label's own name takes
precedence over a pattern, and a longer pattern over a shorter one. Labels that match no name are
not used.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import fractions
import functools
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.order import base
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import interleave as interleave_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stream as stream_lib

UNITS = ("epochs", "weights", "tokens")


class Ranges:
  """Numbers the ids in several ranges consecutively.

  The ranges [10, 12) and [20, 23) number the ids 10, 11, 20, 21 and 22 as 0, 1, 2, 3 and 4.
  """

  def __init__(self, ranges: Sequence[tuple[int, int]]):
    kept = [(start, end) for start, end in ranges if end > start]
    self._starts = np.array([start for start, _ in kept], np.int64)
    sizes = np.array([end - start for start, end in kept], np.int64)
    self._before = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

  def __len__(self) -> int:
    return int(self._before[-1])

  @property
  def bounds(self) -> list[tuple[int, int]]:
    """The ranges that are not empty, in order."""
    sizes = np.diff(self._before)
    return list(zip(self._starts.tolist(), (self._starts + sizes).tolist()))

  def ids(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the id with each of the given numbers, which must be in [0, len(self))."""
    place = np.searchsorted(self._before, numbers, side="right") - 1
    return self._starts[place] + numbers - self._before[place]

  def numbers(self, ids: np.ndarray) -> np.ndarray:
    """Returns the number of each id, or -1 if it is outside the ranges; the inverse of `ids`."""
    if not len(self):
      return np.full(np.shape(ids), -1, np.int64)
    order = np.argsort(self._starts)
    place = order[np.searchsorted(self._starts[order], ids, side="right") - 1]
    numbers = ids - self._starts[place]
    inside = (numbers >= 0) & (numbers < np.diff(self._before)[place])
    return np.where(inside, numbers + self._before[place], -1)


class RangesOrder(base.Order):
  """An order of the ids in several ranges."""

  def __init__(self, ranges: Ranges, order: str, seed: int):
    super().__init__(num_instances=len(ranges), seed=seed)
    self._ranges = ranges
    self._order = permutations.make_order(order, num_instances=len(ranges), seed=seed)
    self.name = self._order.name

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    return self._ranges.ids(self._order.ids(epoch, places))

  def _chunk_places(self, epoch: int, chunks: np.ndarray) -> np.ndarray:
    return self._order.places(epoch, self._ranges.numbers(chunks))


class RestOfRanges:
  """The unconsumed chunks of several ranges, identified by their numbers in `Ranges`."""

  def __init__(self, ranges: Ranges, consumed: consumed_lib.Consumed):
    self._ranges, self._consumed = ranges, consumed
    left = consumed.remaining_before(np.array(ranges.bounds, np.int64).reshape(-1))
    self._left = Ranges(list(zip(left[::2].tolist(), left[1::2].tolist())))
    self.num_instances = len(ranges)
    self.num_remaining = len(self._left)
    self.digest = consumed.digest

  def select(self, ranks: np.ndarray) -> np.ndarray:
    """Returns the numbers of the remaining chunks at the given ranks."""
    return self._ranges.numbers(self._consumed.select(self._left.ids(ranks)))

  def ranks(self, instances: np.ndarray) -> np.ndarray:
    """Returns the rank among the remaining chunks, given chunk numbers; -1 for a consumed chunk."""
    instances = np.asarray(instances, np.int64)
    inside = (instances >= 0) & (instances < self.num_instances)
    found = np.full(instances.shape, -1, np.int64)
    if inside.any():
      found[inside] = self._consumed.ranks(self._ranges.ids(instances[inside]))
      found[found >= 0] = self._left.numbers(found[found >= 0])
    return found

  def close(self) -> None:
    """Closes the bitmap."""
    self._consumed.close()


@dataclasses.dataclass(frozen=True)
class Member:
  """A label in a mixture.

  Attributes:
    label: Name of the label.
    chunks: Train chunks of the label.
    value: Share of the label, in the mixture's unit. If a pattern matches several labels, its
      weight or tokens are divided among them in proportion to their sizes.
  """

  label: str
  chunks: Ranges
  value: fractions.Fraction


class MixtureOrder(base.Order):
  """An order whose epochs are passes of a mixture, and whose ids are train ranks.

  The length of a pass follows from the members' epochs or tokens. With weights, a pass ends when
  every label has been seen at least once.

  Args:
    members: Labels of the mixture.
    unit: Unit of the members' values, one of `UNITS`.
    order: Name of the order in which each label's chunks are taken.
    seed: Seed of the run.
    chunk_size: Number of instances per chunk.
    sequence_length: Number of tokens per instance.
    taken: Number of chunks of each label that earlier mixtures have taken; each label continues
      after them.
    seen: Bitmap over all train chunks; the first epoch of each label leaves out marked chunks.
  """

  def __init__(
      self,
      members: Sequence[Member],
      unit: str,
      *,
      order: str,
      seed: int,
      chunk_size: int,
      sequence_length: int,
      taken: Mapping[str, int] | None = None,
      seen: consumed_lib.Consumed | None = None,
  ):
    self.members = tuple(members)
    self.unit = unit
    sizes = [len(member.chunks) for member in members]
    if unit == "epochs":
      counts = [max(1, round(member.value * n)) for member, n in zip(members, sizes)]
    elif unit == "tokens":
      counts = [max(1, round(member.value / (sequence_length * chunk_size))) for member in members]
    else:
      counts = interleave_lib.counts_of_weights([member.value for member in members])
    self.interleave = interleave_lib.Interleave(counts)
    period = self.interleave.period
    if unit == "weights":
      period = max(-(-n * period // count) for n, count in zip(sizes, counts))
    super().__init__(num_instances=period * chunk_size, seed=seed, chunk_size=chunk_size)
    self._orders = [
        permutations.make_order(order, num_instances=n, seed=member_seed(seed, member.label))
        for member, n in zip(members, sizes)
    ]
    if seen is not None:
      self._orders = [
          consumed_lib.RemainderOrder(
              RestOfRanges(member.chunks, seen),
              label_order,
              shuffles=order != permutations.SequentialOrder.name,
          )
          for member, label_order in zip(members, self._orders)
      ]
    self._taken = [(taken or {}).get(member.label, 0) for member in members]
    shares = ", ".join(f"{member.label}={float(member.value):.12g}" for member in members)
    digest = hashlib.sha256(shares.encode()).hexdigest()[:16]
    self.name = f"{order} mixture of {len(members)} labels by {unit}, {digest}"

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    members, indices = self.interleave.locate(
        epoch * (self.num_instances // self.chunk_size) + places
    )
    ids = np.empty_like(indices)
    for number in np.unique(members):
      here = members == number
      ranks = self._orders[number].at(indices[here] + self._taken[number])
      ids[here] = self.members[number].chunks.ids(ranks)
    return ids

  def _members_of(self, chunks: np.ndarray) -> np.ndarray:
    """Returns the index of the member that each train chunk belongs to; -1 if it has none."""
    starts, ends, members = self._ranges
    at = np.maximum(np.searchsorted(starts, chunks, side="right") - 1, 0)
    return np.where((chunks >= starts[at]) & (chunks < ends[at]), members[at], -1)

  @functools.cached_property
  def _ranges(self) -> np.ndarray:
    """The first chunk, end and member of each range of chunks, sorted by first chunk."""
    rows = [(*r, number) for number, m in enumerate(self.members) for r in m.chunks.bounds]
    return np.array(sorted(rows), np.int64).T

  def places(self, epoch: int, ids: np.ndarray) -> np.ndarray:
    """Returns the first place of each instance in a pass; -1 if the pass does not have it."""
    which, places = self._visits(epoch, ids)
    first = np.full(len(ids), -1, np.int64)
    first[which[::-1]] = places[::-1]  # In reverse, so that the first place is assigned last.
    return first

  def visits(self, epoch: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all places of the given instances in a pass, as `Order.visits` does."""
    which, places = self._visits(epoch, ids)
    by_id = np.argsort(which, kind="stable")
    return which[by_id], places[by_id]

  def _visits(self, epoch: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same visits, grouped by label. The places of each instance ascend."""
    chunks, rest = np.divmod(np.asarray(ids, np.int64), self.chunk_size)
    length = self.num_instances // self.chunk_size
    firsts, ends = (self.interleave.taken((epoch + i) * length) for i in (0, 1))
    found = []
    members = self._members_of(chunks)
    by_member = np.argsort(members, kind="stable")
    bounds = np.searchsorted(members[by_member], np.arange(len(self.members) + 1))
    for number, (member, order, before) in enumerate(zip(self.members, self._orders, self._taken)):
      mine = by_member[bounds[number] : bounds[number + 1]]
      first, end = firsts[number] + before, ends[number] + before
      if not len(mine) or first == end:
        continue
      ranks = member.chunks.numbers(chunks[mine])
      for own_epoch in range(order.epochs.epoch(first), order.epochs.epoch(end - 1) + 1):
        own_places = order.places(own_epoch, ranks)
        indices = own_places + order.epochs.start(own_epoch)
        here = (own_places >= 0) & (indices >= first) & (indices < end)
        places = self.interleave.positions_of(number, indices[here] - before) - epoch * length
        found.append((mine[here], places * self.chunk_size + rest[mine[here]]))
    which, places = (
        np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*found, ((), ()))
    )
    return which.astype(np.int64), places.astype(np.int64)

  def taken(self, chunks: int) -> dict[str, int]:
    """Counts each label's chunks in earlier mixtures and the first `chunks` chunks of this one."""
    here = self.interleave.taken(chunks)
    return {m.label: n + before for m, n, before in zip(self.members, here, self._taken)}

  def close(self) -> None:
    """Closes the files of the labels' orders."""
    for order in self._orders:
      order.close()


def is_mixture(name: str) -> bool:
  """Returns whether an order with this name is a mixture."""
  return " mixture " in name


def mixture_stream(
    index: index_lib.OlmoNpyIndex,
    mixture: Mapping[str, float],
    unit: str,
    *,
    order: str,
    seed: int,
    held_out_instances: int = 0,
    num_epochs: int | None = None,
    split: stream_lib.Split | None = None,
    taken: Mapping[str, int] | None = None,
    seen: consumed_lib.Consumed | None = None,
) -> stream_lib.Stream:
  """Makes a stream of the training part of a corpus, mixed by label.

  Args:
    index: Index of the corpus.
    mixture: Value for each label or pattern of labels.
    unit: Unit of the values, one of `UNITS`.
    order: Name of the order in which each label's instances are taken.
    seed: Seed of the run.
    held_out_instances: Number of instances to hold out, if no `split` is given.
    num_epochs: Number of passes of the mixture; None for an endless stream.
    split: Split of the corpus; by default, one that holds out `held_out_instances` instances.
    taken: Number of chunks of each label that earlier mixtures have taken.
    seen: Bitmap of the train chunks that the first epoch of each label leaves out.
  """
  if order not in (permutations.FeistelOrder.name, permutations.SequentialOrder.name):
    raise errors.ConfigError(
        f"olmo_mixture does not work with olmo_order={order!r}, which is an order of the whole"
        " corpus; use feistel or sequential."
    )
  split = split or stream_lib.Split.of_index(index, held_out_instances)
  mixed = MixtureOrder(
      make_members(index, split, mixture, unit),
      unit,
      order=order,
      seed=seed,
      chunk_size=index.chunk_size,
      sequence_length=index.sequence_length,
      taken=taken,
      seen=seen,
  )
  return stream_lib.Stream(
      index.fingerprint, index.sequence_length, mixed, split, num_epochs=num_epochs
  )


def make_members(
    index: index_lib.OlmoNpyIndex, split: stream_lib.Split, mixture: Mapping[str, float], unit: str
) -> list[Member]:
  """Returns the labels of a mixture, each with its train chunks and its share."""
  ranges: dict[str, list[tuple[int, int]]] = {}
  for entry in index.files:
    first = entry.instance_offset // index.chunk_size
    windows = np.array([first, first + entry.n_instances // index.chunk_size])
    start, end = split.train_windows_before(windows).tolist()
    ranges.setdefault(entry.label, []).append((start, end))
  chunks = {label: Ranges(parts) for label, parts in ranges.items()}
  values = share_values(mixture, {label: len(part) for label, part in chunks.items()}, unit)
  return [Member(label, chunks[label], value) for label, value in values.items()]


def share_values(
    mixture: Mapping[str, float], sizes: Mapping[str, int], unit: str
) -> dict[str, fractions.Fraction]:
  """Returns the share of each label that the mixture uses, in the mixture's unit.

  Args:
    mixture: Value for each label or pattern of labels.
    sizes: Number of chunks of each label.
    unit: One of `UNITS`. The weight or tokens of a pattern are divided among its labels in
      proportion to their size.
  """
  if unit not in UNITS:
    raise errors.ConfigError(
        f"olmo_mixture_unit={unit!r} is unknown; choose from {', '.join(UNITS)}."
    )
  named = labels_of(mixture, sizes)
  found = {}
  for label in sizes:
    for name, labels in named.items():
      if label not in labels:
        continue
      value = fractions.Fraction(str(mixture[name]))
      if not sizes[label]:
        raise errors.ConfigError(
            f"olmo_mixture: {label!r} (matched by {name!r}) has no instances to train on."
        )
      if unit != "epochs":
        value = value * sizes[label] / sum(sizes[other] for other in labels)
      found[label] = value
  return found


def labels_of(mixture: Mapping[str, float], labels: Mapping[str, int]) -> dict[str, list[str]]:
  """Returns the labels that each name selects, by the precedence described in this module."""
  bad = {name: value for name, value in mixture.items() if not 0 < value < float("inf")}
  if not mixture or bad:
    raise errors.ConfigError(
        f"olmo_mixture: each label needs a number above 0, got {dict(bad or mixture)}. Leave out"
        " labels that should not be used."
    )
  found: dict[str, list[str]] = {name: [] for name in mixture}
  for label in labels:
    if label in found:
      found[label].append(label)
      continue
    fitting = [name for name in mixture if fnmatch.fnmatchcase(label, name)]
    if fitting:
      found[max(fitting, key=lambda name: (len(name), name))].append(label)
  unused = [name for name, fits in found.items() if not fits]
  if unused:
    known = sorted(labels)
    shown = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    raise errors.ConfigError(
        f"olmo_mixture: {', '.join(map(repr, unused))} matches no label, or only labels that a more"
        f" specific name matches. Labels in this index: {shown}."
    )
  return found


def member_seed(seed: int, label: str) -> int:
  """Returns the seed of a label, so that labels of the same size are shuffled differently."""
  return int.from_bytes(hashlib.sha256(f"{seed}\x1f{label}".encode()).digest()[:8], "little")
