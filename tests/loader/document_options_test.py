"""What may be wrong with the keys of `dataset_type=olmo_documents` is said before anything is read."""

import types

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import document_options
from maxtext_olmo.loader import options


def _config(**values):
  return types.SimpleNamespace(
      **{
          **options.defaults(),
          "dataset_type": "olmo_documents",
          "olmo_index_path": __file__,  # which is there, and is no index
          "olmo_eos_id": 0,
          "max_target_length": 32,
          "global_batch_size_to_load": 4,
          "vocab_size": 100,
          **values,
      }
  )


class ProblemsTest(parameterized.TestCase):

  @parameterized.parameters(
      ({"olmo_packing": "tetris"}, "olmo_packing='tetris'"),
      ({"olmo_long_documents": "wrap"}, "olmo_long_documents='wrap'"),
      ({"olmo_shift": "up"}, "olmo_shift='up'"),
      ({"olmo_shard": "file"}, "olmo_shard='file'"),
      ({"olmo_eos_id": -1}, "needs olmo_eos_id"),
      ({"olmo_packing_bins": -1}, "olmo_packing_bins"),
      ({"olmo_eval_instances": 3}, "holds out instances, not documents"),
      ({"olmo_order": "maxtext"}, "olmo_order='maxtext' is an order of instances"),
      ({"olmo_allow_corpus_change": "append"}, "cannot go on with another corpus"),
      ({"olmo_packing": "first_fit", "initial_step": 3}, "goes on from a state alone"),
      ({"olmo_shard": "slice", "olmo_initial_position": 8}, "goes on from a state alone"),
      ({"olmo_packing": "first_fit", "olmo_mixture": {"*": 1.0}}, "olmo_mixture over documents"),
      ({"olmo_num_epochs": 1, "olmo_mixture": {"*": 1.0}}, "goes on without end"),
  )
  def test_what_cannot_be_is_an_error_of_the_config(self, values, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      options.Options.read(_config(**values))

  @parameterized.product(
      olmo_packing=(*document_options.PACKINGS, "none"),
      olmo_shard=("batch", "slice"),
      olmo_long_documents=document_options.LONG_DOCUMENTS,
      olmo_shift=("left", "right"),
  )
  def test_every_choice_goes_with_every_other(self, **values):
    self.assertEmpty(document_options.problems(options.Options.read(_config(**values))))

  def test_all_problems_are_said_at_once(self):
    with self.assertRaises(errors.ConfigError) as caught:
      options.Options.read(_config(olmo_packing="tetris", olmo_eos_id=-1, olmo_shift="up"))
    for part in ("olmo_packing='tetris'", "needs olmo_eos_id", "olmo_shift='up'"):
      self.assertIn(part, str(caught.exception))

  def test_other_dataset_types_are_not_looked_at(self):
    values = {"dataset_type": "olmo_grain", "olmo_eos_id": -1, "olmo_order": "maxtext"}
    self.assertEqual(options.Options.read(_config(**values)).olmo_eos_id, -1)


if __name__ == "__main__":
  absltest.main()
