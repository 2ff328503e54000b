"""Tests that rounds alternate, medians are medians, and impossible figures are refused."""

import os

from absl.testing import absltest

from tests.benchmarks import child
from tests.benchmarks import figures


def _run(tokens: int, seconds: float = 1.0, batches: int = 2) -> figures.Run:
  return {"batches": batches, "tokens": tokens, "seconds": seconds}


class _Tokens:
  shape = (2, 5)


class FiguresTest(absltest.TestCase):

  def test_rounds_alternate_and_a_round_that_does_not_count_is_repeated(self):
    calls: list[str] = []
    counts = iter([True, False, True, True])

    def run(name: str) -> figures.Run | None:
      calls.append(name)
      return None if name == "gone" else _run(20, seconds=len(calls))

    found = figures.alternate(["a", "b", "gone"], 3, run, lambda: next(counts))
    self.assertEqual("".join(name[0] for name in calls), "abg" + "ba" + "ba" + "ab")
    self.assertEqual([run["seconds"] for run in found["a"]], [1, 7, 8])
    self.assertEqual(figures.median(found["a"], "tokens", "seconds"), 20 / 7)
    self.assertNotIn("gone", found)

  def test_a_measurement_that_never_counts_is_refused(self):
    with self.assertRaises(figures.ImpossibleFigureError):
      figures.alternate(["a"], 1, lambda _: _run(20), lambda: False)

  def test_missing_tokens_are_refused(self):
    figures.refuse_impossible({"a": [_run(20)]}, {"a": 10}, "limit")
    with self.assertRaisesRegex(figures.ImpossibleFigureError, "a: 2 batches of 10 tokens held 19"):
      figures.refuse_impossible({"a": [_run(20), _run(19)]}, {"a": 10}, "limit")

  def test_loaders_faster_than_all_cores_can_copy_are_refused(self):
    found = {"limit": [_run(20)], "a": [_run(20, 0.99 / (os.cpu_count() or 1))]}
    figures.refuse_impossible(found, {"limit": 10, "a": 10}, "limit")
    found["a"] = [_run(20, 0.9 / (os.cpu_count() or 1))]
    with self.assertRaisesRegex(figures.ImpossibleFigureError, "Mtok/s"):
      figures.refuse_impossible(found, {"limit": 10, "a": 10}, "limit")

  def test_buffered_batches_and_the_end_of_an_epoch_are_not_counted(self):
    taken: list[int] = []

    def take() -> _Tokens:
      taken[-1] += 1
      return _Tokens()

    loader = child.Loader(take, buffered=1, epoch=10, restart=lambda: taken.append(0))
    found = child.run(loader, seconds=0, least=6)
    self.assertEqual((found["batches"], found["tokens"], taken), (6, 60, [7, 5]))


if __name__ == "__main__":
  absltest.main()
