"""A small corpus of documents, and iterators over it."""

import jax
import ml_collections
import numpy as np
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import index_builder as index_lib
from tests import corpora


class DocumentsCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.index_path, _ = corpora.write_corpus(self.directory, tokens_per_file=(900, 700, 7, 1200))
    self.index = index_lib.load_index(self.index_path)
    self.tokens = [
        np.fromfile(self.index.resolve(i), "uint16") for i in range(len(self.index.files))
    ]

  def config(self, **values):
    return {
        **config_lib.defaults(),
        "dataset_type": "olmo_documents",
        "olmo_index_path": self.index_path,
        "olmo_eos_id": 0,
        "max_target_length": 32,
        "global_batch_size_to_load": 4,
        "vocab_size": 100,
        "data_shuffle_seed": 11,
        "olmo_packing_bins": 8,
        **values,
    }

  def make(self, **values):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    config = ml_collections.ConfigDict(self.config(**values))
    train, evaluation = maxtext_olmo.create_data_iterator(config, mesh)
    self.addCleanup(train.close)
    return train if evaluation is None else (train, evaluation)

  def take(self, iterator, count):
    return [{k: np.asarray(v) for k, v in next(iterator).items()} for _ in range(count)]

  def assert_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)
