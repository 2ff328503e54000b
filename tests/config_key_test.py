"""Tests that values of keys are converted, and that each problem is said in one line."""

import enum
import pathlib
import types

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.config_key import BOOLEAN
from maxtext_olmo.config_key import Key
from maxtext_olmo.config_key import at_least
from maxtext_olmo.config_key import more_than
from maxtext_olmo.config_key import one_of
from maxtext_olmo.config_key import read_values
from maxtext_olmo.config_key import some_of


class _Color(enum.Enum):
  RED = "red"


def _read(key: Key, value):
  """Returns the value of a key and its problem, if any."""
  values, problems = read_values(types.SimpleNamespace(**{key.name: value}), [key])
  return values[key.name], problems.get(key.name)


class ReadValuesTest(parameterized.TestCase):

  @parameterized.parameters(
      (5, 3, 3, int),
      (5, 3.0, 3, int),
      (5, np.int64(3), 3, int),
      (5, np.uint8(3), 3, int),
      (5, np.float32(3.0), 3, int),
      (0.5, 2, 2.0, float),
      (0.5, np.float64(0.25), 0.25, float),
      (0.5, np.int32(2), 2.0, float),
      (True, False, False, bool),
      (True, np.bool_(False), False, bool),
      ("text", "other", "other", str),
      ("text", pathlib.Path("/data"), "/data", str),
      ("text", _Color.RED, "red", str),
      ((), ["a", "b"], ("a", "b"), tuple),
      ((), (1, 2), (1, 2), tuple),
  )
  def test_a_value_is_converted_to_the_type_of_the_default(self, default, value, expected, kind):
    found, problem = _read(Key("k", default, "Help."), value)
    self.assertIsNone(problem)
    self.assertEqual(found, expected)
    self.assertIs(type(found), kind)

  @parameterized.parameters(
      (5, "3", "k='3' should be a whole number below 2**64."),
      (5, 3.5, "k=3.5 should be a whole number below 2**64."),
      (5, float("inf"), "k=inf should be a whole number below 2**64."),
      (5, float("nan"), "k=nan should be a whole number below 2**64."),
      (5, 2**70, f"k={2**70} should be a whole number below 2**64."),
      (5, -(2**70), f"k={-2**70} should be a whole number below 2**64."),
      (5, b"5", "k=b'5' should be a whole number below 2**64."),
      (5, True, "k=True should be a whole number below 2**64."),
      (0.5, "x", "k='x' should be a number."),
      (True, 1, "k=1 should be true or false."),
      ("text", 3, "k=3 should be text of at most 4096 characters, without NUL."),
      ("text", b"bytes", "k=b'bytes' should be text of at most 4096 characters, without NUL."),
      ("text", "a\0b", r"k='a\x00b' should be text of at most 4096 characters, without NUL."),
      ((), "abc", "k='abc' should be a list."),
      ((), 3, "k=3 should be a list."),
  )
  def test_a_value_of_another_type_is_a_problem_and_the_default_is_used(
      self, default, value, expected
  ):
    self.assertEqual(_read(Key("k", default, "Help."), value), (default, expected))

  @parameterized.parameters(
      (5, at_least(1), 0, "k=0 must be at least 1."),
      (5, at_least(1, 9), 10, "k=10 must be at most 9."),
      (5, at_least(1), 2**60, f"k={2**60} must be at most {2**53}."),
      ((), some_of("a", "b"), [["a"]], "k=(['a'],) may list only a, b."),
      (0.5, more_than(0), 0, "k=0.0 must be more than 0."),
      ("a", one_of("a", "b"), "c", "k='c' must be one of a, b."),
      ((), some_of("a", "b"), ["a", "c"], "k=('a', 'c') may list only a, b."),
  )
  def test_a_value_that_fails_its_check_is_a_problem_and_is_kept(
      self, default, check, value, expected
  ):
    found, problem = _read(Key("k", default, "Help.", check), value)
    self.assertEqual(problem, expected)
    self.assertEqual(found, tuple(value) if isinstance(value, list) else value)

  def test_a_long_value_is_shown_in_part(self):
    _, problem = _read(Key("k", 5, "Help."), "[" * 100_000)
    self.assertLess(len(problem), 400)

  def test_keys_that_a_config_lacks_or_has_as_none_have_their_default(self):
    keys = [Key("a", 1, "Help."), Key("b", "x", "Help.", one_of("y"))]
    self.assertEqual(read_values(types.SimpleNamespace(a=None), keys), ({"a": 1, "b": "x"}, {}))


class IsSetTest(parameterized.TestCase):

  @parameterized.parameters(
      (5, 5, False),
      (5, 5.0, False),
      (5, 6, True),
      (5, "five", True),
      (5, None, False),
      ((), [], False),
      ((), [1], True),
      ("", "", False),
  )
  def test_a_key_is_set_if_its_value_differs_from_the_default(self, default, value, expected):
    self.assertEqual(Key("k", default, "Help.").is_set(types.SimpleNamespace(k=value)), expected)

  def test_a_key_without_a_default_of_its_own_is_set_by_any_value(self):
    key = Key("k", None, "Help.", kind=BOOLEAN)
    self.assertTrue(key.is_set(types.SimpleNamespace(k=False)))
    self.assertFalse(key.is_set(types.SimpleNamespace()))


if __name__ == "__main__":
  absltest.main()
