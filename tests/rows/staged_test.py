import pathlib

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import joined
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import staged_windows
from maxtext_olmo.order import stages
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import staged
from maxtext_olmo.rows import windows
from tests import corpora


class StagedRowsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    directory = pathlib.Path(self.create_tempdir().full_path)
    self.one = index_lib.load_index(corpora.write_corpus(directory)[0])
    entries = [(self.one.resolve(file), "again") for file in (3, 1)]
    self.other = index_lib.build_index(
        entries, 8, tokenizer="test", dtype="uint16", base=str(directory)
    )
    made = [
        stages.Stage(position, f"position {position}", stages.Settings("feistel", 1, fingerprint))
        for position, fingerprint in ((0, self.one.fingerprint), (130, self.other.fingerprint))
    ]
    corpora_ = corpora_lib.Corpora(self.one, {self.other.fingerprint: self.other})
    self.stream = staged_windows.StagedWindows(made, corpora_)
    self.rows = self.staged_rows(self.one, self.other)

  def staged_rows(self, *indexes):
    rows = windows.WindowRows(self.one)
    return staged.StagedRows(rows, joined.join(indexes), rows.segment_rule)

  def test_it_is_a_row_source(self):
    self.assertIsInstance(self.rows, row_source.RowSource)

  def test_rows_are_those_of_the_index_of_their_epoch(self):
    rows = self.rows.for_stream(self.stream)
    first = self.stream.first_epoch(1)
    for epoch, index in (
        (0, self.one),
        (1, self.one),
        (first, self.other),
        (first + 1, self.other),
    ):
      numbers = np.arange(index.total_instances)
      self.assertEqual(rows.num_rows(epoch), len(numbers))
      found, alone = rows.parts(epoch, numbers), windows.WindowRows(index).parts(0, numbers)
      np.testing.assert_array_equal(found.first, alone.first)
      paths = [self.rows.joined.index.resolve(file) for file in found.source]
      self.assertEqual(paths, [index.resolve(file) for file in alone.source])
    # Without stages, there is the first index alone.
    self.assertEqual(self.rows.num_rows(5), self.one.total_instances)

  def test_a_range_is_found_in_each_index_that_has_its_file(self):
    rows = self.rows.for_stream(self.stream)
    epochs, positions = row_source.positions_of(rows, self.stream, 3, 0, 20, 400)
    found = rows.joined.index.resolve(3)
    expected = []
    for position in range(400):
      (epoch,), (row,) = self.stream.locate(np.array([position]))
      index = (self.one, self.other)[self.stream.stage_of_epoch(int(epoch))[0]]
      part = windows.WindowRows(index).parts(0, np.array([row]))
      if index.resolve(int(part.source[0])) == found and part.first[0] < 20:
        expected.append((int(epoch), position))
    self.assertEqual(list(zip(epochs.tolist(), positions.tolist())), sorted(expected))
    self.assertLen({self.stream.stage_of_epoch(epoch)[0] for epoch in epochs.tolist()}, 2)

  def test_an_index_that_the_config_does_not_name_is_an_error_on_use(self):
    rows = self.staged_rows(self.one).for_stream(self.stream)
    self.assertEqual(rows.num_rows(0), self.one.total_instances)
    with self.assertRaisesRegex(errors.OrderError, "which this config does not name"):
      rows.parts(self.stream.first_epoch(1), np.arange(3))


if __name__ == "__main__":
  absltest.main()
