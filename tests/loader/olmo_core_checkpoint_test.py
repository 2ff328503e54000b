"""Tests of reading OLMo-core's checkpoints, with a file that torch wrote."""

import io
import json
import os
import pathlib
import pickle
import shutil
import zipfile

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.loader import olmo_core_checkpoint
from maxtext_olmo.loader import olmo_core_import

# torch.save of a trainer's state with a NumPy generator, tensors and an OrderedDict.
_SAVED = pathlib.Path(__file__).parents[1] / "testdata" / "olmo_core_rank0.pt"


class _Calls:
  """Creates a directory when it is unpickled."""

  def __init__(self, path: str):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (self.path,)


class CheckpointTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def write_archive(self, content: object) -> pathlib.Path:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
      pickled = content if isinstance(content, bytes) else pickle.dumps(content)
      archive.writestr("rank0/data.pkl", pickled)
    path = self.folder / "rank0.pt"
    path.write_bytes(data.getvalue())
    return path

  def test_the_state_is_found_in_a_folder_and_in_its_file(self):
    (self.folder / "train").mkdir()
    copied = shutil.copy(_SAVED, self.folder / "train" / "rank0.pt")
    for source in (self.folder, copied, str(copied)):
      content, where = olmo_core_checkpoint.read_state(source)
      self.assertEqual(where, str(copied))
      state = olmo_core_import.LoaderState.from_json(content, where)
      self.assertEqual((state.seed, state.epoch, state.batches_processed), (34521, 1, 5))
      self.assertEqual(state.tokens_processed, 5120)

  def test_no_code_of_a_state_runs(self):
    target = self.folder / "made"
    path = self.write_archive({"data_loader": {"epoch": 1}, "callbacks": [_Calls(str(target))]})
    content, _ = olmo_core_checkpoint.read_state(path)
    self.assertEqual(content["data_loader"], {"epoch": 1})
    self.assertFalse(target.exists())

  def test_a_damaged_state_says_what_is_expected(self):
    for content in (b"", b"\x80\x02}q", b"cos\nsystem\n"):
      with self.assertRaisesRegex(errors.ConfigError, "rank0.pt was not written by torch.*JSON"):
        olmo_core_checkpoint.read_state(self.write_archive(content))

  def test_other_files_of_a_state_are_json(self):
    path = self.folder / "state.json"
    path.write_text(json.dumps({"epoch": 2}))
    self.assertEqual(olmo_core_checkpoint.read_state(path), ({"epoch": 2}, str(path)))
    path.write_text("\x80PK")
    with self.assertRaisesRegex(errors.ConfigError, "is not JSON.*checkpoint folder"):
      olmo_core_checkpoint.read_state(path)

  def test_the_config_is_found_in_a_folder(self):
    path = self.folder / "config.json"
    path.write_text(json.dumps({"dataset": {}}))
    expected = ({"dataset": {}}, str(path), str(self.folder))
    self.assertEqual(olmo_core_checkpoint.read_config(self.folder), expected)
    self.assertEqual(olmo_core_checkpoint.read_config(path), expected)

  def test_a_folder_without_the_file_names_it(self):
    for read, name in (
        (olmo_core_checkpoint.read_config, "config.json"),
        (olmo_core_checkpoint.read_state, "rank0.pt"),
    ):
      with self.assertRaisesRegex(errors.CorpusError, name):
        read(self.folder)


if __name__ == "__main__":
  absltest.main()
