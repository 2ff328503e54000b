"""Tests of the table of data keys."""

from absl.testing import absltest

from maxtext_olmo.loader import keys


class KeysTest(absltest.TestCase):

  def test_names_are_unique_and_every_key_says_what_it_does(self):
    names = [key.name for key in keys.KEYS]
    self.assertLen(set(names), len(names))
    for key in keys.KEYS:
      self.assertRegex(key.help, r"(\.|\.\.\.)$", key.name)

  def test_what_is_of_a_host_is_a_key(self):
    self.assertLessEqual(keys.OF_A_HOST, set(keys.defaults()))


if __name__ == "__main__":
  absltest.main()
