"""Tests of the schemas of saved states."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo import schema

_SCHEMA = {
    "step": schema.Count(),
    "size": schema.Maybe(schema.Count(1)),
    "anchor": (schema.Count(), schema.Count()),
    "extents": [(schema.Count(), str)],
    "on": bool,
    "content": dict,
    "any": schema.Maybe(object),
}
_VALUE = {
    "step": 0,
    "size": 3,
    "anchor": [0, 1],
    "extents": [[0, "a"], (1, "b")],
    "on": True,
    "content": {"a": [None, 1.5, {"b": "c"}]},
    "any": {1, 2},
    "more": object(),
}


class SchemaTest(parameterized.TestCase):

  @parameterized.parameters({}, {"size": None}, {"extents": []}, {"step": (1 << 62) - 1})
  def test_what_fits_is_accepted(self, **values):
    schema.check({**_VALUE, **values}, _SCHEMA)

  def test_what_may_be_missing_may_be_missing(self):
    schema.check({name: _VALUE[name] for name in _VALUE if name not in ("size", "any")}, _SCHEMA)

  @parameterized.parameters(
      ({"step": True}, "'step' is True, expected a whole number of at least 0"),
      ({"step": 1.0}, "'step' is 1.0"),
      ({"step": 1 << 62}, "'step' is 46116"),
      ({"size": 0}, "'size' is 0, expected a whole number of at least 1"),
      ({"anchor": [0, -1]}, r"'anchor\[1\]' is -1"),
      ({"anchor": [0]}, r"'anchor' is \[0\], expected a list of 2 items"),
      ({"extents": {}}, "'extents' is {}, expected a list"),
      ({"extents": [[0, 1]]}, r"'extents\[0\]\[1\]' is 1, expected text"),
      ({"on": 1}, "'on' is 1, expected true or false"),
      ({"content": []}, r"'content' is \[\], expected an object"),
      ({"content": {"a": [{1}]}}, r"'content.a\[0\]' is .1., expected JSON"),
  )
  def test_what_does_not_fit_is_named(self, values, message):
    with self.assertRaisesRegex(errors.ResumeError, f"damaged: {message}.*initial_step"):
      schema.check({**_VALUE, **values}, _SCHEMA)

  def test_what_is_missing_is_named(self):
    with self.assertRaisesRegex(errors.ResumeError, "'inner.step' is missing"):
      schema.check({"inner": {}}, {"inner": {"step": schema.Count()}})

  def test_anything_can_be_shown(self):
    deep = []
    for _ in range(100_000):
      deep = [deep]
    for value in (deep, 10**5000, "x" * 10**6, None):
      self.assertLess(len(schema.show(value)), 200)


if __name__ == "__main__":
  absltest.main()
