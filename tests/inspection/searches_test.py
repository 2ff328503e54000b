"""Tests of searches in the background."""

import tempfile
import threading
import unittest

from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import searches
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun


def setUpModule():
  global _run
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="searches_test_")
  unittest.addModuleCleanup(directory.cleanup)
  documents = {**small_run.texts(), "long": ["x" * 2000]}
  _run = small_run.write(directory.name, documents=documents)


class _SlowTokenizer(tokenizer_lib.ByteTokenizer):
  """Blocks in `decode` until the test allows it."""

  def __init__(self):
    super().__init__()
    self.started, self.allowed = threading.Event(), threading.Event()

  def decode(self, ids):
    self.started.set()
    self.allowed.wait()
    return super().decode(ids)


class SearchesTest(absltest.TestCase):

  def make(self, tokenizer=None, **arguments):
    opened = run_lib.open_iterator(run_lib.find_run(_run.checkpoints))
    iterator = self.enter_context(opened)
    made = searches.Searches(iterator, tokenizer or tokenizer_lib.ByteTokenizer(), **arguments)
    self.addCleanup(made.close)
    return made

  def test_a_search_finds_places_and_their_steps_and_is_kept(self):
    made = self.make()
    found = made.get("harbour seal")
    found.wait()
    self.assertTrue(found.finished)
    self.assertEqual(found.scanned, found.total)
    self.assertLen(found.hits, 1)
    self.assertEqual({visit.epoch for visit in found.visits[0].visits}, {0, 1})
    self.assertIn("1 occurrences", found.summary())
    self.assertIs(made.get("harbour seal"), found)

  def test_labels_without_the_text_give_no_hits(self):
    found = self.make().get("harbour seal", "wiki")
    found.wait()
    self.assertEqual(found.summary(), "This text does not occur in the corpus.")

  def test_a_search_for_what_is_everywhere_stops_early(self):
    found = self.make().get("x")
    found.wait()
    self.assertGreaterEqual(len(found.hits), 1000)
    self.assertLen(found.visits, 20)
    self.assertIn("give a longer text", found.summary())

  def test_a_new_search_ends_the_one_that_runs(self):
    tokenizer = _SlowTokenizer()
    made = self.make(tokenizer)
    first = made.get("ipsum")
    tokenizer.started.wait()
    self.assertFalse(first.finished)
    threading.Timer(0.1, tokenizer.allowed.set).start()
    second = made.get("harbour")
    self.assertTrue(first.finished)
    second.wait()
    self.assertLen(second.hits, 1)

  def test_a_search_that_is_not_polled_ends_and_can_be_restarted(self):
    made = self.make(patience=-1.0)
    found = made.get("harbour")
    found.wait()
    self.assertTrue(found.stopped)
    self.assertIsNot(made.get("harbour"), found)

  def test_an_invalid_search_is_an_error(self):
    made = self.make()
    with self.assertRaisesRegex(errors.ConfigError, "some text"):
      made.get("")
    with self.assertRaisesRegex(errors.ConfigError, "matches no label"):
      made.get("a", "news*")

  def test_an_error_is_reported_once_and_then_the_search_starts_again(self):
    class Broken(tokenizer_lib.ByteTokenizer):
      broken = True

      def decode(self, ids):
        if self.broken:
          raise RuntimeError(f"{len(ids)} ids")
        return super().decode(ids)

    tokenizer = Broken()
    made = self.make(tokenizer)
    found = made.get("harbour")
    found.wait()
    self.assertIsInstance(found.error, RuntimeError)
    self.assertIs(made.get("harbour"), found)
    tokenizer.broken = False
    again = made.get("harbour")
    self.assertIsNot(again, found)
    again.wait()
    self.assertIsNone(again.error)
    self.assertLen(again.hits, 1)


if __name__ == "__main__":
  absltest.main()
