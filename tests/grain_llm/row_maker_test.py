"""How documents become rows: shares of hosts, windows of a plan, and what is known of the rows."""

import dataclasses

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
from maxtext_olmo.grain_llm import row_maker
from maxtext_olmo.grain_llm import row_source
from tests import corpora


class _KeepAll(grain.transforms.Filter):

  def filter(self, element):
    return True


def _maker(count=10, **values):
  documents = [{"inputs": np.full(1 + i % 5, i + 1)} for i in range(count)]
  return row_maker.RowMaker(
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
          "shift": row_source.Shift(None),
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


class ShardBoundsTest(absltest.TestCase):

  @given(count=st.integers(0, 1000), hosts=st.integers(1, 40))
  def test_shares_follow_each_other_and_the_first_hosts_get_one_more(self, count, hosts):
    bounds = [row_maker.shard_bounds(count, host, hosts) for host in range(hosts)]
    self.assertEqual((bounds[0][0], bounds[-1][1]), (0, count))
    self.assertEqual([start for start, _ in bounds[1:]], [end for _, end in bounds[:-1]])
    sizes = [end - start for start, end in bounds]
    self.assertEqual(sizes, sorted(sizes, reverse=True))
    self.assertLessEqual(sizes[0] - sizes[-1], 1)

  def test_a_host_that_is_none_is_an_error(self):
    for host, hosts in ((-1, 2), (2, 2), (0, 0)):
      with self.assertRaisesRegex(errors.ConfigError, f"no host {host} of {hosts}"):
        row_maker.shard_bounds(5, host, hosts)


class WindowTest(absltest.TestCase):

  def test_a_window_is_about_as_many_rows_as_asked_for(self):
    records = row_source.RecordParts(grain.MapDataset.source([{"inputs": [1] * 4}] * 100))
    self.assertEqual(row_maker.window_of(records, 100, bins=5, length=8), 10)
    # Documents longer than five rows would each be a window.
    self.assertEqual(row_maker.window_of(records, 100, bins=1, length=1), 1)

  def test_a_corpus_knows_its_tokens_without_being_read(self):
    directory = self.create_tempdir().full_path
    path, _ = corpora.write_corpus(directory)
    index = index_lib.load_index(path)
    documents = documents_lib.build_documents(index, path + ".documents", 0)
    source = source_lib.OlmoDocumentSource(index, documents)
    tokens = sum(entry.n_tokens for entry in index.files)
    window = row_maker.window_of(source, len(source), bins=10, length=16)
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

  def test_nobody_knows_the_rows_of_a_stream_or_of_one_without_end(self):
    self.assertEqual(_maker(packing="first_fit", hosts=3).make().info.host_rows, ())
    endless = _maker(num_epochs=None).make().info
    self.assertEqual((endless.host_rows, endless.endless), ((), True))

  def test_a_host_without_a_document_is_an_error_where_it_could_not_end(self):
    for values in ({"num_epochs": None}, {"packing": "planned"}):
      with self.assertRaisesRegex(errors.ConfigError, "Host 2 of 3 has no document.*only 2"):
        _maker(2, host=2, hosts=3, **values)
    self.assertEmpty(list(_maker(2, host=2, hosts=3).make()))

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
