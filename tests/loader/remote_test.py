"""Tests that a corpus in an object store gives the batches of a corpus on a disk."""

import io
import json
import os
import pathlib
import tempfile
import time
import unittest

import jax
import numpy as np
from absl import logging
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from tests import object_server
from tests import workers as workers_lib
from tests.loader import cases
from tests.loader import row_sources

STARTS_PROCESSES = True

_STEPS = 12
_SECRETS = ("hunter2", "c2lnbmF0dXJl", "AKIASECRETKEY")
_directory = _eos_documents = ""


def setUpModule():
  global _directory, _eos_documents
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="remote_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _directory = directory.name
  _eos_documents = f"{_directory}/documents.eos"
  path = row_sources.write_corpus(_directory)
  index = maxtext_olmo.load_index(path)
  documents_lib.build_documents(index, documents_lib.default_path(path), 0)
  documents_lib.build_documents(index, _eos_documents, 0, rule="eos")


class RemoteCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    self.local_index = f"{_directory}/index.json"
    index = maxtext_olmo.load_index(self.local_index)
    objects = {
        f"bucket/olmo/{path.relative_to(index.base)}": path.read_bytes()
        for path in pathlib.Path(index.base).rglob("*")
        if path.is_file()
    }
    objects["bucket/documents"] = pathlib.Path(f"{self.local_index}.documents").read_bytes()
    self.server = self.enter_context(object_server.ObjectServer(objects))
    self.stores = {
        "olmo_storage_endpoint": self.server.url,
        "olmo_storage_region": "here",
        "olmo_storage_anonymous": True,
    }
    self.options = stores.StoreOptions(self.server.url, "here", True)
    storage = storage_lib.open_storage(self.options)
    self.index = index_builder.build_index(
        [(entry.path, entry.label) for entry in index.files],
        index.sequence_length,
        tokenizer=index.tokenizer,
        dtype=index.dtype,
        base="s3://bucket/olmo",
        storage=storage,
    )
    self.built_with = [request[0] for request in self.server.requests]
    self.server.objects["bucket/index.json"] = index_builder.dump_index(self.index).encode()

  def make(self, source, **values):
    config = row_sources.config_values(source, self.local_index, _directory)
    iterator, _ = maxtext_olmo.create_data_iterator(
        cases.data_config(**{**config, **values}), cases.device_mesh()
    )
    self.addCleanup(iterator.close)
    return iterator

  def make_remote(self, source, **values):
    keys = {"olmo_index_path": "s3://bucket/index.json", **self.stores}
    if source in ("planned", "planned_mixture", "one_document"):
      keys["olmo_documents_path"] = "s3://bucket/documents"
    if source != "outside_in":  # The plans and the copies of sidecars are kept on a disk.
      keys["olmo_order_cache_dir"] = self.create_tempdir().full_path
    if source == "outside_in":  # A type of another package, with keys of its own.
      del keys["olmo_storage_endpoint"], keys["olmo_storage_region"], keys["olmo_storage_anonymous"]
    return self.make(source, **{**keys, **values})

  def assert_same(self, batches, expected):
    self.assertLen(batches, len(expected))
    for batch, other in zip(batches, expected):
      jax.tree.map(np.testing.assert_array_equal, batch, other)


class BatchesTest(RemoteCase):

  def test_the_index_has_the_fingerprint_of_local_files_and_reads_no_byte(self):
    local = maxtext_olmo.load_index(self.local_index)
    self.assertEqual(self.index.fingerprint, local.fingerprint)
    self.assertEqual(self.index.split_key, local.split_key)
    self.assertEqual(
        [entry.etag for entry in self.index.files],
        [self.server.etag(f"bucket/olmo/{entry.path}") for entry in self.index.files],
    )
    self.assertLess(len(self.built_with), len(self.index.files) + 1)

  @parameterized.named_parameters(
      (name, name) for name in row_sources.FROM_FILES if name != "outside_in"
  )
  def test_batches_equal_those_of_local_files(self, source):
    self.assert_same(
        cases.take(self.make_remote(source), _STEPS), cases.take(self.make(source), _STEPS)
    )

  def test_a_remapped_path_may_be_a_url(self):
    base = maxtext_olmo.load_index(self.local_index).base
    iterator = self.make(
        "windows",
        olmo_path_remap_from=base,
        olmo_path_remap_to="s3://bucket/olmo",
        **self.stores,
    )
    self.assert_same(cases.take(iterator, _STEPS), cases.take(self.make("windows"), _STEPS))
    self.assertGreater(self.server.count(), 0)

  def test_a_run_moves_from_a_disk_to_a_bucket_and_back(self):
    expected = cases.take(self.make("windows"), 6)
    first, second, third = self.make("windows"), self.make_remote("windows"), self.make("windows")
    batches = cases.take(first, 2)
    second.set_state(json.loads(json.dumps(first.get_state())))
    batches += cases.take(second, 2)
    third.set_state(json.loads(json.dumps(second.get_state())))
    self.assert_same(batches + cases.take(third, 2), expected)

  def test_workers_read_from_the_bucket(self):
    with workers_lib.started_quickly():
      iterator = self.make_remote("windows", grain_worker_count=2)
      self.assert_same(cases.take(iterator, 4), cases.take(self.make("windows"), 4))

  def test_opening_asks_for_no_token_file(self):
    before = len(self.server.requests)
    self.make_remote("windows", olmo_prefetch_batches=0, olmo_device_prefetch=0)
    asked = [path for _, path, _ in self.server.requests[before:] if ".npy" in path]
    self.assertEmpty(asked)

  def test_no_packing_plan_is_made_from_a_replaced_object(self):
    keys = {"olmo_order_cache_dir": self.create_tempdir().full_path}
    name = f"bucket/olmo/{self.index.files[0].path}"
    content = self.server.objects[name]
    tokens = np.frombuffer(content, self.index.dtype).copy()
    tokens[::3] = 0  # Other documents, in an object of the same size.
    self.server.objects[name] = tokens.tobytes()
    with self.assertRaisesRegex(CorpusError, f"s3://{name}.*was replaced"):
      cases.take(self.make_remote("packed", **keys), 1)
    # Once the object is restored, nothing is left of the other documents.
    self.server.objects[name] = content
    batches = cases.take(self.make_remote("packed", **keys), _STEPS)
    self.assert_same(batches, cases.take(self.make("packed"), _STEPS))

  @parameterized.parameters(0, 1)
  def test_loss_masks_are_asked_for_once_and_token_files_never(self, workers):
    masks = {f"bucket/masks/{i}": bytes(e.n_tokens) for i, e in enumerate(self.index.files)}
    self.server.objects.update(masks)
    keys = {"olmo_label_masks": tuple(f"s3://{name}" for name in masks)}
    with workers_lib.started_quickly():
      batches = cases.take(self.make_remote("windows", grain_worker_count=workers, **keys), _STEPS)
    self.assertFalse(any(batch["targets_segmentation"].any() for batch in batches))
    heads = [path for method, path, _ in self.server.requests if method == "HEAD"]
    self.assertCountEqual(heads, [f"/{name}" for name in masks])

  def test_a_loss_mask_of_another_size_than_its_tokens_stops_the_run(self):
    masks = {f"bucket/masks/{i}": bytes(e.n_tokens + 1) for i, e in enumerate(self.index.files)}
    self.server.objects.update(masks)
    keys = {"olmo_label_masks": tuple(f"s3://{name}" for name in masks)}
    with self.assertRaisesRegex(CorpusError, "The loss mask s3://bucket/masks/.* expected"):
      cases.take(self.make_remote("windows", **keys), 1)

  def test_a_replaced_object_stops_the_run(self):
    iterator = self.make_remote("windows", olmo_prefetch_batches=0, olmo_device_prefetch=0)
    cases.take(iterator, 1)
    for path, content in list(self.server.objects.items()):
      if path.endswith(".npy"):
        self.server.objects[path] = content[::-1]
    with self.assertRaisesRegex(CorpusError, "s3://bucket/olmo/.*ETag is not the expected one"):
      cases.take(iterator, _STEPS)

  def test_the_cache_of_orders_must_be_local(self):
    with self.assertRaisesRegex(ConfigError, "must be on a local disk"):
      self.make("windows_olmo_core", olmo_order_cache_dir="s3://bucket/orders")


class SidecarTest(RemoteCase):
  """The document index is read from a local copy, which is downloaded once."""

  def setUp(self):
    super().setUp()
    self.cache = self.create_tempdir().full_path
    self.server.objects["bucket/padded"] = pathlib.Path(_eos_documents).read_bytes()

  def make_cached(self, source, **values):
    name = "padded" if source.startswith("padded") else "documents"
    keys = {"olmo_documents_path": f"s3://bucket/{name}", "olmo_order_cache_dir": self.cache}
    return self.make_remote(source, **{**keys, **values})

  def requests_of(self, method, name="documents"):
    return [r for r in list(self.server.requests) if r[:2] == (method, f"/bucket/{name}")]

  def copies(self):
    found = os.listdir(self.cache)
    return [name for name in found if name.startswith(("documents.", "padded.")) and len(name) < 30]

  @parameterized.parameters(
      ("planned", "documents"),
      ("planned_stages", "documents"),
      ("one_document", "documents"),
      ("padded", "padded"),
  )
  def test_it_is_downloaded_once_and_a_restart_sends_no_get(self, source, name):
    expected = cases.take(self.make(source), _STEPS)
    for _ in range(2):
      before = len(self.requests_of("HEAD", name))
      self.assert_same(cases.take(self.make_cached(source), _STEPS), expected)
      self.assertLen(self.requests_of("GET", name), 1)
      self.assertLessEqual(len(self.requests_of("HEAD", name)) - before, 2)

  def test_workers_read_the_copy(self):
    with workers_lib.started_quickly():
      iterator = self.make_cached("planned", grain_worker_count=2)
      self.assert_same(cases.take(iterator, 4), cases.take(self.make("planned"), 4))
    self.assertLen(self.requests_of("GET"), 1)

  def test_a_replaced_document_index_is_downloaded_again(self):
    cases.take(self.make_cached("planned"), 1)
    path = self.create_tempfile("with_hashes").full_path
    index = maxtext_olmo.load_index(self.local_index)
    documents_lib.build_documents(index, path, 0, hashes=True)
    self.server.objects["bucket/documents"] = pathlib.Path(path).read_bytes()
    batches = cases.take(self.make_cached("planned"), _STEPS)
    self.assert_same(batches, cases.take(self.make("planned"), _STEPS))
    self.assertLen(self.requests_of("GET"), 2)

  @parameterized.parameters("planned", "padded")
  def test_an_outage_does_not_stop_a_run_whose_tokens_are_in_the_spool(self, source):
    expected = cases.take(self.make(source), _STEPS)
    iterator = self.make_cached(source, olmo_spool_dir=self.create_tempdir().full_path)
    batches = cases.take(iterator, 1)
    while iterator.metrics()["spool_depth_steps"] < _STEPS:
      time.sleep(0.01)
    self.server.faults = lambda number, path: "503"
    self.assert_same(batches + cases.take(iterator, _STEPS - 1), expected)
    self.server.faults = lambda number, path: ""

  def test_a_resumed_run_uses_the_stored_row_counts(self):
    keys = {"olmo_num_epochs": 1, "olmo_prefetch_batches": 0, "olmo_device_prefetch": 0}
    first = self.make_cached("planned", **keys)
    steps = len(list(first))
    state = first.get_state()
    while not any(name.endswith(".epoch-0.rows") for name in os.listdir(self.cache)):
      time.sleep(0.01)  # A thread stores the counts.
    first.close()
    again = self.make_cached("planned", **keys)
    self.assertLen(again, steps)
    again.set_state(state)
    self.assertEmpty(list(again))

  def test_an_explanation_reads_the_copy_but_downloads_none(self):
    expected = [_documents(self.make(source).explain(1)) for source in ("planned", "windows")]
    iterator = self.make_cached("planned")
    before = len(self.server.requests)
    self.assertEqual(_documents(iterator.explain(1)), expected[0])
    asked = self.server.requests[before:]
    self.assertNotIn(("GET", "/bucket/documents"), [request[:2] for request in asked])
    self.server.objects["bucket/index.json.documents"] = self.server.objects["bucket/documents"]
    copies = self.copies()
    explained = self.make_remote("windows", olmo_order_cache_dir=self.cache).explain(1)
    self.assertNotEmpty(expected[1])
    self.assertEqual(_documents(explained), expected[1])
    self.assertEqual(self.copies(), copies)

  def test_errors_name_the_url(self):
    self.server.objects["bucket/documents"] = self.server.objects["bucket/documents"][:-4]
    with self.assertRaisesRegex(CorpusError, "document index s3://bucket/documents is damaged"):
      self.make_cached("planned")


class SecretsTest(RemoteCase):

  def test_nothing_secret_is_written_logged_or_raised(self):
    base = f"{self.server.url.replace('//', '//user:hunter2@')}/bucket"
    signature = "?X-Amz-Credential=AKIASECRETKEY&sig=c2lnbmF0dXJl"
    log = io.StringIO()
    handler = logging.logging.StreamHandler(log)
    logging.get_absl_logger().addHandler(handler)
    self.addCleanup(logging.get_absl_logger().removeHandler, handler)
    run = self.create_tempdir().full_path
    index = index_builder.build_index(
        [(entry.path, entry.label) for entry in self.index.files],
        self.index.sequence_length,
        tokenizer=self.index.tokenizer,
        dtype=self.index.dtype,
        base=f"{base}/olmo{signature}",
    )
    self.server.objects["bucket/signed.json"] = index_builder.dump_index(index).encode()
    iterator = self.make(
        "windows",
        olmo_index_path=f"{base}/signed.json{signature}",
        checkpoint_dir=run,
        initial_step=0,
    )
    self.assert_same(cases.take(iterator, 3), cases.take(self.make("windows"), 3))
    # The secrets are used where they belong, so the test would notice if they were dropped.
    tokens = [i for i, request in enumerate(self.server.requests) if ".npy" in request[1]]
    self.assertIn("c2lnbmF0dXJl", self.server.requests[tokens[-1]][1])
    self.assertStartsWith(self.server.headers[tokens[-1]]["authorization"], "Basic ")

    told = [log.getvalue(), json.dumps(iterator.get_state()), repr(index), repr(iterator)]
    told += [index_builder.dump_index(index), repr(iterator.explain(0))]
    told += [path.read_text() for path in pathlib.Path(run).rglob("*") if path.is_file()]
    for fault in ("403", "404", "412", "416", "301", "400", "ignore_range"):
      self.server.faults = lambda number, path, fault=fault: fault
      with self.assertRaises(CorpusError) as caught:
        storage_lib.open_storage().read(f"{base}/olmo/x.npy{signature}", 0, 8)
      told += _whole_text(caught.exception)
      if fault != "ignore_range":
        with self.assertRaises(CorpusError) as caught:
          maxtext_olmo.load_index(f"{base}/signed.json{signature}")
        told += _whole_text(caught.exception)
    with self.assertRaises(ConfigError) as caught:
      self.make("windows", olmo_order_cache_dir=f"{base}{signature}", olmo_packing=base + signature)
    told += _whole_text(caught.exception)
    self.assertIn("http", told[-1])
    for text in told:
      for secret in _SECRETS:
        self.assertNotIn(secret, text)
    self.assertGreater(len(os.listdir(run)), 0)


def _documents(explanation):
  parts = [part for row in explanation.rows for part in row.parts]
  return [span.document for part in parts for span in part.documents]


def _whole_text(error):
  """Returns the messages of an error and of all errors that led to it."""
  texts = []
  while error is not None:
    texts.append(f"{error!s} {error!r}")
    error = error.__cause__ or error.__context__
  return texts


if __name__ == "__main__":
  absltest.main()
