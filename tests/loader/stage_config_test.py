from absl.testing import absltest

from maxtext_olmo import errors
from tests import corpora
from tests.loader import cases

_A = {"label-0": 1.0, "label-1": 1.0}
_B = {"label-0": 3.0, "label-1": 1.0}
_C = {"label-0": 1.0}
_MIXED = {"olmo_mixture": _A, "olmo_mixture_unit": "weights"}


class StageConfigTest(cases.LoaderCase):

  def test_impossible_stages_are_config_errors(self):
    for stages, message in (
        (({"olmo_mixture": _A},), "stage 1 needs exactly one of from_step"),
        (({"from_step": 5},), "stage 1 sets only where it begins"),
        (({"from_step": 5, "olmo_skip": 3},), "stage 1 sets 'olmo_skip'; a stage may set"),
        (({"from_step": 0, "olmo_mixture": _B},), "from_step=0 must be at least 1"),
        (({"from_step": 5, "olmo_mixture": {"x": 1.0}},), "stage 1: olmo_mixture: 'x' matches no"),
        (({"from_step": 5, "olmo_order": "x"},), "olmo_order='x' must be one of"),
        (({"from_step": 5, "olmo_index_path": "/x"},), "stage 1: "),
        (
            ({"from_step": 9, "olmo_mixture": {}}, {"from_step": 5, "olmo_mixture": _B}),
            "from_step must increase",
        ),
        (
            ({"from_step": 5, "olmo_mixture": _B}, {"from_tokens": 160, "olmo_mixture": _C}),
            "from tokens 160 on begins at position 20, where the stage from step 5 on has no",
        ),
        (
            (
                {
                    "from_step": 5,
                    "olmo_mixture": {},
                    "olmo_order": "olmo_core",
                    "leave_out_seen": True,
                },
            ),
            "leave_out_seen does not work with olmo_order='olmo_core'",
        ),
        ("x", "olmo_stages='x' should be a list of dicts"),
    ):
      with self.subTest(message), self.assertRaisesRegex(errors.ConfigError, message):
        self.train(**_MIXED, olmo_stages=stages)

  def test_tokens_of_another_dtype_are_refused(self):
    path, _ = corpora.write_corpus(self.create_tempdir().full_path, dtype="uint32")
    with self.assertRaisesRegex(errors.ConfigError, "stage 1: its tokens are uint32, but those of"):
      self.train(olmo_stages=({"from_step": 3, "olmo_index_path": path},))


if __name__ == "__main__":
  absltest.main()
