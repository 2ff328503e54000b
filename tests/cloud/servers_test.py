"""Tests of the servers, with obstore as the client and explicit credentials."""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tests.cloud import servers

STARTS_PROCESSES = True

_HTTP = {"allow_http": True}


class ServersTest(parameterized.TestCase):

  @parameterized.parameters("s3", "gs", "az", "http")
  @servers.needs("nginx")
  def test_nginx_is_read_as_any_store_and_knows_when_an_object_was_replaced(self, scheme):
    import obstore
    from obstore import exceptions
    from obstore import store

    directory = pathlib.Path(self.create_tempdir().full_path)
    file = directory / "bucket" / "folder" / "x.npy"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"0123456789")
    with servers.start_nginx(directory) as nginx:
      unsigned = {"skip_signature": True}
      opened = {
          "s3": lambda: store.S3Store(
              "bucket", config={"endpoint": nginx.url, **unsigned}, client_options=_HTTP
          ),
          "gs": lambda: store.GCSStore(
              "bucket", config={"base_url": nginx.url, **unsigned}, client_options=_HTTP
          ),
          "az": lambda: store.AzureStore(
              "bucket",
              config={"endpoint": nginx.url, "account_name": "account", **unsigned},
              client_options=_HTTP,
          ),
          "http": lambda: store.HTTPStore(f"{nginx.url}/bucket", client_options=_HTTP),
      }[scheme]()
      etag = obstore.head(opened, "folder/x.npy")["e_tag"]
      options = {"range": (2, 5), "if_match": etag}
      self.assertEqual(obstore.get(opened, "folder/x.npy", options=options).bytes(), b"234")
      os.utime(file, (1, 1))
      with self.assertRaises(exceptions.PreconditionError):
        obstore.get(opened, "folder/x.npy", options=options)

  @servers.needs("moto")
  def test_moto_lists_reads_and_writes(self):
    import obstore
    from obstore import store

    with servers.start_moto() as moto, servers.environment(servers.moto_environment()):
      servers.create_s3_bucket(moto, "bucket")
      opened = store.S3Store("bucket", config={"endpoint": moto.url}, client_options=_HTTP)
      obstore.put(opened, "folder/x.npy", b"0123456789")
      self.assertEqual(obstore.get_range(opened, "folder/x.npy", start=2, end=5), b"234")
      self.assertLen(obstore.list(opened).collect(), 1)

  @servers.needs("azurite")
  def test_azurite_lists_reads_and_writes(self):
    import obstore
    from obstore import store

    with servers.start_azurite() as azurite, servers.environment(servers.azurite_environment()):
      servers.create_azure_container(azurite, "bucket")
      endpoint = f"{azurite.url}/{servers.AZURITE_ACCOUNT}"
      opened = store.AzureStore("bucket", config={"endpoint": endpoint}, client_options=_HTTP)
      obstore.put(opened, "folder/x.npy", b"0123456789")
      self.assertEqual(obstore.get_range(opened, "folder/x.npy", start=2, end=5), b"234")
      self.assertLen(obstore.list(opened).collect(), 1)


if __name__ == "__main__":
  absltest.main()
