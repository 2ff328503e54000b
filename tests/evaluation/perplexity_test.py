"""Tests for perplexity on a corpus."""

import math
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.evaluation import perplexity
from tests import distributed
from tests import olmo_core_goldens
from tests.evaluation import pipeline_cases
from tests.evaluation import reference

STARTS_PROCESSES = True

_EOS = 256


def write_index(directory, files, sequence_length=32):
  """Returns an index over files of documents, given as (label, documents); documents are bytes."""
  entries = []
  for number, (label, documents) in enumerate(files):
    path = pathlib.Path(directory, f"{number}.npy")
    tokens = [token for document in documents for token in (*document, _EOS)]
    np.array(tokens, "<u2").tofile(path)
    entries.append((str(path), label))
  index = index_lib.build_index(
      entries, sequence_length, tokenizer="bytes", dtype="uint16", base=str(directory)
  )
  path = str(pathlib.Path(directory, "index.json"))
  index.save(path)
  return path


def slow_logprob(params, document, max_length):
  """Scores one document, in windows as the harness cuts them, in float64."""
  tokens = [_EOS, *document, _EOS]
  total, done = 0.0, 1
  while done < len(tokens):
    end = min(len(tokens), done + max_length)
    total += reference.score(params, tokens[max(0, end - max_length - 1) : end], end - done)[0]
    done = end
  return total


class PerplexityTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.params = reference.random_params()
    text = reference.text
    cls.files = [
        ("wiki-validation", [text(i, 1 + i % 4).encode() for i in range(5)]),
        ("books-validation", ["ünïcode".encode(), b"", b"x" * 64, b"y" * 63, b"z" * 128]),
        ("wiki-validation", [text(9, 2).encode()]),
    ]
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.index_path = write_index(folder, cls.files)

  def check(self, found):
    self.assertEqual(list(found), ["wiki-validation", "books-validation"])
    for label, score in found.items():
      documents = [d for name, part in self.files if name == label for d in part]
      self.assertEqual(score.documents, len(documents))
      self.assertEqual(score.tokens, sum(len(d) + 1 for d in documents))
      self.assertEqual(score.bytes, sum(map(len, documents)))
      logprob = sum(slow_logprob(self.params, list(d), 64) for d in documents)
      self.assertAlmostEqual(score.logprob, logprob, delta=1e-3)
      self.assertAlmostEqual(score.perplexity, math.exp(-logprob / score.tokens), delta=1e-3)
      self.assertAlmostEqual(score.bits_per_byte, -logprob / math.log(2) / score.bytes, delta=1e-4)

  def test_each_label_is_scored_as_the_slow_scorer_does_it(self):
    self.check(pipeline_cases.index_perplexity(self.params, self.index_path, 4, 64))

  def test_two_and_four_processes_score_each_token_once(self):
    for processes in (2, 4):
      results = distributed.run(
          "tests.evaluation.pipeline_cases:index_perplexity",
          processes=processes,
          args=(self.params, self.index_path, 4, 64),
      )
      for found in results:
        self.check(found)

  def test_olmo_cores_rule_evaluates_its_batches(self):
    case = olmo_core_goldens.load("padded")[0]
    expected = case["lm_evaluator_order"]
    rows = expected["global_batch_size"] // case["config"]["S"]
    found = perplexity.OlmoCoreRule(case["config"]["S"], rows).chosen(case["items"]["n"])
    self.assertEqual(found.reshape(-1, rows).tolist(), expected["steps"])

  def test_olmo_cores_rule_divides_the_losses_of_a_row_by_one_more_than_their_number(self):
    length, batch = 32, 4
    found = pipeline_cases.index_perplexity(self.params, self.index_path, 4, 64, (length, batch))
    # The real evaluator sums masked losses per position; this does the same, row by row.
    rows = [(label, [*text, _EOS][:length]) for label, texts in self.files for text in texts]
    chosen = perplexity.OlmoCoreRule(length, batch).chosen(len(rows)).tolist()
    self.assertLen(chosen, len(rows) // batch * batch)
    self.assertLess(len(chosen), len(rows))
    for label, score in found.items():
      evaluated = [row for name, row in map(rows.__getitem__, chosen) if name == label]
      losses = 0.0
      for row in evaluated:
        losses -= reference.score(self.params, row, len(row) - 1)[0] if len(row) > 1 else 0.0
      count = sum(len(row) for row in evaluated)
      self.assertEqual((score.documents, score.tokens), (len(evaluated), count))
      self.assertAlmostEqual(score.cross_entropy, losses / count, delta=1e-4)

  def test_too_few_documents_for_a_batch_of_olmo_core_are_an_error(self):
    with self.assertRaisesRegex(errors.ConfigError, "11 documents, which do not fill one batch"):
      pipeline_cases.index_perplexity(self.params, self.index_path, 4, 64, (32, 12))

  def test_a_token_outside_the_vocabulary_stops_it_and_names_the_byte(self):
    directory = self.create_tempdir().full_path
    path = write_index(directory, [("a", [b"abc"])])
    tokens = np.fromfile(directory + "/0.npy", "<u2")
    tokens[2] = 300
    tokens.tofile(directory + "/0.npy")
    with self.assertRaisesRegex(errors.CorpusError, r"Token id 300 in .*0.npy, byte 4, .* 260"):
      pipeline_cases.index_perplexity(self.params, path, 4, 64)

  def test_scores_add_up_and_nothing_has_no_perplexity(self):
    total = perplexity.LabelScore(1, 2, 3, -4.0) + perplexity.LabelScore(10, 20, 30, -40.0)
    self.assertEqual(total, perplexity.LabelScore(11, 22, 33, -44.0))
    self.assertTrue(math.isnan(perplexity.LabelScore().perplexity))
    self.assertTrue(math.isnan(perplexity.LabelScore().bits_per_byte))
    self.assertEqual(total.to_json_dict()["perplexity"], math.exp(2))


if __name__ == "__main__":
  absltest.main()
