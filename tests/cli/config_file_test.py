"""Tests of writing config files."""

import json
import pathlib
import runpy

import yaml
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.cli import config_file

_VALUES = {"max_target_length": 16, "olmo_skip": ((1, 2),), "olmo_index_path": "a\"\\b'/x.json"}


class ConfigFileTest(parameterized.TestCase):

  def write(self, name):
    path = pathlib.Path(self.create_tempdir().full_path, name)
    comment = 'A path: C:\\new "quoted" """x"""\n\n' + "word " * 60
    config_file.write(str(path), _VALUES, comment, "A title.")
    return path

  def test_python_has_the_values_and_any_comment(self):
    path = self.write("run.py")
    config = runpy.run_path(str(path))["get_config"]()
    self.assertEqual({name: config[name] for name in _VALUES}, _VALUES)
    self.assertLess(max(map(len, path.read_text().splitlines()[4:])), 101)

  def test_yaml_and_json_have_the_values(self):
    plain = json.loads(json.dumps(_VALUES))
    self.assertEqual(yaml.safe_load(self.write("run.yml").read_text()), plain)
    self.assertEqual(json.loads(self.write("run.json").read_text()), plain)

  @parameterized.parameters("run", "run.txt")
  def test_other_endings_are_refused(self, name):
    with self.assertRaisesRegex(errors.ConfigError, "a config is a .py, .yml"):
      self.write(name)

  def test_a_file_is_never_replaced(self):
    path = self.write("run.py")
    with self.assertRaisesRegex(errors.ConfigError, "exists already"):
      config_file.write(str(path), _VALUES, "", "A title.")


if __name__ == "__main__":
  absltest.main()
