"""Buckets on loopback, and runs over them, that the tests of this folder share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from absl.testing import parameterized

import maxtext_olmo
from tests import corpora
from tests.cloud import proxy as proxy_lib
from tests.cloud import servers
from tests.loader import cases as loader_cases

# Whether `make test-cloud-long` runs, with an outage of ten minutes and more variants of the tests.
LONG = os.environ.get("CLOUD_LONG") == "1"

LENGTH = 2048  # Tokens per row, of 2 bytes.
BATCH = 32
CONFIG = {
    "max_target_length": LENGTH,
    "global_batch_size_to_load": BATCH,
    "vocab_size": 100,
    "data_shuffle_seed": 3,
    "olmo_instance_filter": False,
}


def url_of(scheme: str, address: str, key: str) -> str:
  """Returns the URL of an object in the folder `bucket` that nginx serves at `address`."""
  bucket = {"http": f"{address}/bucket", "az": "az://bucket@account"}.get(scheme)
  return f"{bucket or f'{scheme}://bucket'}/{key}"


def settings(scheme: str, address: str) -> dict[str, Any]:
  """Returns the keys of the config with which nginx is read: without credentials."""
  if scheme == "http":
    return {}
  return {"olmo_storage_endpoint": address, "olmo_storage_anonymous": True}


class BucketCase(parameterized.TestCase):
  """Tests over one corpus, which is on a disk and also behind nginx and a proxy.

  Attributes:
    directory: Folder that nginx serves; the corpus is in `bucket` below it.
    index_path: The index of the files on the disk.
    proxy: The proxy; it injects no faults when a test begins.
  """

  length: ClassVar[int] = LENGTH
  tokens_per_file: ClassVar[Sequence[int]] = (500 * LENGTH + 5, 300 * LENGTH, 7, 400 * LENGTH)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if (reason := servers.missing("nginx")) is not None:
      raise unittest.SkipTest(reason)
    stack = contextlib.ExitStack()
    cls.addClassCleanup(stack.close)
    stack.enter_context(servers.environment(servers.NO_METADATA))
    cls.directory = tempfile.mkdtemp(prefix="cloud_test_")
    stack.callback(shutil.rmtree, cls.directory)
    cls.index_path = cls.write_corpus(os.path.join(cls.directory, "bucket"))
    cls.nginx = stack.enter_context(servers.start_nginx(cls.directory))
    cls.proxy = stack.enter_context(proxy_lib.start(cls.nginx.port))

  @classmethod
  def write_corpus(cls, directory: str) -> str:
    """Writes token files in `data` and `index.json`; returns the path of the index."""
    path, _ = corpora.write_corpus(
        directory, tokens_per_file=cls.tokens_per_file, sequence_length=cls.length
    )
    return path

  def setUp(self):
    super().setUp()
    self.proxy.heal()
    self.proxy.counts(reset=True)
    self.work = self.create_tempdir().full_path

  def remote_index(self, scheme: str = "http", address: str | None = None) -> str:
    """Builds an index over URLs; returns its path, on the disk."""
    address = address or self.proxy.url
    local = maxtext_olmo.load_index(self.index_path)
    from maxtext_olmo.corpus.storage import open_storage
    from maxtext_olmo.corpus.storage import stores

    options = stores.StoreOptions(
        endpoint="" if scheme == "http" else address, anonymous=scheme != "http"
    )
    base = url_of(scheme, address, "data")
    index = maxtext_olmo.build_index(
        [(f"{base}/{entry.path}", entry.label) for entry in local.files],
        local.sequence_length,
        tokenizer=local.tokenizer,
        dtype=local.dtype,
        base=base,
        storage=open_storage(options),
    )
    path = os.path.join(self.create_tempdir().full_path, "index.json")
    index.save(path)
    return path

  def make(self, index_path: str, **values: Any) -> Any:
    """Returns the train iterator over an index."""
    config = loader_cases.data_config(**{**CONFIG, "olmo_index_path": index_path, **values})
    iterator, _ = maxtext_olmo.create_data_iterator(config, loader_cases.device_mesh())
    self.addCleanup(iterator.close)
    return iterator

  def local_batches(self, count: int, **values: Any) -> list[loader_cases.Batch]:
    """Returns the first batches of a run over the files on the disk."""
    iterator = self.make(self.index_path, **values)
    try:
      return loader_cases.take(iterator, count)
    finally:
      iterator.close()

  def assert_equal_batches(
      self, got: Sequence[loader_cases.Batch], expected: Sequence[loader_cases.Batch], msg: str = ""
  ) -> None:
    """Checks that two runs have the same batches."""
    self.assertLen(got, len(expected))
    for step, (one, other) in enumerate(zip(got, expected)):
      self.assertEqual(set(one), set(other))
      for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], f"{name} of step {step} {msg}")


def with_base(index_path: str, base: str, output: str) -> str:
  """Writes a copy of an index with another base; returns its path."""
  index = dataclasses.replace(maxtext_olmo.load_index(index_path), base=base)
  index.save(output)
  return output
