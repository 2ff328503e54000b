"""Tests that states of format 1 resume to the batches that followed in the release that saved them.

`states_v1.json` was made by the last revision that saved format 1. For each state it has the config
and the corpus to resume with, and digests of the next three batches.
"""

import hashlib
import json
import pathlib

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from tests import corpora
from tests.loader import cases

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata" / "states_v1.json"
_SAVED = json.loads(_TESTDATA.read_text())


def setUpModule():
  cases.compile_fast()


def _digest(batch: dict[str, jax.Array], arrays: list[str]) -> str:
  """Returns a digest of some arrays of a batch, or of where one of them is not 0."""
  found = hashlib.sha256()
  for name in arrays:
    array = np.asarray(batch[name.removesuffix(" != 0")])
    found.update((array != 0 if name.endswith(" != 0") else array).astype("<i4").tobytes())
  return found.hexdigest()[:16]


class StatesOfFormat1Test(parameterized.TestCase):

  def resumed(self, case):
    """Returns an iterator that has resumed from the state of a case."""
    values = {**case["config"], "olmo_order_cache_dir": self.create_tempdir().full_path}
    if case["config"].get("olmo_order", "feistel") == "feistel":
      del values["olmo_order_cache_dir"]
    if case["corpus"]:
      spec = _SAVED["corpora"][case["corpus"]]
      values["olmo_index_path"], _ = corpora.write_corpus(self.create_tempdir().full_path, **spec)
    config = cases.data_config(**values)
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    iterator.set_state(case["state"])
    return iterator

  @parameterized.named_parameters((case["name"], case) for case in _SAVED["cases"])
  def test_the_next_batches_are_the_same(self, case):
    iterator = self.resumed(case)
    got = [_digest(next(iterator), case["arrays"]) for _ in case["next_batches"]]
    self.assertEqual(got, case["next_batches"])
    self.assertEqual(iterator.position, case["position_after"])
    # From here on the run has states of the present format, which resume to the same.
    state = json.loads(json.dumps(iterator.get_state()))
    self.assertEqual(state["format"], 2)
    again = self.resumed({**case, "state": state})
    self.assertEqual((again.step, again.position), (iterator.step, iterator.position))
    self.assertEqual(again.get_state(), state)

  def test_no_warning_is_given_where_nothing_has_changed(self):
    for case in _SAVED["cases"]:
      with self.subTest(case["name"]), self.assertNoLogs(level="WARNING"):
        self.resumed(case)

  def test_a_step_before_a_format_1_state_is_an_error(self):
    case = next(case for case in _SAVED["cases"] if case["name"] == "windows_other_batch_size")
    iterator = self.resumed(case)
    self.assertEqual(iterator.history.at(5).schedule.start(5), 36)
    self.assertEqual(iterator.history.at(7).schedule.start(7), 48)
    with self.assertRaisesRegex(
        errors.OrderError, "Step 4 lies before step 5, .* saved by an older version"
    ):
      iterator.history.at(4)


if __name__ == "__main__":
  absltest.main()
