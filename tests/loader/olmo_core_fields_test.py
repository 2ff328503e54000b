"""Tests of reading objects field by field."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.loader import olmo_core_fields


class FieldsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.reader = olmo_core_fields.Reader()

  def test_fields_that_were_taken_are_no_problem(self):
    section = self.reader.section("a", {"_CLASS_": "x.y.Name", "n": 3, "t": ["b"], "w": 1}, ("w",))
    self.assertEqual(section.name, "Name")
    self.assertEqual(section.take("n", int), 3)
    self.assertEqual(section.take_texts("t"), ("b",))
    self.assertIsNone(section.take_texts("u"))
    self.assertEqual(section.take("missing", int, 7), 7)
    section.end()
    self.reader.raise_problems("it")
    self.assertEqual(self.reader.no_effect, ["a.w"])

  @parameterized.parameters(
      ({"n": "3"}, "a.n cannot be '3'."),
      ({"n": True}, "a.n cannot be True."),
      ({"n": None}, "a.n is missing."),
      ({"n": 1, "m": None}, "a.m=None is not known"),
      (7, "a is missing or not an object."),
  )
  def test_problems_are_collected(self, values, problem):
    section = self.reader.section("a", values)
    section.take("n", int)
    section.end()
    with self.assertRaisesRegex(errors.ConfigError, "^it:\n"):
      self.reader.raise_problems("it")
    self.assertIn(problem, "\n".join(self.reader.problems))

  def test_a_list_must_hold_texts(self):
    section = self.reader.section("a", {"t": ["b", 1]})
    self.assertEqual(section.take_texts("t"), ())
    self.assertEqual(self.reader.problems, ["a.t is not a list of texts."])


if __name__ == "__main__":
  absltest.main()
