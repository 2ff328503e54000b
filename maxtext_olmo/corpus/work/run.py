"""Processes the items of a `Work` that have no result yet, and returns all results in order.

    outcome = run_work(work, pieces_of(index), options, fingerprint=index.fingerprint)
    outcome.check("Documents cannot be counted")
    total = sum(result["documents"] for _, result in outcome)
    outcome.discard()

The results stay in their files until `discard`, so a run that is killed, even after the last item
but before its results are used, loses nothing that was finished.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from maxtext_olmo import english
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus.work import engines
from maxtext_olmo.corpus.work import identity as identity_lib
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.corpus.work import tasks
from maxtext_olmo.corpus.work.options import WorkOptions
from maxtext_olmo.corpus.work.outcome import Outcome as Outcome
from maxtext_olmo.corpus.work.tasks import Failure
from maxtext_olmo.corpus.work.tasks import Item
from maxtext_olmo.corpus.work.tasks import Work as Work
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import MaxtextOlmoError
from maxtext_olmo.errors import StoreUnavailableError
from maxtext_olmo.errors import WorkerError
from maxtext_olmo.errors import WriteError
from maxtext_olmo.progress import progress_bar

_SECONDS_BETWEEN_LINES = 60.0
_TRIES_ALONE = 2
# If workers die during this many items in a row, something other than the items kills them.
_MOST_DEATHS = 4


def run_work(
    work: Work,
    items: Sequence[Item],
    options: WorkOptions | None = None,
    *,
    fingerprint: str,
    description: str = "Working",
    unit: str = "bytes",
    progress: bool = False,
) -> Outcome:
  """Processes the items that have no result yet, and returns all results.

  An item that fails does not stop the others. Later runs do not retry it, unless its input files
  change or `retry_failed` is set.

  Args:
    work: The work.
    items: All items of the work, in the order in which their results are merged. They must be the
      same in every part and on every machine.
    options: How to do it; by default, with a thread per core and results in memory.
    fingerprint: Fingerprint of the corpus, or another text that identifies what the work is for.
    description: Text before the progress bar.
    unit: Unit of the items' weights.
    progress: Whether to show a progress bar.

  Raises:
    WriteError: A result cannot be written, for example because the disk is full. What is done
      stays done.
    WorkerError: The engine fails, or its workers die no matter which items they get.
  """
  options = WorkOptions() if options is None else options
  results = _open_results(work, options, fingerprint)
  run = _Run(work, items, options, results)
  if options.merge:
    return run.outcome()

  def process() -> Outcome:
    todo = run.todo()
    if todo and run.reused:
      logging.info(
          "%s: %d of %s already done.",
          description,
          len(run.done),
          english.count(len(run.items), "piece"),
      )
    bar = progress_bar(
        run.describe(description, len(todo)),
        sum(item.weight for item in todo),
        enabled=progress,
        unit=unit,
        interval=_SECONDS_BETWEEN_LINES,
    )
    if todo:
      with bar as advance, engines.open_engine(options, len(todo)) as engine:
        try:
          _Loop(run, engine, advance).run(todo)
        finally:
          # Only when a storage opens a file again does it notice that the file was replaced.
          work.files.close()
    return run.outcome(redo)

  def redo() -> Outcome:
    run.find_lost()
    return process()

  return process()


def _open_results(work: Work, options: WorkOptions, fingerprint: str) -> results_lib.Results:
  if not options.results:
    return results_lib.MemoryResults()
  folder = results_lib.work_folder(fingerprint, work.name, work.version, work.settings)
  # Absolute, because workers may have different working directories.
  return results_lib.ResultFiles(paths_lib.absolute(options.results), folder)


class _Run:
  """The items of a run, and what is known about each."""

  def __init__(
      self,
      work: Work,
      items: Sequence[Item],
      options: WorkOptions,
      results: results_lib.Results,
  ):
    for item in items:
      results_lib.check_key(item.key)
    if len({item.key for item in items}) != len(items):
      raise ValueError("Two items have the same key.")
    part, parts = options.part or (0, 1)
    self.work, self.results = work, results
    self.items = items[part::parts]
    inputs = {path for item in self.items for path in item.inputs}
    identities = identity_lib.find_identities(work.files, inputs)
    self.identities = {
        item.key: identity_lib.combined(item.inputs, identities) for item in self.items
    }
    self.done: dict[str, str] = {}
    self.failed: dict[str, str] = {}
    self._find_results(retry_failed=options.retry_failed)
    self.reused = len(self.done)

  def todo(self) -> list[Item]:
    """Returns the items that are neither done nor failed."""
    known = self.done.keys() | self.failed.keys()
    return [item for item in self.items if item.key not in known]

  def describe(self, description: str, left: int) -> str:
    """Returns the text before the progress bar, which says how much an earlier run left to do."""
    if not self.reused:
      return description
    return f"{description} ({left:,} of {len(self.items):,} pieces are left)"

  def _find_results(self, *, retry_failed: bool) -> None:
    there, again = self.results.names(), []
    for key, identity in self.identities.items():
      if identity == identity_lib.UNKNOWN:
        continue
      if (name := results_lib.result_name(key, identity)) in there:
        self.done[key] = name
      elif (name := results_lib.result_name(key, identity, failed=True)) in there:
        if retry_failed:
          again.append(name)
        else:
          self.failed[key] = name
    self.results.remove(again)

  def find_lost(self) -> None:
    """Finds the items whose results were removed, and lets `todo` return them again."""
    there = self.results.names()
    lost = {key for key, name in self.done.items() if name not in there}
    if lost:
      logging.warning(
          "The results of %s were removed, perhaps by another command that did the same work and"
          " has finished. Processing them again.",
          english.count(len(lost), "piece"),
      )
    self.done = {key: name for key, name in self.done.items() if key not in lost}

  def note(self, item: Item, done: tasks.Done) -> None:
    """Records the outcome of an item; raises an error if no item can be processed now."""
    kinds: dict[str, type[MaxtextOlmoError]] = {
        "unwritable": WriteError,
        "unusable": ConfigError,
        "unavailable": StoreUnavailableError,
    }
    if done.status in kinds:
      raise kinds[done.status](
          f"{done.text} {len(self.done):,} of {len(self.items):,} pieces are done, and"
          " will not be repeated."
      )
    (self.done if done.status == "ok" else self.failed)[item.key] = done.text

  def fail(self, item: Item, reason: str) -> None:
    """Records that an item failed without an answer from its worker."""
    failure = Failure(item, f"{item}: {reason}")
    self.note(item, tasks.record_failure(self.results, failure, self.identities[item.key]))

  def forget(self, items: Sequence[Item]) -> None:
    """Removes the records of failed items, so that the next run does them again."""
    self.results.remove([self.failed.pop(item.key) for item in items])

  def outcome(self, redo: Callable[[], Outcome] | None = None) -> Outcome:
    """Returns the outcome of the run so far; `redo` processes items whose results are gone."""
    failed = [item for item in self.items if item.key in self.failed]
    records = self.results.read_all(self.failed[item.key] for item in failed)
    return Outcome(
        items=self.items,
        done=self.done,
        failures=tuple(map(Failure.from_record, failed, records)),
        missing=tuple(self.todo()),
        results=self.results,
        reused=self.reused,
        redo=redo,
    )


class _Loop:
  """Gives items to an engine, a few more than it can process at a time, until all are done."""

  def __init__(self, run: _Run, engine: engines.Engine, advance: Callable[[int], None]):
    self._run = run
    self._engine = engine
    self._advance = advance
    self._stop = threading.Event()
    self._context = None if engine.in_process else tasks.make_context(run.work, run.results)
    self._in_hand: dict[concurrent.futures.Future[tasks.Done], Item] = {}
    self._lost: list[Item] = []  # Consecutive items during which workers died.
    self._known_parallelism, self._ask_again = 0, 0.0

  def run(self, items: Sequence[Item]) -> None:
    """Processes all items; leaves no task running if it raises."""
    waiting = collections.deque(items)
    self._warn_if_idle()
    try:
      while waiting or self._in_hand:
        try:
          self._fill(waiting)
          self._collect()
        except concurrent.futures.BrokenExecutor:
          suspects = list(self._in_hand.values())
          self._in_hand.clear()
          logging.warning(
              "A worker process died. Redoing the %s in progress.",
              english.count(len(suspects), "piece"),
          )
          self._engine.restart()
          self._do_one_by_one(suspects)
    except BaseException:  # Including Ctrl-C: the workers must not keep reading terabytes.
      self._stop.set()
      for future in self._in_hand:
        future.cancel()
      raise

  def _fill(self, waiting: collections.deque[Item]) -> None:
    # More items than can run, so that a worker finds its next one waiting, and a cluster that can
    # grow sees that there is more to do.
    room = 2 * self._parallelism() + 2
    while waiting and len(self._in_hand) < room:
      self._submit(waiting[0])
      waiting.popleft()

  def _parallelism(self) -> int:
    """Returns the engine's parallelism, asking a cluster at most once a second."""
    if time.monotonic() >= self._ask_again:
      self._known_parallelism = self._engine.parallelism()
      self._ask_again = time.monotonic() + 1
    return self._known_parallelism

  def _warn_if_idle(self) -> None:
    if not self._engine.parallelism():
      logging.warning("The cluster has no workers yet. Start some, or wait for them to start.")

  def _submit(self, item: Item) -> concurrent.futures.Future[tasks.Done]:
    identity = self._run.identities[item.key]
    if self._context is None:
      future = self._engine.submit(
          tasks.do_item, self._run.work, self._run.results, item, identity, self._stop
      )
    else:
      future = self._engine.submit(tasks.do_item_elsewhere, self._context, item, identity)
    self._in_hand[future] = item
    return future

  def _collect(self) -> None:
    """Waits until an item is done, and records all that are."""
    finished, _ = concurrent.futures.wait(
        self._in_hand, _SECONDS_BETWEEN_LINES, concurrent.futures.FIRST_COMPLETED
    )
    if not finished:
      self._advance(0)  # A log gets a line a minute, even if an item takes longer.
      self._warn_if_idle()
    for future in finished:
      self._take(future)

  def _take(self, future: concurrent.futures.Future[tasks.Done]) -> None:
    """Records the outcome of an item; if it is lost, keeps it in hand and raises BrokenExecutor."""
    item = self._in_hand[future]
    try:
      done = future.result()
    except concurrent.futures.BrokenExecutor:
      raise
    except concurrent.futures.CancelledError as error:
      raise WorkerError(
          "The engine cancelled the work: its scheduler may have died. Run the command again to"
          " process what is missing."
      ) from error
    except Exception as error:  # The engine gave up on the item.
      self._fail(item, f"{type(error).__name__}: {error}")
    else:
      self._run.note(item, done)
      self._lost.clear()
    del self._in_hand[future]
    self._advance(item.weight)

  def _do_one_by_one(self, items: Sequence[Item]) -> None:
    """Processes items one at a time, to find one that kills every worker."""
    for item in items:
      for _ in range(_TRIES_ALONE):
        try:
          self._take(self._submit(item))
          break
        except concurrent.futures.BrokenExecutor:
          self._in_hand.clear()
          self._engine.restart()
      else:
        self._fail(item, "its worker process died each time (killed, out of memory, or crashed)")
        self._advance(item.weight)

  def _fail(self, item: Item, reason: str) -> None:
    """Records an item that killed its workers; raises WorkerError if they die on every item."""
    self._run.fail(item, reason)
    self._lost.append(item)
    if len(self._lost) >= _MOST_DEATHS:
      self._run.forget(self._lost)  # The workers are at fault, not the items.
      raise WorkerError(
          f"Workers returned no result for {len(self._lost)} pieces in a row, most recently {item}:"
          f" {reason}. Check that the workers have enough memory, that this package is installed"
          ' where they run, and that a script that starts them has an `if __name__ == "__main__"`'
          " block."
      )
