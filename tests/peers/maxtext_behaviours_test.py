"""Tests of behaviour that code for MaxText's `olmo_grain` modules relies on, by the same names.

What differs on purpose is in docs/guides/differences.md, and is tested here as well.
"""

import io
import itertools
import json
import os
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.input_pipeline import olmo_data
from maxtext_olmo.input_pipeline import olmo_data_grain


def _write(directory, sizes, dtype="uint32"):
  """Writes raw token files; all tokens of the corpus differ."""
  paths, first = [], 0
  for number, size in enumerate(sizes):
    path = os.path.join(directory, f"part-{number}.npy")
    np.arange(first, first + size, dtype=dtype).tofile(path)
    paths.append(path)
    first += size
  return paths


def _raw_header(path):
  return "uint32", (os.path.getsize(path) // 4,)


def _index(paths, sequence_length=4):
  return olmo_data.build_index(
      [(path, "web") for path in paths],
      sequence_length,
      tokenizer="some/tokenizer",
      header_reader=_raw_header,
  )


class IndexTest(parameterized.TestCase):

  def test_a_file_has_as_many_instances_as_fit_and_its_rest_is_left_out(self):
    index = _index(_write(self.create_tempdir().full_path, (13, 3, 8)))
    self.assertEqual([entry.n_instances for entry in index.files], [3, 0, 2])
    self.assertEqual([entry.instance_offset for entry in index.files], [0, 3, 3])
    self.assertEqual((index.total_instances, index.total_tokens), (5, 24))
    found = [olmo_data.global_to_local(index, number) for number in range(5)]
    self.assertEqual(found, [(0, 0), (0, 4), (0, 8), (2, 0), (2, 4)])
    for number in (-1, 5):
      with self.assertRaises(IndexError):
        olmo_data.global_to_local(index, number)

  def test_it_is_a_json_file_that_loads_as_it_was(self):
    directory = self.create_tempdir().full_path
    index = _index(_write(directory, (12, 8)))
    path = os.path.join(directory, "index.json")
    index.save(path)
    loaded = olmo_data.load_index(path)
    self.assertEqual(loaded.fingerprint, index.fingerprint)
    self.assertEqual(loaded.files, index.files)
    with open(path, encoding="utf-8") as file:
      saved = json.load(file)
    expected = {"format_version", "sequence_length", "dtype", "tokenizer", "total_instances"}
    self.assertContainsSubset(expected | {"total_tokens", "fingerprint", "files"}, saved)

  def test_an_index_of_another_format_is_a_value_error(self):
    path = self.create_tempfile(content=json.dumps({"format_version": "99"})).full_path
    with self.assertRaises(ValueError):
      olmo_data.load_index(path)

  def test_the_fingerprint_follows_the_order_and_the_size_of_files(self):
    paths = _write(self.create_tempdir().full_path, (12, 8))
    fingerprints = {
        _index(paths).fingerprint,
        _index(paths[::-1]).fingerprint,
        _index(paths[:1]).fingerprint,
        _index(paths, sequence_length=2).fingerprint,
    }
    self.assertLen(fingerprints, 4)
    self.assertEqual(_index(paths).fingerprint, _index(paths).fingerprint)

  @parameterized.parameters((0,), (-4,))
  def test_a_sequence_length_that_is_not_positive_is_a_value_error(self, length):
    with self.assertRaises(ValueError):
      _index(_write(self.create_tempdir().full_path, (8,)), length)

  def test_no_files_and_mixed_dtypes_are_value_errors(self):
    with self.assertRaises(ValueError):
      _index([])
    paths = _write(self.create_tempdir().full_path, (8, 8))
    headers = {paths[0]: ("uint16", (16,)), paths[1]: ("uint32", (8,))}
    with self.assertRaises(ValueError):
      olmo_data.build_index(
          [(path, "web") for path in paths], 4, tokenizer="t", header_reader=headers.__getitem__
      )

  def test_headers_of_numpy_are_understood_and_others_refused(self):
    stream = io.BytesIO()
    np.save(stream, np.zeros(7, np.uint16))
    stream.seek(0)
    dtype, shape = olmo_data.parse_npy_header(stream)
    self.assertEqual((np.dtype(dtype), shape), (np.dtype("uint16"), (7,)))
    self.assertTrue(olmo_data.has_npy_magic(stream.getvalue()[:16]))
    self.assertFalse(olmo_data.has_npy_magic(bytes(16)))
    with self.assertRaises(ValueError):
      olmo_data.parse_npy_header(io.BytesIO(bytes(64)))
    path = _write(self.create_tempdir().full_path, (6,))[0]
    self.assertEqual(olmo_data.read_raw_metadata_from_path(path, "uint32"), ("uint32", (6,)))
    with self.assertRaises(ValueError):
      olmo_data.read_raw_metadata_from_path(self.create_tempfile(content="abcde").full_path, "u4")

  def test_paths_are_relative_to_the_base_on_purpose(self):
    paths = _write(self.create_tempdir().full_path, (8, 8))
    index = _index(paths)
    self.assertEqual([entry.path for entry in index.files], ["part-0.npy", "part-1.npy"])
    self.assertEqual([index.resolve(number) for number in range(2)], paths)


class SourceTest(absltest.TestCase):

  def test_items_are_the_windows_of_the_files_and_iteration_ends(self):
    index = _index(_write(self.create_tempdir().full_path, (13, 3, 8)))
    items = list(olmo_data_grain.OlmoNpyDataSource(index))
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [16, 17, 18, 19], [20, 21, 22, 23]]
    self.assertEqual([item["tokens"].tolist() for item in items], expected)
    self.assertEqual([item["instance_id"] for item in items], list(range(5)))
    self.assertEqual([item["file_id"] for item in items], [0, 0, 0, 2, 2])
    self.assertEqual({item["tokens"].dtype for item in items}, {np.dtype(np.uint32)})

  def test_an_item_may_be_changed_without_harm(self):
    source = olmo_data_grain.OlmoNpyDataSource(
        _index(_write(self.create_tempdir().full_path, (8,)))
    )
    source[0]["tokens"][:] = 9
    self.assertEqual(source[0]["tokens"].tolist(), [0, 1, 2, 3])

  def test_a_whole_path_may_be_remapped(self):
    (path,) = _write(self.create_tempdir().full_path, (8,))
    index = _index([path])
    os.rename(path, path + ".moved")
    with self.assertRaises(OSError):
      olmo_data_grain.OlmoNpyDataSource(index)[0]  # pylint: disable=expression-not-assigned
    remapped = olmo_data_grain.OlmoNpyDataSource(index, path_remap={path: path + ".moved"})
    self.assertEqual(remapped[1]["tokens"].tolist(), [4, 5, 6, 7])
    copy = pickle.loads(pickle.dumps(remapped))
    self.assertEqual(copy[1]["tokens"].tolist(), [4, 5, 6, 7])
    self.assertEqual(repr(copy), repr(remapped))


def _sampler(**kwargs):
  return olmo_data_grain.OlmoIndexSampler(**{"total_instances": 23, "seed": 5, **kwargs})


def _keys(sampler, count):
  return [sampler[number].record_key for number in range(count)]


class SamplerTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 4, 23)
  def test_the_shares_of_hosts_are_disjoint_and_leave_out_only_the_remainder(self, hosts):
    whole = _sampler().shuffled_global_indices(seed=5, epoch=0)
    shares = [
        _sampler(shard_index=host, shard_count=hosts).shard_indices(seed=5, epoch=0)
        for host in range(hosts)
    ]
    together = np.concatenate(shares)
    np.testing.assert_array_equal(together, whole[: 23 // hosts * hosts])
    self.assertLen(set(together.tolist()), len(together))

  def test_seed_and_epoch_decide_the_order(self):
    sampler = _sampler()
    orders = {
        tuple(sampler.shuffled_global_indices(seed=seed, epoch=epoch).tolist())
        for seed, epoch in ((5, 0), (5, 0), (5, 1), (6, 0), (6, 1))
    }
    self.assertLen(orders, 4)
    mixed = [olmo_data_grain._combine_seed_epoch(*pair) for pair in ((0, 0), (0, 1), (1, 0))]
    self.assertLen(set(mixed), 3)

  def test_records_follow_the_share_and_roll_over_into_the_next_epoch(self):
    sampler = _sampler(shard_index=1, shard_count=4)
    epochs = [sampler._shard_indices_for_epoch(epoch).tolist() for epoch in range(3)]
    self.assertEqual(_keys(sampler, 15), list(itertools.chain(*epochs)))
    self.assertEqual([sampler[number].index for number in range(15)], list(range(15)))
    self.assertEqual(_keys(_sampler(shuffle=False), 25), [*range(23), 0, 1])

  def test_a_negative_record_number_is_an_error(self):
    with self.assertRaises(IndexError):
      _sampler()[-1]  # pylint: disable=expression-not-assigned

  @parameterized.parameters(0, 1, 7, 22, 23, 26, 100)
  def test_an_initial_step_continues_the_unbroken_stream(self, taken):
    self.assertEqual(_keys(_sampler(initial_step=taken), 30), _keys(_sampler(), 130)[taken:][:30])
    self.assertEqual(repr(_sampler(initial_step=taken)), repr(_sampler()))

  @parameterized.parameters(
      {"initial_step": -1},
      {"total_instances": 0},
      {"shard_index": 2, "shard_count": 2},
      {"shard_index": -1},
      {"shard_count": 0},
  )
  def test_impossible_values_are_value_errors(self, **values):
    with self.assertRaises(ValueError):
      _sampler(**values)


class TransformsTest(parameterized.TestCase):

  def test_the_filter_marks_repetitions(self):
    rng = np.random.default_rng(0)
    filter_ = olmo_data_grain.NgramFilterTransform()
    for tokens, clean in (
        (rng.integers(0, 10_000, 512), True),
        (np.full(200, 7), False),
        (np.tile([3, 1, 2], 80), False),
    ):
      made = filter_.map({"tokens": tokens.astype(np.uint32), "instance_id": 3})
      self.assertEqual(bool(made["instance_mask"]), clean)
      self.assertEqual(made["instance_id"], 3)
      self.assertEqual(olmo_data.is_clean_instance(tokens), clean)

  def test_repetitions_are_found_with_their_places_and_periods(self):
    tokens = np.array([9, 1, 2, 1, 2, 1, 2, 8, 5, 5, 5, 5, 7])
    found = [tuple(item) for item in olmo_data.find_periodic_sequences(tokens, max_period=3)]
    self.assertIn((8, 12, 1, 4), found)
    self.assertIn((1, 7, 2, 3), found)

  def test_a_repetition_does_not_wrap_around_the_end_on_purpose(self):
    # Two copies at the end and one at the beginning are not three in a row.
    tokens = np.array([5, 1, 2, 3, 4, 5, 5])
    self.assertEmpty(list(olmo_data.find_periodic_sequences(tokens, max_period=1)))

  @parameterized.parameters(True, False)
  def test_rows_are_shifted_by_one_and_rejected_ones_take_no_loss(self, clean):
    row = olmo_data_grain.ShiftToInputsTargets().map(
        {"tokens": np.arange(1, 6, dtype=np.uint32), "instance_mask": clean, "file_id": 0}
    )
    self.assertEqual(row["inputs"].tolist(), [1, 2, 3, 4, 5])
    self.assertEqual(row["targets"].tolist(), [2, 3, 4, 5, 0])
    self.assertEqual(row["inputs_position"].tolist(), [0, 1, 2, 3, 4])
    self.assertEqual(row["inputs_segmentation"].tolist(), [1] * 5)
    self.assertEqual(row["targets_segmentation"].tolist(), [1, 1, 1, 1, 0] if clean else [0] * 5)
    self.assertEqual({values.dtype for values in row.values()}, {np.dtype(np.int32)})
    # MaxText's rows lack this one.
    self.assertEqual(row["targets_position"].tolist(), [0, 1, 2, 3, 4])


class LoaderTest(absltest.TestCase):

  def test_batches_cover_the_corpus_and_resume_in_mid_epoch_and_after_it(self):
    index = _index(_write(self.create_tempdir().full_path, (64, 64)))

    def batches(count, taken=0):
      loader = olmo_data_grain.make_olmo_grain_data_loader(
          index,
          seed=3,
          batch_size=4,
          shard_index=0,
          shard_count=1,
          apply_ngram_filter=False,
          initial_step=taken * 4,
      )
      return list(itertools.islice(loader, count))

    unbroken = batches(12)
    firsts = np.concatenate([batch["inputs"][:, 0] for batch in unbroken[:8]])
    self.assertEqual(sorted(firsts.tolist()), list(range(0, 128, 4)))
    for taken in (3, 8, 10):
      for mine, theirs in zip(batches(2, taken), unbroken[taken:]):
        self.assertEqual(set(mine), set(theirs))
        for name, values in mine.items():
          np.testing.assert_array_equal(values, theirs[name], name)


if __name__ == "__main__":
  absltest.main()
