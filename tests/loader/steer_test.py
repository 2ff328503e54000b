"""Tests of what steers a run: exclusions and skips."""

import json
import pathlib
from typing import ClassVar

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from tests.loader import cases

_DOCUMENTS = {
    "dataset_type": "olmo_documents",
    "olmo_eos_id": 0,
    "olmo_packing_bins": 8,
    "max_target_length": 32,
}
_ONE_PER_ROW = {"olmo_packing": "none", "olmo_long_documents": "truncate"}


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 2)
  cases.compile_fast()


class ExcludeTest(cases.LoaderCase):

  axes: ClassVar[dict[str, int]] = {"data": 2}

  def write(self, *lines):
    path = pathlib.Path(self.create_tempdir().full_path, "exclude.jsonl")
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)

  @parameterized.named_parameters(
      ("windows", {}),
      ("windows_sharded_by_sequence", {"data_sharding": (None, "data")}),
      ("document_mask", {"olmo_document_mask": True, "olmo_eos_id": 0}),
      ("mixture", {"olmo_mixture": {"label-0": 2.0, "label-1": 0.5}}),
      ("planned", _DOCUMENTS),
      ("planned_right_shift", {**_DOCUMENTS, "olmo_shift": "right"}),
      ("one_document", {**_DOCUMENTS, **_ONE_PER_ROW}),
  )
  def test_excluded_tokens_are_context_and_take_no_loss(self, values):
    index = maxtext_olmo.load_index(self.index_path)
    lines = [
        {"file": index.files[0].path, "bytes": [40, 200]},
        {"rows": [50, 60]},
        {"file": index.files[2].path},
    ]
    excluded = {(0, token) for token in range(20, 100)}
    excluded |= {(2, token) for token in range(7)}
    for row in range(50, 60):
      file, first = maxtext_olmo.global_to_local(index, row)
      excluded |= {(file, first + token) for token in range(8)}
    plain = self.train(**values)
    steered = self.train(**values, olmo_exclude=self.write(*lines))
    right = values.get("olmo_shift") == "right"
    masked = 0
    for step in range(40):
      parts = plain.host_batches(step).parts(step)
      (was,), (now,) = cases.take(plain, 1), cases.take(steered, 1)
      expected = was["targets_segmentation"].copy()
      for row, column, source, first, count in zip(
          parts.row, parts.column, parts.source, parts.first, parts.count
      ):
        for token in range(count):
          target = column + token - (0 if right else 1)
          if (int(source), int(first) + token) in excluded and target >= 0:
            masked += bool(expected[row, target])
            expected[row, target] = 0
      np.testing.assert_array_equal(now.pop("targets_segmentation"), expected)
      del was["targets_segmentation"]
      self.assert_equal_batches([now], [was])
    self.assertGreater(masked, 50)

  def test_documents_are_excluded_wherever_they_are_packed(self):
    steered = self.train(**_DOCUMENTS, olmo_exclude=self.write({"document": 3}, {"document": 9}))
    lost = 0
    for batch in cases.take(steered, 60):
      there = batch["inputs_segmentation"][:, 1:] == batch["inputs_segmentation"][:, :-1]
      there &= batch["inputs_segmentation"][:, 1:] > 0
      lost += int((there & (batch["targets_segmentation"][:, :-1] == 0)).sum())
    self.assertGreater(lost, 0)

  def test_a_change_of_the_exclusions_is_part_of_the_history(self):
    train = self.train()
    cases.take(train, 3)
    state = train.get_state()
    path = self.write({"label": "label-1"})
    steered = self.train(olmo_exclude=path)
    with self.assertLogs(level="WARNING") as logs:
      steered.set_state(state)
    self.assertIn("exclude", "".join(logs.output))
    cases.take(steered, 2)
    entries = steered.get_state()["history"]
    self.assertEqual([entry["step"] for entry in entries], [0, 3])
    self.assertIsNone(entries[0]["content"]["exclude"])
    self.assertLen(entries[1]["content"]["exclude"], 16)
    again = self.train(olmo_exclude=path)
    again.set_state(steered.get_state())
    self.assertEqual(again.get_state(), steered.get_state())

  def test_what_cannot_be_excluded_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "has no label 'wiki'"):
      self.train(olmo_exclude=self.write({"label": "wiki"}))
    with self.assertRaisesRegex(errors.ConfigError, "olmo_exclude=.* does not exist"):
      self.train(olmo_exclude="/nowhere")
    with self.assertRaisesRegex(errors.ConfigError, "olmo_exclude=.* needs rows that are address"):
      self.train(**_DOCUMENTS, olmo_packing="best_fit", olmo_exclude=self.write())


if __name__ == "__main__":
  absltest.main()
