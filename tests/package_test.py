"""Tests of what users import from the package itself."""

from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import trainers


class PackageTest(absltest.TestCase):

  def test_every_public_name_is_importable(self):
    for name in maxtext_olmo.__all__:
      with self.subTest(name):
        self.assertIsNotNone(getattr(maxtext_olmo, name))

  def test_configs_of_earlier_releases_find_the_trainers_config(self):
    self.assertTrue(callable(trainers.config.get_config))

  def test_a_name_that_is_not_there_is_an_attribute_error(self):
    for module in (maxtext_olmo, trainers):
      with self.assertRaisesRegex(AttributeError, "no_such_name"):
        _ = module.no_such_name


if __name__ == "__main__":
  absltest.main()
