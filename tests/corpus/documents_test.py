"""Tests of building and opening a document index."""

import gzip
import json
import os
import pathlib
import pickle

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import scan
from maxtext_olmo.corpus.storage import stores
from tests import corpora
from tests import object_server
from tests.rows import document_corpus


def _write(directory, files, dtype="uint16"):
  """Writes token files with the given tokens, and returns their index."""
  entries = []
  for i, tokens in enumerate(files):
    path = pathlib.Path(directory, "data", f"part-{i}.npy")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(tokens, dtype).tofile(path)
    entries.append((str(path), "a"))
  index = index_lib.build_index(entries, 4, tokenizer="t", dtype=dtype)
  index.save(os.path.join(directory, "index.json"))
  return index


def _spans(documents):
  ids = np.arange(documents.num_documents)
  files, starts = documents.locate(ids)
  return list(zip(files.tolist(), starts.tolist(), documents.lengths(ids).tolist()))


class StoreTest(absltest.TestCase):

  def serve(self, folder):
    """Returns a server of the files that `_write` wrote, and an index of what it serves."""
    data = pathlib.Path(folder, "data")
    server = self.enter_context(
        object_server.ObjectServer({f"b/{path.name}": path.read_bytes() for path in data.iterdir()})
    )
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    index = index_lib.build_index(
        [(path.name, "a") for path in sorted(data.glob("*.npy"))],
        4,
        tokenizer="t",
        dtype="uint16",
        base="s3://b",
    )
    return server, index

  def test_a_document_index_is_built_from_a_store_and_written_to_it(self):
    folder = self.create_tempdir().full_path
    local = _write(folder, [[5, 6, 0, 7, 0, 0, 8, 9], [3], [0]])
    expected = documents_lib.build_documents(local, os.path.join(folder, "documents"), 0)
    server, index = self.serve(folder)
    built = documents_lib.build_documents(index, "s3://b/index.documents", 0, hashes=True)
    self.assertEqual(_spans(built), _spans(expected))
    self.assertIn("b/index.documents", server.objects)
    opened = documents_lib.load_documents("s3://b/index.documents", index, 0)
    self.assertEqual(_spans(opened), _spans(expected))
    # The corpus is the same wherever it is, so either document index belongs to both.
    served = self.create_tempfile("served", server.objects["b/index.documents"]).full_path
    self.assertEqual(_spans(documents_lib.load_documents(served, local, 0)), _spans(expected))

  def test_documents_of_a_replaced_object_are_not_indexed(self):
    folder = self.create_tempdir().full_path
    _write(folder, [[5, 6, 0, 7, 0, 0, 8, 9], [3], [0]])
    server, index = self.serve(folder)
    first, *_ = sorted(server.objects)
    server.objects[first] = np.array([5, 0, 6, 7, 8, 9, 1, 0], "uint16").tobytes()
    path = os.path.join(folder, "documents")
    with self.assertRaisesRegex(errors.CorpusError, f"s3://{first}.*was replaced"):
      documents_lib.build_documents(index, path, 0)
    self.assertFalse(os.path.exists(path))

  def test_boundary_files_are_read_from_a_store(self):
    folder = self.create_tempdir().full_path
    local = _write(folder, [[5, 6, 1, 7, 1, 1, 8, 9]])
    lines = "0,3,id-0,src,0\n3,8,id-1,src,1\n"
    pathlib.Path(folder, "data", "part-0.csv.gz").write_bytes(gzip.compress(lines.encode()))
    path, options = os.path.join(folder, "documents"), {"rule": "csv", "hashes": True}
    expected = documents_lib.build_documents(local, path, 0, **options)
    self.assertEqual(_spans(expected), [(0, 0, 3), (0, 3, 5)])
    server, index = self.serve(folder)
    built = documents_lib.build_documents(index, f"{path}-of-store", 0, **options)
    self.assertEqual(_spans(built), _spans(expected))
    self.assertEqual(built.describe(np.arange(2)), expected.describe(np.arange(2)))
    server.objects["b/part-0.npy"] = server.objects["b/part-0.npy"][::-1]
    with self.assertRaisesRegex(errors.CorpusError, "s3://b/part-0.npy.*was replaced"):
      documents_lib.build_documents(index, f"{path}-of-replaced", 0, **options)


class DocumentIndexTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    self.path = os.path.join(self.directory, "index.json.documents")
    self.with_gaps = document_corpus.write(self.create_tempdir().full_path).documents

  def test_an_eos_ends_a_document_and_so_does_the_end_of_a_file(self):
    index = _write(self.directory, [[5, 6, 0, 7, 0, 0, 8, 9], [], [3], [0]])
    documents = documents_lib.build_documents(index, self.path, 0)
    self.assertEqual(
        _spans(documents), [(0, 0, 3), (0, 3, 2), (0, 5, 1), (0, 6, 2), (2, 0, 1), (3, 0, 1)]
    )
    self.assertEqual(documents.num_tokens, 10)

  def test_olmo_cores_rule_leaves_out_tails_and_boundary_files(self):
    index = _write(self.directory, [[5, 6, 0, 7, 0, 0, 8, 9], [], [3], [0]])
    with gzip.open(os.path.join(self.directory, "data", "part-0.csv.gz"), "wt") as file:
      file.write("0,8,a,b,1\n")
    documents = documents_lib.build_documents(index, self.path, 0, rule="eos")
    self.assertEqual(_spans(documents), [(0, 0, 3), (0, 3, 2), (0, 5, 1), (3, 0, 1)])
    self.assertEqual(documents_lib.load_documents(self.path, index, 0, rule="eos"), documents)
    with self.assertRaisesRegex(errors.CorpusError, "the rule 'eos', but this run needs 'auto'"):
      documents_lib.load_documents(self.path, index, 0)

  def test_the_rule_csv_needs_a_boundary_file_for_each_token_file(self):
    index = _write(self.directory, [[5, 6, 0, 7], [3]])
    with gzip.open(os.path.join(self.directory, "data", "part-0.csv.gz"), "wt") as file:
      file.write("0,2,a,b,1\n2,4,a,b,2\n")
    with self.assertRaisesRegex(errors.CorpusError, "part-1.npy has no boundary file; expected "):
      documents_lib.build_documents(index, self.path, 0, rule="csv")
    with gzip.open(os.path.join(self.directory, "data", "part-1.csv.gz"), "wt") as file:
      file.write("0,1,a,b,1\n")
    documents = documents_lib.build_documents(index, self.path, 0, rule="csv")
    self.assertEqual(_spans(documents), [(0, 0, 2), (0, 2, 2), (1, 0, 1)])
    with self.assertRaisesRegex(errors.ConfigError, "must be one of auto, eos, csv, got 'bos'"):
      documents_lib.build_documents(index, self.path, 0, rule="bos")

  @settings(deadline=None, max_examples=40)
  @given(st.integers(0, 3), st.integers(0, 160), st.integers(1, 40))
  def test_documents_within_a_range_are_those_with_a_token_in_it(self, file, first, count):
    documents = self.with_gaps
    expected = [
        number
        for number, (source, start, length) in enumerate(_spans(documents))
        if source == file and any(first <= start + i < first + count for i in range(length))
    ]
    self.assertEqual(documents.within(file, first, count).tolist(), expected)

  @settings(deadline=None, max_examples=25)
  @given(st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=4), st.data())
  def test_documents_cover_every_token_once_however_the_file_is_read_in_pieces(self, files, data):
    directory = self.create_tempdir().full_path
    index = _write(directory, files)
    piece = data.draw(st.sampled_from([2, 6, 64]))
    was, scan.CHUNK_BYTES = scan.CHUNK_BYTES, piece
    try:
      documents = documents_lib.build_documents(index, os.path.join(directory, "d"), 0)
    finally:
      scan.CHUNK_BYTES = was
    rebuilt = [[] for _ in files]
    for file_id, start, length in _spans(documents):
      tokens = files[file_id][start : start + length]
      self.assertNotIn(0, tokens[:-1])
      self.assertLen(rebuilt[file_id], start)
      rebuilt[file_id] += tokens
    self.assertEqual(rebuilt, files)

  def test_a_boundary_file_of_dolma_next_to_the_tokens_is_used(self):
    index = _write(self.directory, [[5, 6, 1, 7, 1, 8], [3, 1, 4, 1]])
    with gzip.open(os.path.join(self.directory, "data", "part-0.csv.gz"), "wt") as file:
      file.write("0,3,id-0,source,1\n3,6,id-1,source,2\n")
    documents = documents_lib.build_documents(index, self.path, 1)
    self.assertEqual(_spans(documents), [(0, 0, 3), (0, 3, 3), (1, 0, 2), (1, 2, 2)])
    self.assertEqual(documents.num_boundary_files, 1)

  @parameterized.parameters(
      ("0,9,a\n", "1: .*after token 0 and within the 6 tokens of the file, found '0,9'"),
      ("3,2,a\n", "1: .*found '3,2'"),
      ("0,3,a\n2,4,b\n", "2: .*after token 3 .*found '2,4'"),
      ("-1,3\n", "1: .*found '-1,3'"),
      ("zero,3\n", "1: .*found 'zero,3'"),
      ("0,3\n4\n", "2: .*found '4'"),
      ("0,3\n\n3,6\n", "2: .*found ''"),
      ("0,9" + 5000 * "9" + "\n", "1: .*found '0,9"),
  )
  def test_a_boundary_file_that_does_not_fit_is_named_with_its_line(self, text, message):
    index = _write(self.directory, [[5, 6, 1, 7, 1, 8]])
    with gzip.open(os.path.join(self.directory, "data", "part-0.csv.gz"), "wt") as file:
      file.write(text)
    with self.assertRaisesRegex(errors.CorpusError, "part-0.csv.gz:" + message):
      documents_lib.build_documents(index, self.path, 1)
    self.assertFalse(os.path.exists(self.path))

  @parameterized.parameters((None, 0), (b"", 0), (b"0,3,a\n", 3))
  def test_a_boundary_file_must_reach_the_end_of_its_tokens(self, text, end):
    index = _write(self.directory, [[5, 6, 1, 7, 1, 8]])
    content = b"" if text is None else gzip.compress(text)
    pathlib.Path(self.directory, "data", "part-0.csv.gz").write_bytes(content)
    with self.assertRaisesRegex(
        errors.CorpusError, f"The last document in .*part-0.csv.gz ends at token {end}, .* 6 tokens"
    ):
      documents_lib.build_documents(index, self.path, 1)

  def test_an_empty_file_may_have_an_empty_boundary_file(self):
    index = _write(self.directory, [[], [5, 1]])
    pathlib.Path(self.directory, "data", "part-0.csv.gz").write_bytes(gzip.compress(b""))
    self.assertEqual(_spans(documents_lib.build_documents(index, self.path, 1)), [(1, 0, 2)])

  def test_tokens_between_documents_are_counted(self):
    index = _write(self.directory, [[5, 6, 1, 7, 1, 8]])
    with gzip.open(os.path.join(self.directory, "data", "part-0.csv.gz"), "wt") as file:
      file.write("1,3\n5,6\n")
    with self.assertLogs(level="WARNING") as logs:
      documents = documents_lib.build_documents(index, self.path, 1)
    self.assertEqual(_spans(documents), [(0, 1, 2), (0, 5, 1)])
    self.assertRegex(logs.output[0], "part-0.csv.gz: 3 of 6 tokens lie between documents")

  def test_a_directory_or_fifo_is_not_a_boundary_file(self):
    index = _write(self.directory, [[5, 6, 1]])
    boundaries = pathlib.Path(self.directory, "data", "part-0.csv.gz")
    for make in (os.mkdir, os.mkfifo):
      make(boundaries)
      with self.assertRaisesRegex(errors.CorpusError, "part-0.csv.gz is not a regular file"):
        documents_lib.build_documents(index, self.path, 1)
      os.rename(boundaries, boundaries.with_name(make.__name__))

  @parameterized.named_parameters(
      ("no_gzip", lambda content: b"0,3\n"),
      ("cut_off", lambda content: content[:-12]),
      ("damaged_block", lambda content: content[:10] + b"\xff" + content[11:]),
      ("no_utf_8", lambda content: gzip.compress(b"0,6,\xff\n")),
      ("no_csv", lambda content: gzip.compress(b'0,6,"' + 200_000 * b"x" + b'"\n')),
      ("other_checksum", lambda content: content[:-8] + bytes(4) + content[-4:]),
  )
  def test_a_damaged_boundary_file_is_named(self, damage):
    index = _write(self.directory, [[5, 6, 1, 7, 1, 8]])
    content = gzip.compress(b"0,3,id-0,source,1\n3,6,id-1,source,2\n")
    pathlib.Path(self.directory, "data", "part-0.csv.gz").write_bytes(damage(content))
    with self.assertRaisesRegex(errors.CorpusError, "boundary file .*part-0.csv.gz cannot be read"):
      documents_lib.build_documents(index, self.path, 1)

  def test_tokens_are_counted_from_after_a_header(self):
    path = os.path.join(self.directory, "a.npy")
    np.save(path, np.array([1, 2, 0, 3], np.uint16))
    index = index_lib.build_index([(path, "a")], 2, tokenizer="t", dtype="uint16")
    documents = documents_lib.build_documents(index, self.path, 0)
    self.assertEqual(_spans(documents), [(0, 0, 3), (0, 3, 1)])

  def test_a_saved_index_is_loaded_and_survives_pickling(self):
    index_path, _ = corpora.write_corpus(self.directory)
    index = index_lib.load_index(index_path)
    self.assertEqual(documents_lib.default_path(index_path), self.path)
    built = documents_lib.build_documents(index, self.path, 0, workers=2)
    loaded = documents_lib.load_documents(self.path, index, 0)
    self.assertEqual(loaded, built)
    self.assertEqual(_spans(pickle.loads(pickle.dumps(loaded))), _spans(built))
    self.assertLess(len(pickle.dumps(loaded)), 1000)

  def test_damage_anywhere_in_the_file_is_detected(self):
    index_path, _ = corpora.write_corpus(self.directory)
    index = index_lib.load_index(index_path)
    documents_lib.build_documents(index, self.path, 0)
    whole = pathlib.Path(self.path).read_bytes()
    for damaged in (
        whole[:-1],
        whole + b"0",
        whole[:4200] + bytes([whole[4200] ^ 1]) + whole[4201:],
        whole.replace(b'"eos_id": 0', b'"eos_id": 1', 1),
        b"",
        b"{}",
        4000 * b"[",
    ):
      pathlib.Path(self.path).write_bytes(damaged)
      with self.assertRaisesRegex(errors.CorpusError, "index documents"):
        documents_lib.load_documents(self.path, index, 0)

  def test_a_flipped_bit_in_any_byte_of_the_header_is_found(self):
    index = _write(self.directory, [[1, 2, 0, 4]])
    documents_lib.build_documents(index, self.path, 0)
    whole = pathlib.Path(self.path).read_bytes()
    for place in range(whole.index(b"}") + 1):
      damaged = bytearray(whole)
      damaged[place] ^= 1 << place % 8
      pathlib.Path(self.path).write_bytes(damaged)
      with self.assertRaises(errors.CorpusError, msg=f"byte {place}"):
        documents_lib.load_documents(self.path, index, 0)

  @parameterized.parameters(
      ("checksum", None),
      ("num_tokens", None),
      ("num_files", "1"),
      ("num_files", 7),
      ("num_documents", float("inf")),
      ("num_documents", -1),
      ("surplus", 1),
      ("path", "elsewhere"),
  )
  def test_a_header_with_another_field_is_refused_even_if_its_checksum_is_right(self, name, value):
    index = _write(self.directory, [[1, 2, 0, 4]])
    documents_lib.build_documents(index, self.path, 0)
    whole = pathlib.Path(self.path).read_bytes()
    values = json.loads(whole[:4096])
    del values["header"], values["format"]
    values.pop(name, None)
    values.update({} if value is None else {name: value})
    digest = xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
    header = {"format": "maxtext-olmo documents 1", "header": digest, **values}
    data = json.dumps(header).encode().ljust(4096) + whole[4096:]
    pathlib.Path(self.path).write_bytes(data)
    with self.assertRaisesRegex(errors.CorpusError, "index documents"):
      documents_lib.load_documents(self.path, index, 0)

  def test_a_deeply_nested_header_is_refused(self):
    index = _write(self.directory, [[1, 2, 0, 4]])
    pathlib.Path(self.path).write_bytes(b"[" * 5000)
    with self.assertRaisesRegex(errors.CorpusError, "not a document index"):
      documents_lib.load_documents(self.path, index, 0)

  def test_truncation_while_in_use_is_an_error_that_names_the_bytes(self):
    index = _write(self.directory, [[1, 0] * 10_000])
    documents_lib.build_documents(index, self.path, 0)
    documents = documents_lib.load_documents(self.path, index, 0)
    os.truncate(self.path, 4200)
    for read in (documents.lengths, documents.locate):
      with self.assertRaisesRegex(errors.CorpusError, "documents was replaced or changed.* 4200 "):
        read(np.array([9999]))

  def test_a_file_of_another_corpus_or_eos_is_refused(self):
    one = _write(self.directory, [[1, 2, 0]])
    other = _write(self.create_tempdir().full_path, [[1, 2, 0, 4]])
    documents_lib.build_documents(one, self.path, 0)
    with self.assertRaisesRegex(errors.CorpusError, "another corpus"):
      documents_lib.load_documents(self.path, other, 0)
    with self.assertRaisesRegex(errors.CorpusError, "made with EOS 0.*olmo_eos_id=2"):
      documents_lib.load_documents(self.path, one, 2)
    with self.assertRaisesRegex(errors.MissingFileError, "index documents.*makes one"):
      documents_lib.load_documents(self.path + "x", one, 2)

  def test_an_eos_outside_the_dtype_is_an_error(self):
    index = _write(self.directory, [[1, 2, 0]])
    for eos_id in (-1, 1 << 16):
      with self.assertRaisesRegex(errors.ConfigError, "EOS"):
        documents_lib.build_documents(index, self.path, eos_id)

  def test_a_truncated_file_is_an_error_and_leaves_no_files(self):
    index = _write(self.directory, [[1, 2, 0, 4]])
    np.array([1, 2], np.uint16).tofile(os.path.join(self.directory, "data", "part-0.npy"))
    with self.assertRaisesRegex(errors.CorpusError, "part-0.npy: expected 8 bytes, found 4"):
      documents_lib.build_documents(index, self.path, 0)
    self.assertCountEqual(os.listdir(self.directory), ["data", "index.json"])


if __name__ == "__main__":
  absltest.main()
