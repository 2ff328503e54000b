"""Tests that code written against MaxText's modules runs with the import changed."""

import importlib
import inspect
import itertools
import os

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.input_pipeline import olmo_data
from maxtext_olmo.input_pipeline import olmo_data_grain
from maxtext_olmo.input_pipeline import olmo_grain_data_processing
from tests import corpora
from tests.trainers.maxtext import runs

_MODULES = ("olmo_data", "olmo_data_grain", "olmo_grain_data_processing")


class NamesTest(parameterized.TestCase):

  @parameterized.parameters(*_MODULES)
  @runs.needs_maxtext
  def test_every_public_name_of_maxtexts_module_takes_the_same_call(self, name):
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"
    theirs = importlib.import_module(f"maxtext.input_pipeline.{name}")
    ours = importlib.import_module(f"maxtext_olmo.input_pipeline.{name}")
    found = [
        (key, value)
        for key, value in vars(theirs).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == theirs.__name__
    ]
    self.assertNotEmpty(found)
    for key, value in found:
      mine = inspect.signature(getattr(ours, key)).parameters
      for parameter in inspect.signature(value).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
          continue
        if parameter.name.startswith("_"):  # A cache of theirs.
          continue
        self.assertIn(parameter.name, mine, key)
        self.assertEqual(mine[parameter.name].kind, parameter.kind, f"{key}({parameter.name})")
      more = [p for n, p in mine.items() if n not in inspect.signature(value).parameters]
      for parameter in more:
        self.assertNotEqual(parameter.default, parameter.empty, f"{key}({parameter.name})")

  def test_a_script_from_index_to_batches(self):
    directory = self.create_tempdir().full_path
    path, rows = corpora.write_corpus(directory)
    files = sorted(entry.path for entry in os.scandir(os.path.join(directory, "data")))
    index = olmo_data.build_index(
        [(file, "web") for file in files],
        8,
        tokenizer="test",
        header_reader=lambda file: olmo_data.read_raw_metadata_from_path(file, "uint16"),
    )
    index.save(path)
    index = olmo_data.load_index(path)
    self.assertEqual(index.total_instances, len(rows))
    self.assertEqual(olmo_data.global_to_local(index, 0), (0, 0))
    loader = olmo_data_grain.make_olmo_grain_data_loader(
        index, seed=1, batch_size=4, shard_index=0, shard_count=1
    )
    batch = next(iter(loader))
    self.assertEqual(batch["inputs"].shape, (4, 8))
    source = olmo_data_grain.OlmoNpyDataSource(index)
    np.testing.assert_array_equal(source[3]["tokens"], rows[3])
    self.assertTrue(olmo_data.is_clean_instance(rows[3]))

  def test_the_train_iterator_takes_maxtexts_call(self):
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    import maxtext_olmo

    config = maxtext_olmo.get_config()
    config.update(
        olmo_index_path=path,
        max_target_length=8,
        global_batch_size_to_load=4,
        olmo_order="sequential",
        checkpoint_dir="",
        olmo_eval_index_path=path,
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    for make in (
        olmo_grain_data_processing.make_olmo_grain_train_iterator,
        olmo_grain_data_processing.make_olmo_grain_eval_iterator,
    ):
      iterator = make(config, mesh, [0])
      found = [np.asarray(batch["inputs"]) for batch in itertools.islice(iterator, 3)]
      np.testing.assert_array_equal(np.concatenate(found), rows[:12])
      iterator.close()


if __name__ == "__main__":
  absltest.main()
