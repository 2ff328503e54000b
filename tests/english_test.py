"""Tests of words that depend on a number."""

from absl.testing import absltest

from maxtext_olmo import english


class EnglishTest(absltest.TestCase):

  def test_only_one_is_singular(self):
    self.assertEqual(english.count(1, "token"), "1 token")
    for number, text in ((0, "0 tokens"), (2, "2 tokens"), (12_345, "12,345 tokens")):
      self.assertEqual(english.count(number, "token"), text)


if __name__ == "__main__":
  absltest.main()
