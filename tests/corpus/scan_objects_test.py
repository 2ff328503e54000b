"""Tests of finding objects without reading them."""

import io

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import scan_objects
from maxtext_olmo.corpus import storage as storage_lib
from maxtext_olmo.corpus.storage import remote
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import MissingFileError
from tests import object_server


class ScanObjectsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    objects = {f"b/many/{i}.npy": bytes(4 * i) for i in range(1, 40)}
    objects |= {"b/few/x.npy": bytes(8), "b/many/deep/y.npy": bytes(12)}
    self.server = self.enter_context(object_server.ObjectServer(objects))
    options = stores.StoreOptions(self.server.url, "here", True)
    self.storage = remote.RemoteStorage(options)
    self.router = storage_lib.open_storage(options)
    self.paths = [f"s3://{path}" for path in objects]

  def test_folders_are_listed_and_the_rest_is_asked_for(self):
    seen = []
    found = scan_objects.find_objects(self.storage, self.paths, workers=4, advance=seen.append)
    self.assertEqual([one.size for one in found], [*range(4, 160, 4), 8, 12])
    etags = [self.server.etag(path.removeprefix("s3://")) for path in self.paths]
    self.assertEqual([one.etag for one in found], etags)
    self.assertEqual((self.server.count("GET"), self.server.count("HEAD")), (1, 2))
    self.assertEqual(sum(seen), len(self.paths))

  def test_without_permission_to_list_each_object_is_asked_for(self):
    self.server.faults = lambda number, path: "403" if number == 0 else ""
    found = scan_objects.find_objects(self.storage, self.paths[:9], workers=None)
    self.assertEqual([one.size for one in found], [*range(4, 40, 4)])
    self.assertEqual(self.server.count("HEAD"), 9)

  def test_web_servers_are_asked_for_each_object(self):
    paths = [f"{self.server.url}/b/many/{i}.npy" for i in range(1, 6)]
    found = scan_objects.find_objects(self.storage, paths, workers=None)
    self.assertEqual([one.size for one in found], [4, 8, 12, 16, 20])
    self.assertEqual((self.server.count("GET"), self.server.count("HEAD")), (0, 5))

  def test_missing_objects_are_named_together(self):
    paths = [*self.paths, "s3://b/many/none.npy", "s3://b/none.npy"]
    with self.assertRaisesRegex(MissingFileError, r"(?s)2 of 4 files.*many/none.npy.*b/none.npy"):
      scan_objects.find_objects(self.storage, paths, workers=None)

  def test_headers_are_read_only_on_request(self):
    file = io.BytesIO()
    np.save(file, np.arange(8, dtype="<u4"))
    self.server.objects["b/few/x.npy"] = file.getvalue()
    build = lambda **settings: index_builder.build_index(  # noqa: E731
        [("few/x.npy", "l")], 4, tokenizer="t", base="s3://b", storage=self.router, **settings
    )
    self.assertEqual((entry := build().files[0]).n_tokens, 40)
    self.assertEqual(self.server.count("GET"), 0)
    again = build(npy_headers=True).files[0]
    self.assertEqual((again.data_offset, again.n_tokens, again.etag), (128, 8, entry.etag))

  def test_other_storages_are_scanned_as_before(self):
    local = storage_lib.LocalStorage()
    settings = {"workers": None, "progress": False, "npy_headers": False}
    self.assertEmpty(scan_objects.scan_objects(["/x"], np.dtype("<u4"), local, **settings))
    self.assertEmpty(scan_objects.scan_objects(["gs://x/y"], np.dtype("<u4"), local, **settings))


if __name__ == "__main__":
  absltest.main()
