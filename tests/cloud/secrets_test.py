"""Nothing secret reaches a log, an error, an index, a state or the metrics.

A run in a process of its own, with all that it writes kept, has credentials in the environment and
in its URLs. Whatever it writes is searched for them.
"""

import contextlib
import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from tests import corpora
from tests import distributed
from tests.cloud import proxy as proxy_lib
from tests.cloud import servers

STARTS_PROCESSES = True

_SECRETS = ("hunter2-pass", "s3cr3t-signature", servers.MOTO_SECRET, servers.MOTO_KEY)
_RUN = """
import json, pickle, sys
import jax
from absl import logging
logging.set_verbosity(logging.DEBUG)
logging.use_absl_handler()
import maxtext_olmo
from maxtext_olmo.corpus.storage import open_storage
from tests.loader import cases
base, folder, keys = sys.argv[1:]
keys = json.loads(keys)
from maxtext_olmo.corpus.storage import stores
storage = open_storage(stores.StoreOptions(endpoint=keys.get("olmo_storage_endpoint", "")))
before, question, query = base.partition("?")
index = maxtext_olmo.build_index(
    [(f"{before}/part-{i:03d}.npy{question}{query}", f"label-{i % 2}") for i in range(4)], 8,
    tokenizer="test", dtype="uint16", base=base, storage=storage)
index.save(f"{folder}/index.json")
config = cases.data_config(
    **cases.WINDOWS, olmo_index_path=f"{folder}/index.json", checkpoint_dir=f"{folder}/run", **keys)
print(config)
iterator, _ = maxtext_olmo.create_data_iterator(config, cases.device_mesh())
print(cases.take_inputs(iterator, 3)[0].shape)
print(iterator.get_state(), iterator.metrics(), repr(index), repr(storage), iterator)
json.dump(iterator.get_state(), open(f"{folder}/state.json", "w"))
print("MEANT TO FAIL", flush=True)
cases.take_inputs(iterator, 200)
"""


class SecretsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.served = self.folder / "served"
    corpora.write_corpus(self.served / "bucket")
    self.out = self.folder / "out"
    self.out.mkdir()
    self.enter_context(servers.environment(servers.NO_METADATA))

  def run_child(self, base, keys, env):
    with open(self.out / "stdout", "wb") as out, open(self.out / "stderr", "wb") as err:
      return subprocess.Popen(
          [sys.executable, "-c", _RUN, base, str(self.out), json.dumps(keys)],
          env=distributed.child_environment(env),
          stdout=out,
          stderr=err,
      )

  def assert_clean(self):
    searched = 0
    for path in self.out.rglob("*"):
      if path.is_file():
        searched += 1
        content = path.read_bytes()
        for secret in _SECRETS:
          self.assertNotIn(secret.encode(), content, f"{secret} is in {path}")
    self.assertGreaterEqual(searched, 4)

  def fail_and_finish(self, child, proxy, status):
    """Lets the run read, then fail, and end."""
    while b"MEANT TO FAIL" not in (self.out / "stdout").read_bytes() and child.poll() is None:
      with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.2)
    self.assertIn(b"MEANT TO FAIL", (self.out / "stdout").read_bytes(), self.errors())
    proxy.set(status={status: 1.0})
    self.assertEqual(child.wait(300), 1)
    self.assertRegex(self.errors(), "(CorpusError|MissingFileError): ")
    self.assertIn("part-00", self.errors())

  def errors(self):
    return (self.out / "stderr").read_text(errors="replace")

  @parameterized.parameters(403, 404, 412)
  @servers.needs("nginx")
  def test_credentials_in_a_url(self, status):
    with servers.start_nginx(self.served) as nginx, proxy_lib.start(nginx.port) as proxy:
      proxy.set(latency=0.02)
      address = f"http://user:hunter2-pass@127.0.0.1:{proxy.port}/bucket/data"
      child = self.run_child(f"{address}?sv=1&sig=s3cr3t-signature", {}, {})
      self.fail_and_finish(child, proxy, status)
      counts = proxy.counts()
      self.assertEqual(counts.signed, counts.total)  # They were used.
    self.assert_clean()

  @servers.needs("moto")
  def test_keys_in_the_environment(self):
    import obstore
    from obstore import store as store_lib

    keys = servers.moto_environment()
    with servers.start_moto() as moto, proxy_lib.start(moto.port) as proxy:
      servers.create_s3_bucket(moto, "bucket")
      with servers.environment(keys):
        store = store_lib.S3Store(
            "bucket", config={"endpoint": moto.url}, client_options={"allow_http": True}
        )
        for path in (self.served / "bucket" / "data").iterdir():
          obstore.put(store, f"data/{path.name}", path.read_bytes())
      proxy.set(latency=0.02)
      child = self.run_child("s3://bucket/data", {"olmo_storage_endpoint": proxy.url}, keys)
      self.fail_and_finish(child, proxy, 403)
      counts = proxy.counts()
      self.assertEqual(counts.signed, counts.total)
    self.assert_clean()

  def fail_to_write(self, output, env, *place):
    """Runs the commands that write to a store, each of which must fail."""
    bucket = self.served / "bucket"
    (bucket / "a.md").write_text("A document.")
    mix = bucket / "mix.txt"
    mix.write_text("".join(f"l,data/part-{i:03d}.npy\n" for i in range(4)))
    before, question, query = output.partition("?")

    def to(name):
      return f"{before}/{name}{question}{query}"

    build = ("index", "build", "--mix-file", mix, "--tokenizer", "t", "--dtype", "uint16")
    for number, words in enumerate(
        (
            ("corpus", "copy", bucket / "index.json", "--output", to("copy")),
            ("corpus", "make", bucket / "a.md", "--output", to("made")),
            (*build, "--sequence-length", "8", "--output", to("index.json")),
            (
                "index",
                "documents",
                bucket / "index.json",
                "--eos-id",
                "0",
                "--output",
                to("documents"),
            ),
        )
    ):
      found = subprocess.run(
          [sys.executable, "-m", "maxtext_olmo", "--debug", *map(str, words), *place],
          env=distributed.child_environment(env),
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
      )
      (self.out / f"output-{number}").write_bytes(found.stdout)
      self.assertNotEqual(found.returncode, 0)
      self.assertRegex(found.stdout, b"(?s)Traceback .*access is denied")
    self.assert_clean()

  @servers.needs("nginx")
  def test_credentials_in_a_url_that_is_written_to(self):
    with servers.start_nginx(self.served) as nginx, proxy_lib.start(nginx.port) as proxy:
      proxy.set(status={403: 1.0})
      address = f"http://user:hunter2-pass@127.0.0.1:{proxy.port}/bucket/out"
      self.fail_to_write(f"{address}?sv=1&sig=s3cr3t-signature", {})
      counts = proxy.counts()
      self.assertEqual(counts.signed, counts.total)
      self.assertGreater(counts.total, 4)

  @servers.needs("moto")
  def test_keys_in_the_environment_of_a_bucket_that_is_written_to(self):
    with servers.start_moto() as moto, proxy_lib.start(moto.port) as proxy:
      proxy.set(status={403: 1.0})
      keys = servers.moto_environment()
      self.fail_to_write("s3://bucket/out", keys, "--endpoint", proxy.url)
      self.assertEqual(proxy.counts().signed, proxy.counts().total)


if __name__ == "__main__":
  absltest.main()
