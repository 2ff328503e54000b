"""Tests of making a corpus in a bucket, and of the options that say how it is reached."""

import pathlib

from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import stores
from tests.cli import runner
from tests.cloud import servers

STARTS_PROCESSES = True


@servers.needs("moto")
class MakeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(servers.environment(servers.moto_environment()))
    moto = self.enter_context(servers.start_moto())
    servers.create_s3_bucket(moto, "bucket")
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    self.place = ("--endpoint", moto.url, "--region", "us-east-1")
    self.storage = storage_lib.open_storage(stores.StoreOptions(moto.url, "us-east-1"))
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    (self.folder / "docs").mkdir()
    for name in ("first", "second", "third"):
      (self.folder / "docs" / f"{name}.txt").write_text(f"The text of the {name} document.")

  def run_command(self, *words):
    code, out, err = runner.run(*words)
    self.assertEqual((code, err), (0, ""), words)
    return out

  def read(self, url):
    return self.storage.read(url, 0, self.storage.size(url))

  def test_a_corpus_and_its_indexes_are_those_of_a_disk(self):
    disk, bucket = self.folder / "made", "s3://bucket/made"
    for output, place in ((disk, ()), (bucket, self.place)):
      make = ("corpus", "make", self.folder / "docs", "--output", output, *place)
      command = self.run_command(*make).splitlines()[-1].split()[1:]  # Printed as what comes next.
      command[command.index("--sequence-length") + 1] = "4"
      self.run_command(*command, *place)
      index = f"{output}/index.json"
      self.run_command("index", "documents", index, "--eos-id", "256", *place)
      self.run_command("verify", index, *place)
    names = ("mix.txt", "bytes/docs/part-00000.npy")
    for name in names:
      self.assertEqual(self.read(f"{bucket}/{name}"), (disk / name).read_bytes(), name)
    local = index_builder.load_index(disk / "index.json")
    remote = index_builder.load_index(f"{bucket}/index.json", storage=self.storage)
    self.assertEqual(remote.fingerprint, local.fingerprint)
    self.assertEqual(remote.base, bucket)

  def test_an_existing_corpus_is_replaced_only_when_asked_to(self):
    make = ("corpus", "make", self.folder / "docs", "--output", "s3://bucket/made", *self.place)
    self.run_command(*make)
    code, _, err = runner.run(*make)
    self.assertNotEqual(code, 0)
    self.assertIn("overwrite", err)
    self.run_command(*make, "--overwrite")


if __name__ == "__main__":
  absltest.main()
