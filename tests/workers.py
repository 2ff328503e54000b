"""Grain's worker processes, started quickly enough to start hundreds of them in a test.

Grain spawns each worker: a new interpreter, which imports Grain, JAX and this package for more than
a second of CPU. Here a server process imports them once, and forks itself for each worker
(multiprocessing's `forkserver`). All else is the same: a process of its own for each worker, which
gets the pickled dataset, and imports the test's main module, as a spawned one does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from unittest import mock

_PRELOADED = [
    "absl.testing.parameterized",
    "maxtext_olmo.loader.olmo_documents",
    "maxtext_olmo.grain_llm.pipeline",
    "orbax.checkpoint",
]


@contextlib.contextmanager
def started_quickly() -> Iterator[None]:
  """Within it, processes that would be spawned are forked from a server that has imported what
  they need."""
  multiprocessing.set_forkserver_preload(_PRELOADED)
  contexts = {"spawn": multiprocessing.get_context("forkserver")}
  get_context = multiprocessing.get_context
  with mock.patch.object(
      multiprocessing,
      "get_context",
      lambda method=None: contexts.get(method) or get_context(method),
  ):
    yield
