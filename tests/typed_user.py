"""A user's trainer, which `types_test` type-checks and which is never run.

Each `assert_type` fails the check if the library's types lose what they say.
"""

from typing import Any, assert_type

import jax
import numpy as np

import maxtext_olmo


class EveryOtherRow:
  """A row source of the user's own, which meets the protocol."""

  row_length = 8
  pad_id = 0
  filter_sees_padding = False
  mask_paths = None
  block_rows = 64
  fingerprint = "every other row"

  def __init__(self, rows: maxtext_olmo.RowSource):
    self.segment_rule = rows.segment_rule
    self._rows = rows

  def num_rows(self, epoch: int) -> int | None:
    rows = self._rows.num_rows(epoch)
    return rows and rows // 2

  def parts(self, epoch: int, rows: np.ndarray) -> maxtext_olmo.Parts:
    return self._rows.parts(epoch, 2 * rows)


def halve(rows: maxtext_olmo.RowSource) -> maxtext_olmo.RowSource:
  return EveryOtherRow(rows)


def size_of(storage: maxtext_olmo.Storage, index: maxtext_olmo.OlmoNpyIndex) -> int:
  return sum(storage.size(entry.path) for entry in index.files)


def train(index_path: str) -> dict[str, Any]:
  config = maxtext_olmo.get_config()
  config.olmo_index_path = index_path
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  train, evaluation = maxtext_olmo.create_data_iterator(config, mesh)
  assert_type(train, maxtext_olmo.DataIterator)
  assert_type(evaluation, maxtext_olmo.DataIterator | None)
  try:
    for batch in train:
      assert_type(batch, dict[str, jax.Array])
      break
    assert_type(train.position, int)
    assert_type(train.describe(), maxtext_olmo.RunStatus)
    assert_type(train.explain(0).rows[0], maxtext_olmo.RowExplanation)
    return train.get_state()
  except maxtext_olmo.ResumeError as error:
    raise SystemExit(str(error)) from error
  finally:
    train.close()


def sizes(path: str) -> int:
  index = maxtext_olmo.load_index(path)
  assert_type(index, maxtext_olmo.OlmoNpyIndex)
  assert_type(maxtext_olmo.__version__, str)
  return size_of(maxtext_olmo.LocalStorage(), index)
