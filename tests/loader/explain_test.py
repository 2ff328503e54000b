"""Tests that the explanations of steps equal the batches that the trainer received."""

import json
import os
import tempfile
import unittest

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from tests.loader import cases
from tests.loader import row_sources

_directory = ""


def setUpModule():
  global _directory
  jax.config.update("jax_num_cpu_devices", 4)
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="explain_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  row_sources.write_corpus(_directory)


class ExplainTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.index_path = f"{_directory}/index.json"
    self.index = maxtext_olmo.load_index(self.index_path)

  def make(self, source, **values):
    config = row_sources.config_values(source, self.index_path, _directory)
    config = cases.data_config(**{**config, **values})
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    return iterator

  def tapped_run(self, source, changes):
    """Runs some steps under each config in turn; returns all batches and the last iterator."""
    batches, state = [], None
    for values, steps in changes:
      iterator = self.make(source, **values)
      if state is not None:
        iterator.set_state(json.loads(json.dumps(state)))
      batches += cases.take(iterator, steps)
      state = iterator.get_state()
    return batches, iterator

  def assert_explained(self, iterator, batches):
    for step, batch in enumerate(batches):
      explanation = iterator.explain(step)
      for name, values in explanation.arrays.items():
        np.testing.assert_array_equal(values, batch[name], f"{name} of step {step}")
      self.assertLen(explanation.rows, len(batch["inputs"]))
      self.assertAlmostEqual(sum(row.loss_share for row in explanation.rows), 1.0)
      for row in explanation.rows:
        self.assert_row(row, batch)

  def assert_row(self, row, batch):
    """Checks that the bytes a row names are what the batch has in that row."""
    expected = batch["inputs"][row.row]
    np.testing.assert_array_equal(row.tokens, expected[: row.used])
    trained = batch["targets_segmentation"][row.row] != 0
    self.assertEqual(row.loss_tokens, trained.sum())
    if not row.kept:
      self.assertEqual(row.loss_tokens, 0)
    for part in row.parts:
      if part.first_byte is None:
        continue
      with open(part.file, "rb") as file:
        file.seek(part.first_byte)
        tokens = np.frombuffer(file.read(part.end_byte - part.first_byte), "<u2")
      np.testing.assert_array_equal(tokens, expected[part.column : part.column + part.count])

  @parameterized.named_parameters((name, name) for name in row_sources.SOURCES)
  def test_every_step_of_a_run_with_two_batch_size_changes_is_what_was_fed(self, source):
    sizes = (8, 12, 4)
    batches, last = self.tapped_run(
        source, [({"global_batch_size_to_load": size}, 4) for size in sizes]
    )
    self.assert_explained(last, batches)
    ahead = [last.explain(step) for step in range(12, 14)]
    for explanation, batch in zip(ahead, cases.take(last, 2)):
      for name, values in explanation.arrays.items():
        np.testing.assert_array_equal(values, batch[name], name)

  def test_a_step_is_explained_with_the_filter_and_segments_of_its_time(self):
    changes = [
        ({"olmo_apply_ngram_filter": False}, 8),
        ({"olmo_apply_ngram_filter": True}, 8),
        ({"olmo_document_mask": True, "olmo_eos_id": 0}, 8),
    ]
    batches, last = self.tapped_run("windows", changes)
    self.assert_explained(last, batches)
    self.assertTrue(all(row.kept for step in range(8) for row in last.explain(step).rows))
    self.assertFalse(all(row.kept for step in range(8, 24) for row in last.explain(step).rows))

  def test_a_ramp_up_is_explained(self):
    schedule = {"olmo_batch_schedule": ((0, 4), (3, 8), (5, 12))}
    batches, last = self.tapped_run("windows", [(schedule, 4), (schedule, 6)])
    self.assertEqual([len(last.explain(step).rows) for step in range(6)], [4, 4, 4, 8, 8, 12])
    self.assert_explained(last, batches)

  def test_explaining_does_not_move_the_iterator(self):
    iterator = self.make("windows")
    cases.take(iterator, 2)
    state = iterator.get_state()
    iterator.explain(0)
    iterator.explain(1000)
    self.assertEqual(iterator.get_state(), state)
    expected = cases.take(self.make("windows"), 3)[2]
    np.testing.assert_array_equal(cases.take(iterator, 1)[0]["inputs"], expected["inputs"])

  def test_a_row_has_its_label_position_and_epoch(self):
    iterator = self.make("windows")
    for step in (0, 30):
      for row in iterator.explain(step).rows:
        epoch, number = iterator.stream.locate(np.array([row.position]))
        self.assertEqual((row.epoch, row.number), (epoch[0], number[0]))
        files, offsets = self.index.locate(np.array([row.number]))
        self.assertEqual(row.label, self.index.files[files[0]].label)
        self.assertEqual(row.parts[0].first_byte, offsets[0])
        self.assertEqual(row.parts[0].file, self.index.resolve(int(files[0])))

  def test_documents_are_named_with_what_a_row_has_of_them(self):
    path = documents_lib.default_path(self.index_path)
    documents = documents_lib.build_documents(self.index, path, 0)
    self.addCleanup(os.unlink, path)
    for source in ("windows", "planned", "planned_mixture", "one_document"):
      for row in self.make(source).explain(3).rows:
        for part in row.parts:
          self.assertNotEmpty(part.documents)
          covered = 0
          for span in part.documents:
            number = np.array([span.document])
            start = int(documents.locate(number)[1][0])
            self.assertEqual(span.length, documents.lengths(number)[0])
            self.assertEqual(span.column - part.column, start + span.first - part.first)
            self.assertEqual(span.whole, span.last - span.first + 1 == span.length)
            covered += span.last - span.first + 1
          self.assertEqual(covered, part.count)

  def test_a_step_that_does_not_exist_is_an_error(self):
    iterator = self.make("windows", olmo_num_epochs=1)
    last = len(iterator) - 1
    explanation = iterator.explain(last)
    padding = [row for row in explanation.rows if row.number < 0]
    self.assertNotEmpty(padding)
    self.assertEqual({(row.epoch, row.used, row.parts) for row in padding}, {(-1, 0, ())})
    with self.assertRaisesRegex(errors.OrderError, f"ends with step {last}"):
      iterator.explain(last + 1)
    planned = self.make("planned", olmo_num_epochs=1)
    with self.assertRaisesRegex(errors.OrderError, "Step 5000 is outside .* ends with step"):
      planned.explain(5000)

  def test_steps_before_what_a_state_knows_are_an_error(self):
    iterator = self.make("windows", initial_step=5, olmo_initial_position=33)
    with self.assertRaisesRegex(errors.OrderError, "Step 4 lies before step 5"):
      iterator.explain(4)
    self.assertEqual(iterator.explain(5).position, 33)

  def test_an_explanation_is_json(self):
    explanation = self.make("planned").explain(2)
    values = json.loads(json.dumps(explanation.to_json()))
    self.assertEqual(values["step"], 2)
    self.assertLen(values["rows"], 8)
    self.assertEqual(values["rows"][3]["parts"][0]["count"], explanation.rows[3].parts[0].count)
    self.assertNotIn("tokens", values["rows"][3])


if __name__ == "__main__":
  absltest.main()
