"""Tests of finding documents piece by piece."""

import gzip
import os
import pathlib
import pickle

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo.corpus import document_work
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus.work import pieces
from maxtext_olmo.corpus.work.options import WorkOptions


def _write(directory, files):
  entries = []
  for i, tokens in enumerate(files):
    path = pathlib.Path(directory, f"part-{i}.npy")
    np.array(tokens, "uint16").tofile(path)
    entries.append((str(path), "a"))
  return index_builder.build_index(entries, 4, tokenizer="t", dtype="uint16")


def _document_index(index, directory, piece_bytes, rule, *, workers=1):
  """Returns the bytes of a document index made from pieces of this size."""
  options = WorkOptions(workers=workers, results=os.path.join(directory, "results"))
  outcome = documents_lib.find_documents(
      index, 0, options, rule=rule, hashes=True, piece_bytes=piece_bytes
  )
  path = os.path.join(directory, "documents")
  documents_lib.write_documents(index, path, 0, outcome, rule=rule, hashes=True)
  outcome.discard()
  return pathlib.Path(path).read_bytes()


class DocumentWorkTest(parameterized.TestCase):

  @settings(deadline=None, max_examples=25)
  @given(
      st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=3),
      st.sampled_from([2, 4, 6, 10, 64]),
      st.sampled_from(["auto", "eos"]),
  )
  def test_the_document_index_does_not_depend_on_the_pieces(self, files, piece_bytes, rule):
    directory = self.create_tempdir().full_path
    index = _write(directory, files)
    expected = _document_index(index, directory, 1 << 20, rule)
    self.assertEqual(_document_index(index, directory, piece_bytes, rule, workers=3), expected)
    path = os.path.join(directory, "built")
    documents_lib.build_documents(index, path, 0, rule=rule, hashes=True)
    self.assertEqual(pathlib.Path(path).read_bytes(), expected)

  def test_hashes_are_those_of_the_documents_that_begin_in_a_piece(self):
    directory = self.create_tempdir().full_path
    index = _write(directory, [[5, 6, 0, 7, 8, 0, 9, 9, 9, 0]])
    work = document_work.DocumentWork(0, True)
    found = [work(piece) for piece in pieces.pieces_of(index, piece_bytes=8)]
    self.assertEqual([len(result["hashes"]) // 2 for result in found], [2, 1, 0])
    self.assertEqual([result["ends"].tolist() for result in found], [[2], [1], [1]])

  def test_a_boundary_file_is_one_item_with_names_and_survives_pickling(self):
    directory = self.create_tempdir().full_path
    index = _write(directory, [[5, 6, 0, 7]])
    boundary = os.path.join(directory, "part-0.csv.gz")
    with gzip.open(boundary, "wt") as file:
      file.write("0,3,first,x.jsonl,1\n3,4,second,x.jsonl,2\n")
    (source,) = pieces.source_files(index)
    item = document_work.BoundaryFile(source, boundary)
    self.assertEqual(pickle.loads(pickle.dumps(item)), item)
    found = document_work.DocumentWork(0, True)(item)
    self.assertEqual(found["spans"].tolist(), [[0, 3], [3, 1]])
    self.assertEqual(found["name_text"].tobytes(), b"firstsecond")
    self.assertEqual((found["named"], found["sources_found"]), (2, 1))
    self.assertLen(found["hashes"], 4)

  @parameterized.parameters(False, True)
  def test_a_token_file_that_has_grown_fails_and_succeeds_once_it_is_restored(self, has_boundaries):
    directory = self.create_tempdir().full_path
    index = _write(directory, [[5, 6, 0, 7]])
    if has_boundaries:
      boundary = pathlib.Path(directory, "part-0.csv.gz")
      boundary.write_bytes(gzip.compress(b"0,3\n3,4\n"))
    path = pathlib.Path(directory, "part-0.npy")
    tokens = path.read_bytes()
    path.write_bytes(tokens + b"\0\0")
    options = WorkOptions(results=os.path.join(directory, "results"))
    (failure,) = documents_lib.find_documents(index, 0, options).failures
    self.assertRegex(failure.reason, "part-0.npy: expected 8 bytes, found 10.* restore it")
    path.write_bytes(tokens)
    self.assertEmpty(documents_lib.find_documents(index, 0, options).failures)


if __name__ == "__main__":
  absltest.main()
