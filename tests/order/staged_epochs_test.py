import tempfile

from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import epochs
from maxtext_olmo.order import staged_epochs
from maxtext_olmo.order import stages
from tests import corpora


class BatchEpochsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    directory = self.create_tempdir().full_path
    self.index = index_builder.load_index(corpora.write_corpus(directory)[0])

  def batch_epochs(self, *made, **values):
    """Returns the epochs of stages with an order and a seed from some positions on."""
    settings = [
        (first, stages.Settings(order, seed, self.index.fingerprint)) for first, order, seed in made
    ]
    return staged_epochs.batch_epochs(
        [stages.Stage(first, f"position {first}", some) for first, some in settings],
        corpora_lib.Corpora(self.index, cache_dir=tempfile.mkdtemp(), **values),
    )

  def test_batches_of_stages_that_drop_tails_do_not_span_them(self):
    n = self.index.total_instances
    found = self.batch_epochs(
        (0, "feistel", 1),
        (20, "feistel", 2),
        (40, "olmo_core", 1),
        (40 + n + 7, "feistel", 1),
        (90 + n, "olmo_core", 1),
    )
    self.assertEqual(
        found, epochs.Epochs(((0, 40), (1, n), (2, 7), (3, 43), (4, n)), cut=(0, 2, 3))
    )

  def test_without_such_stages_there_are_none(self):
    self.assertIsNone(self.batch_epochs((0, "feistel", 1), (20, "feistel", 2)))

  def test_an_epoch_has_no_held_out_instances(self):
    found = self.batch_epochs((0, "olmo_core", 1), held_out_instances=5)
    self.assertEqual(found.length(0), self.index.total_instances - 5)


if __name__ == "__main__":
  absltest.main()
