"""Tests of what users import from the package itself."""

import ast
import pathlib
import tomllib

from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config_table
from maxtext_olmo import trainers

_ROOT = pathlib.Path(__file__).resolve().parent.parent


class PackageTest(absltest.TestCase):

  def test_every_public_name_is_importable(self):
    for name in maxtext_olmo.__all__:
      with self.subTest(name):
        self.assertIsNotNone(getattr(maxtext_olmo, name))

  def test_type_checkers_see_the_names_that_can_be_imported(self):
    (block,) = [
        node
        for node in ast.parse(pathlib.Path(maxtext_olmo.__file__).read_text()).body
        if isinstance(node, ast.If)
    ]
    seen = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    expected = {name: f"maxtext_olmo.{module}" for name, module in maxtext_olmo._MODULE_OF.items()}
    self.assertEqual(seen, expected)

  def test_mypy_is_strict_about_the_modules_of_public_names(self):
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    strict = settings["overrides"][0]["module"]
    for module in set(maxtext_olmo._MODULE_OF.values()):
      self.assertTrue({f"maxtext_olmo.{module}", f"maxtext_olmo.{module}.*"} & {*strict}, module)

  def test_dir_shows_public_names_only(self):
    self.assertCountEqual(dir(maxtext_olmo), [*maxtext_olmo.__all__, "__version__"])

  def test_every_public_name_has_a_docstring_of_its_own(self):
    for name in maxtext_olmo.__all__:
      with self.subTest(name):
        public = getattr(maxtext_olmo, name)
        self.assertTrue(
            (vars(public) if isinstance(public, type) else {"__doc__": public.__doc__})["__doc__"]
        )

  def test_get_config_has_data_keys_only(self):
    self.assertCountEqual(maxtext_olmo.get_config(), [key.name for key in config_table.KEYS])
    with self.assertRaisesRegex(AttributeError, "locked"):
      maxtext_olmo.get_config().steps = 3

  def test_configs_of_earlier_releases_find_the_trainers_config(self):
    self.assertTrue(callable(trainers.config.get_config))

  def test_a_name_that_is_not_there_is_an_attribute_error(self):
    for module in (maxtext_olmo, trainers):
      with self.assertRaisesRegex(AttributeError, "no_such_name"):
        _ = module.no_such_name


if __name__ == "__main__":
  absltest.main()
