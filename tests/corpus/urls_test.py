"""Tests of URLs and of the credentials in them."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus import urls
from maxtext_olmo.errors import ConfigError


class UrlsTest(parameterized.TestCase):

  @parameterized.parameters(
      ("gs://b/k", True),
      ("https://h/k?x", True),
      ("/a/b", False),
      ("a/b", False),
      ("/a/x://y", False),
      ("C:/x", False),
  )
  def test_urls_are_told_from_paths(self, path, expected):
    self.assertEqual(urls.is_url(path), expected)

  @parameterized.parameters(
      ("gs://b/a/k.npy", "gs", "b", "a/k.npy"),
      ("S3://b", "s3", "b", ""),
      ("https://h:80/a/k", "https", "h:80", "a/k"),
      ("abfs://c@account.dfs.core.windows.net/k", "abfs", "c@account.dfs.core.windows.net", "k"),
  )
  def test_a_url_has_a_store_and_a_key(self, url, scheme, host, key):
    self.assertEqual(urls.split(url), urls.Location(scheme, host, key))

  def test_keys_of_web_addresses_are_decoded(self):
    self.assertEqual(urls.store_key(urls.split("https://h/a%20b")), "a b")
    self.assertEqual(urls.store_key(urls.split("gs://h/a%20b")), "a%20b")

  @parameterized.parameters("ftp://h/x", "file:///x", "gs:///x", "https://")
  def test_what_cannot_be_read_is_refused(self, url):
    with self.assertRaises(ConfigError):
      urls.split(url)

  @parameterized.parameters(
      ("https://h/k?a=b", "https://h/k", "a=b", ""),
      ("https://u:p@h/k", "https://h/k", "", "u:p"),
      ("az://c/k?sv=1&sig=x", "az://c/k", "sv=1&sig=x", ""),
      ("abfs://c@a/k", "abfs://c@a/k", "", ""),
      ("gs://b/what?.npy", "gs://b/what?.npy", "", ""),
      ("/local?sig=x", "/local?sig=x", "", ""),
  )
  def test_credentials_are_taken_out_and_kept(self, url, clean, query, user):
    self.assertEqual(urls.without_secrets(url), clean)
    self.assertEqual(urls.credentials_of(clean), urls.Secrets(query, user))

  def test_credentials_are_those_of_the_nearest_directory(self):
    urls.without_secrets("https://near/a?sig=1")
    urls.without_secrets("https://near/a/b?sig=2")
    for url, query in (
        ("https://near/a/x", "sig=1"),
        ("https://near/a/b", "sig=2"),
        ("https://near/a/b/c/x", "sig=2"),
        ("https://near/ab", ""),
        ("https://nearer/a/x", ""),
    ):
      self.assertEqual(urls.credentials_of(url).query, query, url)

  def test_credentials_in_a_bucket_url_are_refused_and_not_shown(self):
    with self.assertRaisesRegex(ConfigError, r"s3://\*\*\*@b/k: credentials are not read"):
      urls.without_secrets("s3://KEY:SECRET@b/k")

  def test_texts_are_redacted(self):
    text = 'GET https://u:p@h/k?sig=abc, then "az://c/x?sig=abc" and /tmp/a?b gs://b/k?'
    hidden = 'GET https://***@h/k?*** then "az://c/x?***" and /tmp/a?b gs://b/k?'
    self.assertEqual(urls.redact(text), hidden)
    self.assertEqual(urls.clean_text("--base=https://h/d?sig=abc"), "--base=https://h/d")

  def test_credentials_travel_to_another_process(self):
    urls.without_secrets("https://travels/a?sig=1")
    self.assertIn("https://travels/a", urls.all_secrets())
    urls.remember({"https://other/a": urls.Secrets("sig=9")})
    self.assertEqual(urls.credentials_of("https://other/a/b").query, "sig=9")


if __name__ == "__main__":
  absltest.main()
