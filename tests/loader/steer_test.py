"""Tests of what steers a run: exclusions and skips."""

import gzip
import json
import pathlib
from typing import ClassVar

import jax
import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from tests import corpora
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
    self.check(values, lines, excluded)

  @parameterized.named_parameters(
      ("windows", {"olmo_document_mask": True, "olmo_eos_id": 0}),
      ("planned", _DOCUMENTS),
  )
  def test_documents_are_excluded_by_number_name_and_hash(self, values):
    directory = self.create_tempdir().full_path
    path, _ = corpora.write_corpus(directory)
    index = maxtext_olmo.load_index(path)
    boundaries = pathlib.Path(index.resolve(1)).with_suffix(".csv.gz")
    lines = "0,20,a,s,1\n20,90,b,s,2\n90,100,c,s,3\n100,150,b,s,4\n"
    boundaries.write_bytes(gzip.compress(lines.encode()))
    documents = maxtext_olmo.build_documents(index, path + ".documents", 0, hashes=True)
    # The last document of the first file by its hash, the second of it by its number.
    last = int(documents.file_offsets[1]) - 1
    start, length = (int(array[0]) for array in self.span(documents, last))
    data = np.fromfile(index.resolve(0), np.uint16)[start : start + length].tobytes()
    excluded = {(1, token) for token in (*range(20, 90), *range(100, 150))}
    for number in (1, *documents.find_hashes([xxhash.xxh3_128_hexdigest(data)])[0].tolist()):
      first, count = (int(array[0]) for array in self.span(documents, number))
      file = int(documents.locate(np.array([number]))[0][0])
      excluded |= {(file, first + token) for token in range(count)}
    self.assertIn((0, start), excluded)
    lines = [{"document": 1}, {"document": "b"}, {"hash": xxhash.xxh3_128_hexdigest(data)}]
    self.check({**values, "olmo_index_path": path}, lines, excluded)

  def span(self, documents, number):
    numbers = np.array([number])
    return documents.locate(numbers)[1], documents.lengths(numbers)

  def check(self, values, lines, excluded):
    """Compares each target of a run with a list of exclusions with that of a run without one."""
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

  def test_steps_before_an_exclusion_are_explained_without_it(self):
    train = self.train()
    fed = cases.take(train, 3)
    path = self.write({"label": "label-1"})
    steered = self.train(olmo_exclude=path)
    steered.set_state(train.get_state())
    fed += cases.take(steered, 3)
    for step, batch in enumerate(fed):
      found = steered.explain(step).arrays
      for name, array in batch.items():
        np.testing.assert_array_equal(found[name], array, err_msg=f"{name} of step {step}")
    plain = self.train()
    plain.set_state(steered.get_state())
    with self.assertRaisesRegex(errors.OrderError, "exclusions .* was in force at that step"):
      plain.explain(4)

  def test_what_cannot_be_excluded_is_a_config_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "has no label 'wiki'"):
      self.train(olmo_exclude=self.write({"label": "wiki"}))
    with self.assertRaisesRegex(errors.ConfigError, "olmo_exclude=.* does not exist"):
      self.train(olmo_exclude="/nowhere")
    with self.assertRaisesRegex(errors.ConfigError, "olmo_exclude=.* needs rows that are address"):
      self.train(**_DOCUMENTS, olmo_packing="best_fit", olmo_exclude=self.write())


class SkipTest(cases.LoaderCase):

  axes: ClassVar[dict[str, int]] = {"data": 2}

  def row_numbers(self, iterator, count):
    """Returns the rows of the next steps."""
    found = []
    for _ in range(count):
      found.append(iterator.row_numbers(iterator.step).tolist())
      cases.take(iterator, 1)
    return found

  @parameterized.named_parameters(
      ("windows", {}),
      ("mixture", {"olmo_mixture": {"label-0": 2.0, "label-1": 0.5}}),
      ("planned", _DOCUMENTS),
      ("one_document", {**_DOCUMENTS, **_ONE_PER_ROW}),
  )
  def test_skipped_steps_are_skipped_and_nothing_repeats(self, values):
    plain = self.train(**values)
    expected = cases.take(plain, 16)
    steered = self.train(**values, olmo_skip=((3, 5), (9, 10)))
    got = cases.take(steered, 13)
    self.assert_equal_batches(got, expected[:3] + expected[5:9] + expected[10:16])
    self.assertEqual((steered.step, steered.position), (13, 64))
    status = steered.describe()
    self.assertEqual((status.skipped, status.tokens), (12, 52 * steered.stream.sequence_length))

  def test_a_batch_of_another_size_takes_the_samples_around_the_skip(self):
    plain = np.concatenate(cases.take_inputs(self.train(), 12))
    steered = self.train(
        global_batch_size_to_load=6, olmo_skip=((10, 20),), olmo_skip_unit="samples"
    )
    got = np.concatenate(cases.take_inputs(steered, 5))
    np.testing.assert_array_equal(got, np.concatenate([plain[:10], plain[20:40]]))
    self.assertEqual(steered.position, 40)

  def test_steps_that_the_run_logged_can_be_skipped_from_an_earlier_checkpoint(self):
    plain = self.train()
    expected = cases.take(plain, 5)
    state = json.loads(json.dumps(plain.get_state()))
    expected += cases.take(plain, 15)
    values = {"olmo_skip": ((9, 12),)}
    steered = self.train(**values)
    steered.set_state(state)
    got = cases.take(steered, 5)
    middle = json.loads(json.dumps(steered.get_state()))
    got += cases.take(steered, 4)
    self.assert_equal_batches(got, expected[5:9] + expected[12:17])
    for resumed in (self.train(**values), self.train()):  # What has been skipped stays skipped.
      resumed.set_state(middle)
      self.assertEqual((resumed.step, resumed.position), (10, 52))
      self.assert_equal_batches(cases.take(resumed, 4), got[5:])
      skips = resumed.get_state()["history"][-1]["skips"]
      self.assertEqual(skips, [["steps 9:12", 36, 48, "drop"]])

  def test_the_history_locates_steps_before_and_after_a_skip_and_a_change_of_batch_size(self):
    first = self.train()
    rows = self.row_numbers(first, 4)
    second = self.train(global_batch_size_to_load=8, olmo_skip=((6, 7),))
    second.set_state(first.get_state())
    rows += self.row_numbers(second, 6)
    third = self.train(global_batch_size_to_load=2, olmo_skip=((6, 7), (12, 14)))
    third.set_state(second.get_state())
    rows += self.row_numbers(third, 6)
    seen = [row for batch in rows for row in batch]
    everything = self.train().stream.instance_ids(np.arange(80)).tolist()
    # 4 steps of 4, then step 6 of 8 and steps 12 and 13 of 2 are skipped.
    expected = everything[:32] + everything[40:76] + everything[80:]
    self.assertEqual(seen[: len(expected)], expected[: len(seen)])
    self.assertLen(set(seen), len(seen))
    history = third.history
    for step, batch in enumerate(rows):
      entry = history.at(step)
      starts, sizes = entry.schedule.block(step, 1)
      positions = entry.schedule.skips.positions(starts[0] + np.arange(sizes[0]))
      self.assertEqual(third.stream.instance_ids(positions).tolist(), batch)

  @parameterized.parameters("drop", "mask")
  def test_every_step_is_explained_as_it_was_delivered(self, mode):
    first = self.train()
    fed = cases.take(first, 4)
    values = {"olmo_skip": ((21, 34),), "olmo_skip_unit": "samples", "olmo_skip_mode": mode}
    second = self.train(**values, global_batch_size_to_load=6)
    second.set_state(first.get_state())
    fed += cases.take(second, 6)
    for step, batch in enumerate(fed):
      found = second.explain(step)
      for name, array in batch.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=f"{name} of step {step}")
      rows = [row.position for row in found.rows]
      expected = second.stream.instance_ids(np.array(rows)).tolist()
      self.assertEqual([row.number for row in found.rows], expected)
      for row in found.rows:
        self.assertEqual(second.history.steps_at(row.position), [step])
    if mode == "drop":
      self.assertEqual([second.history.steps_at(position) for position in (21, 33)], [[], []])

  def test_a_range_that_was_passed_is_a_resume_error(self):
    plain = self.train()
    cases.take(plain, 5)
    state = plain.get_state()
    steered = self.train(olmo_skip=((3, 6),))
    with self.assertRaisesRegex(errors.ResumeError, "steps 3:6 begins at position 12, .* passed"):
      steered.set_state(state)
    steered = self.train(olmo_skip=((19, 30),), olmo_skip_unit="samples")
    with self.assertRaisesRegex(errors.ResumeError, "samples 19:30 begins at position 19"):
      steered.set_state(state)

  def test_a_skip_that_has_not_begun_can_be_taken_back(self):
    steered = self.train(olmo_skip=((6, 8),))
    cases.take(steered, 3)
    plain = self.train()
    plain.set_state(steered.get_state())
    expected = cases.take(self.train(), 9)
    self.assert_equal_batches(cases.take(plain, 6), expected[3:])
    self.assertNotIn("skips", plain.get_state()["history"][-1])

  def test_masked_steps_come_without_loss(self):
    expected = cases.take(self.train(), 8)
    for batch in expected[3:5]:
      batch["targets_segmentation"] = np.zeros_like(batch["targets_segmentation"])
    steered = self.train(olmo_skip=((3, 5),), olmo_skip_mode="mask")
    self.assert_equal_batches(cases.take(steered, 4), expected[:4])
    resumed = self.train(olmo_skip=((3, 5),), olmo_skip_mode="mask")
    resumed.set_state(steered.get_state())
    self.assert_equal_batches(cases.take(resumed, 4), expected[4:])

  def test_an_order_that_drops_tails_counts_batches_from_the_skip(self):
    directory = self.create_tempdir().full_path
    values = {"olmo_order": "olmo_core", "olmo_order_cache_dir": directory}
    plain = self.train(**values)  # 123 instances: 30 batches of 4, a tail of 3.
    rows = self.row_numbers(plain, 40)
    steered = self.train(**values, olmo_skip=((5, 7),), olmo_skip_unit="samples")
    got = self.row_numbers(steered, 38)
    epoch = [row for batch in rows[:30] for row in batch]
    rest = set(range(123)) - set(epoch)
    kept = epoch[:5] + epoch[7:]
    self.assertEqual([row for batch in got[:29] for row in batch], kept[:116])
    # 121 are left of the epoch: 30 batches again, with two instances of the tail.
    self.assertEqual([row for row in got[29] if row in kept], kept[116:])
    self.assertLen(set(got[29]) & rest, 2)
    self.assertEqual(got[30:], rows[30:38])

  @parameterized.parameters(((3, 3),), ((5, 2),), ((-1, 2),), ((0, 2**70),))
  def test_a_range_without_steps_is_a_config_error(self, pair):
    with self.assertRaisesRegex(errors.ConfigError, "olmo_skip(: a range must|=.* should be)"):
      self.train(olmo_skip=(pair,))


if __name__ == "__main__":
  absltest.main()
