"""Elastic runs: OLMo-core's own streams and resumes, ramp-up, and changed batch sizes."""

import hashlib
import json
import pathlib

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from tests.loader import cases

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
_CASES = {case["name"]: case for case in json.loads((_TESTDATA / "fsl_order.json").read_text())}
_RESUMES = {case["name"]: case for case in json.loads((_TESTDATA / "fsl_resume.json").read_text())}


def write_case(directory, case, sequence_length=None):
  """Writes the token files of a golden case and their index; returns its path."""
  directory = pathlib.Path(directory)
  paths = []
  for i, count in enumerate(case["tokens_per_file"]):
    rng = np.random.Generator(np.random.PCG64(case["data_seed"] + i))
    tokens = rng.integers(2, case["vocab_size"], size=count, dtype=np.int64)
    tokens[rng.integers(0, 20, size=count, dtype=np.int64) == 0] = 0
    paths.append((str(directory / f"part-{i:03d}.npy"), "x"))
    tokens.astype(case["dtype"]).tofile(paths[-1][0])
  index = index_lib.build_index(
      paths,
      sequence_length or case["sequence_length"],
      tokenizer="t",
      dtype=case["dtype"],
      base=str(directory),
      max_target_sequence_length=case.get("max_target_sequence_length"),
  )
  index.save(directory / "index.json")
  return str(directory / "index.json")


class ElasticCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.cache = self.create_tempdir().full_path
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

  def iterator(self, index_path, length, size, seed, **values):
    config = cases.data_config(
        **{
            "olmo_index_path": index_path,
            "max_target_length": length,
            "global_batch_size_to_load": size,
            "olmo_order": "olmo_core",
            "olmo_order_cache_dir": self.cache,
            "data_shuffle_seed": seed,
            **values,
        }
    )
    iterator, _ = maxtext_olmo.create_data_iterator(config, self.mesh)
    self.addCleanup(iterator.close)
    return iterator


class OlmoCoreTest(ElasticCase):

  def of_case(self, case, size=None, length=None, **values):
    length = length or case["sequence_length"]
    path = write_case(self.create_tempdir().full_path, case, length)
    size = size or case["global_batch_size"] // length
    if not case.get("shuffle", True):
      values["enable_data_shuffling"] = False
    return self.iterator(path, length, size, case["seed"], **values)

  @parameterized.named_parameters(
      (name, case) for name, case in _CASES.items() if case.get("shuffle", True)
  )
  def test_the_tokens_of_a_whole_epoch_are_olmo_cores(self, case):
    iterator = self.of_case(case)
    steps = case["total_batches"]
    iterator.set_state(
        {
            **iterator.get_state(),
            "step": (case["epoch"] - 1) * steps,
            "position": (case["epoch"] - 1) * case["n_instances"],
        }
    )
    whole = hashlib.sha256()
    for _ in range(steps):
      whole.update(np.asarray(next(iterator)["inputs"]).astype("<i8").tobytes())
    rank = next(r for r in case["ranks"] if r["world"] == 1)
    self.assertEqual(whole.hexdigest(), rank["epoch_input_ids_int64_sha256"])
    # The next epoch begins with the next batch, at its first place.
    self.assertEqual(
        iterator.row_numbers(iterator.step).tolist(),
        iterator.stream.order.ids(
            case["epoch"], np.arange(case["total_size"] // case["total_batches"])
        ).tolist(),
    )

  def _resumed(self, name, **values):
    case = _RESUMES[name]
    corpus = _CASES[case["case"]]
    first = self.of_case(corpus, case["gbs0"] // case["seq0"], case["seq0"])
    for _ in range(case["steps0"]):
      next(first)
    state = first.get_state()
    self.assertEqual(state["position"] * case["seq0"], case["state_dict"]["tokens_processed"])
    second = self.of_case(corpus, case["gbs1"] // case["seq1"], case["seq1"], **values)
    second.set_state(state)
    return case, second

  def _next_steps(self, case):
    """Returns the rows of the global batches after the resume; ranks have strided ones."""
    ranks = [rank["next_steps"] for rank in case["resumed"]]
    return [np.stack(rows, axis=1).ravel().tolist() for rows in zip(*ranks)]

  def assert_serves(self, iterator, expected):
    for ids in expected:
      self.assertEqual(iterator.row_numbers(iterator.step).tolist(), ids)
      next(iterator)

  @parameterized.parameters("same", "world_1_to_4", "double_batch_aligned", "seqlen_32_to_64_max64")
  def test_a_resume_continues_as_in_olmo_core(self, name):
    self.assert_serves(*reversed([self._next_steps(_RESUMES[name]), self._resumed(name)[1]]))

  @parameterized.parameters("double_batch_unaligned", "batch_x1.5_unaligned")
  def test_an_unaligned_resume_repeats_as_olmo_core_does_on_request(self, name):
    case, iterator = self._resumed(name, olmo_order_resume="olmo_core")
    self.assert_serves(iterator, self._next_steps(case))

  @parameterized.parameters("double_batch_unaligned", "batch_x1.5_unaligned")
  def test_an_unaligned_resume_is_exact_by_default(self, name):
    case, iterator = self._resumed(name)
    position = case["steps0"] * case["gbs0"] // case["seq0"]
    size = case["gbs1"] // case["seq1"]
    expected = iterator.stream.order.at(position + np.arange(3 * size)).reshape(3, size)
    self.assert_serves(iterator, expected.tolist())

  def test_another_sequence_length_without_max_target_is_refused_and_explained(self):
    case = _RESUMES["seqlen_change_without_max_target"]
    corpus = _CASES[case["case"]]
    path = write_case(self.create_tempdir().full_path, corpus, case["seq0"])
    with self.assertRaisesRegex(errors.CorpusError, "max-target-sequence-length"):
      self.iterator(path, case["seq1"], 8, corpus["seed"])
    # An index for the other length is another corpus: it would be served in another order.
    first = self.iterator(path, case["seq0"], 8, corpus["seed"])
    other = write_case(self.create_tempdir().full_path, corpus, case["seq1"])
    second = self.iterator(other, case["seq1"], 8, corpus["seed"])
    with self.assertRaisesRegex(
        errors.ResumeError,
        "64 tokens, but this index cuts files into 32 .* their order differ",
    ):
      second.set_state(first.get_state())

  def test_batches_that_change_size_inside_a_run_are_those_of_olmo_cores_setter(self):
    case = _RESUMES["setter_512_to_1024_after4_to_512_after2"]
    iterator = self.of_case(_CASES[case["case"]], olmo_batch_schedule=((0, 8), (4, 16), (6, 8)))
    self.assert_serves(iterator, case["rank0_steps"])
    self.assertEqual(iterator.position * 64, case["tokens_processed"])

  def test_a_tail_too_short_for_a_batch_is_used_by_smaller_ones_after_a_resume(self):
    case = _CASES["u32_dropped_tail"]
    first = self.of_case(case)
    for _ in range(case["total_batches"]):
      next(first)
    self.assertEqual(first.position, case["total_size"])
    second = self.of_case(case, size=2)
    second.set_state(first.get_state())
    order = second.stream.order.ids(0, np.arange(case["n_instances"]))
    tail = order[case["total_size"] :].reshape(-1, 2)
    self.assertGreater(len(tail), 1)
    self.assert_serves(second, tail.tolist())
    self.assertEqual(second.position, case["n_instances"])

  def test_a_finite_run_ends_with_the_last_whole_batch(self):
    case = _CASES["u32_dropped_tail"]
    iterator = self.of_case(case, olmo_num_epochs=2)
    self.assertLen(iterator, 2 * case["total_batches"])
    self.assertLen(list(iterator), 2 * case["total_batches"])
    again = self.of_case(case, olmo_num_epochs=2)
    again.set_state(iterator.get_state())
    with self.assertRaises(StopIteration):
      next(again)

  def test_a_batch_longer_than_an_epoch_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "does not fit into an epoch of 186"):
      self.of_case(_CASES["u32_dropped_tail"], size=187)


class RampUpTest(ElasticCase):

  def setUp(self):
    super().setUp()
    self.path = write_case(self.create_tempdir().full_path, _CASES["u32_olmo3seed"])
    index = index_lib.load_index(self.path)
    files = [np.fromfile(index.resolve(i), "<u4") for i in range(len(index.files))]
    self.rows = np.concatenate([f[: len(f) // 64 * 64].reshape(-1, 64) for f in files])

  def make(self, **values):
    return self.iterator(self.path, 64, 8, 3, olmo_order="feistel", **values)

  def taken(self, iterator, count):
    ids, shapes = [], []
    for _ in range(count):
      ids.append(iterator.row_numbers(iterator.step))
      batch = next(iterator)
      shapes.append(batch["inputs"].shape[0])
      np.testing.assert_array_equal(batch["inputs"], self.rows[ids[-1]])
    return np.concatenate(ids).tolist(), shapes

  @parameterized.named_parameters(
      ("steps", dict(olmo_batch_schedule=((0, 2), (3, 5), (5, 8)))),
      (
          "tokens",
          dict(
              olmo_batch_schedule=((0, 2), (6 * 64, 5), (16 * 64, 8)),
              olmo_batch_schedule_unit="tokens",
          ),
      ),
      ("factors", dict(olmo_batch_rampup_factors=((0, 0.25), (3, 0.63), (5, 1)))),
  )
  def test_ramp_up_changes_shapes_and_nothing_else(self, values):
    plain, _ = self.taken(self.make(), 10)
    ramped, shapes = self.taken(self.make(**values), 8)
    self.assertEqual(shapes, [2, 2, 2, 5, 5, 8, 8, 8])
    self.assertEqual(ramped, plain[: len(ramped)])
    for step in (2, 4, 6):
      resumed = self.make(**values, initial_step=step)
      self.assertEqual(
          self.taken(resumed, 1)[0], ramped[sum(shapes[:step]) : sum(shapes[: step + 1])]
      )

  def test_boundaries_in_tokens_stay_where_they_are_when_the_batch_size_changes(self):
    tokens = {"olmo_batch_schedule_unit": "tokens"}
    first = self.make(olmo_batch_schedule=((0, 2), (20 * 64, 8)), **tokens)
    plain, _ = self.taken(self.make(), 8)
    begun, _ = self.taken(first, 3)
    second = self.make(olmo_batch_schedule=((0, 5), (20 * 64, 8)), **tokens)
    second.set_state(first.get_state())
    rest, shapes = self.taken(second, 5)
    self.assertEqual(shapes, [5, 5, 5, 8, 8])
    self.assertEqual(begun + rest, plain[: len(begun + rest)])

  def test_a_state_off_the_boundaries_of_the_new_schedule_continues_exactly(self):
    plain, _ = self.taken(self.make(), 12)
    first = self.make(olmo_batch_schedule=((0, 3),))
    begun, _ = self.taken(first, 3)
    second = self.make(olmo_batch_schedule=((0, 2), (5, 8)))
    second.set_state(first.get_state())
    rest, shapes = self.taken(second, 4)
    self.assertEqual(shapes, [2, 2, 8, 8])
    self.assertEqual(begun + rest, plain[: len(begun + rest)])
    third = self.make()
    third.set_state(second.get_state())
    self.assertEqual((third.step, third.position), (7, 29))
    self.assertEqual(self.taken(third, 2)[0], plain[29:45])


if __name__ == "__main__":
  absltest.main()
