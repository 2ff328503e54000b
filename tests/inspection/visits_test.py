"""Tests of the steps that hold a range of tokens."""

import dataclasses
import json
import tempfile
import unittest

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.inspection import search
from maxtext_olmo.inspection import visits
from tests.loader import cases
from tests.loader import row_sources

_directory = ""
_STEPS = 24


def setUpModule():
  global _directory
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="visits_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  path = row_sources.write_corpus(_directory)
  documents_lib.build_documents(maxtext_olmo.load_index(path), documents_lib.default_path(path), 0)


class VisitsTest(parameterized.TestCase):

  def make(self, source, state=None, **values):
    config = row_sources.config_values(source, f"{_directory}/index.json", _directory)
    config = cases.data_config(**{**config, **values})
    iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
    self.addCleanup(iterator.close)
    if state is not None:
      iterator.set_state(json.loads(json.dumps(state)))
    return iterator

  def after_changes(self, source):
    """Returns the iterator of a run after two changes of the batch size."""
    state = None
    for size, step in ((8, 5), (12, 9), (4, 12)):
      iterator = self.make(source, state, global_batch_size_to_load=size)
      iterator.go_to(step)
      state = iterator.get_state()
    return iterator

  def brute_force(self, iterator, target):
    """Returns the steps, rows and tokens that hold a range, by looking at every row."""
    path, found = iterator.files.paths[target.file], []
    for step in range(_STEPS):
      for row in iterator.explain(step).rows:
        held = 0
        for part in row.parts:
          if part.file == path:
            low = max(part.first, target.first)
            held += max(0, min(part.first + part.count, target.first + target.count) - low)
        if held:
          found.append((step, row.row, held, row.kept))
    return found

  @parameterized.parameters(
      "windows",
      "windows_held_out",
      "windows_olmo_core",
      "windows_mixture",
      "planned",
      "planned_mixture",
      "one_document",
  )
  def test_the_steps_of_a_document_are_those_of_a_search_of_every_row(self, source):
    iterator = self.after_changes(source)
    count = iterator.provenance.documents.num_documents
    for document in np.random.default_rng(1).integers(0, count, 5).tolist():
      target = visits.document_range(iterator, document)
      found = visits.find_visits(iterator, target, _STEPS)
      self.assertIn(document, found.documents)
      got = [(v.step, v.row, v.tokens, v.kept) for v in found.visits if v.step is not None]
      self.assertEqual(sorted(got), self.brute_force(iterator, target), document)
      for visit in found.visits:
        self.assertEqual(visit.seen, visit.step is not None and visit.step < iterator.step)
      self.assertEqual(bool(found.reason), not found.visits)

  def test_each_epoch_has_a_visit_until_the_end_of_the_next(self):
    found = visits.find_visits(self.make("windows"), search.TokenRange(0, 100, 3))
    self.assertEqual([visit.epoch for visit in found.visits], [0, 1])
    planned = visits.find_visits(self.make("planned"), search.TokenRange(0, 100, 1))
    self.assertEqual([visit.epoch for visit in planned.visits], [0, 1])
    json.dumps(found.to_json())

  @parameterized.parameters(True, False)
  def test_every_visit_has_columns_and_only_the_verdict_needs_reading(self, ngram_filter):
    iterator = self.make("windows", olmo_apply_ngram_filter=ngram_filter)
    target = search.TokenRange(0, 100, 3)
    until = 40 * 11  # Some forty epochs.
    whole = visits.find_visits(iterator, target, until)
    self.assertGreater(len(whole.visits), 16)
    self.assertEqual(whole.unread, 0)
    for visit in whole.visits[:: len(whole.visits) // 5]:
      row = iterator.explain(visit.step).rows[visit.row]
      self.assertEqual(visit.kept, row.kept)
      (part,) = row.parts
      self.assertEqual(visit.columns, (max(100, part.first) - part.first, 102 - part.first))
      self.assertEqual(visit.tokens, visit.columns[1] - visit.columns[0] + 1)
    some = visits.find_visits(iterator, target, until, 7)
    self.assertEqual(some.rows_read, 7 if ngram_filter else 0)
    self.assertEqual(some.unread, len(whole.visits) - 7 if ngram_filter else 0)
    for visit, other in zip(some.visits, whole.visits):
      self.assertEqual((visit.columns, visit.tokens), (other.columns, other.tokens))
      self.assertIn(visit.kept, (other.kept, None))

  @parameterized.product(source=("windows", "planned"), ngram_filter=(True, False))
  def test_a_visit_counts_the_excluded_tokens_of_its_range(self, source, ngram_filter):
    plain = self.make(source)
    documents = visits.document_range(plain, 3), visits.document_range(plain, 4)
    self.assertEqual(documents[0].file, documents[1].file)
    path = self.create_tempfile("exclude.jsonl", '{"document": 3}\n').full_path
    iterator = self.make(source, olmo_exclude=path, olmo_apply_ngram_filter=ngram_filter)
    for target, share in zip(documents, (1, 0)):
      found = visits.find_visits(iterator, target)
      self.assertNotEmpty(found.visits)
      for visit in found.visits:
        self.assertEqual(visit.excluded, share * visit.tokens)
    both = dataclasses.replace(documents[0], count=documents[0].count + documents[1].count)
    pieces = visits.find_visits(iterator, both, _STEPS).visits
    self.assertEqual(
        sum(visit.excluded for visit in pieces),
        sum(v.tokens for v in visits.find_visits(iterator, documents[0], _STEPS).visits),
    )
    self.assertEqual({v.excluded for v in visits.find_visits(plain, documents[0]).visits}, {0})

  def test_a_range_that_is_never_seen_has_a_reason(self):
    iterator = self.make("windows_held_out")
    held, *_ = iterator.stream.split.eval_ids(np.arange(11)).tolist()
    part = iterator.source.parts(0, np.array([held]))
    target = search.TokenRange(int(part.source[0]), int(part.first[0]), 4)
    self.assertIn("held out", visits.find_visits(iterator, target).reason)
    tail = search.TokenRange(0, 41 * row_sources.LENGTH + 1, 2)
    self.assertIn("tail of its file", visits.find_visits(iterator, tail).reason)
    mixed = self.make("windows", olmo_mixture={"label-1": 1.0})
    reason = visits.find_visits(mixed, search.TokenRange(0, 5, 1)).reason
    self.assertIn("'label-0', is left out of the mixture", reason)
    later = visits.find_visits(self.make("windows"), search.TokenRange(0, 100, 3), 1)
    self.assertIn("not before position 8", later.reason)

  @parameterized.parameters("windows", "windows_olmo_core", "planned")
  def test_skipped_rows_are_reported(self, source):
    plain = self.make(source)
    for step in (2, 9):  # Before and after the present step.
      part = plain.explain(step).rows[3].parts[0]
      target = search.TokenRange(plain.files.paths.index(part.file), part.first, 1)
      before = visits.find_visits(plain, target).visits
      iterator = self.make(source, olmo_skip=((step, step + 1),))
      iterator.go_to(5)
      after = visits.find_visits(iterator, target).visits
      self.assertEqual([v.position for v in after], [v.position for v in before])
      skipped, *others = after
      self.assertEqual((skipped.step, skipped.seen, skipped.skipped), (None, False, True))
      self.assertEqual((skipped.columns, skipped.tokens), (before[0].columns, before[0].tokens))
      self.assertEqual(visits.describe_unseen(skipped), "skipped (olmo_skip)")
      self.assertFalse(any(visit.skipped for visit in others))
    # A masked row is still part of its step.
    masked = self.make(source, olmo_skip=((9, 10),), olmo_skip_mode="mask")
    first, *_ = visits.find_visits(masked, target).visits
    self.assertEqual((first.step, first.skipped, first.kept), (9, False, False))

  def test_the_dropped_tail_of_an_epoch_is_reported(self):
    iterator = self.make("windows_olmo_core", global_batch_size_to_load=50)
    length = iterator.stream.order.num_instances
    last = iterator.stream.instance_ids(np.array([length - 1]))
    part = iterator.source.parts(0, last)
    target = search.TokenRange(int(part.source[0]), int(part.first[0]), 1)
    first, *_ = visits.find_visits(iterator, target).visits
    self.assertEqual((first.position, first.step, first.seen), (length - 1, None, False))
    self.assertEqual(visits.describe_unseen(first), "never: the tail of an epoch")

  def test_a_document_that_does_not_exist_is_an_error(self):
    iterator = self.make("windows")
    with self.assertRaisesRegex(errors.ConfigError, "the corpus has documents 0 to"):
      visits.document_range(iterator, 10**9)
    for name in ("1000000000", "nameless", "9" * 5000, "²", "-1", ""):
      with self.assertRaisesRegex(
          errors.ConfigError, "no document has this number or name.* which 0"
      ):
        visits.find_documents(iterator, name)
    self.assertEqual(visits.find_documents(iterator, "7"), [7])
    with self.assertRaisesRegex(errors.ConfigError, "does not read files"):
      visits.find_visits(self.make("synthetic"), search.TokenRange(0, 0, 1))


if __name__ == "__main__":
  absltest.main()
