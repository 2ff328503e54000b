"""Finds documents in token files by the rules of OLMo-core's packed dataset.

These rules differ from the default rule of the document index (`documents`): tokens after the last
boundary of a file belong to no document and are dropped. Boundaries come either from the tokens or
from boundary files. An example with EOS 0 and BOS 1, which shows the document of each token:

    tokens                   1  5  0  1  6  0  7  0  8
    eos, without a BOS       0  0  0  1  1  1  2  2  ·     a document ends at each EOS
    eos, with a BOS          0  0  0  ·  ·  ·  ·  ·  ·     only at an EOS before a BOS or file end
    csv                      as the boundary file `part.csv.gz` next to `part.npy` says

A boundary file is used as it is: its documents need no EOS, and may have gaps between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.token_files import TokenFiles
from maxtext_olmo.errors import CorpusError

SOURCES = ("eos", "csv")


@dataclasses.dataclass(frozen=True)
class BoundaryRule:
  """The rule for where documents begin and end.

  Attributes:
    source: Where boundaries come from: the tokens (`eos`) or boundary files (`csv`).
    eos_id: Token that ends a document.
    bos_id: Token that begins a document; -1 if the tokenizer has none.
  """

  source: Literal["eos", "csv"]
  eos_id: int
  bos_id: int = -1


def find_spans(
    files: TokenFiles,
    file_id: int,
    n_tokens: int,
    rule: BoundaryRule,
    advance: Callable[[int], None] = lambda amount: None,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the first token and the length of each document of a file (int64).

  Args:
    files: Token files.
    file_id: Index of the file in `files`.
    n_tokens: Number of tokens in the file.
    rule: Rule for where documents begin and end.
    advance: Called with the number of bytes processed since the last call.
  """
  if rule.source == "csv":
    path = boundaries.boundary_path(files.paths[file_id])
    found = boundaries.read_spans(files.storage, path, n_tokens)
    advance(n_tokens * files.dtype.itemsize)
    return found
  ends = [np.zeros(0, np.int64)]
  # The number of tokens read so far, and whether the last one is an EOS. If it is, the next piece
  # shows whether this EOS ends a document.
  place, is_open = 0, False
  for piece in files.storage.pieces(
      files.paths[file_id],
      int(files.data_offsets[file_id]),
      n_tokens * files.dtype.itemsize,
      scan.CHUNK_BYTES,
  ):
    tokens = np.frombuffer(piece, files.dtype)
    here = np.flatnonzero(tokens == rule.eos_id)
    if rule.bos_id >= 0:
      if is_open and tokens[0] == rule.bos_id:
        ends.append(np.array([place]))
      is_open = bool(len(here)) and int(here[-1]) == len(tokens) - 1
      here = here[:-1] if is_open else here
      here = here[tokens[here + 1] == rule.bos_id]
    ends.append(here + (place + 1))
    place += len(tokens)
    advance(len(piece))
  if is_open:
    ends.append(np.array([place]))
  stops = np.concatenate(ends)
  starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
  return starts, stops - starts


def check_rule(rule: BoundaryRule, dtype: np.dtype) -> None:
  """Raises CorpusError unless the ids of a rule can occur in tokens of a dtype."""
  for name, token in (("EOS", rule.eos_id), ("BOS", rule.bos_id)):
    if token > np.iinfo(dtype).max or (name == "EOS" and token < 0 and rule.source == "eos"):
      raise CorpusError(
          f"The {name} {token} is not a valid {dtype} token id. Set olmo_{name.lower()}_id to the"
          f" id of the tokenizer's {name}."
      )
