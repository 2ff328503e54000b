"""Tests that values of keys are converted, and that each problem is said in one line."""

import enum
import pathlib
import types

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.config_key import BOOLEAN
from maxtext_olmo.config_key import Key
from maxtext_olmo.config_key import at_least
from maxtext_olmo.config_key import more_than
from maxtext_olmo.config_key import one_of
from maxtext_olmo.config_key import read_values
from maxtext_olmo.config_key import some_of
from maxtext_olmo.rows import packing


class _Color(enum.Enum):
  RED = "red"


def _read(key: Key, value):
  """Returns the value of a key and its problem, if any."""
  values, problems = read_values(types.SimpleNamespace(**{key.name: value}), [key])
  return values[key.name], problems.get(key.name)


class ReadValuesTest(parameterized.TestCase):

  @parameterized.parameters(
      (5, 3, 3, int),
      (5, 3.0, 3, int),
      (5, np.int64(3), 3, int),
      (5, np.uint8(3), 3, int),
      (5, np.float32(3.0), 3, int),
      (0.5, 2, 2.0, float),
      (0.5, np.float64(0.25), 0.25, float),
      (0.5, np.int32(2), 2.0, float),
      (True, False, False, bool),
      (True, np.bool_(False), False, bool),
      ("text", "other", "other", str),
      ("text", pathlib.Path("/data"), "/data", str),
      ("text", _Color.RED, "red", str),
      ((), ["a", "b"], ("a", "b"), tuple),
      ((), (1, 2), (1, 2), tuple),
  )
  def test_a_value_is_converted_to_the_type_of_the_default(self, default, value, expected, kind):
    found, problem = _read(Key("k", default, "Help."), value)
    self.assertIsNone(problem)
    self.assertEqual(found, expected)
    self.assertIs(type(found), kind)

  @parameterized.parameters(
      (5, "3", "k='3' should be a whole number below 2**64."),
      (5, 3.5, "k=3.5 should be a whole number below 2**64."),
      (5, float("inf"), "k=inf should be a whole number below 2**64."),
      (5, float("nan"), "k=nan should be a whole number below 2**64."),
      (5, 2**70, f"k={2**70} should be a whole number below 2**64."),
      (5, -(2**70), f"k={-2**70} should be a whole number below 2**64."),
      (5, b"5", "k=b'5' should be a whole number below 2**64."),
      (5, True, "k=True should be a whole number below 2**64."),
      (0.5, "x", "k='x' should be a number."),
      (True, 1, "k=1 should be true or false."),
      ("text", 3, "k=3 should be text of at most 4096 characters, without NUL."),
      ("text", b"bytes", "k=b'bytes' should be text of at most 4096 characters, without NUL."),
      ("text", "a\0b", r"k='a\x00b' should be text of at most 4096 characters, without NUL."),
      ((), "abc", "k='abc' should be a list."),
      ((), 3, "k=3 should be a list."),
  )
  def test_a_value_of_another_type_is_a_problem_and_the_default_is_used(
      self, default, value, expected
  ):
    self.assertEqual(_read(Key("k", default, "Help."), value), (default, expected))

  @parameterized.parameters(
      (5, at_least(1), 0, "k=0 must be at least 1."),
      (5, at_least(1, 9), 10, "k=10 must be at most 9."),
      (5, at_least(1), 2**60, f"k={2**60} must be at most {2**53}."),
      ((), some_of("a", "b"), [["a"]], "k=(['a'],) may list only a, b."),
      (0.5, more_than(0), 0, "k=0.0 must be more than 0."),
      ("a", one_of("a", "b"), "c", "k='c' must be one of a, b."),
      ((), some_of("a", "b"), ["a", "c"], "k=('a', 'c') may list only a, b."),
  )
  def test_a_value_that_fails_its_check_is_a_problem_and_is_kept(
      self, default, check, value, expected
  ):
    found, problem = _read(Key("k", default, "Help.", check), value)
    self.assertEqual(problem, expected)
    self.assertEqual(found, tuple(value) if isinstance(value, list) else value)

  def test_a_long_value_is_shown_in_part(self):
    _, problem = _read(Key("k", 5, "Help."), "[" * 100_000)
    self.assertLess(len(problem), 400)

  def test_keys_that_a_config_lacks_or_has_as_none_have_their_default(self):
    keys = [Key("a", 1, "Help."), Key("b", "x", "Help.", one_of("y"))]
    self.assertEqual(read_values(types.SimpleNamespace(a=None), keys), ({"a": 1, "b": "x"}, {}))


class IsSetTest(parameterized.TestCase):

  @parameterized.parameters(
      (5, 5, False),
      (5, 5.0, False),
      (5, 6, True),
      (5, "five", True),
      (5, None, False),
      ((), [], False),
      ((), [1], True),
      ("", "", False),
  )
  def test_a_key_is_set_if_its_value_differs_from_the_default(self, default, value, expected):
    self.assertEqual(Key("k", default, "Help.").is_set(types.SimpleNamespace(k=value)), expected)

  def test_a_key_without_a_default_of_its_own_is_set_by_any_value(self):
    key = Key("k", None, "Help.", kind=BOOLEAN)
    self.assertTrue(key.is_set(types.SimpleNamespace(k=False)))
    self.assertFalse(key.is_set(types.SimpleNamespace()))


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
      ({"olmo_consumed_path": __file__, "olmo_mixture": {"*": 1}}, "draws on whole labels"),
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
