"""Packed documents with loss masks inside MaxText, and the arrays that reach its loss function.

Documents say which one they are, so each row that was recorded is compared with the files by hand,
without this library:

    corpus = write_corpus(directory)
    run = runs.start(directory, *corpus.arguments(), edit=LossTap(directory / "loss"))
    for step, record in read_losses(directory / "loss").items():
      corpus.check_rows(record.batch, document_mask=True)
      record.check_loss()
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxtext_olmo.corpus import index_builder as index_lib
from tests.trainers.maxtext import runs

EOS = 1
PAD = 2
_FIRST = 3  # Document i begins with the token _FIRST + i.
_EPSILON = 1e-8  # What MaxText adds to the number of tokens.


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Documents in token files, with a byte per token that says whether it counts in the loss.

  Attributes:
    directory: Directory of `index.json` and of the folder `data`.
    tokens: The tokens of each document as rows have them: long ones are cut.
    masks: Whether loss is taken on each token of each document.
  """

  directory: pathlib.Path
  tokens: list[np.ndarray]
  masks: list[np.ndarray]

  def arguments(self, **changes: Any) -> list[str]:
    """Returns the arguments of MaxText for packed rows with attention within documents."""
    values = {
        "dataset_type": "olmo_packed",
        "olmo_eos_id": EOS,
        "olmo_pad_id": PAD,
        "olmo_document_mask": True,
        "packing": True,
        "per_device_batch_size": 4,
        **changes,
    }
    return [f"{name}={value}" for name, value in values.items()]

  def documents(self, row: np.ndarray) -> list[int]:
    """Returns the documents of a row, and checks that it has nothing else."""
    found, column = [], 0
    while column < len(row) and row[column] != PAD:
      document = int(row[column]) - _FIRST
      tokens = self.tokens[document]
      np.testing.assert_array_equal(row[column : column + len(tokens)], tokens)
      found.append(document)
      column += len(tokens)
    np.testing.assert_array_equal(row[column:], PAD)
    return found

  def check_rows(
      self, batch: Mapping[str, np.ndarray], *, document_mask: bool, label_masks: bool
  ) -> list[int]:
    """Checks all arrays of a batch, and returns its documents.

    Args:
      batch: The six arrays.
      document_mask: Whether segments and positions follow documents.
      label_masks: Whether the mask files decide where loss is taken; otherwise, on all tokens.
    """
    found = []
    for i, row in enumerate(batch["inputs"]):
      documents = self.documents(row)
      found += documents
      lengths = [len(self.tokens[document]) for document in documents]
      padding = len(row) - sum(lengths)
      if padding:  # OLMo-core's masks treat what follows the last EOS as one more document.
        lengths.append(padding)
      if not document_mask:
        lengths = [len(row)]
      segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)
      positions = np.concatenate([np.arange(length) for length in lengths])
      # OLMo-core's label of a column is the next token, or -100 if that one is masked or padding.
      masks = [self.masks[document] | (not label_masks) for document in documents]
      counts = np.concatenate([*masks, np.zeros(padding, np.bool_)])
      expected = {
          "targets": np.append(row[1:], 0),
          "inputs_segmentation": segments,
          "inputs_position": positions,
          "targets_position": positions,
          "targets_segmentation": np.append(np.where(counts, segments, 0)[1:], 0),
      }
      for name, values in expected.items():
        np.testing.assert_array_equal(batch[name][i], values, f"{name} of {documents}")
    return found


def write_corpus(directory: str | os.PathLike[str], documents: int = 40, files: int = 3) -> Corpus:
  """Writes token files, mask files, and an index; loss is taken on the second half of documents."""
  directory = pathlib.Path(directory)
  (directory / "data").mkdir(parents=True)
  rng = np.random.default_rng(11)
  tokens, masks = [], []
  for document in range(documents):
    # Some are longer than a row.
    length = int(rng.integers(3, runs.LENGTH + 4))
    body = rng.integers(_FIRST, runs.VOCABULARY, size=length)
    body[0], body[-1] = _FIRST + document, EOS
    tokens.append(body)
    masks.append(np.arange(length) >= length // 2)
  paths = []
  for file, chosen in enumerate(np.array_split(np.arange(documents), files)):
    name = f"token_ids_part_{file}.npy"
    np.concatenate([tokens[i] for i in chosen]).astype("<u2").tofile(directory / "data" / name)
    mask = np.concatenate([masks[i] for i in chosen])
    mask.tofile(directory / "data" / f"labels_mask_part_{file}.npy")
    paths.append((name, "sft"))
  index_lib.build_index(
      paths, runs.LENGTH, tokenizer="test", dtype="uint16", base=str(directory / "data")
  ).save(str(directory / "index.json"))
  return Corpus(directory, [x[: runs.LENGTH] for x in tokens], [x[: runs.LENGTH] for x in masks])


@dataclasses.dataclass(frozen=True)
class LossRecord:
  """One call of MaxText's loss function: its batch, the model's logits, and the loss."""

  batch: dict[str, np.ndarray]
  logits: np.ndarray
  loss: float

  def check_loss(self) -> None:
    """Checks that the loss is the mean over the targets whose segmentation is not 0."""
    logits = self.logits.astype(np.float64)
    peak = logits.max(-1, keepdims=True)
    logs = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    targets = self.batch["targets"][..., np.newaxis].astype(np.int64)
    of_targets = -np.take_along_axis(logs, targets, axis=-1)[..., 0]
    counts = self.batch["targets_segmentation"] != 0
    expected = of_targets[counts].sum() / (counts.sum() + _EPSILON)
    np.testing.assert_allclose(self.loss, expected, rtol=2e-5)


class LossTap:
  """Makes MaxText's loss function write what it gets and returns to a directory.

  It is called in the process of the trainer, and its calls are numbered from 0 at each start.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    self._directory = pathlib.Path(directory)
    self._calls = 0

  def __call__(self) -> None:
    from maxtext.trainers.pre_train import train

    self._directory.mkdir(parents=True, exist_ok=True)
    original = train.loss_fn

    def loss_fn(model: Any, config: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
      import jax
      from flax import nnx

      data = dict(data)
      result = original(model, config, data, *args, **kwargs)
      logits = model(
          decoder_input_tokens=data["inputs"],
          decoder_positions=data["inputs_position"],
          decoder_segment_ids=data["inputs_segmentation"],
          enable_dropout=False,
      )
      nnx.pop(model, nnx.Intermediate)
      if kwargs.get("is_train", True):
        jax.debug.callback(self._write, data, logits, result[0])
      return result

    # The module of the fine-tuning, which takes the function from this one, is imported later.
    train.loss_fn = loss_fn

  def _write(self, data: dict[str, Any], logits: Any, loss: Any) -> None:
    path = self._directory / f"{self._calls}.part"
    self._calls += 1
    with open(path, "wb") as file:
      np.savez(file, **{"logits": logits, "loss": loss}, **data)
    path.rename(path.with_suffix(".npz"))


def read_losses(directory: str | os.PathLike[str], first_step: int = 0) -> dict[int, LossRecord]:
  """Returns what a `LossTap` recorded by step, if the first call was that of `first_step`."""
  found = {}
  for path in pathlib.Path(directory).glob("*.npz"):
    with np.load(path) as arrays:
      batch = {name: arrays[name] for name in arrays if name not in ("logits", "loss")}
      record = LossRecord(batch, arrays["logits"], float(arrays["loss"]))
    found[first_step + int(path.stem)] = record
  return dict(sorted(found.items()))
