"""Tests of the stages of a run over documents."""

import collections
import copy
import pathlib
from typing import Any

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.inspection import search
from maxtext_olmo.inspection import visits
from tests import corpora
from tests.loader import cases

# Grain's workers.
STARTS_PROCESSES = True

_A = {"label-0": 1.0, "label-1": 1.0}
_B = {"label-0": 3.0, "label-1": 1.0}
_UNIT = {"olmo_mixture_unit": "weights"}
_PACKINGS = ({"olmo_packing": "planned"}, {"olmo_packing": "none"})
_STEPS = 30


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 2)
  cases.compile_fast()


class DocumentStagesTest(cases.DocumentsCase):

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    base = maxtext_olmo.load_index(self.index_path)
    corpora.write_tokens(directory / "new.npy", 900, seed=9)
    # Shares a file with the first index, under another number.
    entries = [(str(directory / "new.npy"), "new"), (base.resolve(0), base.files[0].label)]
    other = index_lib.build_index(
        entries, 32, tokenizer="test", dtype="uint16", base=str(directory)
    )
    self.other_path = str(directory / "other.json")
    other.save(self.other_path)
    self.other = other
    self.stages = (
        {"from_step": 6, "data_shuffle_seed": 3},
        {"from_step": 11, "olmo_index_path": self.other_path},
        {"from_step": 17, "olmo_mixture": _A, **_UNIT},
        {"from_tokens": 23 * 4 * 32, "olmo_mixture": _B, **_UNIT},
    )

  def staged(self, **values: Any) -> Any:
    defaults = {"olmo_stages": self.stages, "olmo_long_documents": "truncate"}
    return self.train(**{**defaults, **values})

  @parameterized.parameters(*_PACKINGS)
  def test_each_stage_has_the_rows_that_it_has_alone(self, **packing):
    fed = cases.take(self.staged(**packing), _STEPS)
    alone = {"olmo_stages": (), **packing}
    for first, end, values in (
        (0, 6, {}),
        (6, 11, {"data_shuffle_seed": 3}),
        (11, 17, {"olmo_index_path": self.other_path}),
        (17, 23, {"olmo_mixture": _A, **_UNIT}),
    ):
      expected = cases.take(self.staged(**alone, **values), end - first)
      self.assert_equal_batches(fed[first:end], expected)

  @parameterized.parameters(*_PACKINGS)
  def test_batches_do_not_depend_on_workers(self, **packing):
    expected = cases.take(self.staged(**packing), _STEPS)
    workers = self.staged(**packing, grain_worker_count=2)
    self.assert_equal_batches(cases.take(workers, _STEPS), expected)

  @parameterized.parameters(*_PACKINGS)
  def test_a_run_resumes_at_every_step_as_if_it_had_not_stopped(self, **packing):
    values = {
        **packing,
        "olmo_batch_schedule": ((0, 4), (3, 6), (12, 2)),
        "olmo_skip": ((7, 8), (13, 15)),
    }
    whole = self.staged(**values)
    fed, states = [], []
    for _ in range(_STEPS):
      states.append(whole.get_state())
      fed += cases.take(whole, 1)
    for step in (0, 5, 6, 7, 10, 11, 12, 16, 17, 18, 22, 25):
      resumed = self.staged(**values)
      resumed.set_state(states[step])
      self.assert_equal_batches(cases.take(resumed, 4), fed[step : step + 4])

  @parameterized.parameters(*_PACKINGS)
  def test_every_step_is_explained_as_it_was_fed(self, **packing):
    train = self.staged(**packing)
    for step, batch in enumerate(cases.take(train, _STEPS)):
      explained = train.explain(step)
      for name, array in batch.items():
        np.testing.assert_array_equal(explained.arrays[name], array, err_msg=f"{name}, {step}")
      for row in explained.rows:
        self.assertEqual(row.stage, sum(step >= first for first in (6, 11, 17, 23)))
        for part in row.parts:
          tokens = np.fromfile(part.file, "<u2")[part.first : part.first + part.count]
          np.testing.assert_array_equal(tokens, row.tokens[part.column :][: part.count])
          self.assertNotEmpty(part.documents)

  @parameterized.parameters(*_PACKINGS)
  def test_a_range_of_tokens_is_found_at_every_step_that_was_fed_it(self, **packing):
    train = self.staged(**packing)
    paths = list(train.files.paths)
    for path in (paths[0], paths[3], self.other.resolve(0)):
      target = search.TokenRange(paths.index(path), 150, 40)
      expected = collections.Counter()
      for step in range(_STEPS):
        for row in train.explain(step).rows:
          for part in row.parts:
            tokens = min(part.first + part.count, 190) - max(part.first, 150)
            if part.file == path and tokens > 0:
              expected[step, row.row, row.stage] += tokens
      found = visits.find_visits(train, target, _STEPS).visits
      self.assertEqual({(v.step, v.row, v.stage): v.tokens for v in found}, dict(expected))
      self.assertNotEmpty(found)

  @parameterized.parameters(*_PACKINGS)
  def test_labels_continue_where_they_were(self, **packing):
    values = {"olmo_mixture": _A, **_UNIT, **packing}
    change = ({"from_step": 5, "olmo_mixture": _B}, {"from_step": 9, "olmo_mixture": _A})
    rows = collections.defaultdict(list)
    train = self.staged(**values, olmo_stages=change)
    for step in range(20):
      for row in train.explain(step).rows:
        rows[row.label].append(row.tokens.tolist())
    for label, found in rows.items():
      alone = self.staged(**{**values, "olmo_mixture": {label: 1.0}}, olmo_stages=())
      expected = [r.tokens.tolist() for s in range(20) for r in alone.explain(s).rows]
      self.assertEqual(found, expected[: len(found)])

  def test_another_mixture_takes_effect_at_the_restart(self):
    values = {"olmo_mixture": _A, **_UNIT, "olmo_stages": ()}
    train = self.staged(**values)
    before = cases.take(train, 6)
    changed = self.staged(**{**values, "olmo_mixture": _B}, olmo_allow_mixture_change=True)
    changed.set_state(train.get_state())
    stages = ({"from_step": 6, "olmo_mixture": _B},)
    expected = self.staged(**{**values, "olmo_stages": stages})
    self.assert_equal_batches([*before, *cases.take(changed, 8)], cases.take(expected, 14))
    refused = self.staged(**{**values, "olmo_mixture": _B})
    with self.assertRaisesRegex(errors.ResumeError, "olmo_allow_mixture_change"):
      refused.set_state(train.get_state())

  def test_a_state_of_a_run_that_had_no_stages_gets_stages(self):
    plain = self.staged(olmo_stages=())
    fed = cases.take(plain, 6)
    state = plain.get_state()
    self.assertNotIn("stages", state["history"][0])
    train = self.staged()
    train.set_state(state)
    self.assert_equal_batches([*fed, *cases.take(train, 10)], cases.take(self.staged(), 16))

  def test_the_last_stage_has_the_epochs(self):
    train = self.staged(olmo_stages=self.stages[:2], olmo_num_epochs=1, olmo_packing="none")
    rows = sum((np.asarray(b["inputs_segmentation"]).any(axis=1)).sum() for b in train)
    documents = documents_lib.load_documents(f"{self.other_path}.documents", self.other)
    lengths = documents.lengths(np.arange(documents.num_documents))
    self.assertEqual(rows, 44 + np.count_nonzero(lengths))

  def test_other_documents_of_a_stage_are_refused(self):
    train = self.staged()
    cases.take(train, 13)
    state = copy.deepcopy(train.get_state())
    for entry in state["history"]:
      entry["stages"][2]["documents"] = "xxh3:0"
    with self.assertRaisesRegex(errors.ResumeError, "the document index: 'xxh3:0' then"):
      self.staged().set_state(state)

  @parameterized.parameters(
      ({"leave_out_seen": True, "data_shuffle_seed": 1}, {}, "leave_out_seen needs dataset_type"),
      ({"olmo_order": "olmo_core"}, {}, "needs feistel or sequential"),
      ({"olmo_mixture": _A}, {"olmo_num_epochs": 1}, "has no end"),
      ({"data_shuffle_seed": 1}, {"olmo_packing": "first_fit"}, "addressed by position"),
      ({"olmo_mixture": {"nothing": 1.0}}, {}, "stage 1: .*nothing"),
  )
  def test_impossible_stages_are_refused(self, stage, values, message):
    with self.assertRaisesRegex(errors.ConfigError, message):
      self.staged(olmo_stages=({"from_step": 5, **stage},), **values)

  @parameterized.parameters(*_PACKINGS)
  def test_a_plan_counts_the_tokens_that_the_steps_have(self, **packing):
    values = {"olmo_stages": self.stages[:2], "olmo_long_documents": "truncate", **packing}
    train = self.train(**values)
    expected = collections.Counter()
    for step in range(_STEPS):
      for row in train.explain(step).rows:
        for part in row.parts:
          expected[part.label] += part.count
    run = run_lib.run_of_config("config.py", self.config(**values).to_dict())
    with run_plan.open_plan(run, _STEPS) as plan:
      found = plan.count_sources()
      changes = plan.find_changes()
    self.assertEqual(dict(zip(found.labels, found.tokens.sum(axis=0).tolist())), dict(expected))
    self.assertTrue(found.exact)
    self.assertEqual([change.step for change in changes], [6, 11])
    # A mixture counts in rows.
    run = run_lib.run_of_config(
        "config.py", self.config(**{**values, "olmo_stages": self.stages}).to_dict()
    )
    with run_plan.open_plan(run, _STEPS) as plan:
      found = plan.count_sources()
    shares = dict(zip(found.labels, found.tokens[-7:].sum(axis=0) / found.tokens[-7:].sum()))
    self.assertAlmostEqual(shares["label-0"], 0.75, delta=0.1)


if __name__ == "__main__":
  absltest.main()
