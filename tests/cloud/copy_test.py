"""Tests of `corpus copy` between a disk and object stores, with faults and kills."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import copy as copy_lib
from maxtext_olmo.corpus import copy_targets
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import CorpusError
from tests import distributed
from tests import object_server
from tests.cloud import cases
from tests.cloud import proxy as proxy_lib
from tests.cloud import servers

STARTS_PROCESSES = True


class CopyTest(cases.BucketCase):

  def start(self, *words, env=None):
    return subprocess.Popen(
        [sys.executable, "-m", "maxtext_olmo", "corpus", "copy", *map(str, words)],
        env=distributed.child_environment(env or servers.NO_METADATA),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

  def copy(self, *words, env=None):
    process = self.start(*words, env=env)
    out, err = process.communicate(timeout=500)
    self.assertEqual(process.returncode, 0, err)
    return out

  def assert_same_files(self, folder):
    source = pathlib.Path(self.directory, "bucket", "data")
    for path in source.iterdir():
      self.assertEqual((pathlib.Path(folder) / path.name).read_bytes(), path.read_bytes())

  def test_from_a_bucket_with_faults_to_a_disk(self):
    self.proxy.set(latency=0.01, status={503: 0.05}, reset=0.05, cut=0.05)
    out = self.copy(
        self.remote_index("s3"),
        "--endpoint", self.proxy.url, "--anonymous",
        "--output", self.work,
        "--reread",
    )  # fmt: skip
    self.assertIn("Copied 4 of 4 files", out)
    self.assert_same_files(self.work)

  def test_killed_copies_continue(self):
    index = self.remote_index()
    self.proxy.set(bandwidth=2e6)
    record = pathlib.Path(self.work, ".copied")
    for last in (False, False, True):
      process = self.start(index, "--output", self.work, "--workers", "1")
      before = self.copied_bytes()
      # Twice within the first file, and then after it has been recorded as complete.
      while process.poll() is None and not (
          record.exists() and b"\n" in record.read_bytes()
          if last
          else self.copied_bytes() >= before + 200_000
      ):
        time.sleep(0.02)
      process.send_signal(signal.SIGKILL)
      process.communicate()
    self.proxy.heal()
    self.assertIn("were already there", self.copy(index, "--output", self.work, "--reread"))
    self.assert_same_files(self.work)
    self.assertEmpty(list(pathlib.Path(self.work).rglob("*.part")))

  def copied_bytes(self):
    return sum(path.stat().st_size for path in pathlib.Path(self.work).rglob("*part*"))

  @servers.needs("moto")
  def test_from_a_disk_to_s3_and_back(self):
    keys = servers.moto_environment()
    with servers.start_moto() as moto:
      servers.create_s3_bucket(moto, "bucket")
      self.there_and_back("s3://bucket/copy", moto.url, keys)

  @servers.needs("moto")
  def test_from_a_public_bucket_to_a_private_one_on_another_server(self):
    keys = servers.moto_environment()
    with servers.start_moto() as moto, proxy_lib.start(moto.port) as proxy:
      servers.create_s3_bucket(moto, "mine")
      index = self.remote_index("s3")
      public = ("--endpoint", self.proxy.url, "--anonymous")
      private = ("--output", "s3://mine/copy", "--output-endpoint", proxy.url)
      out = self.copy(index, *public, *private, "--reread", env=keys)
      self.assertIn("4 copies by reading them again", out)
      self.assertEqual(self.proxy.counts().signed, 0)
      self.assertEqual(proxy.counts().signed, proxy.counts().total)
      mix = ("s3://mine/copy/mix.txt", "--endpoint", moto.url)
      self.copy(*mix, "--output", self.work, env=keys)
    self.assert_same_files(self.work)

  @servers.needs("moto")
  @parameterized.parameters({"bandwidth": 0.5e6}, {"outage": "503", "only": "partNumber"})
  def test_slow_links_and_busy_stores_delay_uploads_but_fail_none(self, **faults):
    keys = servers.moto_environment()
    with servers.start_moto() as moto, proxy_lib.start(moto.port) as proxy:
      servers.create_s3_bucket(moto, "bucket")
      proxy.set(**faults)
      options = ("--output", "s3://bucket/copy", "--endpoint", proxy.url)
      process = self.start(self.index_path, *options, env=keys)
      # More refusals of each of the 4 files than obstore tolerates by default.
      while faults.get("outage") and proxy.counts().faults.get("503", 0) < 4 * 12:
        self.assertIsNone(process.poll())
        time.sleep(0.05)
      if faults.get("outage"):
        proxy.heal()
      out, err = process.communicate()
      self.assertEqual(process.returncode, 0, err)
      self.assertIn("Copied 4 of 4 files", out)

  @servers.needs("azurite")
  def test_from_a_disk_to_azure_and_back(self):
    keys = servers.azurite_environment()
    with servers.start_azurite() as azurite:
      servers.create_azure_container(azurite, "bucket")
      endpoint = f"{azurite.url}/{servers.AZURITE_ACCOUNT}"
      self.there_and_back("az://bucket/copy", endpoint, keys)

  @servers.needs("moto")
  def test_what_is_not_the_file_of_the_index_never_appears_in_s3(self):
    with servers.start_moto() as moto, proxy_lib.start(moto.port) as proxy:
      servers.create_s3_bucket(moto, "bucket")
      proxy.set(status={403: 1.0}, only="delete")  # Nothing may be removed.
      with servers.environment(servers.moto_environment()):
        self.refuse_wrong_files("s3://bucket/copy", proxy.url)

  @servers.needs("azurite")
  def test_what_is_not_the_file_of_the_index_never_appears_in_azure(self):
    with servers.start_azurite() as azurite, proxy_lib.start(azurite.port) as proxy:
      servers.create_azure_container(azurite, "bucket")
      proxy.set(status={403: 1.0}, only="comp=batch")  # Nothing may be removed.
      with servers.environment(servers.azurite_environment()):
        self.refuse_wrong_files("az://bucket/copy", f"{proxy.url}/{servers.AZURITE_ACCOUNT}")

  def refuse_wrong_files(self, url, endpoint):
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(endpoint))
    content = {
        name: os.urandom(size)
        for name, size in (("small", 100), ("large", 2 * copy_targets.PIECE_BYTES + 1))
    }
    server = self.enter_context(
        object_server.ObjectServer({f"b/{name}": data for name, data in content.items()})
    )
    source = open_storage(stores.StoreOptions())

    def copy(checksum):
      files = [copy_lib.SourceFile(name, "x", checksum=checksum) for name in content]
      return copy_lib.copy_files(files, f"{server.url}/b", url, source)

    def replace(number, path):
      """Replaces an object just before the copy asks for its ETag once more."""
      if server.requests[: number + 1].count(("HEAD", f"/{path}", "")) == 2:
        server.objects[path] = bytes(len(server.objects[path]))
      return ""

    for _ in range(2):  # A second run must not take what the first one left for a copy.
      with self.assertRaisesRegex(CorpusError, "(?s)2 of 2 .*large does not match its checksum"):
        copy("xxh3:0000000000000000")
      self.assertEmpty(open_storage().remote.list_below(url))
    server.requests.clear()
    server.faults = replace
    with self.assertRaisesRegex(CorpusError, "(?s)2 of 2 .*large was replaced during the copy"):
      copy(None)
    self.assertEmpty(open_storage().remote.list_below(url))
    self.assertEqual(copy(None).copied, 2)
    self.assertLen(open_storage().remote.list_below(url), 2)

  def there_and_back(self, url, endpoint, keys):
    options = ("--endpoint", endpoint)
    there = (self.index_path, "--output", url, *options)
    self.assertIn("Copied 4 of 4 files", self.copy(*there, "--reread", env=keys))
    self.assertIn("0 bytes, 4 were already there", self.copy(*there, env=keys))
    # An object of the same size that is no copy is replaced.
    self.touch("part-002.npy")
    self.assertIn("Copied 1 of 4 files", self.copy(*there, env=keys))
    self.copy(f"{url}/mix.txt", "--output", f"{url}/again", *options, env=keys)
    out = self.copy(f"{url}/again/mix.txt", "--output", self.work, *options, env=keys)
    self.assertIn("Copied 4 of 4 files", out)
    self.assert_same_files(self.work)

  def touch(self, name):
    os.utime(os.path.join(self.directory, "bucket", "data", name))


if __name__ == "__main__":
  absltest.main()
