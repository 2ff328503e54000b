"""Tests that the files of a corpus are read only through a storage."""

import ast
import fnmatch
import gzip
import os
import pathlib

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import manifest
from maxtext_olmo.corpus import npy_header
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus import verify
from maxtext_olmo.errors import CorpusError
from tests import memory_storage

_PACKAGE = pathlib.Path(maxtext_olmo.__file__).parent

_READS = {
    "open",
    "os.open",
    "os.stat",
    "os.path.getsize",
    "io.open",
    "gzip.open",
    "np.memmap",
    "np.fromfile",
    "np.load",
}
_READ_METHODS = {"read_bytes", "read_text", "stat"}

# Modules that may open files without a storage, and why.
_ALLOWED = {
    "atomic.py": "writes files",
    "cores.py": "reads the kernel's cgroup files",
    "corpus/chat_template.py": "reads a tokenizer's chat template",
    "corpus/copy*.py": "writes and compares copies",
    "corpus/document_hashes.py": "uses temporary files of its own",
    "corpus/document_names.py": "uses temporary files of its own",
    "corpus/document_work.py": "uses temporary files of its own",
    "corpus/sorted_table.py": "uses temporary files of its own",
    "corpus/text_*.py": "reads the user's text, which is not a corpus yet",
    "corpus/tokenizer.py": "reads a tokenizer's files",
    "corpus/work/identity.py": "finds out when a file was changed",
    "corpus/work/results.py": "keeps results in files of its own",
    "evaluation/cache.py": "keeps finished requests in a file of its own",
    "evaluation/tokenizer.py": "reads a tokenizer's files",
    "loader/run_files.py": "reads the small files of a run's directory",
    "loader/history_file.py": "appends to the history in a run's directory",
    "order/stored.py": "writes and locks order files itself",
    "rows/packed_cache.py": "notices whether cache files of OLMo-core were replaced",
    "trainers/*": "reads configs, logs, metrics and checkpoints of a run",
    "cli/demo.py": "reads the metrics of a run",
    "cli/main.py": "opens /dev/null",
    "cli/order.py": "reads a trainer's state",
    "cli/__init__.py": "reads a config",
    "cli/plan.py": "tells an index from a config",
    "inspection/fleet_plan.py": "finds the size of an order's file",
    "inspection/markup.py": "reads its own styles",
    "inspection/report_page.py": "reads its own scripts and styles",
}


def _dotted(node: ast.expr) -> str:
  if isinstance(node, ast.Attribute):
    return f"{_dotted(node.value)}.{node.attr}"
  return node.id if isinstance(node, ast.Name) else ""


def _reads(path: pathlib.Path) -> list[str]:
  """Returns the calls in a module that open or examine files, with their lines."""
  found = []
  for node in ast.walk(ast.parse(path.read_text())):
    if not isinstance(node, ast.Call):
      continue
    name = _dotted(node.func)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _READ_METHODS:
      name = f".{node.func.attr}"
    # A stream from a storage is not a file.
    is_stream = name == "gzip.open" and isinstance(node.args[0], ast.Call)
    if (name in _READS or name[1:] in _READ_METHODS) and not is_stream:
      found.append(f"{path.relative_to(_PACKAGE)}:{node.lineno}: {name}")
  return found


class OnlyStorageReadsTest(absltest.TestCase):

  def test_no_other_module_opens_files_of_a_corpus(self):
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
      name = str(path.relative_to(_PACKAGE))
      if not any(fnmatch.fnmatch(name, pattern) for pattern in ("corpus/storage/*", *_ALLOWED)):
        found += _reads(path)
    self.assertEmpty(found, "Read these through Storage, or say above why not.")


class OtherStorageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    rng = np.random.default_rng(0)
    self.tokens = [rng.integers(0, 50, n).astype(np.uint16) for n in (100, 64)]
    self.storage = memory_storage.MemoryStorage(
        {
            "mem://b/mix.txt": b"wiki,{TOKENIZER}/a.npy\nbooks,{TOKENIZER}/b.npy\n",
            "mem://b/t/a.npy": self.tokens[0].tobytes(),
            "mem://b/t/b.npy": self._saved(self.tokens[1]),
            "mem://b/t/b.csv.gz": gzip.compress(b"0,60\n60,64\n"),
        }
    )
    mix = manifest.read_mix("mem://b/mix.txt", tokenizer="t", storage=self.storage)
    self.index = index_builder.build_index(
        [(entry.path, entry.label) for entry in mix],
        8,
        tokenizer="t",
        dtype="uint16",
        base="mem://b",
        checksums="xxh3",
        storage=self.storage,
    )

  def _saved(self, tokens: np.ndarray) -> bytes:
    path = os.path.join(self.directory, "x.npy")
    np.save(path, tokens)
    return pathlib.Path(path).read_bytes()

  def test_storages_are_recognised(self):
    self.assertIsInstance(self.storage, storage_lib.Storage)
    self.assertIsInstance(storage_lib.LocalStorage(), storage_lib.Storage)
    self.assertNotIsInstance(object(), storage_lib.Storage)

  def test_an_index_is_built_and_loaded(self):
    self.assertEqual([entry.n_tokens for entry in self.index.files], [100, 64])
    self.assertEqual([entry.data_offset for entry in self.index.files], [0, 128])
    path = os.path.join(self.directory, "index.json")
    self.index.save(path)
    self.storage.files["mem://b/index.json"] = pathlib.Path(path).read_bytes()
    again = index_builder.load_index("mem://b/index.json", storage=self.storage)
    self.assertEqual(again, self.index)

  def test_headers_are_read(self):
    self.assertEqual(
        npy_header.read_npy_header_from_path("mem://b/t/b.npy", storage=self.storage),
        ("uint16", (64,)),
    )
    self.assertEqual(
        npy_header.read_raw_metadata_from_path("mem://b/t/a.npy", "uint16", storage=self.storage),
        ("uint16", (100,)),
    )

  def test_instances_and_documents_are_read(self):
    source = source_lib.OlmoNpyDataSource(self.index, storage=self.storage)
    np.testing.assert_array_equal(source[12 + 3]["tokens"], self.tokens[1][24:32])
    documents = documents_lib.build_documents(
        self.index, os.path.join(self.directory, "documents"), 0, storage=self.storage
    )
    self.assertEqual(documents.num_boundary_files, 1)
    records = source_lib.OlmoDocumentSource(self.index, documents, storage=self.storage)
    np.testing.assert_array_equal(records[len(records) - 1]["inputs"], self.tokens[1][60:])

  def test_damage_is_found(self):
    report = verify.verify_corpus(self.index, vocab_size=50, storage=self.storage)
    self.assertTrue(report.ok, report.findings)
    self.storage.files["mem://b/t/a.npy"] = self.tokens[0][::-1].tobytes()
    report = verify.verify_corpus(self.index, vocab_size=50, storage=self.storage)
    self.assertRegex(report.errors[0].message, "the content has changed")
    del self.storage.files["mem://b/t/a.npy"]
    report = verify.verify_corpus(self.index, storage=self.storage)
    self.assertRegex(report.errors[0].message, "There is no mem://b/t/a.npy")

  @parameterized.parameters(
      lambda storage: manifest.read_mix("mem://no", storage=storage),
      lambda storage: index_builder.load_index("mem://no", storage=storage),
      lambda storage: index_builder.build_index(
          [("mem://no", "l")], 8, tokenizer="t", storage=storage
      ),
  )
  def test_a_missing_file_is_a_corpus_error(self, read):
    with self.assertRaisesRegex(CorpusError, "There is no mem://no in this storage"):
      read(self.storage)


if __name__ == "__main__":
  absltest.main()
