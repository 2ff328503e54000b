"""Functions that the processes of hosts_test run."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.rows import reader as reader_lib
from tests import shards as shards_lib
from tests import workers as workers_lib
from tests.loader import cases
from tests.loader import row_sources  # noqa: F401 (it registers a dataset type)


@dataclasses.dataclass(frozen=True)
class Serve:
  """Takes batches on a mesh over all processes; returns its shards and the last state."""

  config: dict[str, Any]
  axes: dict[str, int]
  steps: int
  state: dict[str, Any] | None = None
  device_order: tuple[int, ...] | None = None

  def __call__(self) -> tuple[list[shards_lib.ShardedBatch], dict[str, Any]]:
    mesh = cases.device_mesh(self.axes, self.device_order)
    iterator, _ = maxtext_olmo.create_data_iterator(cases.data_config(**self.config), mesh)
    if self.state is not None:
      iterator.set_state(self.state)
    batches = [shards_lib.take_apart(next(iterator)) for _ in range(self.steps)]
    state = iterator.get_state()
    iterator.close()
    return batches, state


@dataclasses.dataclass(frozen=True)
class Evaluate:
  """Evaluates twice; returns this process's shards of each pass."""

  config: dict[str, Any]
  axes: dict[str, int]

  def __call__(self) -> list[list[shards_lib.ShardedBatch]]:
    config = cases.data_config(**self.config)
    train, evaluation = maxtext_olmo.create_data_iterator(config, cases.device_mesh(self.axes))
    passes = [[shards_lib.take_apart(batch) for batch in evaluation] for _ in range(2)]
    train.close()
    evaluation.close()
    return passes


@dataclasses.dataclass(frozen=True)
class Refuse:
  """Starts with a config for each process; returns the error that this process gets."""

  configs: Sequence[dict[str, Any]]
  axes: dict[str, int]

  def __call__(self) -> tuple[str, str]:
    config = cases.data_config(**self.configs[jax.process_index()])
    try:
      maxtext_olmo.create_data_iterator(config, cases.device_mesh(self.axes))
    except errors.MaxtextOlmoError as error:
      return type(error).__name__, str(error)
    return "", "no error"


def run_all(jobs: Sequence[Callable[[], Any]], compiled: bool = False) -> list[Any]:
  """Runs jobs in sequence; with compiled reads on request, if numba is installed."""
  jax.config.update("jax_disable_most_optimizations", True)
  if compiled and importlib.util.find_spec("numba"):
    assert reader_lib.compile_reads(np.uint16)
  with workers_lib.started_quickly():
    return [job() for job in jobs]
