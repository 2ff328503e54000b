"""Averages of the real OLMo-core's language-model evaluator, compared with `eval --ppl`.

Both score the same random documents with the same bigram model: OLMo-core by its own dataset,
loader, loss and `LMEvaluator`, and this package by `--averaging=olmo_core`.
"""

import pathlib
import random
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest
from olmo_core.data import NumpyPaddedFSLDatasetConfig
from olmo_core.data import TokenizerConfig
from olmo_core.data.collator import DataCollator
from olmo_core.data.utils import get_labels
from olmo_core.eval.lm_evaluator import LMEvaluator
from olmo_core.nn.functional import cross_entropy_loss

import maxtext_olmo
from maxtext_olmo.evaluation import perplexity
from maxtext_olmo.evaluation import scoring
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from tests.peers import tally

_CASES = tally.num_cases(10)
_VOCABULARY, _EOS, _PAD = 260, 256, 257
_KIND = "evaluation, averages"


def _write(folder: pathlib.Path, rng: random.Random) -> list[tuple[str, str]]:
  """Writes documents of bytes, some files with a tail; returns paths and labels."""
  files = []
  for number in range(rng.randrange(1, 5)):
    tokens: list[int] = []
    for _ in range(rng.randrange(3, 20)):
      tokens += [*rng.randbytes(rng.randrange(0, 60)), _EOS]
    tokens += rng.randbytes(rng.choice((0, 0, 7)))
    path = folder / f"{number}.npy"
    np.array(tokens, "<u2").tofile(path)
    files.append((str(path), rng.choice(("wiki", "books"))))
  return files


def _theirs(
    files: list[tuple[str, str]], work_dir: str, length: int, rows: int, table: np.ndarray
) -> dict[str, float]:
  """Returns what OLMo-core's evaluator logs."""
  paths, labels = zip(*files)
  dataset = NumpyPaddedFSLDatasetConfig(
      paths=list(paths),
      metadata=[{"label": label} for label in labels],
      tokenizer=TokenizerConfig(vocab_size=_VOCABULARY, eos_token_id=_EOS, pad_token_id=_PAD),
      sequence_length=length,
      work_dir=work_dir,
  ).build()
  evaluator = LMEvaluator.from_numpy_dataset(
      dataset,
      name="lm",
      global_batch_size=rows * length,
      collator=DataCollator(pad_token_id=_PAD),
      device=torch.device("cpu"),
      num_threads=0,
  )
  logits = torch.tensor(table)
  for batch in evaluator:
    labels = get_labels(batch)
    flat = logits[batch["input_ids"]].view(-1, _VOCABULARY)
    loss, _ = cross_entropy_loss(flat, labels.view(-1), ignore_index=-100, reduction="none")
    evaluator.update_metrics(batch, loss.view(labels.shape), None)
  return {name: float(value) for name, value in evaluator.compute_metrics().items()}


class EvaluationCheck(absltest.TestCase):

  def test_loss_and_perplexity_are_those_that_olmo_core_logs(self):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    tokenizer = tokenizer_lib.load_eval_tokenizer("bytes")

    def apply(params: Any, batch: Any) -> Any:
      return jnp.take(params, batch.inputs, axis=0)

    for number in range(_CASES):
      rng = random.Random(f"{tally.SEED}-evaluation-{number}")
      with self.subTest(seed=tally.SEED, case=number), tempfile.TemporaryDirectory() as folder:
        files = _write(pathlib.Path(folder), rng)
        length, rows = rng.choice((8, 16, 32)), rng.randrange(1, 4)
        table = np.random.default_rng(number).normal(0, 2, (_VOCABULARY, _VOCABULARY))
        table = table.astype(np.float32)
        theirs = _theirs(files, f"{folder}/work", length, rows, table)
        index = maxtext_olmo.build_index(
            files, length, tokenizer="bytes", dtype="uint16", base=folder
        )
        scorer = scoring.Scorer(apply, mesh, batch_size=8, padding_multiple=64, max_length=64)
        ours = perplexity.score_index(
            scorer,
            jnp.asarray(table),
            index,
            tokenizer,
            olmo_core=perplexity.OlmoCoreRule(length, rows),
        )
        tally.case(_KIND)
        tally.compare(_KIND, sorted(f"{label}/CE loss" for label in ours), sorted(theirs)[::2])
        for label, score in ours.items():
          found = {"CE loss": score.cross_entropy, "PPL": score.perplexity}
          for name, value in found.items():
            expected = theirs[f"{label}/{name}"]
            # Its sums are float32; labels without a row in any batch have no average.
            close = np.isclose(value, expected, rtol=2e-5, atol=0, equal_nan=True)
            tally.compare(_KIND, value, value if close else expected)


if __name__ == "__main__":
  absltest.main()
