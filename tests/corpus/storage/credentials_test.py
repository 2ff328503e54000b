"""Tests of credentials that obstore does not find by itself."""

import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import credentials
from maxtext_olmo.errors import ConfigError


class CredentialsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _google(self, kind):
    path = self.folder / "google.json"
    path.write_text(json.dumps({"type": kind}))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}

  @parameterized.parameters("service_account", "authorized_user")
  def test_obstore_reads_common_google_accounts_itself(self, kind):
    self.assertIsNone(credentials.google_provider(self._google(kind)))

  def test_without_a_file_obstore_asks_the_metadata(self):
    self.assertIsNone(credentials.google_provider({"CLOUDSDK_CONFIG": str(self.folder)}))
    (self.folder / "application_default_credentials.json").write_text("not JSON")
    self.assertIsNone(credentials.google_provider({"CLOUDSDK_CONFIG": str(self.folder)}))

  def test_federated_accounts_need_google_auth(self):
    try:
      import google.auth  # noqa: F401
    except ImportError:
      with self.assertRaisesRegex(ConfigError, "'external_account'.*pip install 'google-auth"):
        credentials.google_provider(self._google("external_account"))

  @parameterized.parameters(
      "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"
  )
  def test_obstore_reads_the_aws_environment_itself(self, name):
    self.assertIsNone(credentials.aws_provider({name: "x"}))

  def test_an_aws_profile_needs_boto3(self):
    try:
      import boto3  # noqa: F401
    except ImportError:
      with self.assertRaisesRegex(ConfigError, "pip install 'boto3'"):
        credentials.aws_provider({"AWS_PROFILE": "team"})

  def test_aws_files_without_boto3_are_left_to_obstore(self):
    (self.folder / "config").write_text("[default]")
    environment = {"AWS_CONFIG_FILE": str(self.folder / "config")}
    try:
      import boto3  # noqa: F401
    except ImportError:
      self.assertIsNone(credentials.aws_provider(environment))


if __name__ == "__main__":
  absltest.main()
