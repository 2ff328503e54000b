import dataclasses
import pathlib

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import stages
from tests import corpora


class CorporaTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.base = index_builder.load_index(corpora.write_corpus(self.directory)[0])
    self.path = str(self.directory / "other.json")
    self.other = self.write([1, 3])

  def write(self, files):
    """Writes an index of some files of the base corpus, cut into longer windows."""
    index = index_builder.build_index(
        [(self.base.resolve(file), "again") for file in files],
        16,
        tokenizer="test",
        dtype="uint16",
        base=str(self.directory),
        max_target_sequence_length=16,
    )
    index.save(self.path)
    return index

  def stage(self, index):
    return stages.Stage(
        0, "step 5", stages.Settings("feistel", 1, index.fingerprint, index_path=self.path)
    )

  def test_an_index_is_loaded_by_its_path_in_instances_of_the_length_of_the_run(self):
    found = corpora_lib.Corpora(self.base).index(self.stage(self.other))
    self.assertEqual(found.fingerprint, self.other.fingerprint)
    self.assertEqual(found.sequence_length, self.base.sequence_length)

  def test_an_index_that_is_given_is_not_loaded(self):
    given = self.other.with_sequence_length(8)
    found = corpora_lib.Corpora(self.base, {given.fingerprint: given})
    self.assertIs(found.index(self.stage(given)), given)
    self.assertIs(found.index(self.stage(self.base)), self.base)

  def test_another_index_at_the_path_of_a_stage_is_an_error(self):
    self.write([3, 1])
    with self.assertRaisesRegex(
        errors.CorpusError, f"{self.path} with the fingerprint {self.other.fingerprint}, but that"
    ):
      corpora_lib.Corpora(self.base).index(self.stage(self.other))

  def test_what_the_base_holds_out_is_held_out_of_other_indexes_too(self):
    corpora_ = corpora_lib.Corpora(self.base, held_out_instances=self.base.total_instances // 2)
    split = corpora_.split(self.other.with_sequence_length(8))
    self.assertLess(split.num_train, self.other.with_sequence_length(8).total_instances)
    none = dataclasses.replace(corpora_, held_out_instances=0)
    self.assertEqual(
        none.split(self.other.with_sequence_length(8)).num_train,
        self.other.with_sequence_length(8).total_instances,
    )


if __name__ == "__main__":
  absltest.main()
