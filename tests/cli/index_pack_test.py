"""`maxtext-olmo index pack`."""

import json
import pathlib
import types

import numpy as np
from absl.testing import absltest

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.loader import olmo_packed
from tests import object_server
from tests.cli import runner


class IndexPackTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    rng = np.random.default_rng(0)
    for number in range(5):
      tokens = rng.integers(1, 100, 500)
      tokens[rng.integers(0, 20, 500) == 0] = 0
      tokens.astype("<u2").tofile(self.folder / f"part-{number}.npy")
    index = maxtext_olmo.build_index(
        [(f"part-{n}.npy", "web") for n in range(5)],
        16,
        tokenizer="none",
        dtype="uint16",
        base=str(self.folder),
    )
    index.save(str(self.folder / "index.json"))
    self.config = str(self.folder / "config.json")
    self.write_config(dataset_type="olmo_packed")

  def write_config(self, **keys):
    values = {
        "olmo_index_path": str(self.folder / "index.json"),
        "max_target_length": 16,
        "olmo_pad_id": 1,
        "olmo_eos_id": 0,
        "olmo_source_group_size": 2,
        **keys,
    }
    pathlib.Path(self.config).write_text(json.dumps(values))

  def plans(self):
    return [path.read_bytes() for path in self.folder.glob("index.json.packed-*")]

  def test_parts_and_a_merge_write_the_plan_that_one_command_writes(self):
    results = str(self.folder / "results")
    for part in ("1", "0"):
      code, out, err = runner.run(
          *("index", "pack", self.config, "--part", part, "--of", "2", "--results", results)
      )
      self.assertEqual(code, 0, err)
      self.assertIn(f"part {part} of 2", out)
      self.assertEmpty(self.plans())
    code, out, err = runner.run("index", "pack", self.config, "--merge", "--results", results)
    self.assertEqual(code, 0, err)
    self.assertRegex(out, r"index.json.packed-\w+: \d+ rows with \d+ documents, \d+.\d\d% full")
    (merged,) = self.plans()
    for path in self.folder.glob("index.json.packed-*"):
      path.unlink()
    code, _, err = runner.run("index", "pack", self.config)
    self.assertEqual(code, 0, err)
    self.assertEqual(self.plans(), [merged])
    self.assertEmpty(list(self.folder.glob("*.work")))

  def test_a_run_uses_the_plan_that_is_there(self):
    code, _, err = runner.run("index", "pack", self.config, "--config.olmo_source_group_size=3")
    self.assertEqual(code, 0, err)
    before = self.plans()
    values = json.loads(pathlib.Path(self.config).read_text()) | {"olmo_source_group_size": 3}
    options = config_lib.Options.read(types.SimpleNamespace(**config_lib.defaults() | values))
    olmo_packed.open_rows(options, options.olmo_index_path)
    self.assertEqual(self.plans(), before)
    code, out, _ = runner.run("index", "pack", self.config, "--config.olmo_source_group_size=3")
    self.assertEqual(code, 0)
    self.assertIn("already exists", out)

  def serve(self):
    """Puts the corpus into a store and returns the server and arguments for another host."""
    objects = {f"b/{path.name}": path.read_bytes() for path in self.folder.glob("*.npy")}
    server = self.enter_context(object_server.ObjectServer(objects))
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    options = stores.StoreOptions(server.url, "here", anonymous=True)
    index = maxtext_olmo.build_index(
        [(f"part-{n}.npy", "web") for n in range(5)],
        16,
        tokenizer="none",
        dtype="uint16",
        base="s3://b",
        storage=storage_lib.open_storage(options),
    )
    server.objects["b/index.json"] = index_builder.dump_index(index).encode()
    self.write_config(
        dataset_type="olmo_packed",
        olmo_index_path="s3://b/index.json",
        olmo_storage_endpoint=server.url,
        olmo_storage_region="here",
        olmo_storage_anonymous=True,
    )
    return server

  def pack(self, cache):
    return runner.run("index", "pack", self.config, f"--config.olmo_order_cache_dir={cache}")

  def start(self, cache):
    """Opens the rows as the run does, on a host with its own cache."""
    values = json.loads(pathlib.Path(self.config).read_text()) | {"olmo_order_cache_dir": cache}
    options = config_lib.Options.read(types.SimpleNamespace(**config_lib.defaults() | values))
    return olmo_packed.open_rows(options, options.olmo_index_path)

  def test_hosts_download_the_plan_next_to_an_index_in_a_store(self):
    server = self.serve()
    code, out, err = self.pack(self.create_tempdir().full_path)
    self.assertEqual(code, 0, err)
    (name,) = (name for name in server.objects if ".packed-" in name)
    self.assertIn(f"Wrote s3://{name}", out)
    other = self.create_tempdir().full_path
    for downloads in (1, 0):
      server.requests.clear()
      opened = self.start(other)
      gets = [path for method, path, _ in server.requests if method == "GET"]
      self.assertEqual(gets.count(f"/{name}"), downloads)
      self.assertFalse([path for path in gets if path.endswith(".npy")])
    packed_here = self.start(self._cache_of_a_host_without_the_object(server, name))
    self.assertEqual(opened.rows.fingerprint, packed_here.rows.fingerprint)
    code, out, _ = self.pack(self.create_tempdir().full_path)
    self.assertEqual(code, 0)
    self.assertIn(f"s3://{name} already exists", out)

  def _cache_of_a_host_without_the_object(self, server, name):
    cache, content = self.create_tempdir().full_path, server.objects.pop(name)
    self.start(cache)
    server.objects[name] = content
    return cache

  def test_a_plan_that_cannot_be_written_to_the_store_is_kept_here_and_written_later(self):
    server, cache = self.serve(), self.create_tempdir().full_path
    server.faults = lambda number, path: "403" if ".packed-" in path else ""
    code, _, err = self.pack(cache)
    self.assertEqual(code, 0)
    self.assertRegex(err, "warning: Cannot write s3://b/.*access is denied(.*\n)*.*only on this")
    self.start(self.create_tempdir().full_path)  # Packs the documents again.
    server.faults = lambda number, path: ""
    code, out, _ = self.pack(cache)
    self.assertEqual(code, 0)
    self.assertRegex(out, "nothing to pack.\nWrote s3://b/index.json.packed-")

  def test_a_damaged_plan_in_the_store_stops_the_run_and_is_named(self):
    server = self.serve()
    self.pack(self.create_tempdir().full_path)
    (name,) = (name for name in server.objects if ".packed-" in name)
    server.objects[name] = server.objects[name][:-1] + b"?"
    with self.assertRaisesRegex(
        errors.CorpusError, f"is damaged: bytes 4096 to .*It is a copy of s3://{name}: delete that"
    ):
      self.start(self.create_tempdir().full_path)

  def test_other_dataset_types_have_no_plan(self):
    code, _, err = runner.run(
        *("index", "pack", self.config, "--config.dataset_type=olmo_padded"),
        "--config.olmo_source_group_size=1",
    )
    self.assertEqual(code, 2)
    self.assertIn("has dataset_type='olmo_padded'", err)


if __name__ == "__main__":
  absltest.main()
