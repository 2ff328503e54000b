"""The outcome of work over a corpus: the result of each item, and which items failed.

Two commands may do the same work at the same time, in the same place. The first to finish removes
the results, which the second may still need. The second then redoes the items whose results are
gone, and finishes with the same results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.corpus.work.tasks import Failure
from maxtext_olmo.errors import CorpusError

# More than the number of commands that are likely to do the same work at the same time.
_MOST_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The results of a `Work`; iterate over it to get (item, result) in the order of the items.

  Attributes:
    items: The items: all of them, or those of a part.
    done: Name of the result of each item that is done, by key.
    failures: Items that failed, in order.
    missing: Items that are neither done nor failed; only a merge can have any.
    results: Where the results are kept.
    reused: Number of items that were done before this run.
    redo: Function that processes the items whose results are gone, and returns the new outcome;
      None for a merge, which processes nothing.
  """

  items: Sequence[Any]
  done: dict[str, str]
  failures: tuple[Failure, ...]
  missing: tuple[Any, ...]
  results: results_lib.Results
  reused: int = 0
  redo: Callable[[], Outcome] | None = None

  def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
    items = [item for item in self.items if item.key in self.done]
    found = self.results.read_all(self.done[item.key] for item in items)
    for item, result in zip(items, found):
      yield item, self._redone(item) if result is None else result

  def _redone(self, item: Any) -> dict[str, Any]:
    """Processes all items whose results are gone, and returns the result of one of them."""
    for _ in range(_MOST_ATTEMPTS):
      (result,) = self.results.read_all([self.done[item.key]])
      if result is not None:  # It was processed again together with an earlier item.
        return result
      if self.redo is None:
        break
      for failure in self.redo().failures:
        if failure.item.key == item.key:
          raise failure.error
    raise CorpusError(
        f"The result for {item} was damaged or removed. Run the command again, without --merge, to"
        " redo this piece."
    )

  def check(self, what: str) -> None:
    """Raises CorpusError, whose message begins with `what`, unless every item has a result."""
    if self.failures:
      errors = [failure.error for failure in self.failures]
      raise scan.kind_of(errors)(
          f"{what} ({len(errors):,} of {len(self.items):,} pieces failed):\n"
          f"{scan.list_errors(errors)}\n"
          "Everything else is done and will not be repeated. Fix the problem and run the command"
          " again with --retry-failed (and without --merge)."
      )
    if self.missing:
      errors = [CorpusError(str(item)) for item in self.missing]
      files = self.results if isinstance(self.results, results_lib.ResultFiles) else None
      where = f" in {files.place}" if files else ""
      raise CorpusError(
          f"{what}: {len(self.missing):,} of {len(self.items):,} pieces have no result yet"
          f"{where}:\n{scan.list_errors(errors)}\n"
          "Wait for the parts that are still running, or run the command without --part and --merge"
          " to process what is missing. If all parts have finished, check that they had the same"
          " options, the same --results and the same files as this command. If an earlier --merge"
          " has succeeded, it has removed the results."
      )

  def discard(self) -> None:
    """Removes the results, after the merged result was written."""
    self.results.discard()
