"""Background searches for text, so that a server can answer other requests meanwhile.

A search runs in its own thread, and the client polls for its result. The search is stopped if
nobody has polled it for a while, or if a new search begins. So after a page is closed, the machine
does not continue to scan terabytes.
"""

from __future__ import annotations

import collections
import fnmatch
import threading
import time
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.inspection import search
from maxtext_olmo.inspection import visits as visits_lib
from maxtext_olmo.loader import iterator as iterator_lib

_MOST_HITS = 1000
_LOCATED = 20  # Hits whose steps are looked up.
_MOST_READ = 20  # Rows per hit that are read to learn whether the repetition filter keeps them.
_KEPT = 16  # Finished searches to keep.


class _StoppedError(Exception):
  """Raised in the thread of a search to end it."""


def corpus_of(
    iterator: iterator_lib.BatchIterator,
) -> tuple[token_files.TokenFiles, index_lib.OlmoNpyIndex]:
  """Returns the token files of a run, and their index."""
  if iterator.provenance is None:
    raise errors.ConfigError("This run does not read files, so it cannot be searched.")
  return iterator.files, iterator.provenance.index


class Search:
  """One search, started by `Searches.get`.

  Attributes:
    total: Bytes to scan.
    scanned: Bytes scanned so far.
    hits: The occurrences of the text, once the search has finished.
    visits: The steps that hold the first few occurrences.
    error: The error that ended the search, if any.
    finished: Whether the search has ended.
  """

  def __init__(
      self,
      iterator: iterator_lib.BatchIterator,
      tokenizer: Any,
      text: str,
      label: str,
      until_step: int | None,
      patience: float,
  ):
    files, index = corpus_of(iterator)
    only = [i for i, f in enumerate(index.files) if fnmatch.fnmatchcase(f.label, label)]
    if not text:
      raise errors.ConfigError("Give some text to look for.")
    if not only:
      raise errors.ConfigError(f"{label!r} matches no label of the corpus.")
    self.total = sum(index.files[i].n_tokens for i in only) * index.token_dtype.itemsize
    self.scanned = 0
    self.hits: list[search.TokenRange] = []
    self.visits: list[visits_lib.Visits] = []
    self.error: Exception | None = None
    self.finished = False
    self.stopped = False
    self._patience = patience
    self._asked = time.monotonic()
    self._lock = threading.Lock()

    def run() -> None:
      try:
        self.hits = search.find_text(
            text, tokenizer, index, files, only=only, most=_MOST_HITS, progress=self._advance
        )
        for hit in self.hits[:_LOCATED]:
          self._advance(0)
          self.visits.append(visits_lib.find_visits(iterator, hit, until_step, _MOST_READ))
      except _StoppedError:
        self.stopped = True
      except Exception as error:  # Reported when the result is polled.
        self.error = error
      finally:
        self.finished = True

    self._thread = threading.Thread(target=run, name="search", daemon=True)
    self._thread.start()

  @property
  def num_hits(self) -> int:
    """The number of hits; 0 until the scan is over."""
    return len(self.hits)

  def ask(self) -> None:
    """Records a poll, which keeps the search running."""
    self._asked = time.monotonic()

  def stop(self) -> None:
    """Stops the search and waits for its threads."""
    self._asked = float("-inf")
    self._thread.join()

  def wait(self) -> None:
    """Waits until the search has ended."""
    self._thread.join()

  def summary(self) -> str:
    """Returns a sentence that says how often the text occurs."""
    if not self.hits:
      return "This text does not occur in the corpus."
    if len(self.hits) >= _MOST_HITS:
      return f"The search stopped after {len(self.hits):,} occurrences; give a longer text."
    return f"{len(self.hits):,} occurrences ({self.total / 1e9:,.2f} GB scanned)."

  def _advance(self, scanned: int) -> None:
    with self._lock:
      self.scanned += scanned
    if time.monotonic() - self._asked > self._patience:
      raise _StoppedError


class Searches:
  """The searches of a server: one that is running, and some that have finished.

  Args:
    iterator: An iterator at the state of the run.
    tokenizer: The tokenizer of the corpus.
    until_step: The step at which searches stop; None for the end of the next epoch.
    patience: Seconds without a poll after which a search ends.
  """

  def __init__(
      self,
      iterator: iterator_lib.BatchIterator,
      tokenizer: Any,
      until_step: int | None = None,
      patience: float = 60.0,
  ):
    def begin(text: str, label: str) -> Search:
      return Search(iterator, tokenizer, text, label, until_step, patience)

    self._begin = begin
    self._found: collections.OrderedDict[tuple[str, str], Search] = collections.OrderedDict()
    self._lock = threading.Lock()

  def get(self, text: str, label: str = "*") -> Search:
    """Returns the search for a text in all labels that match a pattern; starts it if needed.

    A search that failed is returned once; the next call starts it again.
    """
    with self._lock:
      found = self._found.get((text, label))
      if found is not None and found.error is not None:
        return self._found.pop((text, label))
      if found is None or found.stopped:
        self._stop_all()
        found = self._found[text, label] = self._begin(text, label)
        while len(self._found) > _KEPT:
          self._found.popitem(last=False)
      found.ask()
      return found

  def close(self) -> None:
    """Stops the running search."""
    with self._lock:
      self._stop_all()

  def _stop_all(self) -> None:
    for search_ in self._found.values():
      if not search_.finished:
        search_.stop()
