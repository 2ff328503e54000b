import types

import ml_collections
from absl.testing import absltest

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import config as tiny_config

_STAGE = {"from_step": 3, "olmo_mixture": {"web": 1}}


class StagesKeyTest(absltest.TestCase):

  def test_configs_and_command_lines_may_have_stages(self):
    expected = ({"from_step": 3, "olmo_mixture": {"web": 1.0}},)
    read = tiny_config.read_config(["train", f"--config.olmo_stages=({_STAGE},)"])
    for config in (
        types.SimpleNamespace(olmo_stages=[_STAGE]),
        ml_collections.ConfigDict({"olmo_stages": (_STAGE,)}),
        read,
    ):
      self.assertEqual(config_lib.read_value(config, "olmo_stages"), expected)

  def test_values_of_other_types_name_their_stage(self):
    for stage, message in (
        ({"from_step": 1.5, "data_shuffle_seed": 1}, "stage 2: from_step=1.5 should be a whole"),
        ({"from_step": 4, "olmo_mixture": {"a": "b"}}, "stage 2: olmo_mixture=.* should be a dict"),
        ({"from_step": 4, "leave_out_seen": 1}, "stage 2: leave_out_seen=1 should be true or"),
        ({"from_step": 4, "from_tokens": 4}, "stage 2 needs exactly one of from_step"),
        ({"from_step": 4, "olmo_mixture_unit": "x"}, "stage 2: olmo_mixture_unit='x' must be one"),
        ({"from_step": 3, "data_shuffle_seed": 1}, r"from_step must increase .* \[3, 3\]"),
    ):
      config = types.SimpleNamespace(olmo_stages=(_STAGE, stage), dataset_type="olmo_grain")
      with self.subTest(message), self.assertRaisesRegex(errors.ConfigError, message):
        config_lib.Options.read(config)

  def test_keys_that_exclude_stages_are_named(self):
    base = {"olmo_stages": (_STAGE,), "dataset_type": "olmo_grain"}
    for values, message in (
        ({"olmo_allow_corpus_change": "any"}, "olmo_stages needs olmo_allow_corpus_change='no'"),
        ({"dataset_type": "olmo_packed"}, "'olmo_packed' does not read it"),
        (
            {
                "olmo_stages": ({"from_step": 3, "olmo_order": "olmo_core"},),
                "olmo_eval_instances": 4,
            },
            "stage 1: olmo_eval_instances=4 cannot be held out of the olmo_core order",
        ),
    ):
      with self.subTest(message), self.assertRaisesRegex(errors.ConfigError, message):
        config_lib.Options.read(types.SimpleNamespace(**{**base, **values}))


if __name__ == "__main__":
  absltest.main()
