"""Dataset types: the possible values of `config.dataset_type`, and the iterators they create.

This package has its own types. `register_dataset_type` adds others, and so do installed packages
with an entry point in the group `maxtext_olmo.dataset_types` that names a `DatasetType`.

`DataIterator` is the interface of every iterator from `create_data_iterator`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import pace
from maxtext_olmo.devices import collectives
from maxtext_olmo.order import status
from maxtext_olmo.rows import explain as explain_lib


@runtime_checkable
class DataIterator(Protocol):
  """An iterator over global batches that can save its place and return to it.

  Dataset types of other packages implement this protocol; `create_data_iterator` refuses an
  iterator that lacks a member of the protocol. A trainer takes a batch for each step, and saves the
  state of the iterator with the model:

  >>> import jax
  >>> import numpy as np
  >>> import maxtext_olmo
  >>> config = maxtext_olmo.get_config()
  >>> config.update(dataset_type="synthetic", max_target_length=16)
  >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  >>> train, _ = maxtext_olmo.create_data_iterator(config, mesh)
  >>> for batch in train:
  ...   if train.step == 3:  # Steps done, this one included.
  ...     break
  >>> saved = train.get_state()

  A run that restores the state continues with the next batch:

  >>> expected = next(train)["inputs"]
  >>> train.set_state(saved)
  >>> bool((next(train)["inputs"] == expected).all())
  True
  >>> train.close()
  """

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    """Returns the iterator itself. An eval iterator starts again from the beginning."""

  def __next__(self) -> dict[str, jax.Array]:
    """Returns the global batch of the next step, as arrays on the mesh."""

  def get_state(self) -> dict[str, Any]:
    """Returns the state after the last batch that was taken, as a JSON value."""

  def set_state(self, state: dict[str, Any]) -> None:
    """Resumes from a saved state; raises ResumeError if it belongs to another stream."""

  def reset(self) -> None:
    """Returns to the step at which the iterator began."""

  def close(self) -> None:
    """Stops threads and worker processes; a second call does nothing."""

  def metrics(self) -> dict[str, float]:
    """Returns what loading has cost so far (seconds, bytes, reads), keyed by metric name."""

  def describe(self) -> status.RunStatus:
    """Returns the run's step, position and epoch; the result prints as a few lines of text."""

  def explain(self, step: int) -> explain_lib.StepExplanation:
    """Returns the rows of any step and where they come from.

    Raises:
      OrderError: The rows of this dataset type have no positions.
    """

  @property
  def step(self) -> int:
    """The number of steps done, which is also the index of the next step."""

  @property
  def position(self) -> int:
    """The number of samples consumed, over all hosts."""

  @property
  def local_iterator(self) -> Any:
    """The object whose state this process checkpoints; usually the iterator itself."""


_MEMBERS = tuple(
    name
    for name in vars(DataIterator)
    if name in ("__iter__", "__next__") or not name.startswith("_")
)


ENTRY_POINT_GROUP = "maxtext_olmo.dataset_types"

MakeIterator = Callable[[Any, jax.sharding.Mesh], Any]


class DatasetType(NamedTuple):
  """The functions that make the iterators of a dataset type from a config and a mesh.

  Attributes:
    make_train: Makes the train iterator, a `DataIterator`.
    make_eval: Makes the eval iterator; None for a type without evaluation.
    make_both: Makes both iterators at once, for types that can share the cost of opening the data.
    reads: The `olmo_*` keys that the type reads. A config that sets any other is refused.

  An installed package adds a type by naming such an object in an entry point of the group
  `maxtext_olmo.dataset_types`:

  >>> from maxtext_olmo.loader import synthetic
  >>> dataset_type = DatasetType(synthetic.make_synthetic_train_iterator)
  >>> dataset_type.make_eval is None  # It has no evaluation.
  True
  """

  make_train: MakeIterator
  make_eval: MakeIterator | None = None
  make_both: Callable[[Any, jax.sharding.Mesh], tuple[Any, Any]] | None = None
  reads: Collection[str] = ()


_REGISTERED: dict[str, DatasetType] = {}


def register_dataset_type(
    name: str,
    make_train: MakeIterator,
    make_eval: MakeIterator | None = None,
    *,
    reads: Collection[str] = (),
) -> None:
  """Registers a dataset type, which replaces any earlier type of the same name.

  Args:
    name: The value of `config.dataset_type` that selects the type.
    make_train: Makes the train iterator, a `DataIterator`, from a config and a mesh.
    make_eval: Makes the eval iterator; None for a type without evaluation.
    reads: The `olmo_*` keys that the type reads. A config that sets any other is refused.

  Example:
    >>> import jax
    >>> import numpy as np
    >>> import maxtext_olmo
    >>> from maxtext_olmo.loader import synthetic
    >>> register_dataset_type("noise", synthetic.make_synthetic_train_iterator)
    >>> config = maxtext_olmo.get_config()
    >>> config.update(dataset_type="noise", max_target_length=16)
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    >>> train, _ = maxtext_olmo.create_data_iterator(config, mesh)
    >>> next(train)["inputs"].shape
    (8, 16)
    >>> train.close()
  """
  _REGISTERED[name] = DatasetType(make_train, make_eval, reads=reads)


def dataset_types() -> tuple[str, ...]:
  """Returns the names of all known dataset types."""
  return tuple(sorted({*_REGISTERED, *config_lib.DATASET_TYPES, *_entry_points()}))


def create_data_iterator(
    config: Any, mesh: jax.sharding.Mesh
) -> tuple[DataIterator, DataIterator | None]:
  """Returns the train iterator of `config.dataset_type`, and the eval iterator or None.

  Args:
    config: Any object with the keys of the configuration guide as attributes.
    mesh: The trainer's mesh. The global batches are arrays on it.

  Returns:
    The train iterator, and an eval iterator if `config.eval_interval` is positive.

  Raises:
    ConfigError: The config is invalid; the message lists every problem.
    CorpusError: The index, or a file that it names, is missing or damaged.
    ResumeError: The latest checkpoint in `config.checkpoint_dir` belongs to another stream.

  Example:
    >>> import tempfile
    >>> import jax
    >>> import numpy as np
    >>> import maxtext_olmo
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.arange(400, dtype="uint32").tofile(f"{folder.name}/part.npy")
    >>> index = maxtext_olmo.build_index(
    ...     [("part.npy", "web")], 16, tokenizer="none", base=folder.name)
    >>> index.save(f"{folder.name}/index.json")
    >>> config = maxtext_olmo.get_config()
    >>> config.update(olmo_index_path=f"{folder.name}/index.json", max_target_length=16)
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    >>> train, _ = maxtext_olmo.create_data_iterator(config, mesh)
    >>> batch = next(train)
    >>> batch["inputs"].shape
    (8, 16)
    >>> train.step, train.position
    (1, 8)
    >>> train.explain(0).rows[0].parts[0].label  # The origin of the first row of step 0.
    'web'
    >>> train.close()
    >>> folder.cleanup()
  """
  name = config_lib.read_value(config, "dataset_type")
  wants_eval = config_lib.read_value(config, "eval_interval") > 0
  dataset_type, built_in = _find(name)
  workers = 0
  if built_in:
    # A problem on one host, such as a missing path, must stop all hosts.
    options = collectives.run_on_all_processes(
        lambda: config_lib.Options.read(config), "reading the configuration"
    )
    workers = options.grain_worker_count
  else:
    config_lib.check_all_read(config, name, dataset_type.reads)
  pace.share_with(jax.process_count() * max(1, workers))
  if not wants_eval:
    made = (dataset_type.make_train(config, mesh), None)
  elif dataset_type.make_both is not None:
    made = dataset_type.make_both(config, mesh)
  elif dataset_type.make_eval is not None:
    made = _make_in_turn(dataset_type.make_train, dataset_type.make_eval, config, mesh)
  else:
    raise errors.ConfigError(
        f"eval_interval={config.eval_interval}, but dataset_type={name!r} has no evaluation. Set"
        " eval_interval=0."
    )
  if not built_in:
    _check_members(name, made)
  return made


def _make_in_turn(
    make_train: MakeIterator, make_eval: MakeIterator, config: Any, mesh: jax.sharding.Mesh
) -> tuple[Any, Any]:
  train = make_train(config, mesh)
  try:
    return train, make_eval(config, mesh)
  except BaseException:
    _close(train)
    raise


def _check_members(name: str, made: tuple[Any, Any]) -> None:
  """Raises ConfigError, and closes the iterators, if one of them is not a `DataIterator`."""
  for part, iterator in zip(("train", "eval"), made):
    missing = [name for name in _MEMBERS if not hasattr(iterator, name)]
    if iterator is not None and missing:
      for other in made:
        _close(other)
      raise errors.ConfigError(
          f"The {part} iterator of dataset_type={name!r}, {type(iterator).__name__}, is not a"
          f" maxtext_olmo.DataIterator; it lacks {', '.join(missing)}."
      )


def _close(iterator: Any) -> None:
  if hasattr(iterator, "close"):
    iterator.close()


def _find(name: str) -> tuple[DatasetType, bool]:
  """Returns a dataset type, and whether it belongs to this package."""
  if name in _REGISTERED:
    return _REGISTERED[name], False
  if name in config_lib.DATASET_TYPES:  # Imported late, because these modules import this one.
    return importlib.import_module(f"maxtext_olmo.loader.{name}").DATASET_TYPE, True
  if name in _entry_points():
    return _entry_points()[name].load(), False
  raise errors.ConfigError(
      f"dataset_type={name!r} is unknown. Known types: {', '.join(dataset_types())}. Other packages"
      f" add types with register_dataset_type or the entry-point group {ENTRY_POINT_GROUP}."
  )


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
  found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
  return {point.name: point for point in found}
