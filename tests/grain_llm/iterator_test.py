"""Tests that resuming equals continuing, for every kind of stream and any workers and hosts."""

import json
import multiprocessing

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from tests import workers as workers_lib

STARTS_PROCESSES = True

E = 99
STEPS = 60
_KINDS = (
    "plain",
    "first_fit",
    "best_fit",
    "concat_then_split",
    "planned",
    "mixed",
    "mixed_packed",
    "ramped",
)


_VERSION_1 = (
    (
        "plain",
        {
            "step": 4,
            "iterator_length": 19,
            "epoch_start": 19,
            "iterator": {"next_index": 23},
            "identity": (
                "list of 78 documents, feistel 3, all hosts, unpacked rows of 16, long documents"
                " error"
            ),
        },
        [109, 130, 142, 141],
    ),
    (
        "first_fit",
        {
            "step": 23,
            "iterator_length": None,
            "epoch_start": 0,
            "iterator": {
                "step": 23,
                "rows": {
                    "parent": {"parent": {"next_index": 132}, "next_index_in_buffer": 1},
                    "next_row": 2,
                    "counter": 92,
                },
            },
            "identity": (
                "list of 150 documents, feistel 3, all hosts, first_fit rows of 16, bins 5, long"
                " documents error"
            ),
        },
        [137, 138, 141, 139],
    ),
    (
        "planned",
        {
            "step": 23,
            "iterator_length": 24,
            "epoch_start": 0,
            "iterator": {"next_index": 23},
            "identity": (
                "list of 150 documents, feistel 3, all hosts, planned rows of 16, bins 5, long"
                " documents error"
            ),
        },
        [103, 138, 145, 113],
    ),
    (
        "mixed",
        {
            "step": 6,
            "iterator_length": 17,
            "epoch_start": 17,
            "iterator": {"next_index": 23},
            "identity": (
                "mix by [2, 1] of: list of 41 documents, feistel 3, all hosts, unpacked rows of 16,"
                " long documents error; list of 23 documents, feistel 3, all hosts, unpacked rows"
                " of 16, long documents error"
            ),
        },
        [126, 130, 220, 114],
    ),
)


def _documents(count, first=100):
  rng = np.random.default_rng(first)
  return [
      {"inputs": np.append(rng.integers(first, first + 50, n), E)}
      for n in rng.integers(1, 15, count)
  ]


def _make(kind, workers=0, **kwargs):
  """Makes an iterator; 60 steps are about three epochs, and no batch ends with an epoch."""
  packing = kind if kind not in ("plain", "mixed", "mixed_packed", "ramped") else None
  packing = "first_fit" if kind == "mixed_packed" else packing
  # Packed rows hold about two documents each.
  counts = [41, 23] if kind.startswith("mixed") else [78] if kind in ("plain", "ramped") else [150]
  rows = [
      pipeline_lib.make_grain_llm_dataset(
          0,
          1,
          _documents(count, 100 * (i + 1)),
          4,
          16,
          True,
          3,
          eod_token_id=E,
          packing=packing,
          grain_packing_bin_count=5,
      )
      for i, count in enumerate(counts)
  ]
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  return pipeline_lib.make_grain_multihost_iterator(
      rows,
      counts,
      mesh,
      4,
      1,
      [2, 1][: len(rows)],
      worker_count=workers,
      batch_class=dict,
      batch_rampup_factors={7: 0.5, 30: 2.0} if kind == "ramped" else None,
      **kwargs,
  )


def _next(iterator):
  try:
    batch = next(iterator)
  except StopIteration:
    batch = next(iter(iterator))
  return {name: np.asarray(values) for name, values in batch.items()}


class ContinuingEqualsResumingTest(parameterized.TestCase):

  def assert_equal(self, got, expected):
    self.assertEqual(set(got), set(expected))
    for name, values in got.items():
      np.testing.assert_array_equal(values, expected[name], err_msg=name)

  def run_through(self, iterator):
    self.addCleanup(iterator.close)
    states, batches = [], []
    for _ in range(STEPS):
      states.append(json.loads(json.dumps(iterator.get_state())))
      batches.append(_next(iterator))
    return states, batches

  @parameterized.parameters(*_KINDS)
  def test_at_every_one_of_the_first_steps_over_three_epochs(self, kind):
    states, batches = self.run_through(_make(kind))
    resumed = _make(kind)
    self.addCleanup(resumed.close)
    for step, state in enumerate(states):
      resumed.set_state(state)
      self.assertEqual(json.loads(json.dumps(resumed.get_state())), state)
      for ahead in range(step, min(step + 2, STEPS)):
        self.assert_equal(_next(resumed), batches[ahead])

  @parameterized.product(kind=("plain", "first_fit", "planned", "mixed", "ramped"), workers=(1, 2))
  def test_at_every_one_of_the_first_steps_with_workers(self, kind, workers):
    with workers_lib.started_quickly():
      iterator = _make(kind, workers)
      states, batches = self.run_through(iterator)
      states.append(json.loads(json.dumps(iterator.get_state())))
      iterator.close()
      for step in range(STEPS):
        # As in a restarted program: only the state of the run remains.
        self.assertEmpty(multiprocessing.active_children())
        resumed = _make(kind, workers)
        self.addCleanup(resumed.close)
        resumed.set_state(states[step])
        self.assertEqual(json.loads(json.dumps(resumed.get_state())), states[step])
        for ahead in range(step, min(step + 2, STEPS)):
          self.assert_equal(_next(resumed), batches[ahead])
          self.assertEqual(json.loads(json.dumps(resumed.get_state())), states[ahead + 1])
        self.assertLen(multiprocessing.active_children(), workers)
        resumed.close()

  @parameterized.parameters(
      ("plain", 7), ("first_fit", 52), ("planned", 33), ("mixed", 19), ("ramped", 30)
  )
  def test_one_or_two_workers_give_the_same_batches_and_states(self, kind, step):
    states, batches = self.run_through(_make(kind))
    for workers in (1, 2):
      found_states, found = self.run_through(_make(kind, workers))
      self.assertEqual(
          [{**s, "iterator_length": None} for s in found_states],
          [{**s, "iterator_length": None} for s in states],
      )
      for got, expected in zip(found, batches):
        self.assert_equal(got, expected)
    # The state of a run without workers resumes with two.
    resumed = _make(kind, 2)
    self.addCleanup(resumed.close)
    resumed.set_state(states[step])
    for ahead in range(step, step + 3):
      self.assert_equal(_next(resumed), batches[ahead])

  @parameterized.parameters("plain", "first_fit", "planned")
  def test_threads_give_the_same_batches_and_states(self, kind):
    states, batches = self.run_through(_make(kind))
    found_states, found = self.run_through(
        _make(kind, 2, use_thread_prefetch=True, worker_buffer_size=3)
    )
    self.assertEqual([s["iterator"] for s in found_states], [s["iterator"] for s in states])
    for got, expected in zip(found, batches):
      self.assert_equal(got, expected)

  def test_sixty_steps_are_about_three_epochs(self):
    for kind in ("plain", "planned"):
      iterator = _make(kind)
      self.addCleanup(iterator.close)
      for _ in range(25):
        _next(iterator)
      self.assertBetween(len(iterator), 15, 24)

  def test_the_state_survives_orbax(self):
    iterator = _make("mixed")
    self.addCleanup(iterator.close)
    for _ in range(5):
      _next(iterator)
    directory = self.create_tempdir().full_path
    with ocp.CheckpointManager(directory) as manager:
      manager.save(4, args=ocp.args.Composite(data=ocp.args.JsonSave(iterator.get_state())))
      manager.wait_until_finished()
      expected = _next(iterator)
      other = _make("mixed")
      self.addCleanup(other.close)
      saved = manager.restore(4, args=ocp.args.Composite(data=ocp.args.JsonRestore()))
      other.set_state(saved["data"])
    self.assert_equal(_next(other), expected)

  def test_a_state_of_another_mix_is_refused(self):
    state = _make("mixed").get_state()
    with self.assertRaisesRegex(errors.ResumeError, "another stream"):
      _make("plain").set_state(state)

  @parameterized.parameters(*_VERSION_1)
  def test_a_state_of_version_1_restores(self, kind, state, tokens):
    """Uses states and batches from the release before format 2."""
    state = {**state, "position": 92}
    straight = _make(kind)
    self.addCleanup(straight.close)
    for _ in range(23):
      _next(straight)
    resumed = _make(kind)
    self.addCleanup(resumed.close)
    resumed.set_state(state)
    self.assertEqual((resumed.step, resumed.position), (23, 92))
    self.assertEqual(resumed.get_state(), straight.get_state())
    batch = _next(resumed)
    self.assertEqual(batch["inputs"][:, 0].tolist(), tokens)
    self.assert_equal(batch, _next(straight))
    with self.assertRaisesRegex(errors.ResumeError, "saved by another, all hosts"):
      resumed.set_state({**state, "identity": "another, all hosts"})

  def test_a_closed_iterator_says_so(self):
    iterator = _make("plain")
    iterator.close()
    with self.assertRaisesRegex(ValueError, "closed"):
      next(iterator)


if __name__ == "__main__":
  absltest.main()
