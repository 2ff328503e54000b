"""Tests of the data keys."""

import dataclasses
import types

import ml_collections
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import options
from maxtext_olmo.order import schedule as schedule_lib


class OptionsTest(parameterized.TestCase):

  def _config(self, **values) -> ml_collections.ConfigDict:
    path = self.create_tempfile("index.json", "{}").full_path
    return ml_collections.ConfigDict({**options.defaults(), "olmo_index_path": path, **values})

  def test_the_table_of_keys_and_the_fields_are_the_same(self):
    fields = [field.name for field in dataclasses.fields(options.Options)]
    self.assertEqual([key.name for key in options.KEYS], fields)
    self.assertTrue(all(key.help.endswith(".") or "..." in key.help for key in options.KEYS))

  def test_a_config_dict_and_a_plain_object_read_alike(self):
    config = self._config(max_target_length=64, olmo_batch_schedule=((0, 4), (10, 8)))
    read = options.Options.read(config)
    self.assertEqual(read, options.Options.read(types.SimpleNamespace(**config.to_dict())))
    self.assertEqual(read.olmo_batch_schedule, ((0, 4), (10, 8)))
    self.assertEqual(read.schedule().start(11), 48)

  def test_keys_that_a_config_lacks_have_defaults(self):
    config = types.SimpleNamespace(olmo_index_path=self._config().olmo_index_path)
    read = options.Options.read(config)
    self.assertEqual(read.olmo_order, "feistel")
    self.assertEqual(read.initial_step, -1)

  def test_batch_sizes_follow_from_each_other(self):
    read = options.Options.read(self._config(global_batch_size_to_load=16))
    self.assertEqual(read.global_batch_size_to_train_on, 16)
    self.assertEqual(read.global_batch_size_to_load_eval, 16)
    self.assertEqual(read.global_batch_size_to_eval_on, 16)

  def test_without_shuffling_the_order_is_sequential(self):
    read = options.Options.read(self._config(enable_data_shuffling=False))
    self.assertEqual(read.order_name, "sequential")

  def test_all_problems_are_reported_together(self):
    config = self._config(
        max_target_length=0,
        olmo_order="alphabetic",
        olmo_document_mask=True,
        eval_interval=10,
        olmo_index_path="/nowhere/index.json",
    )
    with self.assertRaises(errors.ConfigError) as caught:
      options.Options.read(config)
    text = str(caught.exception)
    for part in (
        "max_target_length=0 must be positive",
        "olmo_order='alphabetic' is unknown; known are feistel",
        "olmo_document_mask needs olmo_eos_id",
        "eval_interval=10 needs olmo_eval_index_path or olmo_eval_instances",
        "olmo_index_path='/nowhere/index.json' does not exist",
    ):
      self.assertIn(part, text)

  @parameterized.parameters(
      ({"olmo_index_path": ""}, "olmo_index_path is empty"),
      ({"global_batch_size_to_load": 0}, "global_batch_size_to_load=0 must be positive"),
      ({"global_batch_size_to_train_on": 9}, "train_on=9 exceeds global_batch_size_to_load=8"),
      ({"global_batch_size_to_eval_on": 9}, "eval_on=9 exceeds global_batch_size_to_load_eval=8"),
      ({"initial_step": -2}, "initial_step=-2 must be -1, 0 or more"),
      ({"olmo_num_epochs": -1}, "olmo_num_epochs=-1 must not be negative"),
      ({"olmo_batch_schedule": ((1, 4),)}, "begins at step 0"),
      ({"olmo_batch_schedule": (3, 4)}, r"not a list of \(boundary, rows\) pairs"),
      (
          {"olmo_batch_schedule": ((0, 4),), "global_batch_size_to_train_on": 4},
          "olmo_batch_schedule needs global_batch_size_to_train_on equal",
      ),
      ({"olmo_batch_schedule": ((0, 4.5),)}, r"not a list of \(boundary, rows\) pairs"),
      ({"olmo_batch_rampup_factors": ((0, "x"),)}, r"not a list of \(boundary, factor\) pairs"),
      ({"olmo_batch_rampup_factors": ((0, 0.01),)}, "at least one row: 8 rows times 0.01 are 0"),
      (
          {"olmo_batch_rampup_factors": ((0, 2),), "olmo_batch_schedule": ((0, 4),)},
          "both set; a run takes one",
      ),
      ({"olmo_batch_schedule_unit": "weeks"}, "'weeks' must be one of steps, tokens"),
      ({"olmo_order_resume": "olmo_core"}, "must be 'exact', or 'olmo_core' where"),
      ({"olmo_order_resume": "theirs", "olmo_order": "olmo_core"}, "'theirs' must be 'exact'"),
      ({"olmo_allow_corpus_change": "yes"}, "'yes' must be one of no, extend, any"),
      (
          {"olmo_eval_instances": 4, "olmo_order": "olmo_core"},
          "cannot be held out of the olmo_core order.*olmo_eval_index_path",
      ),
      ({"vocab_size": 2**31 + 1}, r"exceeds 2\*\*31"),
      ({"vocab_size": 100, "olmo_eos_id": 100}, "olmo_eos_id=100 is outside the vocabulary of 100"),
      ({"olmo_path_remap_to": "/mnt"}, "olmo_path_remap_to is set without"),
      (
          {"olmo_eval_instances": 4, "olmo_eval_index_path": "x"},
          "both set; evaluation takes one",
      ),
  )
  def test_what_cannot_work_is_a_config_error(self, values, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      options.Options.read(self._config(**values))

  @parameterized.parameters(
      ("max_target_length", "64", "should be a whole number"),
      ("olmo_apply_ngram_filter", 1, "should be true or false"),
      ("olmo_order", 3, "should be text"),
  )
  def test_a_value_of_another_type_is_a_config_error(self, name, value, message):
    config = types.SimpleNamespace(**{**self._config().to_dict(), name: value})
    with self.assertRaisesRegex(errors.ConfigError, f"{name}={value!r} {message}"):
      options.Options.read(config)

  def test_batch_schedules_come_from_steps_or_tokens_and_rows_or_factors(self):
    def schedule(**values):
      return options.Options.read(
          self._config(global_batch_size_to_load=8, max_target_length=4, **values)
      ).schedule()

    pairs = ((0, 4), (10, 16))
    tokens = {"olmo_batch_schedule_unit": "tokens"}
    self.assertEqual(schedule(olmo_batch_schedule=pairs), schedule_lib.BatchSchedule(pairs))
    self.assertEqual(
        schedule(olmo_batch_schedule=pairs, **tokens),
        schedule_lib.BatchSchedule(((0, 4), (3, 16)), by_position=True),
    )
    self.assertEqual(
        schedule(olmo_batch_rampup_factors=((10, 2), (20, 1.5))),
        schedule_lib.BatchSchedule(((0, 8), (10, 16), (20, 12))),
    )
    self.assertEqual(
        schedule(olmo_batch_rampup_factors=((10, 2),), **tokens),
        schedule_lib.BatchSchedule(((0, 8), (3, 16)), by_position=True),
    )

  def test_a_whole_number_given_as_a_float_is_one(self):
    config = types.SimpleNamespace(**{**self._config().to_dict(), "max_target_length": 64.0})
    value = options.Options.read(config).max_target_length
    self.assertIsInstance(value, int)

  def test_what_all_processes_must_share_leaves_out_what_is_of_a_host(self):
    read = options.Options.read(self._config())
    shared = read.of_the_run()
    self.assertIn("olmo_apply_ngram_filter", shared)
    self.assertIn("olmo_initial_position", shared)
    self.assertNotIn("olmo_index_path", shared)
    self.assertNotIn("grain_worker_count", shared)

  def test_an_index_that_would_not_be_read_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "synthetic reads no files; set dataset_type"):
      options.Options.read(self._config(dataset_type="synthetic"))

  def test_other_dataset_types_need_no_index(self):
    options.Options.read(self._config(dataset_type="synthetic", olmo_index_path=""))


if __name__ == "__main__":
  absltest.main()
