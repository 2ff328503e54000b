"""Tests of the header of a document index."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import document_header

_VALUES = {
    "fingerprint": "xxh3:1",
    "eos_id": 0,
    "num_documents": 3,
    "checksum": "2",
    "names": {"named": 2, "sources": 1, "name_bytes": 9, "source_bytes": 4, "checksum": "5"},
    "hashes": "",
}


class DocumentHeaderTest(parameterized.TestCase):

  def test_values_survive(self):
    header = document_header.write(_VALUES)
    self.assertLen(header, 4096)
    self.assertEqual(document_header.read(header), document_header.with_sizes(_VALUES))

  def test_a_header_without_names_has_none(self):
    values = {**_VALUES, "names": None}
    self.assertIsNone(document_header.read(document_header.write(values))["names"])

  def test_format_1_has_neither_names_nor_hashes(self):
    values = {key: value for key, value in _VALUES.items() if key not in ("names", "hashes")}
    header = document_header.write(values).replace(b"documents 2", b"documents 1")
    self.assertEqual(document_header.read(header), {**values, "names": None, "hashes": ""})

  def test_a_changed_value_is_refused(self):
    header = document_header.write(_VALUES).replace(b'"eos_id": 0', b'"eos_id": 1')
    with self.assertRaisesRegex(ValueError, "its header was changed"):
      document_header.read(header)

  @parameterized.parameters(
      ("eos_id", -1), ("num_documents", "3"), ("num_documents", 1.5), ("checksum", 2)
  )
  def test_a_value_of_the_wrong_type_is_refused(self, name, value):
    header = document_header.write({**_VALUES, name: value})
    with self.assertRaisesRegex(ValueError, name):
      document_header.read(header)


if __name__ == "__main__":
  absltest.main()
