"""Tests of how stores are opened."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import ConfigError

_OPTIONS = stores.StoreOptions("http://127.0.0.1:1", "here", True)


class StoresTest(parameterized.TestCase):

  @parameterized.parameters(
      ("gs://b/x", "GCSStore"),
      ("s3://b/x", "S3Store"),
      ("s3a://b/x", "S3Store"),
      ("abfs://c@account.dfs.core.windows.net/x", "AzureStore"),
      ("https://h/x", "HTTPStore"),
  )
  def test_each_scheme_has_a_store(self, url, kind):
    store = stores.open_store(url, _OPTIONS)
    self.assertEqual(type(store).__name__, kind)
    self.assertIs(stores.open_store(f"{url}/y", _OPTIONS), store)

  def test_other_options_or_credentials_are_another_store(self):
    first = stores.open_store("https://h/x", _OPTIONS)
    self.assertIsNot(stores.open_store("https://h/x", stores.StoreOptions()), first)
    self.assertIsNot(stores.open_store("https://h/x", _OPTIONS, writing=True), first)
    urls.without_secrets("https://h/signed?sig=1")
    self.assertIsNot(stores.open_store("https://h/signed/x", _OPTIONS), first)

  def test_what_cannot_be_opened_is_a_config_error(self):
    with self.assertRaisesRegex(ConfigError, "Cannot open az://c: .*Check the credentials"):
      stores.open_store("az://c/x", stores.StoreOptions(anonymous=True))  # No account.


if __name__ == "__main__":
  absltest.main()
