"""An open document index: names, hashes, sections, and files of format 1."""

import gzip
import json
import os
import pathlib
import pickle

import numpy as np
import xxhash
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus.document_names import DocumentName
from tests import corpora

_BOUNDARIES = (
    "0,20,id-0,web.jsonl.gz,1\n20,90,ünïque,web.jsonl.gz,2\n90,100,twice,,\n100,150,twice,b,7\n"
)


def as_format_1(data: bytes) -> bytes:
  """Returns a document index in format 1, from before documents had names."""
  values = json.loads(data[:4096])
  count, files = values["num_documents"], values["num_files"]
  for name in ("format", "header", "names", "hashes"):
    del values[name]
  digest = xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
  header = {"format": "maxtext-olmo documents 1", "header": digest, **values}
  end = 4096 + 8 * (files + 1) + 12 * count
  return json.dumps(header).encode().ljust(4095) + b"\n" + data[4096:end]


class DocumentIndexTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    path, _ = corpora.write_corpus(self.directory, tokens_per_file=(333, 150, 7, 514))
    self.index = index_builder.load_index(path)
    self.path = path + ".documents"
    boundaries = self.directory / "data" / "part-001.csv.gz"
    boundaries.write_bytes(gzip.compress(_BOUNDARIES.encode()))
    documents_lib.build_documents(self.index, self.path, 0, hashes=True)
    self.documents = documents_lib.load_documents(self.path, self.index, 0)
    self.first = int(self.documents.file_offsets[1])  # The first document that has a name.

  def test_names_are_those_of_the_boundary_file(self):
    self.assertEqual(
        self.documents.describe(self.first + np.arange(-1, 5)),
        [
            DocumentName("", "", None),
            DocumentName("id-0", "web.jsonl.gz", 1),
            DocumentName("ünïque", "web.jsonl.gz", 2),
            DocumentName("twice", "", None),
            DocumentName("twice", "b", 7),
            DocumentName("", "", None),
        ],
    )
    self.assertEqual(
        self.documents.example_of_a_name, f" Document {self.first} has the name 'id-0'."
    )
    found = self.documents.find_names(["twice", "ünïque", "", "nowhere"])
    first = self.first
    self.assertEqual([one.tolist() for one in found], [[first + 2, first + 3], [first + 1], [], []])

  def test_names_and_hashes_change_neither_boundaries_nor_their_checksum(self):
    os.unlink(self.directory / "data" / "part-001.csv.gz")
    (self.directory / "data" / "part-001.csv.gz").write_bytes(
        gzip.compress(b"0,20\n20,90\n90,100\n100,150\n")
    )
    plain = documents_lib.build_documents(self.index, self.path + ".plain", 0)
    self.assertIsNone(plain.names)
    self.assertEmpty(plain.example_of_a_name)
    self.assertEqual(plain.checksum, self.documents.checksum)
    numbers = np.arange(plain.num_documents)
    np.testing.assert_array_equal(plain.lengths(numbers), self.documents.lengths(numbers))

  def test_a_file_of_format_1_is_read_and_has_no_names(self):
    numbers = np.arange(self.documents.num_documents)
    expected = self.documents.locate(numbers)
    old = as_format_1(pathlib.Path(self.path).read_bytes())
    pathlib.Path(self.path).write_bytes(old)
    found = documents_lib.load_documents(self.path, self.index, 0)
    self.assertEqual(found.checksum, self.documents.checksum)
    self.assertEqual(found.describe(np.array([self.first])), [DocumentName("", "", None)])
    self.assertEmpty(found.find_names(["id-0"])[0])
    np.testing.assert_array_equal(found.locate(numbers), expected)
    documents_lib.build_documents(self.index, self.path, 0)  # The upgrade.
    self.assertLen(documents_lib.load_documents(self.path, self.index).find_names(["id-0"])[0], 1)

  def test_a_file_of_format_1_cannot_have_names(self):
    data = pathlib.Path(self.path).read_bytes()
    renamed = data.replace(b"maxtext-olmo documents 2", b"maxtext-olmo documents 1")
    pathlib.Path(self.path).write_bytes(renamed)
    with self.assertRaisesRegex(errors.CorpusError, "expected .* bytes, found"):
      documents_lib.load_documents(self.path, self.index, 0)

  def test_every_section_has_a_checksum(self):
    whole = pathlib.Path(self.path).read_bytes()
    for place in range(4096, len(whole), 7):
      damaged = bytearray(whole)
      damaged[place] ^= 4
      pathlib.Path(self.path).write_bytes(damaged)
      with self.assertRaisesRegex(errors.CorpusError, r"damaged: bytes \d+ to \d+ have the check"):
        documents_lib.load_documents(self.path, self.index, 0)

  @parameterized.parameters(
      ({"named": -1},),
      ({"name_bytes": "12"},),
      ({"sources": None},),
      ({"checksum": 3},),
      ({"surplus": 3},),
      ([],),
      ("names",),
      (7,),
  )
  def test_a_header_with_other_names_is_refused_even_if_its_checksum_is_right(self, change):
    data = pathlib.Path(self.path).read_bytes()
    values = json.loads(data[:4096])
    del values["header"]
    name = values.pop("format")
    values["names"] = {**values["names"], **change} if isinstance(change, dict) else change
    digest = xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
    header = json.dumps({"format": name, "header": digest, **values}).encode()
    pathlib.Path(self.path).write_bytes(header.ljust(4096) + data[4096:])
    with self.assertRaisesRegex(errors.CorpusError, "index documents"):
      documents_lib.load_documents(self.path, self.index, 0)

  def test_it_survives_pickling(self):
    copy = pickle.loads(pickle.dumps(self.documents))
    self.assertEqual(copy, self.documents)
    self.assertEqual(copy.find_names(["id-0"])[0].tolist(), [self.first])


if __name__ == "__main__":
  absltest.main()
