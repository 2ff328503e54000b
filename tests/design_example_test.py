"""The dataset type in the design guide runs as it is printed there."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
from absl.testing import absltest

import maxtext_olmo
from tests import corpora

_GUIDE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "guides" / "design.md"
_LENGTH, _BATCH = 8, 4


class DesignExampleTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```", _GUIDE.read_text())
    exec(compile(block, str(_GUIDE), "exec"), {"__name__": "design_example"})
    directory = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(directory, tokens_per_file=(60, 3, 41), dtype="uint16")
    self.windows = set()
    for file in sorted((directory / "data").glob("*.npy")):
      tokens = np.fromfile(file, "<u2")
      for first in range(0, len(tokens) - _LENGTH + 1, _LENGTH // 2):
        self.windows.add(tuple(tokens[first : first + _LENGTH].tolist()))
    config = maxtext_olmo.get_config()
    config.dataset_type = "overlapping"
    config.olmo_index_path = path
    config.max_target_length = _LENGTH
    config.global_batch_size_to_load = _BATCH
    config.enable_checkpointing = False
    self.config = config

  def make_iterator(self) -> Any:
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    train, _ = maxtext_olmo.create_data_iterator(self.config, mesh)
    self.addCleanup(train.close)
    return train

  def test_every_overlapping_window_comes_once_per_epoch(self):
    train = self.make_iterator()
    steps, rest = divmod(len(self.windows), _BATCH)
    rows = [
        tuple(row) for _ in range(steps + 1) for row in np.asarray(next(train)["inputs"]).tolist()
    ]
    epoch = rows[: steps * _BATCH + rest]
    self.assertLen(set(epoch), len(epoch))
    self.assertEqual(set(epoch), self.windows)

  def test_a_state_resumes_at_its_position_with_another_batch_size(self):
    train = self.make_iterator()
    next(train)
    state = train.get_state()
    following = np.asarray(next(train)["inputs"])
    self.config.global_batch_size_to_load = _BATCH // 2
    resumed = self.make_iterator()
    resumed.set_state(state)
    again = np.concatenate([np.asarray(next(resumed)["inputs"]) for _ in range(2)])
    np.testing.assert_array_equal(again, following)


if __name__ == "__main__":
  absltest.main()
