"""Sends requests to object stores, and retries each one until the store answers.

A request that fails for a transient reason is sent again, after a delay with jitter, until the
store answers or has been silent for too long. Warnings are logged meanwhile. obstore could retry
requests itself, but silently: retries would not be counted, a store that throttles would not get
fewer requests, and no message would say why a run is waiting.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from absl import logging

from maxtext_olmo import exit_compat
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import failures
from maxtext_olmo.corpus.storage import pace as pace_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.corpus.storage import traffic as traffic_lib
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import StoreUnavailableError

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0
_WARN_AFTER, _WARN_EVERY = 5.0, 30.0
# Seconds to wait for a store that has answered only to other processes. The address may still be
# wrong here, so a run with many hosts must not wait for an hour.
_KNOWN_PATIENCE = 600.0

# Set when the interpreter begins to exit, so that it need not wait for retries.
_exiting = threading.Event()
exit_compat.call_before_pools_are_joined(_exiting.set)


class Answer(Protocol):
  """The answer to a request."""

  @property
  def data(self) -> Any:
    """The data of the response, or None."""


A = TypeVar("A", bound=Answer)


class Target(NamedTuple):
  """The object that a request is for.

  Attributes:
    url: URL, without credentials.
    store: The obstore store.
    name: URL of the store.
    key: Key in the store.
    pace: Pace of requests to the store.
  """

  url: str
  store: Any
  name: str
  key: str
  pace: pace_lib.Pace


class Requests:
  """Sends, retries and counts requests; safe to share between threads.

  Args:
    options: Options for connecting to the stores.

  Attributes:
    traffic: Counters of the requests.
  """

  def __init__(self, options: stores.StoreOptions):
    self._options = options
    self.traffic = traffic_lib.Traffic()
    self._targets: dict[str, Target] = {}  # By path.
    self._answered: set[str] = set()
    self._warned: dict[str, float] = {}
    self._lock = threading.Lock()
    self._stop = threading.Event()

  def stop(self) -> None:
    """Abandons requests that are waiting to be retried; later requests are not affected."""
    with self._lock:
      stopped, self._stop = self._stop, threading.Event()
    stopped.set()

  def send(
      self, target: Target, what: Callable[[], str], ask: Callable[[], A], *, known: bool = False
  ) -> A:
    """Sends a request, and retries it until it is answered or retrying is pointless.

    Args:
      target: The object.
      what: Returns a description of the request, for error messages.
      ask: Function that sends the request once.
      known: Whether the object is known to exist, so that the store must have answered before, if
        only to another process.
    """
    pace, traffic, stop = target.pace, self.traffic, self._stop
    backoff, began = _FIRST_BACKOFF, time.monotonic()
    while True:
      if delay := pace.delay():
        _sleep(delay, stop, what)
      sent = time.monotonic()
      traffic.began()
      try:
        answer = ask()
      except CorpusError:
        traffic.failed(retried=False, throttled=False)
        raise
      except Exception as error:
        failure = failures.explain(error, what())
      else:
        traffic.ended(time.monotonic() - sent, len(answer.data or b""))
        self._note_answer(target.name)
        return answer
      # Errors are raised outside the handler, so that no traceback shows the original error, which
      # may contain signatures.
      traffic.failed(retried=failure.repeat, throttled=failure.throttled)
      if not failure.repeat:
        self._note_answer(target.name)  # A refusal is an answer.
        raise failure.error
      if failure.throttled:
        pace.slow_down()
      self._note_failure(target.name, failure, time.monotonic() - began, known)
      _sleep(backoff * random.uniform(0.5, 1.0), stop, what)
      backoff = min(2 * backoff, _LONGEST_BACKOFF)

  def locate(self, path: str) -> Target:
    stores.obstore()  # Raises in a forked child.
    found = self._targets.get(path)
    if found is None:
      url = urls.without_secrets(path)
      location = urls.split(url)
      name = f"{location.scheme}://{location.host}"
      store = stores.open_store(url, self._options)
      options = self._options
      pace = pace_lib.of_store(name, options.endpoint, slow_start=options.slow_start)
      found = Target(url, store, name, urls.store_key(location), pace)
      self._targets[path] = found
    return found

  def _note_failure(
      self, store: str, failure: failures.Failure, seconds: float, known: bool
  ) -> None:
    """Warns that a store does not answer; raises if it has been silent for too long."""
    outage = self.traffic.store_fails(store, failure.reason)
    # That other processes had credentials does not mean that this one will get any.
    known = known and failure.reason != failures.NO_CREDENTIALS
    patience = self._options.first_patience
    if store in self._answered:
      patience = self._options.patience
    elif known:
      patience = max(patience, min(self._options.patience, _KNOWN_PATIENCE))
    if seconds > patience:
      # Credentials that were never obtained are an error to fix first.
      unset = failure.reason == failures.NO_CREDENTIALS and store not in self._answered
      kind = CorpusError if unset else StoreUnavailableError
      raise kind(f"{failure.error} Gave up after {seconds:.0f} s{self._at_endpoint()}.")
    with self._lock:
      now = time.monotonic()
      due = outage > _WARN_AFTER and now - self._warned.get(store, -_WARN_EVERY) >= _WARN_EVERY
      if due:
        self._warned[store] = now
    if due:
      logging.warning(
          "%s has not answered for %.0f s%s: %s. Requests are retried; reading continues as soon as"
          " it answers.",
          store,
          outage,
          self._at_endpoint(),
          failure.reason,
      )

  def _at_endpoint(self) -> str:
    endpoint = self._options.endpoint
    return f" at the endpoint {urls.without_secrets(endpoint)}" if endpoint else ""

  def _note_answer(self, store: str) -> None:
    self._answered.add(store)
    outage = self.traffic.store_answers(store)
    if outage > _WARN_AFTER:
      self._warned.pop(store, None)
      logging.info("%s is answering again after %.0f s.", store, outage)


def _sleep(seconds: float, stop: threading.Event, what: Callable[[], str]) -> None:
  """Sleeps; raises CorpusError if the storage is closed or the interpreter begins to exit."""
  end = time.monotonic() + seconds
  while (left := end - time.monotonic()) > 0:
    if stop.wait(min(left, 0.1)) or _exiting.is_set():
      raise CorpusError(f"Stopped trying to {what()}: the storage or the process is closing.")
