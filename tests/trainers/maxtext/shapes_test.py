"""Tests of how names of MaxText are checked by shape, on modules that stand for MaxText's."""

import sys
import types
from unittest import mock

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.trainers.maxtext import shapes
from tests.trainers.maxtext import runs


class FunctionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    module = types.ModuleType("maxtext_of_a_fork")
    module.load = lambda config, mesh, *, more=None: config
    module.Manager = type("Manager", (), {"__init__": lambda self, config, step: None})
    module.version = 3
    self.enter_context(mock.patch.dict(sys.modules, {"maxtext_of_a_fork": module}))
    self.enter_context(mock.patch.object(shapes, "installed_version", lambda: "9.9"))

  def refused(self, module, name, parameters, message):
    with self.assertRaisesRegex(errors.ConfigError, f"^MaxText 9.9 does not fit .*{message}"):
      shapes.Function(module, name, parameters).find()

  def test_a_function_or_class_with_the_parameters_and_more_is_found(self):
    found = shapes.Function("maxtext_of_a_fork", "load", ("config", "more")).find()
    self.assertEqual(found(1, 2), 1)
    shapes.Function("maxtext_of_a_fork", "Manager", ("step",)).find()

  def test_what_is_missing_is_named_with_what_to_do(self):
    self.refused("maxtext_of_a_fork", "save", (), "no function maxtext_of_a_fork.save")
    self.refused("maxtext_of_a_fork", "version", (), "no function maxtext_of_a_fork.version")
    self.refused(
        "maxtext_of_a_fork.common", "save", (), "no function maxtext_of_a_fork.common.save"
    )
    self.refused(
        "maxtext_of_a_fork",
        "load",
        ("config", "state", "step"),
        r"load takes \(config, mesh, more\), without state, step.*: pip install maxtext==",
    )

  def test_a_package_that_maxtext_lacks_is_named(self):
    site = self.create_tempdir()
    site.create_file("maxtext_without_tensorflow.py", "import no_tensorflow_here")
    self.enter_context(mock.patch.object(sys, "path", [site.full_path, *sys.path]))
    with self.assertRaisesRegex(errors.ConfigError, "needs the package no_tensorflow_here"):
      shapes.Function("maxtext_without_tensorflow", "load", ()).find()

  def test_a_config_without_a_key_is_refused(self):
    shapes.check_keys(types.SimpleNamespace(steps=3), ["steps"])
    with self.assertRaisesRegex(errors.ConfigError, "its config has no olmo_order"):
      shapes.check_keys(types.SimpleNamespace(steps=3), ["steps", "olmo_order"])


class VersionTest(absltest.TestCase):

  @absltest.skipIf(runs.has_maxtext(), "MaxText is installed here.")
  def test_without_maxtext_the_error_says_where_the_commands_are(self):
    with self.assertRaisesRegex(errors.ConfigError, "not installed in .*docs/guides/maxtext.md"):
      shapes.installed_version()


if __name__ == "__main__":
  absltest.main()
