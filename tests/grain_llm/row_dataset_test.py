"""Tests of making rows from documents."""

import dataclasses
import itertools
import json

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.grain_llm import pipeline as pipeline_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.grain_llm import rows_by_position
from tests import corpora
from tests import workers as workers_lib

STARTS_PROCESSES = True

E = 99


def _documents(count=40):
  rng = np.random.default_rng(count)
  return [{"inputs": np.append(rng.integers(1, 90, n), E)} for n in rng.integers(1, 12, count)]


def _rows(packing, num_epochs=2, **kwargs):
  return pipeline_lib.make_grain_llm_dataset(
      0, 1, _documents(), 4, 16, True, 5, num_epochs, eod_token_id=E, packing=packing, **kwargs
  )


class _KeepAll(grain.transforms.Filter):

  def filter(self, element):
    return True


def _maker(count=10, **values):
  documents = [{"inputs": np.full(1 + i % 5, i + 1)} for i in range(count)]
  return row_dataset.RowMaker(
      **{
          "dataset": documents,
          "documents": grain.MapDataset.source(documents),
          "operations": (),
          "host": 0,
          "hosts": 1,
          "order": "feistel",
          "seed": 3,
          "num_epochs": 1,
          "length": 8,
          "packing": None,
          "bins": 4,
          "shift": None,
          "eod_token_id": 0,
          "pad": True,
          "shard": "slice",
          "long_documents": "error",
          "counts_path": None,
          **values,
      }
  )


def _tokens(rows):
  found = np.concatenate([row["inputs"][row["inputs_segmentation"] != 0] for row in rows])
  return sorted(found.tolist())


class RowsCase(parameterized.TestCase):

  def assert_equal(self, got, expected):
    self.assertLen(got, len(expected))
    for one, other in zip(got, expected):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


class RowDatasetTest(RowsCase):

  @parameterized.parameters(None, "planned", "first_fit", "concat_then_split")
  def test_any_number_of_workers_gives_the_same_rows(self, packing):
    expected = list(_rows(packing))
    with workers_lib.started_quickly():
      for workers in (1, 2):
        opened = iter(_rows(packing).open(workers, ahead=2))
        self.assert_equal(list(opened), expected)
        opened.close()

  @parameterized.parameters(None, "planned")
  def test_rows_by_position_are_those_of_the_stream(self, packing):
    dataset = _rows(packing)
    one_by_one = list(dataset)
    together = dataset.rows.rows(np.arange(len(one_by_one)))
    self.assertFalse(dataset.rows.has(len(one_by_one)))
    self.assert_equal(together, one_by_one)

  def test_the_state_of_rows_by_position_is_the_number_taken(self):
    opened = iter(_rows("planned"))
    next(opened)
    next(opened)
    self.assertEqual(opened.get_state(), {"next_index": 2})


class FurtherTransformationsTest(RowsCase):
  """Tests of Grain's own transformations applied to the rows."""

  @parameterized.parameters(None, "planned", "first_fit", "concat_then_split")
  def test_rows_are_mapped_filtered_and_batched(self, packing):
    expected = [row["inputs"] for row in _rows(packing)]
    mapped = _rows(packing).map(lambda row: row["inputs"]).filter(lambda ids: ids[0] % 2 == 0)
    even = [ids for ids in expected if ids[0] % 2 == 0]
    np.testing.assert_array_equal(np.concatenate(list(mapped.batch(3))), even)

  @parameterized.parameters(None, "planned", "first_fit")
  def test_a_slice_of_the_rows_is_that_of_a_list(self, packing):
    for epochs in (2, None):
      rows = _rows(packing, num_epochs=epochs)
      expected = list(itertools.islice(rows, 20))
      for sl in (slice(2, 7), slice(0, 12, 5), slice(3, 4)):
        self.assert_equal(list(rows.slice(sl)), expected[sl])
      self.assert_equal(list(itertools.islice(rows.slice(slice(4, None, 2)), 8)), expected[4::2])

  def test_a_slice_of_a_stream_continues_from_its_state(self):
    rows = _rows("first_fit").slice(slice(1, None, 2))
    iterator = iter(rows)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = list(iterator)
    resumed = iter(rows)
    resumed.set_state(state)
    self.assert_equal(list(resumed), expected)

  def test_workers_of_grain_give_the_same_rows(self):
    with workers_lib.started_quickly():
      for packing in (None, "planned", "first_fit"):
        expected = list(itertools.islice(_rows(packing, num_epochs=None), 9))
        options = grain.MultiprocessingOptions(num_workers=2)
        rows = _rows(packing, num_epochs=None)
        for dataset, first in ((rows, 0), (rows.slice(slice(1, None)), 1)):
          opened = iter(dataset.map(dict).mp_prefetch(options))
          found = list(itertools.islice(opened, 9 - first))
          opened.close()
          self.assert_equal(found, expected[first:])

  @parameterized.parameters(None, "planned", "first_fit")
  def test_the_element_spec_is_that_of_the_rows(self, packing):
    rows = _rows(packing)
    datasets = [rows, rows.slice(slice(1, 5)), rows.batch(2, drop_remainder=True)]
    if rows.rows is not None:
      datasets += [rows.open(), rows.rows]
    for dataset in datasets:
      spec = grain.experimental.get_element_spec(dataset)
      row = next(iter(dataset))
      self.assertEqual(
          {name: (value.shape, value.dtype) for name, value in spec.items()},
          {name: (value.shape, value.dtype) for name, value in row.items()},
      )
    unpadded = _rows(None, apply_padding=False)
    self.assertEqual(grain.experimental.get_element_spec(unpadded)["inputs"].shape, (None,))


class ShardBoundsTest(absltest.TestCase):

  @given(count=st.integers(0, 1000), hosts=st.integers(1, 40))
  def test_shares_follow_each_other_and_the_first_hosts_get_one_more(self, count, hosts):
    bounds = [row_dataset.shard_bounds(count, host, hosts) for host in range(hosts)]
    self.assertEqual((bounds[0][0], bounds[-1][1]), (0, count))
    self.assertEqual([start for start, _ in bounds[1:]], [end for _, end in bounds[:-1]])
    sizes = [end - start for start, end in bounds]
    self.assertEqual(sizes, sorted(sizes, reverse=True))
    self.assertLessEqual(sizes[0] - sizes[-1], 1)

  def test_a_host_outside_the_range_is_an_error(self):
    for host, hosts in ((-1, 2), (2, 2), (0, 0)):
      with self.assertRaisesRegex(errors.ConfigError, f"no host {host} of {hosts}"):
        row_dataset.shard_bounds(5, host, hosts)


class WindowTest(absltest.TestCase):

  def test_a_window_is_about_as_many_rows_as_asked_for(self):
    records = rows_by_position.RecordParts(grain.MapDataset.source([{"inputs": [1] * 4}] * 100))
    self.assertEqual(row_dataset.window_of(records, 100, bins=5, length=8), 10)
    # Documents longer than five rows would each be a window.
    self.assertEqual(row_dataset.window_of(records, 100, bins=1, length=1), 1)

  def test_a_corpus_knows_its_tokens_without_being_read(self):
    directory = self.create_tempdir().full_path
    path, _ = corpora.write_corpus(directory)
    index = index_lib.load_index(path)
    documents = documents_lib.build_documents(index, path + ".documents", 0)
    source = source_lib.OlmoDocumentSource(index, documents)
    tokens = sum(entry.n_tokens for entry in index.files)
    window = row_dataset.window_of(source, len(source), bins=10, length=16)
    self.assertAlmostEqual(window * tokens / len(source), 160, delta=tokens / len(source))


class RowMakerTest(parameterized.TestCase):

  @parameterized.parameters(
      ({}, True, False),
      ({"packing": "planned"}, True, True),
      ({"packing": "first_fit"}, False, True),
      ({"long_documents": "split"}, False, True),
      ({"operations": (_KeepAll(),)}, False, True),
  )
  def test_rows_are_random_access_where_their_number_follows_from_the_lengths(
      self, values, random_access, packed
  ):
    made = _maker(**values).make()
    self.assertEqual(made.rows is not None, random_access)
    self.assertEqual(made.info.packed, packed)

  @parameterized.product(packing=(None, "first_fit", "planned"), hosts=(1, 3))
  def test_hosts_together_have_every_document_once(self, packing, hosts):
    found = []
    for host in range(hosts):
      found += _tokens(_maker(packing=packing, host=host, hosts=hosts).make())
    expected = [i + 1 for i in range(10) for _ in range(1 + i % 5)]
    self.assertEqual(sorted(found), expected)

  @parameterized.parameters(None, "planned")
  def test_every_host_knows_the_rows_of_all(self, packing):
    made = [_maker(packing=packing, num_epochs=2, host=host, hosts=3).make() for host in range(3)]
    counted = tuple(len(list(rows)) for rows in made)
    self.assertEqual([rows.info.host_rows for rows in made], [counted] * 3)

  def test_the_rows_of_a_stream_and_of_endless_rows_are_unknown(self):
    self.assertEqual(_maker(packing="first_fit", hosts=3).make().info.host_rows, ())
    endless = _maker(num_epochs=None).make().info
    self.assertEqual((endless.host_rows, endless.endless), ((), True))

  def test_a_host_without_a_document_is_an_error_where_it_could_not_end(self):
    for values in ({"num_epochs": None}, {"packing": "planned"}):
      with self.assertRaisesRegex(errors.ConfigError, "Host 2 of 3 has no document.*only 2"):
        _maker(2, host=2, hosts=3, **values).make()
    self.assertEmpty(list(_maker(2, host=2, hosts=3).make()))

  def test_a_host_that_does_not_exist_is_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "no host 3 of 3"):
      _maker(host=3, hosts=3).make()

  def test_the_identity_names_all_that_decides_which_row_comes_when(self):
    first = _maker(packing="planned")
    others = [
        dataclasses.replace(first, **change)
        for change in (
            {"order": "sequential"},
            {"seed": 4},
            {"length": 9},
            {"bins": 5},
            {"packing": "best_fit"},
            {"long_documents": "split"},
            {"host": 1, "hosts": 2},
        )
    ] + [_maker(11, packing="planned")]
    identities = [maker.make().info.identity for maker in [first, *others]]
    self.assertLen(set(map(str, identities)), len(identities))
    self.assertEqual(dataclasses.replace(first).make().info.identity, identities[0])

  def test_all_hosts_have_the_identity_of_the_run(self):
    made = [_maker(host=host, hosts=3).make().info for host in range(3)]
    self.assertEqual([info.identity for info in made], [made[0].identity] * 3)
    self.assertEqual(
        [info.version_1[info.host].count(f"host {i} of 3") for i, info in enumerate(made)], [1] * 3
    )

  def test_rows_without_padding_have_no_length(self):
    self.assertIsNone(_maker(pad=False).make().info.length)
    self.assertEqual(_maker(pad=False, packing="first_fit").make().info.length, 8)
    lengths = sorted(len(row["inputs"]) for row in _maker(pad=False).make())
    self.assertEqual(lengths, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5])


if __name__ == "__main__":
  absltest.main()
