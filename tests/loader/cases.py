"""Configs, meshes and iterators that the tests of this folder share."""

import shutil
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import ml_collections
import numpy as np
from absl.testing import parameterized

import maxtext_olmo
from tests import corpora

WINDOWS = {
    "max_target_length": 8,
    "global_batch_size_to_load": 4,
    "vocab_size": 100,
    "data_shuffle_seed": 11,
}
DOCUMENTS = {
    **WINDOWS,
    "dataset_type": "olmo_documents",
    "max_target_length": 32,
    "olmo_eos_id": 0,
    "olmo_packing_bins": 8,
}

Batch = dict[str, np.ndarray]


def data_config(**values: Any) -> ml_collections.ConfigDict:
  """Returns a config with the default of every key that `values` does not give."""
  return ml_collections.ConfigDict({**maxtext_olmo.get_config().to_dict(), **values})


def device_mesh(
    axes: dict[str, int] | None = None, order: Sequence[int] | None = None
) -> jax.sharding.Mesh:
  """Returns a mesh over the first devices, in their own order or another; by default over one."""
  axes = axes or {"data": 1}
  devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
  if order is not None:
    devices = devices[list(order)]
  return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def compile_fast() -> None:
  """Compiles without optimizations until the end of the test file; for `setUpModule`."""
  jax.config.update("jax_disable_most_optimizations", True)
  unittest.addModuleCleanup(jax.config.update, "jax_disable_most_optimizations", False)


def take(iterator: Any, count: int) -> list[Batch]:
  """Returns the next batches as NumPy arrays."""
  return [{name: np.asarray(array) for name, array in next(iterator).items()} for _ in range(count)]


def take_inputs(iterator: Any, count: int) -> list[np.ndarray]:
  """Returns the inputs of the next batches."""
  return [np.asarray(next(iterator)["inputs"]) for _ in range(count)]


class LoaderCase(parameterized.TestCase):
  """Tests that make iterators over one corpus, which they leave as it is."""

  defaults: ClassVar[dict[str, Any]] = WINDOWS
  corpus: ClassVar[dict[str, Any]] = {}
  axes: ClassVar[dict[str, int]] = {"data": 1}

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.directory = tempfile.mkdtemp(prefix="loader_test_")
    cls.addClassCleanup(shutil.rmtree, cls.directory)
    cls.index_path, cls.rows = corpora.write_corpus(cls.directory, **cls.corpus)

  def config(self, **values: Any) -> ml_collections.ConfigDict:
    return data_config(**{"olmo_index_path": self.index_path, **self.defaults, **values})

  def make(self, **values: Any) -> Any:
    """Returns the train and the eval iterator."""
    made = maxtext_olmo.create_data_iterator(self.config(**values), device_mesh(self.axes))
    for iterator in made:
      if iterator is not None:
        self.addCleanup(iterator.close)
    return made

  def train(self, **values: Any) -> Any:
    return self.make(**values)[0]

  def assert_equal_batches(self, got: Sequence[Batch], expected: Sequence[Batch]) -> None:
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


class DocumentsCase(LoaderCase):
  """The same over a corpus of short documents."""

  defaults = DOCUMENTS
  corpus: ClassVar[dict[str, Any]] = {"tokens_per_file": (900, 700, 7, 1200)}

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    index = maxtext_olmo.load_index(cls.index_path)
    cls.tokens = [np.fromfile(index.resolve(i), "<u2") for i in range(len(index.files))]
