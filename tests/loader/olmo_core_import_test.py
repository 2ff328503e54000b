"""Tests of the ties to OLMo-core, against its own outputs."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import olmo_core_fingerprint
from maxtext_olmo.loader import olmo_core_import
from tests.loader import elastic_test

_CASES = elastic_test._CASES
_RESUMES = elastic_test._RESUMES


class OlmoCoreTest(parameterized.TestCase):

  def index(self, case, length=None):
    path = elastic_test.write_case(self.create_tempdir().full_path, case, length)
    return elastic_test.index_lib.load_index(path)

  def test_sources_are_permuted_as_python_has_always_shuffled(self):
    self.assertEqual(olmo_core_import.permute_sources("abcdefgh", 34521), list("ghbadecf"))
    self.assertCountEqual(olmo_core_import.permute_sources("abcdefgh", 7), "abcdefgh")

  @parameterized.parameters(
      *(name for name, case in _RESUMES.items() if "state_dict" in case and case["seq0"] == 64)
  )
  def test_a_state_gives_its_position(self, name):
    case = _RESUMES[name]
    state = olmo_core_import.LoaderState.from_json(case["state_dict"], "state")
    index = self.index(_CASES[case["case"]])
    self.assertEqual(state.position(index), case["steps0"] * case["gbs0"] // 64)
    self.assertEqual(state.rows, case["gbs0"] // 64)
    ids = olmo_core_fingerprint.TokenizerIds(100278, pad_id=1, eos_id=0)
    dataset = olmo_core_fingerprint.windows(index, ids)
    self.assertEqual(state.check_dataset(dataset), case["state_dict"]["dataset_fingerprint"])

  def test_later_epochs_count_from_the_whole_ones_before(self):
    case = _CASES["tiny_u16_epoch2"]
    end = case["ranks"][0]["state_dict_at_end"]
    state = olmo_core_import.LoaderState.from_json({"data_loader": end}, "state")
    self.assertEqual(state.position(self.index(case)), 29 + 28)

  @parameterized.parameters(
      (dict(seed=None), "seed is None"),
      (dict(epoch=True), "epoch is True"),
      (dict(epoch=0), "has impossible numbers"),
      (dict(dataset_type="vsl"), "type 'vsl'"),
      (dict(tokens_processed="5"), "tokens_processed is '5'"),
  )
  def test_an_invalid_state_is_refused(self, change, message):
    state = {**_RESUMES["same"]["state_dict"], **change}
    with self.assertRaisesRegex(errors.ResumeError, message):
      olmo_core_import.LoaderState.from_json(state, "state.json")
    with self.assertRaisesRegex(errors.ResumeError, "expected a JSON object"):
      olmo_core_import.LoaderState.from_json([], "state.json")

  @parameterized.parameters(
      (
          dict(max_target_sequence_length=128),
          "had max_target_sequence_length=128, but the index has None",
      ),
      (dict(sequence_length=32), "changes the order .OLMo-core would silently continue"),
      (dict(tokens_processed=65), "inside an instance of 64"),
      (
          dict(tokens_processed=64 * 541),
          "read 541 instances of its epoch, but the index has only",
      ),
  )
  def test_an_index_that_does_not_fit_is_refused(self, change, message):
    state = {**_RESUMES["same"]["state_dict"], **change}
    index = self.index(_CASES["u32_olmo3seed"])
    with self.assertRaisesRegex(errors.ResumeError, message):
      olmo_core_import.LoaderState.from_json(state, "state.json").position(index)

  def test_rows_that_are_not_counted_are_enough_in_the_first_epoch(self):
    state = olmo_core_import.LoaderState.from_json(_RESUMES["same"]["state_dict"], "state")
    self.assertEqual(state.position_in_rows(None, 64), state.tokens_processed // 64)
    later = {**_RESUMES["same"]["state_dict"], "epoch": 2}
    with self.assertRaisesRegex(errors.ResumeError, "depends on the number of rows"):
      olmo_core_import.LoaderState.from_json(later, "state").position_in_rows(None, 64)

  def test_another_fingerprint_or_version_is_refused(self):
    state = _RESUMES["same"]["state_dict"]
    ids = olmo_core_fingerprint.TokenizerIds(100278, pad_id=1, eos_id=0, bos_id=7)
    dataset = olmo_core_fingerprint.windows(self.index(_CASES["u32_olmo3seed"]), ids)
    with self.assertRaisesRegex(
        errors.ResumeError, "the run had bos_token_id=None, but this dataset has bos_token_id=7"
    ):
      olmo_core_import.LoaderState.from_json(state, "s").check_dataset(dataset)
    other = {**state, "dataset_fingerprint_version": "v1"}
    with self.assertRaisesRegex(errors.ResumeError, "version 'v1'"):
      olmo_core_import.LoaderState.from_json(other, "s").check_dataset(dataset)


if __name__ == "__main__":
  absltest.main()
