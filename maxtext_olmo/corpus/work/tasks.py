"""Processes one item in a worker: a thread, a process, or a worker of a cluster.

A task writes its own result, so nothing is lost if the driver dies. It never raises: it returns the
name of the file that it wrote, whether the item succeeded or failed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import threading
import traceback
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from absl import logging

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import Storage
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import reason
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.work import identity as identity_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError
from maxtext_olmo.errors import StoreUnavailableError
from maxtext_olmo.errors import WriteError
from maxtext_olmo.errors import is_transient


class Item(Protocol):
  """A unit of work; must be picklable, and `str(item)` describes it in messages."""

  @property
  def key(self) -> str:
    """A name that no other item of the work has: letters, digits, dots, dashes, underscores."""

  @property
  def weight(self) -> int:
    """Amount of work, usually in bytes, for the progress bar."""

  @property
  def inputs(self) -> tuple[str, ...]:
    """Paths of the files that the result depends on."""


@dataclasses.dataclass(frozen=True)
class Work:
  """A function of an item, which is called in workers and returns JSON values and arrays.

  Subclasses are frozen data classes in importable modules. They set `name` and `version`, have
  their settings as fields with JSON values, and implement `__call__`. The version must change when
  the meaning of a result changes. An exception in `__call__` makes the item fail; other items
  continue.

  Attributes:
    name: Name of the work, part of the names of result files.
    version: Version of the work, part of the names of result files.
    storage: Storage that holds the input files; None opens one per process. It is not a setting.
  """

  name: ClassVar[str]
  version: ClassVar[int]
  storage: Storage | None = dataclasses.field(default=None, kw_only=True, repr=False, compare=False)

  def __call__(self, item: Any) -> results_lib.Result:
    """Processes one item."""
    raise NotImplementedError

  def __getstate__(self) -> dict[str, Any]:
    # Leaves out the storage that was opened: each process opens its own.
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @functools.cached_property
  def files(self) -> Storage:
    """The storage that holds the input files."""
    return open_storage() if self.storage is None else self.storage

  @property
  def settings(self) -> dict[str, Any]:
    """The fields that decide what a result is."""
    fields = (field.name for field in dataclasses.fields(self))
    return {name: getattr(self, name) for name in fields if name != "storage"}


class Done(NamedTuple):
  """The outcome of an item.

  Attributes:
    status: "ok" or "failed"; "unwritable" if the result cannot be written, for example because the
      disk is full; "unusable" if the worker cannot process any item; "unavailable" if a store does
      not answer.
    text: Name of the result file, or the error that stops the work.
  """

  status: Literal["ok", "failed", "unwritable", "unusable", "unavailable"]
  text: str


class Failure(NamedTuple):
  """An item that failed, and why.

  Attributes:
    item: The item.
    reason: The reason in one line.
    is_missing: Whether a file does not exist.
    is_system: Whether the reason is an error of the operating system.
  """

  item: Any
  reason: str
  is_missing: bool = False
  is_system: bool = False

  @property
  def error(self) -> CorpusError:
    """The error that made the item fail."""
    error = (MissingFileError if self.is_missing else CorpusError)(self.reason)
    error.__cause__ = OSError(self.reason) if self.is_system else None
    return error

  @classmethod
  def of(cls, item: Any, error: Exception) -> Failure:
    """Describes an exception that an item raised."""
    cause = error.__cause__
    system = cause if isinstance(cause, OSError) and not isinstance(cause, CorpusError) else None
    if isinstance(error, CorpusError) and system is not None and system.filename is not None:
      text = f"{system.filename}: {reason(error)}"
    elif isinstance(error, CorpusError):
      text = str(error)
    else:
      text = f"{item}: {type(error).__name__}: {error}"
    return cls(item, text, isinstance(error, MissingFileError), system is not None)

  def record(self) -> dict[str, Any]:
    """Returns the failure as a result."""
    return {"reason": self.reason, "missing": self.is_missing, "system": self.is_system}

  @classmethod
  def from_record(cls, item: Any, record: dict[str, Any] | None) -> Failure:
    """Returns the failure that `record` described; None is a record that is gone or damaged."""
    if record is None:
      return cls(item, f"{item}: the record of the failure is damaged")
    return cls(item, record["reason"], record["missing"], record["system"])


def do_item(
    work: Work,
    results: results_lib.Results,
    item: Item,
    identity: str,
    stop: threading.Event | None = None,
) -> Done:
  """Processes an item and writes its result, or a record of its failure.

  Args:
    work: The work.
    results: Where results are kept.
    item: The item.
    identity: Identity of the item's inputs, which must not change while the item is processed.
    stop: Event that ends the work early, without a result, when it is set; only for threads.
  """
  if stop is not None:
    reading.stop_with(stop)
  try:
    try:
      _check_inputs(work, item, identity)
      result = work(item)
      _check_inputs(work, item, identity)
    except (concurrent.futures.CancelledError, StoreUnavailableError, WriteError):
      raise
    except ConfigError as error:  # Such as a missing package or a different tokenizer here.
      return Done("unusable", str(error))
    except Exception as error:
      if not isinstance(error, CorpusError):
        logging.error("%s: %s", item, "".join(traceback.format_exception(error)))
      return record_failure(results, Failure.of(item, error), identity)
    name = results_lib.result_name(item.key, identity)
    results.write(name, result)
    return Done("ok", name)
  except (StoreUnavailableError, WriteError) as error:
    # Not a failure of the item, which would have to be retried with an option.
    return Done("unavailable" if is_transient(error) else "unwritable", str(error))


def record_failure(results: results_lib.Results, failure: Failure, identity: str) -> Done:
  """Writes a record of a failed item; raises WriteError if that is impossible."""
  name = results_lib.result_name(failure.item.key, identity, failed=True)
  results.write(name, failure.record())
  return Done("failed", name)


def _check_inputs(work: Work, item: Item, identity: str) -> None:
  if identity == identity_lib.UNKNOWN:
    return
  if identity_lib.combined_now(work.files, item.inputs) != identity:
    raise CorpusError(
        f"{', '.join(item.inputs)} changed during this run, or differs between machines. Wait"
        " until the files are complete, and run the command again."
    )


@dataclasses.dataclass(frozen=True)
class Context:
  """What the tasks of a run need in other processes; each process keeps the first copy it gets.

  Attributes:
    id: Random text, the same for all tasks of a run.
    work: The work.
    version: Version of the work where the driver runs.
    results: Where results are kept.
    store_options: How to reach object stores.
    secrets: Credentials that came with URLs.
  """

  id: str
  work: Work
  version: int
  results: results_lib.Results
  store_options: stores.StoreOptions
  secrets: Mapping[str, urls.Secrets] = dataclasses.field(repr=False)


def make_context(work: Work, results: results_lib.Results) -> Context:
  """Returns what `do_item_elsewhere` needs.

  Raises:
    ConfigError: The class of the work cannot be imported by other processes.
  """
  if type(work).__module__ == "__main__":
    raise ConfigError(
        f"{type(work).__name__} is defined in a script, so workers cannot import it. Move it"
        " to a module."
    )
  return Context(
      uuid.uuid4().hex, work, work.version, results, stores.default_options(), urls.all_secrets()
  )


# More than the number of drivers that are likely to share a worker at the same time.
_MOST_CONTEXTS = 16

_contexts: dict[str, Context] = {}


def do_item_elsewhere(context: Context, item: Item, identity: str) -> Done:
  """Processes an item in another process, which keeps the work and its storage for later items."""
  if "RAYON_NUM_THREADS" not in os.environ:
    # The workers already share the cores. RAYON_NUM_THREADS=1 would instead make all threads of a
    # Dask worker wait for a single tokenizer thread.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  kept = _contexts.get(context.id)
  if kept is None:
    if context.work.version != context.version:
      return Done(
          "unusable",
          f"A worker has version {context.work.version} of the work '{context.work.name}', but the"
          f" driver has {context.version}. Install the same release of maxtext-olmo on all"
          " machines.",
      )
    urls.remember(context.secrets)
    kept = _contexts.setdefault(context.id, context)
    if len(_contexts) > _MOST_CONTEXTS:
      _contexts.pop(next(iter(_contexts)), None)  # The oldest one; its tasks still hold it.
  with stores.use_in_block(kept.store_options):
    return do_item(kept.work, kept.results, item, identity)
