"""Tests of maxtext_olmo.trainers.tiny.config."""

from __future__ import annotations

import contextlib
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config_table
from maxtext_olmo import errors
from maxtext_olmo.trainers.tiny import config as config_lib

_CONFIGS = pathlib.Path(__file__).resolve().parents[3] / "configs"


class ConfigTest(parameterized.TestCase):

  def write(self, text: str) -> str:
    return self.create_tempfile("config_file.py", text).full_path

  def test_every_data_key_and_trainer_key_is_there_once(self):
    names = [key.name for key in (*config_table.KEYS, *config_lib.KEYS)]
    self.assertCountEqual(config_lib.get_config(), names)
    self.assertLen(set(names), len(names))

  def test_a_key_that_does_not_exist_cannot_be_set(self):
    with self.assertRaisesRegex(AttributeError, "locked"):
      config_lib.get_config().no_such_key = 1

  def test_a_file_changes_defaults_and_the_command_line_changes_both(self):
    path = self.write(
        "import maxtext_olmo\n"
        "def get_config():\n"
        "  c = maxtext_olmo.get_trainer_config()\n"
        "  c.steps, c.emb_dim = 7, 8\n"
        "  return c\n"
    )
    args = [f"--config={path}", "--config.steps=9", "--config.mesh_shape=(2,2)"]
    config = config_lib.read_config(["tiny", *args])
    self.assertEqual((config.steps, config.emb_dim, config.mesh_shape), (9, 8, (2, 2)))
    self.assertEqual(config.num_layers, config_lib.get_config().num_layers)

  def test_a_key_whose_default_depends_on_the_dataset_type_can_be_set(self):
    self.assertIsNone(config_lib.get_config().olmo_apply_ngram_filter)
    for text, value in (("true", True), ("false", False)):
      config = config_lib.read_config(["tiny", f"--config.olmo_apply_ngram_filter={text}"])
      self.assertIs(config.olmo_apply_ngram_filter, value)
    self.assertIsNone(config_lib.get_config().olmo_apply_ngram_filter)

  def test_without_a_file_the_defaults_are_changed(self):
    config = config_lib.read_config(["tiny", "--config.learning_rate=1", "--config.remat"])
    self.assertEqual((config.learning_rate, config.remat), (1.0, True))

  @parameterized.named_parameters(
      ("misspelt", ["--config.stpes=3"], "no key 'stpes'; did you mean 'steps'?"),
      ("unknown", ["--config.zzz=3"], "no key 'zzz'; known keys: adam_b1, "),
      ("not_a_number", ["--config.steps=many"], "--config.steps=many: invalid literal"),
      ("no_file", ["--config=/nowhere/x.py"], "No such file or directory: '/nowhere/x.py'"),
      ("not_a_flag", ["steps=3"], "'steps=3' is not a flag. Set keys with --config.KEY=VALUE"),
      ("other_flag", ["--steps=3"], "Unknown command line flag 'steps'"),
  )
  def test_a_command_line_that_cannot_be_read_says_why(self, args: list[str], text: str):
    with self.assertRaises(errors.ConfigError) as raised:
      config_lib.read_config(["tiny", *args])
    self.assertIn(text, str(raised.exception))

  def test_a_file_with_an_unknown_key_says_which(self):
    path = self.write(
        "import maxtext_olmo\n"
        "def get_config():\n"
        "  c = maxtext_olmo.get_trainer_config()\n"
        "  c.learning_rat = 1.0\n"
        "  return c\n"
    )
    with self.assertRaisesRegex(errors.ConfigError, "'learning_rat'; did you mean 'learning_rate'"):
      config_lib.read_config(["tiny", f"--config={path}"])

  def test_a_file_with_data_keys_only_gets_the_trainers_defaults(self):
    path = self.write(
        "import maxtext_olmo\n"
        "def get_config():\n"
        "  c = maxtext_olmo.get_config()\n"
        "  c.max_target_length = 96\n"
        "  return c\n"
    )
    config = config_lib.read_config(["tiny", f"--config={path}", "--config.steps=9"])
    self.assertEqual((config.max_target_length, config.steps), (96, 9))
    self.assertCountEqual(config, config_lib.get_config())
    with self.assertRaisesRegex(AttributeError, "locked"):
      config.no_such_key = 1

  def test_a_trainers_key_in_a_config_of_data_keys_says_where_to_begin(self):
    path = self.write(
        "import maxtext_olmo\n"
        "def get_config():\n"
        "  c = maxtext_olmo.get_config()\n"
        "  c.steps = 3\n"
        "  return c\n"
    )
    with self.assertRaisesRegex(errors.ConfigError, r"'steps', .*get_trainer_config\(\)"):
      config_lib.read_config(["tiny", f"--config={path}"])

  def test_a_file_that_makes_its_own_config_may_not_misspell_a_key(self):
    path = self.write(
        "import ml_collections\n"
        "def get_config():\n"
        "  return ml_collections.ConfigDict({'stpes': 3})\n"
    )
    with self.assertRaisesRegex(errors.ConfigError, "'stpes'; did you mean 'steps'"):
      config_lib.read_config(["tiny", f"--config={path}"])

  @parameterized.parameters("tiny", "tiny.py", "configs/tiny.py")
  def test_configs_of_the_package_are_found_by_name_from_any_directory(self, name: str):
    with contextlib.chdir(self.create_tempdir().full_path):
      config = config_lib.read_config(["tiny", f"--config={name}", "--config.steps=3"])
      self.assertEqual((config.dataset_type, config.steps), ("synthetic", 3))
      pathlib.Path("tiny.py").write_text(
          "import maxtext_olmo\n" "def get_config():\n" "  return maxtext_olmo.get_config()\n"
      )
      own = config_lib.read_config(["tiny", "--config=tiny.py"])
      self.assertEqual(own.dataset_type, "olmo_grain")

  def test_a_path_that_is_not_a_config_file_is_refused(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    os.mkfifo(folder / "fifo")
    (folder / "text.py").write_text("some words")
    for name, message in (("fifo", "not a regular file"), ("text.py", "is not Python")):
      with self.assertRaisesRegex(errors.ConfigError, message):
        config_lib.read_config(["tiny", f"--config={folder / name}"])

  def test_a_file_with_a_mistake_of_another_kind_shows_it(self):
    path = self.write("import math\ndef get_config():\n  return math.no_such_thing\n")
    with self.assertRaisesRegex(errors.ConfigError, "'math' has no attribute 'no_such_thing'"):
      config_lib.read_config(["tiny", f"--config={path}"])

  def test_all_problems_are_reported_together_those_of_the_data_too(self):
    config = config_lib.get_config()
    config.update(
        {
            "dataset_type": "synthetic",
            "max_target_length": 0,
            "vocab_size": 0,
            "steps": -1,
            "head_dim": 7,
            "dtype": "float8",
            "adam_b2": 1.0,
            "warmup_steps": -1,
            "learning_rate_final_fraction": 2.0,
            "mesh_axes": ("data", "data"),
            "mesh_shape": (-1, -1, 0),
            "num_processes": 2,
            "process_id": 2,
        }
    )
    with self.assertRaises(errors.ConfigError) as raised:
      config_lib.validate(config)
    self.assertEqual(
        str(raised.exception).splitlines(),
        [
            "The configuration is invalid:",
            "  - max_target_length=0 must be at least 1.",
            "  - steps=-1 must be at least 1.",
            "  - dtype='float8' must be one of float32, bfloat16.",
            "  - warmup_steps=-1 must be at least 0.",
            "  - learning_rate_final_fraction=2.0 must be from 0 to 1.",
            "  - adam_b2=1.0 must be at least 0 and less than 1.",
            "  - vocab_size=0 must be at least 1.",
            "  - head_dim=7 must be even.",
            "  - mesh_axes=('data', 'data') and mesh_shape=(-1, -1, 0) must have the same length,"
            " at least 1.",
            "  - mesh_axes=('data', 'data') names an axis twice.",
            "  - mesh_shape=(-1, -1, 0) must have positive sizes, except that one may be -1.",
            "  - process_id=2 must be at least 0 and less than num_processes=2; set both or"
            " neither.",
            "  - num_processes=2 needs coordinator_address, the host:port of process 0.",
        ],
    )

  @parameterized.parameters(*sorted(path.name for path in _CONFIGS.glob("*.py")))
  def test_the_configs_are_valid(self, name: str):
    config = config_lib.read_config(["tiny", f"--config={_CONFIGS / name}"])
    if config.dataset_type != "synthetic" and not config.olmo_index_path:
      config.olmo_index_path = str(_CONFIGS / name)  # any file that exists
    config_lib.validate(config)

  def test_the_7b_config_has_the_size_of_the_real_run(self):
    config = config_lib.read_config(["tiny", f"--config={_CONFIGS / 'olmo3_7b_stage1.py'}"])
    tokens = config.global_batch_size_to_load * config.max_target_length
    self.assertEqual(tokens, 4_194_304)
    self.assertLess(abs(tokens * config.steps - 5e12), tokens)


if __name__ == "__main__":
  absltest.main()
