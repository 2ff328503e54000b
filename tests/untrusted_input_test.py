"""Nothing that a corpus, index, state or cache says is ever evaluated, imported or unpickled."""

import ast
import gzip
import os
import pathlib
import pickle
import shutil
from collections.abc import Iterator

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.evaluation import cache as cache_lib
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.rows import buffers
from maxtext_olmo.rows import loss_mask
from maxtext_olmo.rows import parts as parts_lib
from maxtext_olmo.rows import reader as reader_lib
from tests import corpora

_PACKAGE = pathlib.Path(maxtext_olmo.__file__).parent
_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "execfile",
    "read_array",
    "unsafe_load",
    "full_load",
    "system",
    "popen",
    "run_path",
    "run_module",
    "spec_from_file_location",
    "from_pretrained",
    "load_dataset",
}
# Its unpickler finds no class and no function, so it only makes plain values.
_ALLOWED = {"loader/olmo_core_checkpoint.py": {"pickle"}}
# Where modules are imported by a name that is not written there, and where the name comes from.
_IMPORTS = {
    "__init__.py": "the table of public names",
    "cli/main.py": "the table of commands",
    "loader/registry.py": "the table of dataset types",
    "trainers/maxtext/adapter.py": "the table of MaxText's entry points",
    "trainers/maxtext/shapes.py": "the table of MaxText's functions",
}


def _calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
  """Yields each call of a module with what it is called on, and its name."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      if isinstance(node.func, ast.Attribute):
        yield ast.unparse(node.func.value), node.func.attr, node
      elif isinstance(node.func, ast.Name):
        yield "", node.func.id, node


class SourceTest(absltest.TestCase):

  def test_the_package_has_no_means_to_run_what_it_reads(self):
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
      name = str(path.relative_to(_PACKAGE))
      tree = ast.parse(path.read_text())
      for node in ast.walk(tree):
        if isinstance(node, ast.Import):
          imported = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
          imported = {(node.module or "").split(".")[0]}
        else:
          continue
        imported -= _ALLOWED.get(name, set())
        found += [f"{name}:{node.lineno} imports {module}" for module in imported & _MODULES]
      for owner, called, node in _calls(tree):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        bad = (called in _CALLS and (owner, called) != ("re", "compile")) or (
            called == "load" and owner in ("np", "numpy", "yaml", "torch")
        )
        bad |= keywords.get("allow_pickle", "False") != "False"
        bad |= keywords.get("shell", "False") != "False"
        bad |= keywords.get("trust_remote_code", "False") != "False"
        constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
        bad |= called == "import_module" and not constant and name not in _IMPORTS
        if bad:
          found.append(f"{name}:{node.lineno} calls {ast.unparse(node)[:80]}")
    self.assertEqual(found, [])


class _Payload:
  """Creates a file when it is unpickled."""

  def __init__(self, marker: str):
    self._marker = marker

  def __reduce__(self):
    return os.mkdir, (self._marker,)


class PickledInputTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.marker = self.dir / "executed"
    payload = _Payload(str(self.marker))
    self.npy = self.dir / "payload.npy"
    np.save(self.npy, np.array([payload] * 64, dtype=object), allow_pickle=True)
    self.pickle = self.dir / "payload.pickle"
    self.pickle.write_bytes(pickle.dumps([payload] * 64))
    self.payloads = (self.npy, self.pickle)
    self.index_path, _ = corpora.write_corpus(self.dir / "corpus")
    self.index = maxtext_olmo.load_index(self.index_path)

  def tearDown(self):
    self.assertFalse(self.marker.exists())
    super().tearDown()

  def make(self, **values):
    config = maxtext_olmo.get_config()
    config.update(
        {
            "dataset_type": "olmo_grain",
            "olmo_index_path": self.index_path,
            "max_target_length": 8,
            "global_batch_size_to_load": 4,
            "vocab_size": 100,
            **values,
        }
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    train, _ = maxtext_olmo.create_data_iterator(config, mesh)
    self.addCleanup(train.close)
    return train

  def test_the_payload_works(self):
    with open(self.pickle, "rb") as file:
      pickle.load(file)
    self.assertTrue(self.marker.exists())
    self.marker.rmdir()
    np.load(self.npy, allow_pickle=True)
    self.assertTrue(self.marker.exists())
    self.marker.rmdir()

  def test_a_token_file_is_refused(self):
    with self.assertRaisesRegex(errors.CorpusError, "payload.npy.*dtype object"):
      index_lib.build_index([(str(self.npy), "web")], 8, tokenizer="test", dtype="uint16")

  def test_a_token_file_that_was_replaced_is_refused(self):
    for payload in self.payloads:
      shutil.copy(payload, self.index.resolve(0))
      with self.assertRaisesRegex(errors.CorpusError, "part-000.npy"):
        next(self.make())

  def test_a_mask_is_bytes(self):
    files = self.make().files
    for payload in self.payloads:
      paths = [str(payload)] * len(self.index.files)
      mask = reader_lib.mask_reader(files, paths)
      reader = loss_mask.MaskReader(files, mask, buffers.BufferPool())
      one = np.array([0])
      with self.assertRaisesRegex(errors.CorpusError, "loss mask .* expected"):
        reader.read(parts_lib.Parts.one_per_row(one, one, np.array([32])), (1, 32))

  @parameterized.parameters("olmo_core", "maxtext")
  def test_an_order_file_is_built_again(self, order):
    cache = self.dir / "orders"
    values = {"olmo_order": order, "olmo_order_cache_dir": str(cache)}
    expected = np.asarray(next(self.make(**values))["inputs"])
    for payload in self.payloads:
      for path in cache.glob("*.order"):
        shutil.copy(payload, path)
      np.testing.assert_array_equal(np.asarray(next(self.make(**values))["inputs"]), expected)

  def test_a_bitmap_is_refused(self):
    for payload in self.payloads:
      with self.assertRaisesRegex(errors.CorpusError, "is not a bitmap"):
        consumed_lib.Consumed(payload, fingerprint="", num_instances=1)

  def test_a_document_index_is_refused(self):
    documents = documents_lib.default_path(self.index_path)
    documents_lib.build_documents(self.index, documents, 0)
    documents_lib.load_documents(documents, self.index, 0)
    for payload in self.payloads:
      shutil.copy(payload, documents)
      with self.assertRaises(errors.CorpusError):
        documents_lib.load_documents(documents, self.index, 0)

  def test_a_boundary_file_is_refused(self):
    for payload in self.payloads:
      for i in range(len(self.index.files)):
        boundary = pathlib.Path(self.index.resolve(i)).with_suffix(".csv.gz")
        boundary.write_bytes(gzip.compress(payload.read_bytes()))
      with self.assertRaises(errors.CorpusError):
        documents_lib.build_documents(self.index, self.dir / "documents", 0)

  def test_row_counts_of_a_plan_are_counted_again(self):
    values = {
        "dataset_type": "olmo_documents",
        "olmo_eos_id": 0,
        "olmo_packing": "planned",
        "olmo_num_epochs": 1,
    }
    train = self.make(**values)
    thread = train.stream.source.plan.count_in_background(0)
    if thread is not None:
      thread.join()
    expected = [np.asarray(batch["inputs"]) for batch in train]
    stored = list(pathlib.Path(self.index_path).parent.glob("*.rows"))
    self.assertNotEmpty(stored)
    for payload in self.payloads:
      for path in stored:
        shutil.copy(payload, path)
      found = [np.asarray(batch["inputs"]) for batch in self.make(**values)]
      np.testing.assert_array_equal(found, expected)

  def test_an_index_is_refused(self):
    for payload in self.payloads:
      with self.assertRaises(errors.CorpusError):
        maxtext_olmo.load_index(str(payload))

  def test_a_state_is_refused(self):
    train = self.make()
    for payload in self.payloads:
      with self.assertRaises(errors.ResumeError):
        train.set_state(payload.read_bytes())

  def test_a_checkpoint_is_refused(self):
    item = self.dir / "checkpoints" / "3" / "data"
    item.mkdir(parents=True)
    (item.parent / "commit_success.txt").write_text("")
    for payload in self.payloads:
      shutil.copy(payload, item / "olmo_state.json")
      with self.assertRaises(errors.ResumeError):
        self.make(checkpoint_dir=str(self.dir / "checkpoints"))

  def test_a_tokenizer_is_refused(self):
    for payload in self.payloads:
      copy = self.dir / "tokenizer.json"
      shutil.copy(payload, copy)
      with self.assertRaises(errors.ConfigError):
        tokenizer_lib.load_tokenizer(str(copy))

  def test_a_cache_of_evaluations_has_no_results(self):
    for payload in self.payloads:
      copy = self.dir / "cache.jsonl"
      shutil.copy(payload, copy)
      try:
        cache = cache_lib.RequestCache(copy)
      except errors.MaxtextOlmoError:
        continue
      self.assertEqual(cache.lookup(["key"]), {})
      cache.close()


if __name__ == "__main__":
  absltest.main()
