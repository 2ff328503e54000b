"""Nothing asks for credentials over the network while they are given or not needed.

A library loaded before all others logs the address of every connection of a process, and refuses
those that leave this machine.
"""

import pathlib
import shutil
import subprocess
import sys
import textwrap

from absl.testing import absltest
from absl.testing import parameterized

from tests import distributed
from tests.cloud import servers

STARTS_PROCESSES = True

_SOURCE = pathlib.Path(__file__).with_name("connects.c")
_READ = """
import sys
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import stores
url, endpoint, anonymous = sys.argv[1:]
options = stores.StoreOptions(endpoint=endpoint, anonymous=anonymous == "yes", first_patience=2.0)
print(open_storage(options).read(url, 2, 3).decode())
"""
_PUT = """
import sys, obstore
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import stores
url, endpoint = sys.argv[1:]
store = stores.open_store(url, stores.StoreOptions(endpoint=endpoint), writing=True)
obstore.put(store, urls.store_key(urls.split(url)), b"0123456789")
"""


class MetadataTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
      self.skipTest("There is no C compiler.")
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.library = self.folder / "connects.so"
    command = [compiler, "-shared", "-fPIC", str(_SOURCE), "-o", str(self.library), "-ldl"]
    subprocess.run(command, check=True)
    self.log = self.folder / "connects.log"
    self.enter_context(servers.environment({}))

  def run_child(self, code, *args, credentials):
    env = {"LD_PRELOAD": str(self.library), "CONNECT_LOG": str(self.log), **credentials}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env=distributed.child_environment(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done

  def addresses(self):
    return set(self.log.read_text().split()) if self.log.exists() else set()

  @parameterized.parameters("s3", "gs", "az", "http")
  @servers.needs("nginx")
  def test_an_anonymous_read_connects_to_the_store_alone(self, scheme):
    (self.folder / "bucket").mkdir()
    (self.folder / "bucket" / "x.npy").write_bytes(b"0123456789")
    with servers.start_nginx(self.folder) as nginx:
      url = {
          "http": f"{nginx.url}/bucket/x.npy",
          "az": "az://bucket@account/x.npy",
      }.get(scheme, f"{scheme}://bucket/x.npy")
      endpoint = "" if scheme == "http" else nginx.url
      done = self.run_child(_READ, url, endpoint, "yes", credentials={})
    self.assertEqual((done.returncode, done.stdout), (0, "234\n"), done.stderr)
    self.assertEqual(self.addresses(), {"127.0.0.1"})

  @servers.needs("moto")
  def test_a_signed_s3_read_connects_to_the_store_alone(self):
    keys = servers.moto_environment()
    with servers.start_moto() as moto:
      servers.create_s3_bucket(moto, "bucket")
      for code, more in ((_PUT, ()), (_READ, ("no",))):
        done = self.run_child(code, "s3://bucket/x.npy", moto.url, *more, credentials=keys)
        self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout, "234\n")
    self.assertEqual(self.addresses(), {"127.0.0.1"})

  @servers.needs("azurite")
  def test_a_signed_azure_read_connects_to_the_store_alone(self):
    keys = servers.azurite_environment()
    with servers.start_azurite() as azurite:
      servers.create_azure_container(azurite, "bucket")
      endpoint = f"{azurite.url}/{servers.AZURITE_ACCOUNT}"
      for code, more in ((_PUT, ()), (_READ, ("no",))):
        done = self.run_child(code, "az://bucket/x.npy", endpoint, *more, credentials=keys)
        self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(done.stdout, "234\n")
    self.assertEqual(self.addresses(), {"127.0.0.1"})

  @parameterized.parameters("s3://bucket/x.npy", "gs://bucket/x.npy", "az://bucket@account/x.npy")
  def test_without_credentials_the_error_says_so(self, url):
    endpoint = f"http://127.0.0.1:{distributed.free_port()}"
    keys = {"HOME": str(self.folder), **servers.NO_METADATA}
    done = self.run_child(_READ, url, endpoint, "no", credentials=keys)
    self.assertNotEqual(done.returncode, 0)
    self.assertRegex(done.stderr, r"(?s)Error: .*credentials.*olmo_storage_anonymous")


if __name__ == "__main__":
  absltest.main()
