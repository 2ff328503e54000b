"""Tests of stages, and of a mixture that changes at a restart."""

import copy
import dataclasses
import pathlib
import shutil
from typing import Any, ClassVar

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import windows
from tests import corpora
from tests.loader import cases

STARTS_PROCESSES = True

_A = {"label-0": 1.0, "label-1": 1.0}
_B = {"label-0": 3.0, "label-1": 1.0}
_C = {"label-0": 1.0}
_MIXED = {"olmo_mixture": _A, "olmo_mixture_unit": "weights"}
# Of mixtures, orders and seeds, with what was seen left out and not.
_STAGES = (
    {"from_step": 5, "olmo_mixture": _B},
    {"from_step": 9, "olmo_mixture": {}, "leave_out_seen": True},
    {"from_tokens": 14 * 32, "data_shuffle_seed": 3, "olmo_mixture": _C},
)


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 2)
  cases.compile_fast()


def numbers(iterator, first, end):
  """Returns the rows of some steps, without reading them."""
  return [iterator.row_numbers(step).tolist() for step in range(first, end)]


class StagesTest(cases.LoaderCase):

  axes: ClassVar[dict[str, int]] = {"data": 2}

  def setUp(self):
    super().setUp()
    self.cache = self.create_tempdir().full_path

  def staged(self, **values: Any) -> Any:
    return self.train(
        **{**_MIXED, "olmo_stages": _STAGES, "olmo_order_cache_dir": self.cache, **values}
    )

  def test_a_stage_is_in_force_from_its_step_on(self):
    plain, staged = self.train(**_MIXED), self.staged()
    self.assertEqual(numbers(plain, 0, 5), numbers(staged, 0, 5))
    self.assertNotEqual(numbers(plain, 5, 9), numbers(staged, 5, 9))
    index = maxtext_olmo.load_index(self.index_path)
    labels = [
        index.files[index.locate(np.array([row]))[0][0]].label
        for rows in numbers(staged, 5, 9)
        for row in rows
    ]
    self.assertEqual(labels.count("label-0"), 12)

  @parameterized.parameters(0, 1)
  def test_batches_do_not_depend_on_workers(self, held_out):
    values = {"olmo_eval_instances": 8 * held_out}
    expected = cases.take(self.staged(**values), 20)
    self.assert_equal_batches(cases.take(self.staged(**values, grain_worker_count=2), 20), expected)

  def test_a_run_resumes_at_every_step_as_if_it_had_not_stopped(self):
    values = {
        "olmo_batch_schedule": ((0, 4), (3, 6), (12, 2)),
        "olmo_skip": ((7, 8), (11, 12)),
    }
    whole = self.staged(**values)
    states, fed = [whole.get_state()], []
    for _ in range(22):
      fed += cases.take(whole, 1)
      states.append(whole.get_state())
    for step, state in enumerate(states):
      resumed = self.staged(**values)
      resumed.set_state(state)
      self.assert_equal_batches(
          cases.take(resumed, 3), [*fed, *cases.take(whole, 3)][step : step + 3]
      )
      whole.set_state(states[-1])

  def test_every_step_is_explained_as_it_was_fed(self):
    train = self.staged()
    fed = cases.take(train, 22)
    for step, batch in enumerate(fed):
      found = train.explain(step)
      for name, array in batch.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=f"{name}, {step}")

  def test_nothing_that_was_seen_comes_again_before_the_corpus_ends(self):
    train = self.staged(olmo_stages=_STAGES[:2], olmo_eval_instances=8)
    count = train.stream.corpora.split(train.stream.index(0)).num_train
    rows = train.stream.locate(np.arange(count))[1]
    self.assertLen(set(rows.tolist()), count)

  def test_the_held_out_part_is_the_same_in_all_stages(self):
    train, evaluation = self.make(
        **_MIXED,
        olmo_stages=_STAGES,
        olmo_order_cache_dir=self.cache,
        olmo_eval_instances=12,
        eval_interval=1,
        global_batch_size_to_load_eval=4,
    )
    held_out = {row for step in range(3) for row in evaluation.row_numbers(step).tolist()}
    self.assertLen(held_out, 12)
    rows = train.stream.locate(np.arange(600))[1]
    self.assertFalse(held_out & set(rows.tolist()))

  def test_the_last_stage_has_the_epochs(self):
    train = self.staged(olmo_stages=_STAGES[:2], olmo_num_epochs=2)
    seen = 36 + (123 - 36) + 123
    steps = sum(1 for _ in train)
    self.assertEqual(steps, -(-seen // 4))

  def test_stages_and_skips_count_from_where_a_run_without_a_past_begins(self):
    values = {
        "olmo_stages": ({"from_step": 12, "data_shuffle_seed": 3},),
        "olmo_skip": ((11, 12),),
    }
    moved = self.staged(**values)
    moved.go_to(10, 8, keep_history=False)
    begun = self.staged(**values, initial_step=10, olmo_initial_position=8)
    self.assertEqual(moved.get_state(), begun.get_state())
    self.assertEqual(numbers(moved, 10, 16), numbers(begun, 10, 16))
    self.assertEqual(moved.stream.number_at(moved.history.present.schedule.start(12)), 1)

  def test_stages_ahead_may_be_changed(self):
    train = self.staged()
    cases.take(train, 7)
    other = self.staged(olmo_stages=(_STAGES[0], {"from_step": 8, "olmo_mixture": _C}))
    other.set_state(train.get_state())
    plain = self.staged(olmo_stages=(_STAGES[0],))
    self.assertEqual(numbers(other, 7, 8), numbers(plain, 7, 8))
    self.assertNotEqual(numbers(other, 8, 10), numbers(plain, 8, 10))
    cases.take(other, 3)
    # Back before the change, the first plan holds again.
    train.set_state(train.get_state())
    self.assertEqual(numbers(other, 7, 8), numbers(train, 7, 8))

  def test_a_stage_may_begin_where_a_run_resumes(self):
    train = self.train(**_MIXED)
    cases.take(train, 4)
    annealed = self.train(**_MIXED, olmo_stages=({"from_step": 4, "olmo_mixture": _C},))
    annealed.set_state(train.get_state())
    whole = self.train(**_MIXED, olmo_stages=({"from_step": 4, "olmo_mixture": _C},))
    self.assertEqual(numbers(annealed, 4, 12), numbers(whole, 4, 12))

  def test_a_stage_that_the_run_has_passed_is_refused(self):
    train = self.train(**_MIXED)
    cases.take(train, 4)
    for stage in ({"from_step": 3}, {"from_tokens": 96}):
      late = self.train(**_MIXED, olmo_stages=({**stage, "olmo_mixture": _C},))
      with self.assertRaisesRegex(errors.ResumeError, "has reached step 4 without it. Resume from"):
        late.set_state(train.get_state())

  def test_a_stage_that_the_run_has_passed_is_refused_where_a_schedule_begins(self):
    train = self.train(**_MIXED)
    cases.take(train, 4)
    # The state of a restart that changes the batch size is at the anchor of its schedule.
    larger = {**_MIXED, "global_batch_size_to_load": 6}
    restarted = self.train(**larger)
    restarted.set_state(train.get_state())
    for state in (
        restarted.get_state(),
        self.train(**larger, initial_step=4, olmo_initial_position=16).get_state(),
    ):
      for tokens in (1, 32, 96):
        late = self.train(**larger, olmo_stages=({"from_tokens": tokens, "olmo_mixture": _C},))
        with self.assertRaisesRegex(errors.ResumeError, "has reached step 4 without it"):
          late.set_state(state)
    expected = self.train(**larger, olmo_stages=({"from_step": 4, "olmo_mixture": _C},))
    expected.set_state(restarted.get_state())
    for tokens in (97, 128):
      stages = ({"from_tokens": tokens, "olmo_mixture": _C},)
      begun = self.train(**larger, olmo_stages=stages)
      begun.set_state(restarted.get_state())
      self.assertEqual(numbers(begun, 4, 9), numbers(expected, 4, 9))
      again = self.train(**larger, olmo_stages=stages)
      again.set_state(begun.get_state())
      self.assertEqual(numbers(again, 4, 9), numbers(expected, 4, 9))

  def test_the_stage_in_force_must_be_the_same(self):
    train = self.staged()
    cases.take(train, 7)
    state = train.get_state()
    changed = ({"from_step": 5, "olmo_mixture": {"label-0": 2.0, "label-1": 1.0}}, *_STAGES[1:])
    with self.assertRaisesRegex(errors.ResumeError, "the stage from step 5 on.*\n.*olmo_mixture"):
      self.staged(olmo_stages=changed).set_state(state)
    with self.assertRaisesRegex(errors.ResumeError, "the stage from step 5 on.*\n.*olmo_mixture"):
      self.train(**_MIXED).set_state(state)

  def test_steps_of_other_stages_are_not_explained(self):
    train = self.staged()
    cases.take(train, 7)
    other = self.staged(olmo_stages=({"from_step": 6, "olmo_mixture": _C},))
    with self.assertRaisesRegex(errors.ResumeError, "this run has reached step 7 without it"):
      other.set_state(train.get_state())

  def test_damaged_stages_are_resume_errors(self):
    train = self.staged()
    cases.take(train, 16)
    state = train.get_state()
    resumed = self.staged()
    bad = (None, -1, 2**70, 1.5, "x", "", [], {}, True, 0, [1], {"a": 1}, 13, {"label-0": 1e300})
    for number, stage in enumerate(state["history"][0]["stages"]):
      for name in stage:
        for value in bad:
          if name == "index_path" or (name, value) == ("request", ""):
            continue
          spoiled = copy.deepcopy(state)
          spoiled["history"][0]["stages"][number][name] = value
          try:
            resumed.set_state(spoiled)
          except errors.ResumeError:
            continue
          self.assertEqual(resumed.position, train.position)
          self.assertEqual(numbers(resumed, 16, 18), numbers(train, 16, 18))


class MixtureChangeTest(cases.LoaderCase):

  def test_another_mixture_takes_effect_at_the_restart(self):
    train = self.train(**_MIXED)
    fed = cases.take(train, 5)
    with self.assertRaisesRegex(errors.ResumeError, "olmo_allow_mixture_change"):
      self.train(olmo_mixture=_B, olmo_mixture_unit="weights").set_state(train.get_state())
    changed = self.train(
        olmo_mixture=_B, olmo_mixture_unit="weights", olmo_allow_mixture_change=True
    )
    changed.set_state(train.get_state())
    staged = self.train(**_MIXED, olmo_stages=({"from_step": 5, "olmo_mixture": _B},))
    self.assertEqual(numbers(changed, 5, 20), numbers(staged, 5, 20))
    fed += cases.take(changed, 5)
    # The next restart needs no permission, and knows both mixtures.
    again = self.train(olmo_mixture=_B, olmo_mixture_unit="weights")
    again.set_state(changed.get_state())
    for step, batch in enumerate(fed):
      found = again.explain(step).arrays
      for name, array in batch.items():
        np.testing.assert_array_equal(found[name], array, err_msg=f"{name} of step {step}")
    self.assertEqual(again.get_state(), changed.get_state())

  def test_a_change_is_undone_by_an_earlier_checkpoint(self):
    train = self.train(**_MIXED)
    cases.take(train, 5)
    state = train.get_state()
    changed = self.train(
        olmo_mixture=_B, olmo_mixture_unit="weights", olmo_allow_mixture_change=True
    )
    changed.set_state(state)
    cases.take(changed, 3)
    back = self.train(**_MIXED)
    back.set_state(state)
    self.assertEqual(numbers(back, 5, 12), numbers(train, 5, 12))
    # A trainer that knows only the step goes back in the same iterator.
    changed.go_to(3)
    later = self.train(**_MIXED, olmo_stages=({"from_step": 3, "olmo_mixture": _B},))
    self.assertEqual(numbers(changed, 3, 12), numbers(later, 3, 12))

  def test_labels_continue_where_they_were(self):
    values = {"olmo_mixture_unit": "weights", "olmo_allow_mixture_change": True}
    mixtures = [_A, _B, _C, {"label-1": 1.0}, _A, _B]
    state, rows = None, []
    for mixture in mixtures:
      train = self.train(olmo_mixture=mixture, **values)
      if state is not None:
        train.set_state(state)
      for _ in range(7):
        rows += train.row_numbers(train.step).tolist()
        cases.take(train, 1)
      state = train.get_state()
    for label in ("label-0", "label-1"):
      alone = self.train(olmo_mixture={label: 1.0}, olmo_mixture_unit="weights")
      index = maxtext_olmo.load_index(self.index_path)
      files = index.locate(np.array(rows))[0]
      mine = [row for row, file in zip(rows, files) if index.files[file].label == label]
      self.assertGreater(len(mine), 50)
      self.assertEqual(mine, alone.stream.locate(np.arange(len(mine)))[1].tolist())

  @parameterized.product(allow=(False, True), staged=(False, True))
  def test_a_run_without_a_mixture_gets_one_in_a_stage(self, allow, staged):
    stages = ({"from_step": 9, "data_shuffle_seed": 3, "olmo_mixture": {}},) if staged else ()
    plain = self.train(olmo_stages=stages)
    cases.take(plain, 5)
    message = (
        r"no mixture so far.* olmo_allow_mixture_change does not apply.* olmo_stages="
        r"\({'from_step': 5, 'olmo_mixture': {'label-0': 3.0, 'label-1': 1.0}},\)$"
    )
    values = {"olmo_mixture_unit": "weights", "olmo_allow_mixture_change": allow}
    with self.assertRaisesRegex(errors.ResumeError, message):
      self.train(**values, olmo_mixture=_B, olmo_stages=stages).set_state(plain.get_state())
    mixed = self.train(**values, olmo_stages=({"from_step": 5, "olmo_mixture": _B},))
    mixed.set_state(plain.get_state())
    cases.take(mixed, 2)
    if not staged:
      # The other way round, the key does not apply either.
      mixed = self.train(**_MIXED)
      cases.take(mixed, 5)
      with self.assertRaisesRegex(errors.ResumeError, r"'from_step': 5, …},\)\.$"):
        self.train(**values).set_state(mixed.get_state())


class OlmoCoreStagesTest(cases.LoaderCase):

  def setUp(self):
    super().setUp()
    self.values = {"olmo_order_cache_dir": self.create_tempdir().full_path}

  def test_an_order_that_drops_tails_counts_from_its_beginning(self):
    stage = {"from_step": 7, "olmo_order": "olmo_core", "data_shuffle_seed": 5}
    staged = self.train(**self.values, olmo_stages=(stage,))
    alone = self.train(**self.values, olmo_order="olmo_core", data_shuffle_seed=5)
    self.assertEqual(numbers(staged, 7, 107), numbers(alone, 0, 100))
    plain = self.train(**self.values)
    self.assertEqual(numbers(staged, 0, 7), numbers(plain, 0, 7))

  def test_a_stage_after_it_spans_epochs_again(self):
    stage = {"from_step": 43, "olmo_order": "feistel"}
    staged = self.train(**self.values, olmo_order="olmo_core", olmo_stages=(stage,))
    alone = self.train(**self.values)
    self.assertEqual(numbers(staged, 43, 143), numbers(alone, 0, 100))
    resumed = self.train(**self.values, olmo_order="olmo_core", olmo_stages=(stage,))
    fed = cases.take(staged, 50)
    for step in (29, 30, 31, 42, 43, 44):
      state = self.train(
          **self.values, olmo_order="olmo_core", olmo_stages=(stage,), initial_step=step
      ).get_state()
      resumed.set_state(state)
      self.assert_equal_batches(cases.take(resumed, 5), fed[step : step + 5])


class ChunkStagesTest(cases.LoaderCase):

  corpus: ClassVar[dict[str, Any]] = {"max_target_sequence_length": 32}

  def test_the_rest_of_a_chunk_comes_first(self):
    values = {
        "global_batch_size_to_load": 3,
        "olmo_order_cache_dir": self.create_tempdir().full_path,
    }
    stage = {"from_step": 5, "data_shuffle_seed": 2, "leave_out_seen": True}
    staged = self.train(**values, olmo_stages=(stage,), olmo_eval_instances=8)
    plain = self.train(**values, olmo_eval_instances=8)
    self.assertEqual(
        staged.stream.locate(np.arange(16))[1].tolist(),
        plain.stream.locate(np.arange(16))[1].tolist(),
    )
    self.assertEqual(staged.stream.stages[1].position, 16)
    count = plain.stream.split.num_train
    rows = staged.stream.locate(np.arange(count))[1]
    self.assertLen(set(rows.tolist()), count)

  def test_a_run_resumes_while_the_rest_of_a_chunk_comes_first(self):
    values = {
        "global_batch_size_to_load": 2,
        "olmo_order_cache_dir": self.create_tempdir().full_path,
        "olmo_stages": ({"from_step": 5, "data_shuffle_seed": 2, "leave_out_seen": True},),
    }
    whole = self.train(**values, olmo_mixture=_A, olmo_mixture_unit="weights")
    self.assertEqual(whole.stream.stages[1].position, 12)
    states, fed = [whole.get_state()], []
    for _ in range(10):
      fed += cases.take(whole, 1)
      states.append(whole.get_state())
    for step, state in enumerate(states[:8]):
      resumed = self.train(**values, olmo_mixture=_A, olmo_mixture_unit="weights")
      resumed.set_state(state)
      self.assert_equal_batches(cases.take(resumed, 2), fed[step : step + 2])

  def test_the_sequence_length_may_change_in_a_run_with_stages(self):
    stages = (
        {"from_step": 6, "olmo_mixture": _B},
        {"from_step": 20, "olmo_mixture": _C},
    )
    short = self.train(**_MIXED, olmo_stages=stages, max_target_length=8)
    cases.take(short, 8)
    long = self.train(
        **_MIXED, olmo_stages=stages, max_target_length=16, global_batch_size_to_load=2
    )
    long.set_state(short.get_state())
    tokens = [
        np.concatenate([b["inputs"].ravel() for b in cases.take(it, 8)]) for it in (short, long)
    ]
    ids = short.stream.locate(np.arange(32, 64))[1]
    self.assertEqual(ids[::2].tolist(), (2 * long.stream.locate(np.arange(16, 32))[1]).tolist())
    self.assertEqual(tokens[0].shape, tokens[1].shape)


class IndexStagesTest(cases.LoaderCase):
  """Another index shares files with the first, cuts them into longer windows, and has one more."""

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    base = maxtext_olmo.load_index(self.index_path)
    corpora.write_tokens(directory / "new.npy", 200, seed=9)
    paths = [base.resolve(3), str(directory / "new.npy"), base.resolve(0)]
    self.other = index_lib.build_index(
        [(path, label) for path, label in zip(paths, ("web", "new", "web"))],
        8,
        tokenizer="test",
        dtype="uint16",
        base=str(directory),
        max_target_sequence_length=16,
    )
    self.other.save(directory / "other.json")
    self.base = base
    self.values = {
        "olmo_order_cache_dir": str(directory / "cache"),
        "olmo_stages": (
            {"from_step": 12, "olmo_index_path": str(directory / "other.json")},
            {"from_step": 20, "olmo_index_path": self.index_path, "data_shuffle_seed": 4},
        ),
    }

  def ranges(self, train, first, end):
    """Returns the (path, token) pairs of the rows at some positions."""
    epochs, rows = train.stream.locate(np.arange(first, end))
    found = []
    for epoch, row in zip(epochs.tolist(), rows.tolist()):
      parts = train.source.parts(epoch, np.array([row]))
      path = train.files.paths[parts.source[0]]
      found.append({(path, int(parts.first[0]) + i) for i in range(int(parts.count[0]))})
    return found

  def test_rows_of_each_stage_are_those_of_its_index(self):
    train = self.train(**self.values, olmo_batch_extras=("labels", "row_ids"))
    alone = self.train(olmo_index_path=self.values["olmo_stages"][0]["olmo_index_path"])
    plain = self.train()
    fed = cases.take(train, 24)
    self.assert_equal_batches(
        [{k: v for k, v in b.items() if k not in ("labels", "row_ids")} for b in fed[12:20]],
        cases.take(alone, 8),
    )
    self.assert_equal_batches(
        [{k: v for k, v in b.items() if k not in ("labels", "row_ids")} for b in fed[:12]],
        cases.take(plain, 12),
    )
    labels = {int(label) for batch in fed[12:20] for label in np.asarray(batch["labels"])}
    self.assertEqual(labels, {0, 1, 2})  # Files that both have keep their labels; 2 is 'new'.

  def test_workers_and_every_resume_give_the_same_batches(self):
    train = self.train(**self.values)
    fed = cases.take(train, 24)
    self.assert_equal_batches(cases.take(self.train(**self.values, grain_worker_count=2), 24), fed)
    for step in (0, 11, 12, 13, 20, 21):
      state = self.train(**self.values, initial_step=step).get_state()
      resumed = self.train(**self.values)
      resumed.set_state(state)
      self.assert_equal_batches(cases.take(resumed, 3), fed[step : step + 3])

  def test_steps_are_explained_with_the_names_of_their_index(self):
    documents_lib.build_documents(self.base, f"{self.index_path}.documents", 0)
    path = self.values["olmo_stages"][0]["olmo_index_path"]
    documents_lib.build_documents(self.other, f"{path}.documents", 0)
    train = self.train(**self.values)
    fed = cases.take(train, 24)
    named = set()
    for step, batch in enumerate(fed):
      explained = train.explain(step)
      for name, array in batch.items():
        np.testing.assert_array_equal(explained.arrays[name], array, err_msg=f"{name}, {step}")
      for row in explained.rows:
        self.assertEqual((row.stage, row.epoch), ((step >= 12) + (step >= 20), 0))
        part = row.parts[0]
        tokens = np.fromfile(part.file, "<u2")[part.first : part.first + part.count]
        np.testing.assert_array_equal(tokens, row.tokens)
        self.assertNotEmpty(part.documents)
        named.add(row.label)
    self.assertEqual(named, {"label-0", "label-1", "new"})

  def test_what_was_seen_of_shared_files_is_left_out(self):
    stage = {**self.values["olmo_stages"][0], "leave_out_seen": True}
    train = self.train(**{**self.values, "olmo_stages": (stage,)}, olmo_eval_instances=10)
    seen = set().union(*self.ranges(train, 0, 48))
    count = train.stream.stream(1).epochs.length(0)
    first = self.ranges(train, 48, 48 + count)
    self.assertFalse(seen & set().union(*first))
    # Windows of 16 tokens that overlap neither what was seen nor what is held out all come, once.
    held_out = train.stream.stream(0).split.held_out_windows
    rows = windows.WindowRows(self.base)
    kept = set(seen)
    for row in held_out.tolist():
      parts = rows.parts(0, np.array([row]))
      path = self.base.resolve(int(parts.source[0]))
      kept |= {(path, int(parts.first[0]) + i) for i in range(8)}
    expected = []
    for file, entry in enumerate(self.other.files):
      for window in range(entry.n_tokens // 16):
        tokens = {(self.other.resolve(file), window * 16 + i) for i in range(16)}
        if not tokens & kept:
          expected.append(tokens)
    pairs = [a | b for a, b in zip(first[::2], first[1::2])]
    self.assertCountEqual(map(sorted, pairs), map(sorted, expected))

  @parameterized.parameters(
      ({"olmo_eval_instances": 10}, {}), ({}, {"leave_out_seen": True}), ({}, {})
  )
  def test_an_index_that_moves_within_a_stage_is_refused_if_rows_depend_on_it(self, values, more):
    stage = {**self.values["olmo_stages"][0], **more}
    values = {**self.values, "olmo_stages": (stage,), **values}
    train = self.train(**values)
    states = [train.get_state()]
    for _ in range(16):
      cases.take(train, 1)
      states.append(train.get_state())
    # The copy of the first index has the same fingerprint, but other full paths.
    directory = pathlib.Path(self.create_tempdir().full_path)
    shutil.copytree(self.base.base, directory / "data")
    dataclasses.replace(self.base, base=str(directory / "data")).save(directory / "moved.json")
    moved = self.train(**{**values, "olmo_index_path": str(directory / "moved.json")})
    moved.set_state(states[11])
    if values.get("olmo_eval_instances") or more:
      message = (
          r"(?s)the stage from step 12 on leaves out.*"
          rf"  {self.index_path} then, {directory}/moved.json now\n"
          r"  .*other.json\n.*before this stage"
      )
      with self.assertRaisesRegex(errors.ResumeError, message):
        moved.set_state(states[16])
      # A run that entered the stage after the move keeps the new paths.
      moved.set_state(states[11])
      self.assertNotEqual(numbers(moved, 12, 20), numbers(train, 12, 20))
      cases.take(moved, 5)
      moved.set_state(moved.get_state())
      train.set_state(states[11])
      with self.assertRaisesRegex(errors.ResumeError, "the set of shared files has changed"):
        train.set_state(moved.get_state())
    else:
      moved.set_state(states[16])
      self.assertEqual(numbers(moved, 12, 20), numbers(train, 12, 20))

  def test_a_state_without_the_shared_files_loads(self):
    train = self.train(**self.values, olmo_eval_instances=10)
    cases.take(train, 16)
    state = train.get_state()
    (entry,) = state["history"]
    self.assertTrue(entry["stages"][1].pop("shared"))
    resumed = self.train(**self.values, olmo_eval_instances=10)
    resumed.set_state(state)
    self.assertEqual(numbers(resumed, 0, 24), numbers(train, 0, 24))

  def test_damaged_shared_files_are_resume_errors(self):
    train = self.train(**self.values, olmo_eval_instances=10)
    cases.take(train, 16)
    for bad in ("x", [], {"x": "y"}, {self.base.fingerprint: "y"}, {self.base.fingerprint: 1}):
      state = copy.deepcopy(train.get_state())
      state["history"][0]["stages"][1]["shared"] = bad
      with self.subTest(bad), self.assertRaises(errors.ResumeError):
        self.train(**self.values, olmo_eval_instances=10).set_state(state)

  def test_a_file_is_found_in_all_stages(self):
    train = self.train(**self.values)
    file = train.files.paths.index(self.base.resolve(3))
    epochs, positions = row_source.positions_of(train.source, train.stream, file, 40, 30, 300)
    wanted = {(self.base.resolve(3), token) for token in range(40, 70)}
    expected = [i for i, tokens in enumerate(self.ranges(train, 0, 300)) if tokens & wanted]
    self.assertEqual(positions.tolist(), expected)
    self.assertEqual(epochs.tolist(), train.stream.locate(positions)[0].tolist())

  def test_the_place_has_the_stage_and_its_own_epoch(self):
    train = self.train(**self.values)
    expected = {0: (0, 0), 11: (0, 0), 12: (1, 0), 20: (2, 0), 20 + 31: (2, 1)}
    for step, (stage, epoch) in expected.items():
      train.go_to(step)
      self.assertEqual(train.place, {"position": 4 * step, "stage": stage, "epoch": epoch})
    plain = self.train(olmo_num_epochs=1)
    self.assertEqual(plain.place, {"position": 0, "epoch": 0})
    plain.go_to(31)
    self.assertEqual(plain.place, {"position": 123})


if __name__ == "__main__":
  absltest.main()
