"""Tests that values that cannot work together are refused."""

import types

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.rows import packing


def _read_checked(**values) -> config_lib.Options:
  # The index exists, and is not an index: nothing may read it.
  return config_lib.Options.read(
      types.SimpleNamespace(**{**config_lib.defaults(), "olmo_index_path": __file__, **values})
  )


def _read_documents(**values) -> config_lib.Options:
  return _read_checked(**{"dataset_type": "olmo_documents", "olmo_eos_id": 0, **values})


class ChecksTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"olmo_index_path": ""}, "olmo_index_path is empty"),
      ({"global_batch_size_to_train_on": 9}, "train_on=9 exceeds global_batch_size_to_load=8"),
      ({"global_batch_size_to_eval_on": 9}, "eval_on=9 exceeds global_batch_size_to_load_eval=8"),
      ({"olmo_batch_schedule": ((1, 4),)}, "olmo_batch_schedule: .*must begin at step 0"),
      (
          {"olmo_batch_schedule": ((0, 4),), "global_batch_size_to_train_on": 4},
          "olmo_batch_schedule needs global_batch_size_to_train_on=4 to equal",
      ),
      (
          {"olmo_batch_rampup_factors": ((0, 0.01),)},
          "at least one row, but 8 rows times 0.01 give 0",
      ),
      (
          {"olmo_batch_rampup_factors": ((0, 2),), "olmo_batch_schedule": ((0, 4),)},
          "olmo_batch_rampup_factors are both set; set only one",
      ),
      (
          {"olmo_order_resume": "olmo_core"},
          "olmo_order_resume='olmo_core' needs olmo_order='olmo_core', not 'feistel'",
      ),
      (
          {"olmo_eval_instances": 4, "olmo_order": "olmo_core"},
          "cannot be held out of the olmo_core order.*olmo_eval_index_path",
      ),
      ({"vocab_size": 100, "olmo_eos_id": 100}, "olmo_eos_id=100 is outside the vocabulary"),
      ({"olmo_path_remap_to": "/mnt"}, "olmo_path_remap_to is set without olmo_path_remap_from"),
      ({"olmo_path_remap_from": "/mnt"}, "olmo_path_remap_from is set without olmo_path_remap_to"),
      ({"olmo_document_mask": True}, "olmo_document_mask needs olmo_eos_id"),
      ({"eval_interval": 10}, "eval_interval=10 needs olmo_eval_index_path or olmo_eval_instances"),
      (
          {"olmo_eval_instances": 4, "olmo_eval_index_path": __file__},
          "olmo_eval_instances are both set; set only one",
      ),
      (
          {"olmo_consumed_path": __file__, "olmo_eval_instances": 4},
          "cannot hold out instances that were consumed already",
      ),
      ({"olmo_consumed_path": __file__, "olmo_mixture": {"*": 1}}, "always reads whole labels"),
      (
          {"olmo_mixture": {"*": 1}, "olmo_allow_corpus_change": "any"},
          "olmo_mixture needs olmo_allow_corpus_change='no', not 'any'",
      ),
  )
  def test_windows(self, values, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      _read_checked(**values)

  @parameterized.parameters(
      ({"olmo_eos_id": -1}, "needs olmo_eos_id"),
      ({"olmo_order": "maxtext"}, "'maxtext': olmo_documents needs feistel or sequential"),
      ({"eval_interval": 5}, "eval_interval=5 needs olmo_eval_index_path"),
      ({"olmo_num_epochs": 1, "olmo_mixture": {"*": 1.0}}, "needs olmo_num_epochs=0"),
      (
          {"olmo_packing": "first_fit", "initial_step": 3},
          "initial_step=3 needs rows that are addressed by position: olmo_shard='batch'",
      ),
      ({"olmo_shard": "slice", "olmo_initial_position": 8}, "olmo_initial_position=8 needs rows"),
      ({"olmo_packing": "first_fit", "olmo_mixture": {"*": 1.0}}, "olmo_mixture=.* needs rows"),
      (
          {"olmo_packing": "best_fit", "olmo_apply_ngram_filter": True},
          "olmo_apply_ngram_filter=True needs rows",
      ),
      ({"olmo_packing": "none", "olmo_batch_extras": ["row_ids"]}, "olmo_batch_extras=.* needs"),
      ({"olmo_packing": "first_fit", "olmo_prefetch_batches": 7}, "olmo_prefetch_batches=7 needs"),
      ({"olmo_packing": "first_fit", "olmo_device_prefetch": 5}, "olmo_device_prefetch=5 needs"),
      (
          {"olmo_packing": "first_fit", "generate_padding_batch_train": True},
          "generate_padding_batch_train=True needs rows",
      ),
      (
          {
              "olmo_packing": "best_fit",
              "global_batch_size_to_load": 8,
              "global_batch_size_to_train_on": 4,
          },
          "global_batch_size_to_train_on=4 needs rows",
      ),
      (
          {
              "olmo_packing": "first_fit",
              "olmo_batch_schedule": ((0, 8), (25600, 8)),
              "olmo_batch_schedule_unit": "tokens",
          },
          "olmo_batch_schedule_unit='tokens' needs rows",
      ),
  )
  def test_documents(self, values, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      _read_documents(**values)

  @parameterized.product(
      olmo_packing=config_table.PACKINGS,
      olmo_shard=("batch", "slice"),
      olmo_long_documents=packing.LONG_DOCUMENTS,
      olmo_shift=("left", "right"),
  )
  def test_every_choice_about_documents_works_with_every_other(self, **values):
    _read_documents(**values)

  def test_what_only_documents_need_is_not_asked_of_windows(self):
    self.assertEqual(_read_checked(olmo_order="maxtext").olmo_eos_id, -1)


if __name__ == "__main__":
  absltest.main()
