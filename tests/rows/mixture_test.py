"""Tests of mixtures of rows from several sources."""

import dataclasses
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import mixture
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments
from tests.rows import document_corpus


@dataclasses.dataclass
class _Rows(row_source.RowSourceDefaults):
  """Row r of epoch e is token 100 · e + r of a file."""

  file: int
  count: int
  row_length: int = 4
  fingerprint: str = "rows"
  looked: list = dataclasses.field(default_factory=list)

  def num_rows(self, epoch):
    del epoch
    return self.count

  def parts(self, epoch, rows):
    ones = np.ones(len(rows), np.int64)
    return parts_lib.Parts.one_per_row(self.file * ones, 100 * epoch + rows, ones)

  def look_ahead(self, position, num_epochs=None):
    self.looked.append((position, num_epochs))

  def close(self):
    self.looked.append("closed")


def _stream(source):
  return row_sequence.RowSequence(source, name="t", seed=0)


def _mixed(*sources, weights=(2, 1), starts=()):
  return mixture.MixedRows([_stream(source) for source in sources], weights, starts)


class MixedRowsTest(parameterized.TestCase):

  def test_rows_come_by_weight_each_member_in_its_own_order_and_epochs(self):
    mixed = _mixed(_Rows(0, 3), _Rows(1, 4))
    parts = mixed.parts(0, np.arange(30))
    self.assertEqual(np.bincount(parts.source).tolist(), [20, 10])
    self.assertEqual(parts.source[:6].tolist(), [0, 1, 0, 0, 1, 0])
    for file, count in ((0, 3), (1, 4)):
      epochs, rows = np.divmod(parts.first[parts.source == file], 100)
      np.testing.assert_array_equal(epochs * count + rows, np.arange(len(rows)))

  @parameterized.parameters(([7, 3, 3, 29, 0],), ([5],), ([],))
  def test_any_rows_may_be_asked_for(self, rows):
    mixed = _mixed(_Rows(0, 3), _Rows(1, 4))
    whole = mixed.parts(0, np.arange(30))
    parts = mixed.parts(0, np.array(rows, np.int64))
    self.assertEqual(parts.source.tolist(), whole.source[rows].tolist())
    self.assertEqual(parts.first.tolist(), whole.first[rows].tolist())

  def test_a_mixture_that_follows_another_begins_with_the_rows_that_it_left(self):
    sources = _Rows(0, 3), _Rows(1, 4)
    names = [row_sequence.RowSequence(s, name=n, seed=0) for s, n in zip(sources, "ab")]
    first = mixture.MixedRows(names, (2, 1), (10, 20))
    taken = np.bincount(first.parts(0, np.arange(7)).source)
    self.assertEqual(first.taken_until(7), {"a": 10 + taken[0], "b": 20 + taken[1]})
    starts = [5, 2]
    second = _mixed(*sources, weights=(1, 3), starts=starts)
    whole = _mixed(*sources, weights=(1, 3)).parts(0, np.arange(60))
    parts = second.parts(0, np.arange(30))
    for file, start in enumerate(starts):
      found = parts.first[parts.source == file]
      expected = whole.first[whole.source == file][start : start + len(found)]
      np.testing.assert_array_equal(found, expected)
    self.assertEqual(second.starts, (5, 2))
    second.look_ahead(8)
    self.assertEqual([s.looked[-1][0] for s in sources], [5 + 2, 2 + 6])

  def test_it_has_no_end(self):
    stream = _stream(_mixed(_Rows(0, 3), _Rows(1, 4)))
    self.assertIsNone(stream.source.num_rows(0))
    self.assertTrue(stream.has(10**9))
    self.assertEqual(stream.locate(np.array([10**9]))[1].tolist(), [10**9])

  def test_packed_members_keep_their_parts(self):
    corpus = document_corpus.write(self.create_tempdir().full_path)
    members = [corpus.planned(seed=seed) for seed in range(2)]
    parts = _mixed(*members).parts(0, np.arange(12))
    counts = [0, 0]
    for row in range(12):
      own = parts.take(np.array([row]))
      member = [0, 1, 0][row % 3]
      expected = members[member].parts(0, np.array([counts[member]]))
      counts[member] += 1
      self.assertEqual(own.first.tolist(), expected.first.tolist())
      self.assertEqual(own.count.tolist(), expected.count.tolist())

  @parameterized.parameters(
      ("row_length", 8),
      ("pad_id", 7),
      ("segment_rule", segments.SegmentRule("part")),
      ("filter_sees_padding", True),
      ("block_rows", 5),
      ("mask_paths", ["a"]),
      ("fingerprint", "others"),
  )
  def test_members_must_agree(self, name, value):
    other = _Rows(1, 4)
    setattr(other, name, value)
    with self.assertRaisesRegex(errors.ConfigError, f"must have the same {name}"):
      _mixed(_Rows(0, 3), other)
    both = _Rows(0, 3)
    setattr(both, name, value)
    self.assertEqual(getattr(_mixed(both, other), name), value)

  @parameterized.parameters(((1,),), ((1, 2, 3),), ((),), ((1, 0),))
  def test_every_member_needs_a_weight(self, weights):
    with self.assertRaises(errors.ConfigError):
      _mixed(_Rows(0, 3), _Rows(1, 4), weights=weights)

  def test_members_prepare_what_they_need_soon_and_are_closed(self):
    sources = _Rows(0, 3), _Rows(1, 4)
    mixed = _mixed(*sources)
    mixed.look_ahead(30)
    mixed.close()
    self.assertEqual([s.looked for s in sources], [[(20, None), "closed"], [(10, None), "closed"]])

  def test_it_survives_pickling(self):
    again = pickle.loads(pickle.dumps(_mixed(_Rows(0, 3), _Rows(1, 4))))
    self.assertEqual(again.parts(0, np.arange(3)).source.tolist(), [0, 1, 0])


if __name__ == "__main__":
  absltest.main()
