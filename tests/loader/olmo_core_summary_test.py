"""Tests of the words for a run of OLMo-core."""

import numpy as np
from absl.testing import absltest

from maxtext_olmo.loader import olmo_core_run

_IDS = {"vocab_size": 50_000, "eos_token_id": 0, "pad_token_id": 1}


class OlmoCoreSummaryTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    np.arange(40, dtype="uint16").tofile(f"{self.folder}/part.npy")

  def understood(self, dataset="NumpyFSLDatasetConfig", **fields):
    content = {
        "dataset": {
            "_CLASS_": f"olmo_core.data.numpy_dataset.{dataset}",
            "tokenizer": _IDS,
            "paths": [f"{self.folder}/part.npy"],
            "sequence_length": 4,
            **fields,
        },
        "data_loader": {"global_batch_size": 8, "seed": 7},
        "model": {},
    }
    index_path = f"{self.folder}/index.json"
    return dict(olmo_core_run.import_run(content, index_path=index_path).understood)

  def test_it_says_what_a_config_means(self):
    understood = self.understood()
    self.assertEqual(understood["dataset"], "NumpyFSLDataset")
    self.assertStartsWith(understood["files"], "1 with 40 tokens")
    self.assertEqual(understood["tokens"], "uint16, vocabulary 50,000, EOS 0, padding 1")
    self.assertEqual(understood["rows"], "4 tokens")
    self.assertEqual(understood["batch"], "2 rows, 8 tokens")
    self.assertEqual(understood["order"], "olmo_core, seed 7")
    self.assertEqual(understood["not needed"], "model")

  def test_only_documents_have_boundaries(self):
    self.assertNotIn("boundaries", self.understood())
    self.assertEqual(self.understood("NumpyPaddedFSLDatasetConfig")["boundaries"], "EOS")

  def test_packed_rows_say_how_they_are_packed(self):
    understood = self.understood("NumpyPackedFSLDatasetConfig")
    self.assertIn("packed from 1 file at a time, long documents truncated", understood["rows"])
    self.assertIn("olmo_packing_ties", understood["equally long documents"])


if __name__ == "__main__":
  absltest.main()
