"""Dataset types: a name in a config → the functions that make its iterators.

Types come with this package, from `register_dataset_type`, and from other installed packages through the entry-point
group `maxtext_olmo.dataset_types`, whose entries name a `DatasetType`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from maxtext_olmo import errors

ENTRY_POINT_GROUP = "maxtext_olmo.dataset_types"

MakeIterator = Callable[[Any, jax.sharding.Mesh], Any]


class DatasetType(NamedTuple):
  """How to make the train and eval iterators of a dataset type from a config and a mesh.

  Attributes:
    make_train: Makes the train iterator.
    make_eval: Makes the eval iterator; None for a type without evaluation.
    make_both: Makes both at once, where they share what is costly to open; else they are made one after the other.
  """

  make_train: MakeIterator
  make_eval: MakeIterator | None = None
  make_both: Callable[[Any, jax.sharding.Mesh], tuple[Any, Any]] | None = None


_REGISTERED: dict[str, DatasetType] = {}


def register_dataset_type(
    name: str, make_train: MakeIterator, make_eval: MakeIterator | None = None
) -> None:
  """Makes `dataset_type=name` mean these functions; a later registration of the name replaces it."""
  _REGISTERED[name] = DatasetType(make_train, make_eval)


def dataset_types() -> tuple[str, ...]:
  """The names that `create_data_iterator` knows now."""
  return tuple(sorted({*_REGISTERED, *_built_in(), *_entry_points()}))


def create_data_iterator(config: Any, mesh: jax.sharding.Mesh) -> tuple[Any, Any | None]:
  """The train iterator, and the eval iterator where `eval_interval` asks for one, of `config.dataset_type`."""
  name = getattr(config, "dataset_type", None) or "olmo_grain"
  dataset_type = _find(str(getattr(name, "value", name)))
  wants_eval = (getattr(config, "eval_interval", None) or 0) > 0
  if wants_eval and dataset_type.make_both is not None:
    return dataset_type.make_both(config, mesh)
  train = dataset_type.make_train(config, mesh)
  if not wants_eval:
    return train, None
  if dataset_type.make_eval is None:
    train.close()
    raise errors.ConfigError(
        f"eval_interval={config.eval_interval}, but dataset_type={name!r} has no evaluation."
    )
  try:
    return train, dataset_type.make_eval(config, mesh)
  except BaseException:
    train.close()
    raise


def _find(name: str) -> DatasetType:
  found = _REGISTERED.get(name)
  if found is None and name in _built_in():
    found = _built_in()[name]()
  if found is None and name in _entry_points():
    found = _entry_points()[name].load()
  if found is None:
    raise errors.ConfigError(
        f"dataset_type={name!r} is unknown; known are {', '.join(dataset_types())}. Other packages"
        f" add theirs with register_dataset_type or the entry-point group {ENTRY_POINT_GROUP}."
    )
  return found


def _built_in() -> dict[str, Callable[[], DatasetType]]:
  """The types that come with this package, so that they are there without an installation's metadata."""

  def olmo() -> DatasetType:
    from maxtext_olmo.loader import olmo_grain  # pylint: disable=import-outside-toplevel

    return olmo_grain.DATASET_TYPE

  def documents() -> DatasetType:
    from maxtext_olmo.loader import olmo_documents  # pylint: disable=import-outside-toplevel

    return olmo_documents.DATASET_TYPE

  def synthetic() -> DatasetType:
    from maxtext_olmo.loader import synthetic  # pylint: disable=import-outside-toplevel

    return synthetic.DATASET_TYPE

  return {"olmo_grain": olmo, "olmo_documents": documents, "synthetic": synthetic}


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
  found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
  return {point.name: point for point in found}
