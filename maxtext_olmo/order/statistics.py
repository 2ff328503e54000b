"""Statistics of how well an order mixes, in standard deviations from a true shuffle.

They are computed over a hundred blocks of a thousand consecutive positions, spread over an epoch:

    displacement     the mean distance of an instance from its place in the corpus
    correlation      between the ids at positions 1, 2 and 8 apart
    files            how many of 950 files, of very different sizes, occur in a batch of 500
    chi-square       how evenly the ids fall into 256 equal ranges, over all blocks
    block chi-square the same within single blocks, summed
    all orders of 5  the frequency of each of the 120 permutations of 5 instances, over seeds

For a true shuffle, all but one in 16,000 such values are between -4 and +4.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from maxtext_olmo import grain_compat
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stored

_BLOCKS = 100
_BLOCK = 1000
_BATCH = 500
_FILES = 950
_RANGES = 256
_LIMIT = 4.0
_SMALL = 5
_SMALL_SEEDS = 6_000

Ids = Callable[[np.ndarray], np.ndarray]


def report(sizes: Sequence[int], *, seed: int, largest_stored: int) -> str:
  """Returns a report with a Markdown table for each size."""
  parts = [__doc__.split("\n\n", 1)[1]]
  for n in sizes:
    with tempfile.TemporaryDirectory(prefix="maxtext_olmo_stats_") as cache:
      orders = _orders(n, seed, cache if n <= largest_stored else None)
      columns = {name: measure(ids, n) for name, ids in orders.items()}
    parts.append(f"\n{n:,} instances, seed {seed}; standard deviations from a true shuffle:\n\n")
    parts.append(_table("", columns))
  places = np.arange(_SMALL)
  small = {
      "feistel": lambda seed: _order("feistel", _SMALL, seed)(places),
      "olmo_core": lambda seed: stored.shuffled(_SMALL, seed + 1),
  }
  found = {name: {"chi-square": small_orders(ids)} for name, ids in small.items()}
  parts += ["\n", _table(f"all orders of {_SMALL}, {_SMALL_SEEDS:,} seeds", found)]
  return "".join(parts)


def _table(corner: str, columns: dict[str, dict[str, float]]) -> str:
  lines = [[corner, *columns], ["---", *["---:"] * len(columns)]]
  for row in next(iter(columns.values())):
    lines.append([row, *(_shown(found[row]) for found in columns.values())])
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def measure(ids: Ids, n: int) -> dict[str, float]:
  """Returns the statistics of an order over n instances; standard normal for a true shuffle."""
  blocks = max(1, min(_BLOCKS, n // (2 * _BLOCK)))
  starts = np.linspace(0, n - _BLOCK, blocks).astype(np.int64)
  positions = starts[:, None] + np.arange(_BLOCK)
  found = ids(positions.ravel()).reshape(positions.shape)
  share = (found + 0.5) / n
  figures = {"displacement": _displacement((positions + 0.5) / n, share)}
  for lag in (1, 2, 8):
    figures[f"correlation, {lag} apart"] = _correlation(share, lag)
  figures[f"files in a batch of {_BATCH}"] = _files(found, n)
  figures["chi-square"] = _chi_square(np.bincount(_range_of(share).ravel(), minlength=_RANGES), n)
  per_block = [np.bincount(_range_of(block), minlength=_RANGES) for block in share]
  figures["block chi-square"] = sum(_chi_square(c, n) for c in per_block) / math.sqrt(blocks)
  return figures


def small_orders(ids: Callable[[int], np.ndarray]) -> float:
  """Returns a statistic of how evenly seeds produce all permutations of a few instances."""
  places = {order: i for i, order in enumerate(itertools.permutations(range(_SMALL)))}
  counts = np.zeros(len(places))
  for seed in range(_SMALL_SEEDS):
    counts[places[tuple(ids(seed))]] += 1
  return _chi_square(counts)


def _order(name: str, n: int, seed: int, cache: str | None = None) -> Ids:
  order = permutations.make_order(name, num_instances=n, seed=seed, cache_dir=cache)
  return lambda places: order.ids(0, places)


def _orders(n: int, seed: int, cache: str | None) -> dict[str, Ids]:
  """Returns the orders to compare; without a cache, only computed orders."""
  found = {"feistel": _order("feistel", n, seed)}
  if cache is not None:
    found["olmo_core"] = _order("olmo_core", n, seed, cache)
  return {**found, "Grain's shuffle": grain_shuffle(n, seed)}


def grain_shuffle(n: int, seed: int) -> Ids:
  """Computes `grain.MapDataset.range(n).shuffle(seed)` without the cost of making datasets."""
  shuffle = grain_compat.index_shuffle
  return lambda places: np.fromiter(
      (shuffle(int(place), n - 1, seed, 4) for place in places), np.int64, len(places)
  )


def _displacement(place: np.ndarray, share: np.ndarray) -> float:
  # For an id uniform over [0, 1], the distance from x has mean (x² + (1-x)²) / 2 and second moment
  # (x³ + (1-x)³) / 3.
  mean = (place**2 + (1 - place) ** 2) / 2
  variance = (place**3 + (1 - place) ** 3) / 3 - mean**2
  distance = np.abs(share - place)
  return float((distance - mean).sum() / math.sqrt(variance.sum()))


def _correlation(share: np.ndarray, lag: int) -> float:
  first, second = share[:, :-lag] - 0.5, share[:, lag:] - 0.5
  # The product of two independent uniforms around 0 has mean 0 and variance 1/144.
  return float((first * second).sum() * 12 / math.sqrt(first.size))


def _files(found: np.ndarray, n: int) -> float:
  sizes = np.random.Generator(np.random.PCG64(1)).lognormal(sigma=1.5, size=_FILES)
  ends = np.cumsum(sizes / sizes.sum()) * n
  shares = np.diff(np.floor(ends), prepend=0) / n
  batches = np.searchsorted(np.floor(ends), found.reshape(-1, _BATCH), side="right")
  seen = np.array([len(np.unique(batch)) for batch in batches])
  absent = (1 - shares) ** _BATCH
  pairs = (1 - shares[:, None] - shares[None, :]).clip(0) ** _BATCH
  np.fill_diagonal(pairs, absent)
  variance = (pairs - absent[:, None] * absent[None, :]).sum()
  return float((seen - (1 - absent).sum()).sum() / math.sqrt(len(seen) * variance))


def _range_of(share: np.ndarray) -> np.ndarray:
  return (share * _RANGES).astype(np.int64)


def _chi_square(counts: np.ndarray, population: int | None = None) -> float:
  """Returns the chi-square statistic of counts as a standard normal value.

  The conversion is Wilson and Hilferty's cube-root approximation.
  """
  expected = counts.sum() / len(counts)
  freedom = len(counts) - 1
  value = float(((counts - expected) ** 2).sum() / expected)
  if population is not None:
    # No instance appears twice, so the counts are more even than those of independent draws.
    value *= (population - 1) / (population - counts.sum())
  spread = 2 / (9 * freedom)
  return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def _shown(figure: float) -> str:
  return f"{figure:+.1f}" if abs(figure) < _LIMIT else f"**{figure:+.1f}**"
