"""The laws of the design in one process, for every kind of row source."""

import json
import multiprocessing
import tempfile
import unittest

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.loader import synthetic
from tests import distributed
from tests import workers as workers_lib
from tests.loader import cases
from tests.loader import row_sources

STARTS_PROCESSES = True

# The runs are of 20 steps that contain the end of an epoch. Documents with a row each have longer
# epochs.
_STEPS = 20
_FIRST_STEP = {"one_document": 38}
_MESHES = (
    ({"data": 4}, (("data",),)),
    ({"data": 2, "fsdp": 2}, (("data", "fsdp"),)),
    ({"tensor": 2, "data": 2}, (("data",),)),
    ({"tensor": 4}, ()),
    ({"data": 2, "sequence": 2}, (("data",), "sequence")),
    ({"sequence": 4}, (None, "sequence")),
)
_EVERY_SOURCE = parameterized.named_parameters((name, name) for name in row_sources.SOURCES)


_directory = ""
_runs: dict[str, tuple[list[cases.Batch], list[dict]]] = {}


def setUpModule():
  global _directory
  jax.config.update("jax_num_cpu_devices", 4)
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="laws_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  row_sources.write_corpus(_directory)


class LawsCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.index_path = f"{_directory}/index.json"
    self.index = maxtext_olmo.load_index(self.index_path)
    self.tokens = [np.fromfile(self.index.resolve(i), "<u2") for i in range(len(self.index.files))]

  def make(self, source, axes=None, **values):
    config = row_sources.config_values(source, self.index_path, _directory)
    config = cases.data_config(**{**config, **values})
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh(axes))
    self.addCleanup(iterator.close)
    return iterator

  def run_of(self, source):
    """Returns the batches of an uninterrupted run, and the states before and after them."""
    if source not in _runs:
      _runs[source] = self._run(source)
    return _runs[source]

  def _run(self, source):
    iterator = self.make(source)
    iterator.go_to(_FIRST_STEP.get(source, 0))
    states, batches = [], []
    for _ in range(_STEPS):
      states.append(json.loads(json.dumps(iterator.get_state())))
      batches += cases.take(iterator, 1)
    states.append(iterator.get_state())
    return batches, states

  def assert_continues(self, iterator, source, step, count, msg=""):
    """Checks batches from a step on, and the state after them, against the uninterrupted run."""
    batches, states = self.run_of(source)
    for number, got in enumerate(cases.take(iterator, count), step):
      self.assertEqual(set(got), set(batches[number]))
      for name, values in got.items():
        np.testing.assert_array_equal(values, batches[number][name], f"{name} {number} {msg}")
    self.assertEqual(iterator.get_state(), states[step + count], msg)


class BatchTest(LawsCase):
  """A batch is a pure function of its step."""

  @_EVERY_SOURCE
  def test_resuming_at_any_step_equals_the_uninterrupted_run(self, source):
    _, states = self.run_of(source)
    for step in range(_STEPS):
      ahead = {"olmo_prefetch_batches": step % 3, "olmo_device_prefetch": step % 2}
      resumed = self.make(source, **ahead)
      resumed.set_state(states[step])
      self.assertEqual(resumed.get_state(), states[step])
      self.assert_continues(resumed, source, step, min(2, _STEPS - step))
      resumed.close()

  @_EVERY_SOURCE
  def test_batches_do_not_depend_on_worker_count(self, source):
    _, states = self.run_of(source)
    for workers in (1, 2):
      with workers_lib.started_quickly():
        iterator = self.make(source, grain_worker_count=workers, grain_per_worker_buffer_size=2)
        iterator.set_state(states[12])
        self.assert_continues(iterator, source, 12, 6, f"{workers} workers")
        self.assertLen(multiprocessing.active_children(), workers)
        iterator.close()
        self.assertEmpty(multiprocessing.active_children())

  @_EVERY_SOURCE
  def test_batches_do_not_depend_on_the_mesh(self, source):
    _, states = self.run_of(source)
    for axes, spec in _MESHES:
      iterator = self.make(source, axes, data_sharding=spec)
      iterator.set_state(states[13])
      self.assert_continues(iterator, source, 13, 4, f"{axes}")
      iterator.close()


class PositionTest(LawsCase):
  """Position is one integer."""

  @_EVERY_SOURCE
  def test_other_batch_sizes_after_a_resume_neither_repeat_nor_skip(self, source):
    batches, states = self.run_of(source)
    expected = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    got, state = [], states[0]
    # The last leg crosses the end of the epoch, where olmo_core orders drop a tail by definition.
    legs = [(8, 3), (3, 4), (16, 2), (5, 3), (8, 6)]
    for size, count in legs[:-1] if source.endswith("olmo_core") else legs:
      iterator = self.make(source, global_batch_size_to_load=size)
      iterator.set_state(state)
      got += cases.take(iterator, count)
      state = iterator.get_state()
      iterator.close()
    for name, values in expected.items():
      together = np.concatenate([batch[name] for batch in got])
      np.testing.assert_array_equal(together, values[: len(together)], err_msg=name)
    self.assertEqual(state["position"], states[0]["position"] + len(together))

  @_EVERY_SOURCE
  def test_the_state_is_one_small_json_dict(self, source):
    _, states = self.run_of(source)
    self.assertEqual(json.loads(json.dumps(states[5])), states[5])
    self.assertLess(len(json.dumps(states[5])), 2000)


class EpochTest(LawsCase):
  """Once per epoch."""

  def times_read(self, source, **values):
    """Returns, for each file, how often a run to its end has each token; and its row numbers."""
    iterator = self.make(source, **values)
    counts = [np.zeros(len(tokens), np.int64) for tokens in self.tokens]
    rows = []
    dataset = iterator.host_batches()
    for step in range(sum(1 for _ in iterator)):
      parts = dataset.parts(step)
      rows += dataset.row_numbers(step).tolist()
      for file, first, count in zip(parts.source, parts.first, parts.count):
        counts[file][first : first + count] += 1
    return counts, [row for row in rows if row >= 0]

  def in_windows(self):
    """Returns, for each file, which tokens are in a window; the last few may be in none."""
    length = row_sources.LENGTH
    return [np.arange(len(tokens)) < len(tokens) // length * length for tokens in self.tokens]

  @parameterized.parameters("windows", "windows_document_mask")
  def test_every_window_comes_once_per_epoch(self, source):
    counts, rows = self.times_read(source, olmo_num_epochs=2)
    for count, inside in zip(counts, self.in_windows()):
      np.testing.assert_array_equal(count, 2 * inside)
    for epoch in range(2):
      self.assertCountEqual(rows[123 * epoch : 123 * (epoch + 1)], range(123))
    self.assertNotEqual(rows[:123], rows[123:])

  def test_held_out_windows_never_come(self):
    _, rows = self.times_read("windows_held_out", olmo_num_epochs=3)
    counts = np.bincount(rows, minlength=123)
    self.assertEqual(np.bincount(counts).tolist(), [11, 0, 0, 112])

  def test_an_olmo_core_order_drops_the_tail_of_each_epoch(self):
    _, rows = self.times_read("windows_olmo_core", olmo_num_epochs=2)
    self.assertLen(rows, 2 * 120)
    for epoch in range(2):
      self.assertLen(set(rows[120 * epoch : 120 * (epoch + 1)]), 120)

  def test_a_mixture_of_windows_gives_each_label_its_epochs(self):
    counts, _ = self.times_read("windows_mixture", olmo_num_epochs=1)
    for number in (0, 2):  # The files of label-0, twice.
      np.testing.assert_array_equal(counts[number], 2 * self.in_windows()[number])
    other = np.concatenate([counts[1], counts[3]]).reshape(-1)
    self.assertEqual(other.max(), 1)  # Half of label-1, each at most once.
    self.assertEqual(other.sum(), row_sources.LENGTH * round(0.5 * (30 + 52)))

  def test_every_token_of_every_document_comes_once_per_epoch(self):
    counts, _ = self.times_read("planned", olmo_num_epochs=2)
    for count in counts:
      self.assertEqual(set(count.tolist()), {2})

  def test_every_document_has_one_row_per_epoch_up_to_its_length(self):
    counts, rows = self.times_read("one_document", olmo_num_epochs=2)
    documents = documents_lib.load_documents(self.index_path + ".documents", self.index, 0)
    numbers = np.arange(documents.num_documents)
    self.assertCountEqual(rows, [*numbers.tolist(), *numbers.tolist()])
    files, firsts = documents.locate(numbers)
    for file, first, length in zip(files, firsts, documents.lengths(numbers)):
      row = counts[file][first : first + length]
      np.testing.assert_array_equal(row, 2 * (np.arange(length) < row_sources.LENGTH))

  @parameterized.parameters(
      ("packed", row_sources.LENGTH),
      ("packed_olmo_core", None),
      ("padded", row_sources.LENGTH),
      ("padded_olmo_core", row_sources.LENGTH),
  )
  def test_every_packed_or_padded_document_comes_once_per_epoch(self, source, most):
    # Without a shuffle, so that the olmo_core order drops no tail.
    counts, rows = self.times_read(source, olmo_num_epochs=2, enable_data_shuffling=False)
    self.assertEqual(rows[: len(rows) // 2], rows[len(rows) // 2 :])
    for tokens, count in zip(self.tokens, counts):
      expected, first = np.zeros(len(tokens), np.int64), 0
      for end in np.flatnonzero(tokens == 0) + 1:
        expected[first:end][:most] = 2
        first = end
      np.testing.assert_array_equal(count, expected)

  def test_a_mixture_of_planned_rows_repeats_no_token_before_its_label_is_used_up(self):
    iterator = self.make("planned_mixture")
    counts = [np.zeros(len(tokens), np.int64) for tokens in self.tokens]
    dataset = iterator.host_batches(0)
    for step in range(20):
      parts = dataset.parts(step)
      for file, first, count in zip(parts.source, parts.first, parts.count):
        counts[file][first : first + count] += 1
    for files in ((0, 2), (1, 3)):
      label = np.concatenate([counts[file] for file in files])
      self.assertLessEqual(label.max() - label.min(), 1)

  def test_synthetic_rows_come_in_sequence(self):
    iterator = self.make("synthetic")
    rows = np.concatenate([iterator.row_numbers(step) for step in range(4)])
    self.assertEqual(rows.tolist(), list(range(4 * row_sources.BATCH)))

  def test_the_rows_of_another_package_come_once_per_epoch(self):
    counts, _ = self.times_read("outside_in", olmo_num_epochs=2)
    for count in counts:
      self.assertEqual(set(count.tolist()), {2})


class ExplainTest(LawsCase):
  """Every row can be explained, by the very table it was read by."""

  def by_hand(self, parts, shape, pad_id=0):
    """Returns the tokens and loss masks of some rows, by plain reads of what their parts name."""
    tokens, masks = np.zeros(shape, np.int64), np.ones(shape, np.int64)
    for row in range(parts.num_rows):
      column = 0
      for part in range(parts.bounds[row], parts.bounds[row + 1]):
        first, count = int(parts.first[part]), int(parts.count[part])
        path = self.index.resolve(int(parts.source[part]))
        with open(path, "rb") as file:
          file.seek(2 * first)
          tokens[row, column : column + count] = np.frombuffer(file.read(2 * count), "<u2")
        with open(row_sources.mask_path(path), "rb") as file:
          file.seek(first)
          masks[row, column : column + count] = np.frombuffer(file.read(count), np.uint8)
        column += count
      tokens[row, column:] = pad_id
      masks[row, column:] = 0
    return tokens, masks

  @parameterized.parameters(*row_sources.FROM_FILES)
  def test_parts_read_by_hand_are_the_batch(self, source):
    batches, states = self.run_of(source)
    pad_id = row_sources.pad_id(source)
    dataset = self.make(source).host_batches(states[0]["step"])
    for batch, state in zip(batches, states):
      parts = dataset.parts(state["step"])
      tokens, _ = self.by_hand(parts, batch["inputs"].shape, pad_id)
      np.testing.assert_array_equal(tokens, batch["inputs"])
      np.testing.assert_array_equal(tokens[:, 1:], batch["targets"][:, :-1])

  def test_records_made_by_hand_are_the_batch(self):
    batches, _ = self.run_of("synthetic")
    dataset = self.make("synthetic").host_batches()
    records = synthetic.SyntheticRecords(row_sources.LENGTH, 100, 3)
    for step, batch in enumerate(batches):
      parts = dataset.parts(step)
      expected = [records[number]["inputs"] for number in parts.source.tolist()]
      np.testing.assert_array_equal(expected, batch["inputs"])

  @parameterized.parameters(
      "outside_in", "windows_label_masks", "packed_olmo_core", "padded_olmo_core"
  )
  def test_loss_is_taken_where_the_masks_by_hand_say_so(self, source):
    batches, states = self.run_of(source)
    dataset = self.make(source).host_batches(0)
    rejected = 0
    for batch, state in zip(batches, states):
      _, masks = self.by_hand(dataset.parts(state["step"]), batch["inputs"].shape)
      counted = batch["targets_segmentation"] != 0
      trained = counted.any(axis=1)
      rejected += int((~trained).sum())
      np.testing.assert_array_equal(counted[trained, :-1], masks[trained, 1:] != 0)
    self.assertBetween(rejected, 1, 30)

  @parameterized.parameters("windows", "windows_mixture", "windows_document_mask")
  def test_the_filter_masks_the_rows_that_repeat_and_no_others(self, source):
    batches, _ = self.run_of(source)
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    counted = np.concatenate([batch["targets_segmentation"] for batch in batches])
    clean = [maxtext_olmo.is_clean_instance(row) for row in inputs]
    self.assertEqual(counted.any(axis=1).tolist(), clean)
    self.assertFalse(all(clean))


_READ_EVERY_SOURCE = """
import importlib, pkgutil, sys
import jax, numpy as np
import maxtext_olmo
from maxtext_olmo import corpus, order, rows
for room in (corpus, order, rows):
  for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    importlib.import_module(module.name)
from maxtext_olmo.corpus import documents, token_files
from maxtext_olmo.order import mixture, permutations, schedule, stream
from maxtext_olmo.rows import document_rows, planned, reader, row_sequence, segments
from maxtext_olmo.rows import steps, windows
from maxtext_olmo.rows import mixture as mixture_rows

path = sys.argv[1]
index = maxtext_olmo.load_index(path)
documents.build_documents(index, path + ".alone", 0)
found = documents.load_documents(path + ".alone", index, 0)
shuffled = permutations.make_order("feistel", num_instances=found.num_documents, seed=0)
packing = planned.PackingPlan(
    found.lengths, shuffled, identity="", row_length=64, window=50, locate=found.locate)
packed = planned.PlannedRows(packing, 64, index.fingerprint)
in_sequence = row_sequence.RowSequence(packed, name="", seed=0)
mixed = mixture_rows.MixedRows([in_sequence, in_sequence], [1, 2])
alone = document_rows.DocumentRows(found, 64, "truncate")
of_windows = windows.WindowRows(index, segments.SegmentRule("after_eos", 0))
streams = [
    (of_windows, stream.train_stream(index, order="feistel", seed=0)),
    (of_windows, mixture.mixture_stream(
        index, {"*": 1.0}, "epochs", order="feistel", seed=0, held_out_instances=0, num_epochs=1)),
    (packed, in_sequence),
    (mixed, row_sequence.RowSequence(mixed, name="", seed=0)),
    (alone, row_sequence.RowSequence(alone, name="", seed=0, order=shuffled)),
]
files = reader.FileReader(token_files.TokenFiles.of_index(index))
for source, rows_of in streams:
  dataset = steps.StepDataset(
      source, files, rows_of, schedule.BatchSchedule.constant(4), {4: np.arange(4)})
  assert dataset[3]["tokens"].shape == (4, 64), source
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""


class ImportTest(LawsCase):
  """Reading tokens needs no JAX."""

  def run_python(self, code, *args):
    done = distributed.run_python(code, *args)
    self.assertEqual(done.returncode, 0, done.stderr)

  def test_reading_the_rows_of_any_source_initialises_no_jax_backend(self):
    self.run_python(_READ_EVERY_SOURCE, self.index_path)

  def test_importing_the_package_imports_neither_jax_nor_grain(self):
    self.run_python(
        "import sys, maxtext_olmo\n"
        "assert not {'jax', 'grain', 'orbax', 'numpy'} & set(sys.modules)\n"
        "assert 'create_data_iterator' in dir(maxtext_olmo)\n"
        "import importlib.util\n"
        "missing = set() if importlib.util.find_spec('lm_eval') else {'JaxLM'}\n"
        "for name in set(maxtext_olmo.__all__) - missing: getattr(maxtext_olmo, name)\n"
    )


if __name__ == "__main__":
  absltest.main()
