"""Tests of checking one piece of a file."""

import dataclasses
import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import checksums
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import verify_work
from maxtext_olmo.corpus.work import pieces
from maxtext_olmo.errors import CorpusError
from tests import object_server
from tests.corpus.work import sample_work
from tests.memory_storage import MemoryStorage


class VerifyWorkTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    index = sample_work.write_corpus(self.create_tempdir().full_path)
    self.source = pieces.source_files(index)[2]
    self.work = verify_work.VerifyWork(vocab_size=40, eos_id=0)

  def test_files_are_cut_only_if_their_tokens_are_read_and_their_checksum_allows_it(self):
    def counts(work, checksum=None):
      source = dataclasses.replace(self.source, checksum=checksum)
      return [piece.count for piece in work.pieces(source, 4000)]

    self.assertEqual(counts(self.work), [2000, 1000])
    self.assertEqual(counts(verify_work.VerifyWork()), [3000])
    self.assertEqual(counts(self.work, "xxh3:00"), [3000])
    self.assertEqual(counts(self.work, "xxh3-pieces-2000:00"), [1000, 1000, 1000])

  @parameterized.product(
      algorithm=["xxh3-pieces-1024", "xxh3-pieces-96", "xxh3-pieces-1023"],
      rest=[None, 0, 1, 2, 3, 4],
  )
  def test_the_checksum_from_pieces_is_that_of_the_whole_file(self, algorithm, rest):
    path = os.path.join(self.create_tempdir().full_path, "part.npy")
    tokens = np.random.default_rng(1).integers(0, 1000, 512, np.uint32)
    if rest is None:
      np.save(path, tokens)  # With a header of 128 bytes.
    else:
      with open(path, "wb") as file:
        file.write(tokens.tobytes() + b"\1" * rest)
    index = index_builder.build_index([(path, "a")], 8, tokenizer="t", dtype="uint32")
    (source,) = pieces.source_files(index)
    source = dataclasses.replace(source, checksum=f"{algorithm}:")
    work = verify_work.VerifyWork()
    joined = verify_work.join_pieces(source, [work(piece) for piece in work.pieces(source)])
    whole = checksums.new_hash(algorithm)
    whole.update(pathlib.Path(path).read_bytes())
    self.assertEqual(joined.digest, whole.hexdigest())

  def test_a_piece_counts_bad_ids_and_documents_and_names_the_first_place(self):
    first, second = self.work.pieces(self.source, 4000)
    found = self.work(second)
    tokens = np.fromfile(self.source.path, np.uint16)[2000:]
    bad = np.flatnonzero(tokens >= 40)
    self.assertEqual(found["bad"], len(bad))
    self.assertEqual(found["first_bad"], [2000 + bad[0], tokens[bad[0]]])
    joined = verify_work.join_pieces(self.source, [self.work(first), found])
    self.assertEqual(joined.lengths.tokens, 3000)
    self.assertEqual(
        joined.lengths.documents, np.count_nonzero(np.fromfile(self.source.path, np.uint16) == 0)
    )

  def test_two_reads_that_differ_are_an_error(self):
    class FlakyStorage(MemoryStorage):
      """Returns other content once its tokens have been read."""

      def pieces(self, *args):
        yield b"".join(super().pieces(*args))
        self.files = self.later

    (piece,) = self.work.pieces(self.source)
    good = np.full(self.source.n_tokens, 3, np.uint16).tobytes()
    storage = FlakyStorage({self.source.path: b"\xff" * len(good)})
    storage.later = {self.source.path: good}
    work = dataclasses.replace(self.work, storage=storage)
    with self.assertRaisesRegex(CorpusError, "Two reads of bytes 0 to 6000 of .* differ"):
      work(piece)

  def test_every_piece_of_a_replaced_object_is_broken_and_gives_one_reason(self):
    content = pathlib.Path(self.source.path).read_bytes()
    server = self.enter_context(object_server.ObjectServer({"b/x": content}))
    source = dataclasses.replace(
        self.source, path=f"{server.url}/b/x", etag=server.etag("b/x"), checksum=None
    )
    parts = self.work.pieces(source, 4000)
    self.assertEqual([self.work(piece)["broken"] for piece in parts], [None, None])
    server.objects["b/x"] = content[::-1]
    found = [self.work(piece) for piece in parts]
    self.assertLen(found, 2)
    for result in (*found, {"broken": verify_work.join_pieces(source, found).broken}):
      self.assertRegex(result["broken"], "the store's ETag is .*, but the .* object was replaced")

  def test_a_piece_of_an_object_that_is_replaced_meanwhile_is_not_checked(self):
    content = pathlib.Path(self.source.path).read_bytes()
    server = self.enter_context(object_server.ObjectServer({"b/x": content}))
    source = dataclasses.replace(self.source, path=f"{server.url}/b/x", etag=server.etag("b/x"))

    def replace(number, path):
      if server.requests[number][0] == "GET":
        server.objects[path] = content[::-1]
      return ""

    server.faults = replace
    _, second = self.work.pieces(source, 4000)
    with self.assertRaisesRegex(CorpusError, "bytes 4000 to 6000 of .*was replaced"):
      self.work(second)

  def test_every_piece_of_a_file_of_another_size_is_broken_and_gives_one_reason(self):
    parts = self.work.pieces(self.source, 4000)
    os.truncate(self.source.path, 5000)
    found = [self.work(piece) for piece in parts]
    joined = verify_work.join_pieces(self.source, found)
    self.assertRegex(joined.broken, "expected 6000 bytes, found 5000")
    self.assertLen([result for result in found if result["broken"]], 2)


if __name__ == "__main__":
  absltest.main()
