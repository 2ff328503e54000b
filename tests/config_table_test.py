import importlib.util
import re
import types

import ml_collections
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from maxtext_olmo import config_table
from maxtext_olmo import errors


def _config(**values) -> ml_collections.ConfigDict:
  # The index exists, and is not an index: nothing may read it.
  return ml_collections.ConfigDict({**config_lib.defaults(), "olmo_index_path": __file__, **values})


def _read(**values) -> config_lib.Options:
  return config_lib.Options.read(_config(**values))


def _other_than(default):
  """Returns a value of the same type; None stands for a boolean."""
  if default is None or isinstance(default, bool):
    return not default
  others = {int: 99, float: 99.0, str: "other", tuple: ("other",), dict: {"other": 1.0}}
  return others[type(default)]


_DIRECTORIES = (
    "checkpoint_dir",
    "olmo_order_cache_dir",
    "olmo_spool_dir",
    "olmo_packing_cache_dir",
)


class KeysTest(parameterized.TestCase):

  def test_names_are_unique_and_every_key_has_help(self):
    names = [key.name for key in config_table.KEYS]
    self.assertLen(set(names), len(names))
    for key in config_table.KEYS:
      self.assertRegex(key.help, r"^[A-Z('].*\.$", key.name)

  def test_every_key_is_read_by_a_dataset_type_and_an_option(self):
    read = _read()
    for key in config_table.KEYS:
      self.assertContainsSubset(key.read_by, config_lib.DATASET_TYPES)
      self.assertNotEmpty(key.read_by, key.name)
      self.assertTrue(hasattr(read, key.name), key.name)

  @parameterized.product(key=config_table.KEYS, dataset_type=config_lib.DATASET_TYPES)
  def test_a_key_that_the_dataset_type_does_not_read_is_refused(self, key, dataset_type):
    if not key.name.startswith("olmo_"):
      return
    config = types.SimpleNamespace(
        dataset_type=dataset_type, **{key.name: _other_than(key.default)}
    )
    try:
      config_lib.Options.read(config)
      text = ""
    except errors.ConfigError as error:
      text = str(error)
    message = f"would have no effect, because dataset_type={dataset_type!r} does not read it"
    if dataset_type in key.read_by:
      self.assertNotIn("no effect", text)
    else:
      self.assertRegex(text, f"{key.name}=.* {message}.*: {', '.join(key.read_by)}.")

  def test_every_value_out_of_bounds_is_refused(self):
    for key in config_table.KEYS:
      if key.check is None or key.name == "olmo_batch_extras":
        continue
      wrong = "no such thing" if key.kind.python_type is str else -(2**60)
      if isinstance(key.default, float):
        wrong = float(wrong)
      if key.name in _DIRECTORIES:
        wrong = __file__
      problem = rf"{key.name}={re.escape(repr(wrong))} (must|does not|is)"
      with self.assertRaisesRegex(errors.ConfigError, problem):
        _read(**{"dataset_type": key.read_by[-1], "olmo_index_path": "", key.name: wrong})


_HOSTILE = (
    float("inf"), float("-inf"), float("nan"), 2**70, -(2**70), 2**62, 1.5, True, None, b"x", "x",
    "a\0b", "[" * 100_000, [None, 1], [["data", "data"]], ((0, float("inf")),),
    ((0, float("nan")),), ((0, 2**70),), ((0, -1),), ((0, 1.5),), (("0", "1"),), ((2**70, 1),),
    {"a": float("nan")}, {1: 2}, object(), len,
)  # fmt: skip


class HostileValuesTest(parameterized.TestCase):

  @parameterized.parameters(*((key.name, key.read_by[0]) for key in config_table.KEYS))
  def test_any_value_of_any_key_is_accepted_or_named_in_a_config_error(self, name, dataset_type):
    for value in _HOSTILE:
      values = {"dataset_type": dataset_type, "olmo_index_path": __file__, "olmo_eos_id": 0}
      if dataset_type == "olmo_packed":
        values["olmo_pad_id"] = 1
      values[name] = value
      try:
        config_lib.Options.read(types.SimpleNamespace(**values)).schedule()
      except errors.ConfigError as error:
        self.assertIn(name, str(error))
        self.assertLess(len(str(error)), 2000)

  @parameterized.parameters(
      {"olmo_batch_schedule": ((0, float("inf")),)},
      {"olmo_batch_schedule": ((0, float("nan")),)},
      {"olmo_batch_schedule": ((0, 1.5),)},
      {"olmo_batch_schedule": ((0, -1),)},
      {"olmo_batch_schedule": (("0", "1"),)},
      {"olmo_batch_schedule": ((0, 2**40),)},
      {"olmo_batch_rampup_factors": ((0, 1e300),)},
      {"grain_worker_count": 2**70},
      {"grain_worker_count": 2**20},
      {"olmo_prefetch_batches": 2**31},
      {"global_batch_size_to_load": 2**31},
      {"global_batch_size_to_load": 2**24, "max_target_length": 2**20},
      {"data_sharding": [1, 2]},
      {"data_sharding": [["data", None]]},
      {"data_sharding": 3},
      {"olmo_documents_path": "a\0b", "dataset_type": "olmo_documents", "olmo_eos_id": 0},
      {"olmo_index_path": "/dev/null"},
      {"checkpoint_dir": __file__},
      {"checkpoint_dir": "s3://bucket/run"},
      {"checkpoint_dir": "az://container@account/run"},
      {"checkpoint_dir": "https://host/run"},
  )
  def test_a_mistake_is_refused_before_anything_is_allocated(self, **values):
    with self.assertRaisesRegex(errors.ConfigError, next(iter(values))):
      _read(**values)


class CheckpointsInBucketsTest(absltest.TestCase):

  def test_a_bucket_that_orbax_cannot_commit_to_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "atomically only on a file system and in gs:"):
      _read(checkpoint_dir="s3://bucket/run")

  def test_a_gs_bucket_needs_a_package(self):
    packages = ("gcsfs", "tensorflow")
    if any(map(importlib.util.find_spec, packages)):
      self.assertEqual(_read(checkpoint_dir="gs://bucket/run").checkpoint_dir, "gs://bucket/run")
    else:
      with self.assertRaisesRegex(errors.ConfigError, "needs gcsfs.*pip install gcsfs"):
        _read(checkpoint_dir="gs://bucket/run")

  def test_a_url_that_is_not_used_is_accepted(self):
    _read(checkpoint_dir="s3://bucket/run", enable_checkpointing=False)


if __name__ == "__main__":
  absltest.main()
