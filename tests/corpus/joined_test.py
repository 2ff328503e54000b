import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import joined
from tests import corpora


class JoinedTest(absltest.TestCase):

  def test_a_file_shared_by_indexes_is_listed_once(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    first = index_lib.load_index(corpora.write_corpus(directory)[0])
    corpora.write_tokens(directory / "new.npy", 90, seed=8)
    entries = [(str(directory / "new.npy"), "new"), (first.resolve(2), "other")]
    second = index_lib.build_index(
        entries, 8, tokenizer="test", dtype="uint16", base=str(directory)
    )
    found = joined.join([first, second, first])
    self.assertLen(found.index.files, 5)
    self.assertEqual(list(found.indexes), [first.fingerprint, second.fingerprint])
    self.assertEqual(found.numbers[first.fingerprint].tolist(), [0, 1, 2, 3])
    self.assertEqual(found.numbers[second.fingerprint].tolist(), [4, 2])
    for index in (first, second):
      for own, number in enumerate(found.numbers[index.fingerprint].tolist()):
        self.assertEqual(found.index.resolve(number), index.resolve(own))
    self.assertEqual([f.label for f in found.index.files][2:], ["label-0", "label-1", "new"])
    self.assertEqual(found.index.total_instances, first.total_instances)


if __name__ == "__main__":
  absltest.main()
