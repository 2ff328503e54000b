"""Tests of the pinned shuffle."""

import hashlib
import json
import pathlib
import subprocess
import sys

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.order import shuffle
from tests import distributed

STARTS_PROCESSES = True

_GOLDEN = pathlib.Path(__file__).parents[1] / "testdata" / "fsl_permutations.json"
_WAYS = {
    "numpy": shuffle.with_numpy,
    "python": shuffle.with_python,
}


def _digest(numbers):
  return hashlib.sha256(numbers.astype("<u4").tobytes()).hexdigest()


class ShuffleTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in _WAYS)
  def test_each_way_gives_what_olmo_core_gave(self, name):
    for case in json.loads(_GOLDEN.read_text()):
      if name == "python" and case["n"] > 100_000:
        continue
      numbers = np.arange(case["n"], dtype=np.uint32)
      _WAYS[name](numbers, case["seed"] + case["epoch"])
      self.assertEqual(_digest(numbers), case["sha256_uint32_le"], case)
      self.assertEqual(numbers[:16].tolist(), case["first16"])

  def test_blocks_of_draws_join_without_a_seam(self):
    # More draws than one block of raw outputs has.
    expected = np.arange(400_000, dtype=np.uint32)
    shuffle.with_numpy(expected, 5)
    numbers = np.arange(400_000, dtype=np.uint32)
    shuffle.with_python(numbers, 5)
    np.testing.assert_array_equal(numbers, expected)

  def test_the_installed_numpy_still_shuffles_as_it_did(self):
    self.assertTrue(shuffle.numpy_shuffles_as_before())
    self.assertIs(shuffle.choose(), shuffle.with_numpy)

  def test_another_numpy_is_noticed_and_passed_over(self):
    # A process of its own, whose NumPy shuffles differently from ours.
    code = (
        "import numpy as np\n"
        "from maxtext_olmo.order import shuffle\n"
        "class Other(np.random.Generator):\n"
        "  def shuffle(self, x): x[:] = np.roll(x, 1)\n"
        "np.random.Generator = Other\n"
        "print(shuffle.choose().__name__, shuffle.shuffled(10, 1).tolist())\n"
    )
    golden = next(c for c in json.loads(_GOLDEN.read_text()) if c["n"] == 10 and c["seed"] == 0)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=distributed.child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    self.assertEqual(done.stdout.strip(), f"with_python {golden['first16']}")
    self.assertIn("shuffles differently", done.stderr)

  @parameterized.parameters(0, (1 << 32) - 1)
  def test_sizes_that_uint32_cannot_hold_are_refused(self, n):
    with self.assertRaisesRegex(errors.OrderError, "from 1 to 2"):
      shuffle.shuffled(n, 0)


if __name__ == "__main__":
  absltest.main()
