"""Tests of the names of Grain and JAX without a stable API, and of what each is needed for."""

import ast
import inspect
import pathlib

import grain
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import grain_compat

_PACKAGE = pathlib.Path(maxtext_olmo.__file__).parent
# What breaks without each name, and the parameters that are passed to it by name.
_NAMES = {
    "BestFitPackIterDataset": (
        "olmo_packing=best_fit",
        ("length_struct", "num_packing_bins", "shuffle_bins", "seed"),
    ),
    "ConcatThenSplitIterDataset": ("olmo_packing=concat_then_split", ("length_struct",)),
    "FirstFitPackIterDataset": (
        "olmo_packing=first_fit",
        ("length_struct", "num_packing_bins", "shuffle_bins", "seed"),
    ),
    "FlatMapIterDataset": ("splitting long documents in streams", ()),
    "RepeatIterDataset": ("streams without an end", ()),
    "ShapeDtypeStruct": ("the specs of batches whose lengths differ", ()),
    "ThreadPrefetchIterDataset": ("prefetching of streams", ("prefetch_buffer_size",)),
    "get_element_spec": ("the element specs of our datasets", ()),
}
# The only modules that may use private names of these packages.
_ALLOWED = {"grain_compat.py": "grain", "trainers/cluster.py": "jax"}


class NamesTest(parameterized.TestCase):

  @parameterized.parameters(*_NAMES)
  def test_grain_has_the_name_with_the_parameters_that_are_passed(self, name):
    breaks, parameters = _NAMES[name]
    found = inspect.signature(getattr(grain_compat, name)).parameters
    self.assertContainsSubset(parameters, found, f"Without them, {breaks} does not work.")

  def test_documents_can_be_split_by_a_transform(self):
    class Twice(grain_compat.FlatMapTransform):
      max_fan_out = 2

      def flat_map(self, element):
        return [element, element]

    made = grain_compat.FlatMapIterDataset(grain.MapDataset.range(3).to_iter_dataset(), Twice())
    self.assertEqual(list(made), [0, 0, 1, 1, 2, 2], "Splitting long documents does not work.")

  def test_a_closed_iterator_is_told_from_an_open_one(self):
    iterator = iter(grain.MapDataset.range(3).to_iter_dataset())
    grain_compat.assert_not_closed(iterator)
    iterator.close()
    with self.assertRaises(ValueError, msg="A closed iterator of ours would give batches."):
      grain_compat.assert_not_closed(iterator)

  def test_indices_are_shuffled_as_in_a_dataset(self):
    dataset = grain.MapDataset.range(100).shuffle(seed=5)
    expected = [dataset[i] for i in range(100)]
    found = [grain_compat.index_shuffle(i, 99, 5, 4) for i in range(100)]
    self.assertEqual(found, expected, "`order stats` would compare with another shuffle.")


class PlacesTest(absltest.TestCase):

  def test_no_other_module_uses_private_or_experimental_names(self):
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
      name = path.relative_to(_PACKAGE).as_posix()
      for node in ast.walk(ast.parse(path.read_text())):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for text in (module, *imported):
          if "._src" in text or text.startswith("grain.experimental"):
            found.setdefault(name, set()).add(text.split(".")[0])
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "grain.experimental":
          found.setdefault(name, set()).add("grain")
        if isinstance(node, ast.Attribute) and node.attr == "_assert_not_closed":
          found.setdefault(name, set()).add("grain")
    self.assertEqual(found, {name: {package} for name, package in _ALLOWED.items()})


if __name__ == "__main__":
  absltest.main()
