"""Tests that documents are sorted as NumPy sorts them, on whichever CPU."""

import doctest
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import tie_order
from maxtext_olmo.rows import tie_sort
from tests import olmo_core_goldens
from tests.rows import adversary

STARTS_PROCESSES = True

_GOLDEN = {
    "avx2": "avx2_ran",
    "scalar": "scalar_ran",
    "avx512": "avx512_emulated",
    "stable": "stable",
}

# Prints, for lists of lengths in a file, the argsort of the NumPy of this process.
_PROGRAM = """
import json, sys
import numpy as np
with open(sys.argv[1]) as file:
  cases = json.load(file)
print(json.dumps([np.argsort(-1 * np.array(case, np.int64)).tolist() for case in cases]))
"""


def _random_cases(seed: int) -> list[np.ndarray]:
  """Returns lengths with many ties: few values, truncated, sorted, repeating, and all kinds."""
  rng = np.random.default_rng(seed)
  cases = []
  for size in (0, 1, 2, 15, 17, 100, 255, 256, 257, 300, 511, 700, 1500, 4000, 9000):
    uniform = rng.integers(1, 3000, size)
    cases += [
        rng.integers(1, 3, size),
        rng.integers(1, 40, size),
        np.minimum(uniform, int(rng.integers(1, 3000))),
        np.where(rng.random(size) < 0.8, 2048, uniform),
        np.sort(rng.integers(1, 50, size)),
        -np.sort(-rng.integers(1, 50, size)),
        np.resize(rng.integers(1, 30, max(1, size // 7)), size),
    ]
  return cases


def _golden_lengths(config) -> np.ndarray:
  numbers = olmo_core_goldens.split_mix(config["seed"] * 16, np.arange(config["n"]))
  lengths = 1 + (numbers % np.uint64(3 * config["cap"])).astype(np.int64)
  return np.minimum(config["cap"], lengths)


class TieOrderTest(parameterized.TestCase):

  @parameterized.parameters(*_GOLDEN)
  def test_the_orders_are_those_of_the_goldens(self, ties):
    for case in olmo_core_goldens.load("sort_order")["cases"]:
      lengths = _golden_lengths(case["config"])
      digest = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()
      self.assertEqual(digest, case["lengths_int64_sha256"])
      order, expected = tie_order.longest_first(lengths, ties), case[_GOLDEN[ties]]
      if isinstance(expected, list):
        self.assertEqual(order.tolist(), expected)
      else:
        self.assertEqual(olmo_core_goldens.row_hash(order), expected["int64_sha256"])

  @parameterized.parameters(*tie_order.TIES)
  def test_compiled_and_plain_sorts_agree(self, ties):
    cases = _random_cases(1)
    plain = [tie_order.longest_first(lengths, ties) for lengths in cases]
    if not tie_order.compile_sort():
      self.skipTest("numba is not installed")
    for lengths, order in zip(cases, plain):
      np.testing.assert_array_equal(tie_order.longest_first(lengths, ties), order)

  def test_each_order_differs_from_the_others_only_between_equal_lengths(self):
    lengths = np.random.default_rng(0).integers(1, 9, 2000)
    orders = {ties: tie_order.longest_first(lengths, ties) for ties in tie_order.TIES}
    for order in orders.values():
      np.testing.assert_array_equal(lengths[order], -np.sort(-lengths))
    self.assertLen({order.tobytes() for order in orders.values()}, len(tie_order.TIES))

  def test_an_unknown_name_is_an_error_that_lists_the_names(self):
    with self.assertRaisesRegex(errors.ConfigError, "'neon'.*avx512, avx2, scalar, stable"):
      tie_order.longest_first(np.array([1]), "neon")

  def test_the_examples_run(self):
    self.assertEqual(doctest.testmod(tie_order).failed, 0)


class RealNumPyTest(absltest.TestCase):
  """Compares with the NumPy that is installed, in all variants that this CPU can run."""

  def _argsorts(self, cases, disabled: str) -> list[np.ndarray]:
    path = self.create_tempfile(content=json.dumps([case.tolist() for case in cases])).full_path
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled}
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, path], env=environment, capture_output=True, text=True
    )
    self.assertEqual(found.returncode, 0, found.stderr)
    return [np.array(order, np.int64) for order in json.loads(found.stdout)]

  def _check(self, ties: str, disabled: str, cases) -> None:
    for lengths, order in zip(cases, self._argsorts(cases, disabled)):
      np.testing.assert_array_equal(tie_order.longest_first(lengths, ties), order)

  def _skip_unless(self, *needed: str) -> dict[str, bool]:
    version = tuple(int(part) for part in np.__version__.split(".")[:2])
    from numpy._core._multiarray_umath import __cpu_features__ as features

    if version < (2, 4) or not all(features.get(name) for name in needed):
      self.skipTest(f"needs NumPy 2.4 or later and a CPU with {', '.join(needed)}")
    return features

  def test_avx512_is_that_of_numpy(self):
    self._skip_unless("X86_V4")
    self._check("avx512", "", _random_cases(2))

  def test_avx2_is_that_of_numpy(self):
    features = self._skip_unless("X86_V3")
    newer = ("X86_V4", "AVX512_ICL", "AVX512_SPR")
    self._check("avx2", " ".join(name for name in newer if features.get(name)), _random_cases(3))

  def test_scalar_is_that_of_numpy(self):
    features = self._skip_unless("X86_V3")
    newer = ("X86_V3", "X86_V4", "AVX512_ICL", "AVX512_SPR")
    cases = _random_cases(4)
    for count in (100, 3000):
      # Keys are negative lengths, so the lengths fall where the keys of the adversary rise.
      keys = adversary.defeat(
          lambda *args: tie_sort.scalar_sort(*args, [0] * tie_sort.STACK), count
      )
      cases += [count + 1 - np.array(keys), count + 1 - np.array(keys) // 2]
    self._check("scalar", " ".join(name for name in newer if features.get(name)), cases)


if __name__ == "__main__":
  absltest.main()
