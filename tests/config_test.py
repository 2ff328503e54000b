"""Tests of the table of data keys, and of the options that are read by it."""

import pickle
import types

import ml_collections
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.order import schedule as schedule_lib


def _config(**values) -> ml_collections.ConfigDict:
  # The index exists, and is not an index: nothing may read it.
  return ml_collections.ConfigDict({**config_lib.defaults(), "olmo_index_path": __file__, **values})


def _read(**values) -> config_lib.Options:
  return config_lib.Options.read(_config(**values))


class UnreadKeysTest(absltest.TestCase):

  def test_keys_of_maxtext_are_never_refused(self):
    _read(dataset_type="synthetic", olmo_index_path="", generate_padding_batch_train=True)

  def test_a_default_is_not_refused_however_it_is_written(self):
    config = types.SimpleNamespace(
        dataset_type="synthetic", olmo_mixture={}, olmo_num_epochs=0.0, olmo_batch_extras=[]
    )
    config_lib.Options.read(config)

  def test_an_unread_key_is_one_problem_whatever_its_value(self):
    config = types.SimpleNamespace(dataset_type="synthetic", olmo_order="alphabetic")
    with self.assertRaises(errors.ConfigError) as caught:
      config_lib.Options.read(config)
    self.assertLen(str(caught.exception).splitlines(), 2)

  def test_types_whose_rows_never_change_refuse_stages(self):
    stages = ({"from_step": 2, "data_shuffle_seed": 7},)
    for name in ("olmo_packed", "olmo_padded"):
      for values in ({"olmo_stages": stages}, {"olmo_allow_mixture_change": True}):
        config = types.SimpleNamespace(dataset_type=name, **values)
        with self.assertRaisesRegex(errors.ConfigError, f"would have no effect.*{name}"):
          config_lib.Options.read(config)

  def test_types_of_other_packages_read_what_they_declare(self):
    config = types.SimpleNamespace(olmo_order="sequential", olmo_shift="right", vocab_size=3)
    config_lib.check_all_read(config, "mine", ("olmo_order", "olmo_shift"))
    with self.assertRaisesRegex(
        errors.ConfigError, "olmo_shift='right' would have no effect.*'mine'.*: olmo_documents"
    ):
      config_lib.check_all_read(config, "mine", ("olmo_order",))


class OptionsTest(parameterized.TestCase):

  def test_a_config_dict_and_a_plain_object_read_alike(self):
    config = _config(max_target_length=64, olmo_batch_schedule=((0, 4), (10, 8)))
    read = config_lib.Options.read(config)
    self.assertEqual(read, config_lib.Options.read(types.SimpleNamespace(**config.to_dict())))
    self.assertEqual(read.olmo_batch_schedule, ((0, 4), (10, 8)))
    self.assertEqual(read.schedule().start(11), 48)

  def test_keys_that_a_config_lacks_have_defaults(self):
    read = config_lib.Options.read(types.SimpleNamespace(olmo_index_path=__file__))
    self.assertEqual(read.olmo_order, "feistel")
    self.assertEqual(read.initial_step, -1)

  def test_batch_sizes_default_to_each_other(self):
    read = _read(global_batch_size_to_load=16)
    self.assertEqual(read.global_batch_size_to_train_on, 16)
    self.assertEqual(read.global_batch_size_to_load_eval, 16)
    self.assertEqual(read.global_batch_size_to_eval_on, 16)

  @parameterized.parameters(("olmo_grain", True), ("olmo_documents", False))
  def test_the_filter_has_a_default_for_each_dataset_type(self, dataset_type, default):
    values = {"dataset_type": dataset_type, "olmo_eos_id": 0}
    self.assertIs(_read(**values).olmo_apply_ngram_filter, default)
    for chosen in (True, False):
      self.assertIs(_read(olmo_apply_ngram_filter=chosen, **values).olmo_apply_ngram_filter, chosen)

  def test_without_shuffling_the_order_is_sequential(self):
    self.assertEqual(_read(enable_data_shuffling=False).order_name, "sequential")

  def test_all_problems_are_reported_together(self):
    with self.assertRaises(errors.ConfigError) as caught:
      _read(
          max_target_length=0,
          olmo_order="alphabetic",
          olmo_document_mask=True,
          olmo_packing="first_fit",
          eval_interval=10,
          olmo_index_path="/nowhere/index.json",
      )
    self.assertSameElements(
        str(caught.exception).splitlines(),
        [
            "The configuration is invalid:",
            "  - max_target_length=0 must be at least 1.",
            "  - olmo_order='alphabetic' must be one of feistel, sequential, olmo_core, maxtext.",
            "  - olmo_document_mask needs olmo_eos_id, the token that ends a document.",
            "  - olmo_packing='first_fit' would have no effect, because dataset_type='olmo_grain'"
            " does not read it. Remove it, or choose a dataset type that reads it: olmo_documents.",
            "  - eval_interval=10 needs olmo_eval_index_path or olmo_eval_instances.",
            "  - olmo_index_path='/nowhere/index.json' does not exist.",
        ],
    )

  @parameterized.parameters(
      ("olmo_batch_schedule", (3, 4), r"a list of \(boundary, rows\) pairs"),
      ("olmo_batch_schedule", ((0, 4.5),), r"a list of \(boundary, rows\) pairs"),
      ("olmo_batch_rampup_factors", ((0, "x"),), r"a list of \(boundary, factor\) pairs"),
      ("olmo_mixture", ("wiki",), "a dict from label to number"),
      ("olmo_mixture", {"wiki": "much"}, "a dict from label to number"),
      ("olmo_batch_extras", "row_ids", "a list"),
  )
  def test_a_value_of_another_form_is_a_config_error(self, name, value, expected):
    config = types.SimpleNamespace(**{"olmo_index_path": __file__, name: value})
    with self.assertRaisesRegex(errors.ConfigError, f"{name}=.* should be {expected}"):
      config_lib.Options.read(config)

  def test_extras_are_among_those_that_are_known(self):
    self.assertEqual(_read(olmo_batch_extras=("labels",)).olmo_batch_extras, ("labels",))
    with self.assertRaisesRegex(errors.ConfigError, "may list only row_ids, labels"):
      _read(olmo_batch_extras=("row_ids", "colors"))

  def test_numbers_may_be_those_of_numpy(self):
    config = types.SimpleNamespace(
        olmo_index_path=__file__,
        max_target_length=np.int64(64),
        olmo_batch_schedule=np.array([[0, 4], [10, 8]]),
        olmo_mixture={"wiki": np.float32(2), "web": np.int8(1)},
    )
    read = config_lib.Options.read(config)
    self.assertEqual(repr(read.max_target_length), "64")
    self.assertEqual(repr(read.olmo_batch_schedule), "((0, 4), (10, 8))")
    self.assertEqual(repr(read.olmo_mixture), "{'wiki': 2.0, 'web': 1.0}")

  def test_batch_schedules_are_by_steps_or_tokens_and_of_rows_or_factors(self):
    def schedule(**values):
      return _read(global_batch_size_to_load=8, max_target_length=4, **values).schedule()

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

  def test_processes_share_the_values_that_are_not_of_a_host(self):
    shared = _read().run_options()
    self.assertIn("olmo_apply_ngram_filter", shared)
    self.assertIn("olmo_initial_position", shared)
    self.assertNotIn("olmo_index_path", shared)
    self.assertNotIn("grain_worker_count", shared)

  def test_options_cannot_be_changed_but_copied(self):
    read = _read()
    with self.assertRaisesRegex(AttributeError, "cannot be changed"):
      read.olmo_order = "sequential"
    changed = read.replace(olmo_order="sequential")
    self.assertEqual((read.olmo_order, changed.olmo_order), ("feistel", "sequential"))
    self.assertNotEqual(read, changed)
    self.assertEqual(pickle.loads(pickle.dumps(changed)), changed)
    with self.assertRaises(AttributeError):
      _ = read.olmo_ordre


if __name__ == "__main__":
  absltest.main()
