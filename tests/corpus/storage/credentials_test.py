"""Tests of credentials that obstore does not find by itself."""

import importlib
import json
import os
import pathlib
import sys
import time
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import credentials
from maxtext_olmo.corpus.storage import remote
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from tests import object_server

# Stands in for azure-identity, which asks for a token where the user has logged in.
_AZURE_IDENTITY = """
import time
import types

class DefaultAzureCredential:
  def get_token(self, *scopes, tenant_id=None):
    return types.SimpleNamespace(token=f"for {scopes[0]}", expires_on=time.time() + 3600)
"""


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

  def test_azure_without_azure_identity_is_left_to_obstore(self):
    try:
      import azure.identity  # noqa: F401
    except ImportError:
      self.assertIsNone(credentials.azure_provider({}))


class AzureIdentityTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.create_tempdir().full_path)
    for name, text in (("azure/identity", _AZURE_IDENTITY), ("azure/identity/aio", "")):
      (folder / name).mkdir(parents=True)
      (folder / name / "__init__.py").write_text(text)
    (folder / "azure" / "__init__.py").touch()
    self.enter_context(mock.patch.dict(sys.modules))
    for name in list(sys.modules):
      if name.split(".")[0] == "azure" or name == "obstore.auth.azure":
        del sys.modules[name]
    self.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
    self.enter_context(mock.patch.dict(os.environ))
    for name in list(os.environ):
      if name.startswith("AZURE_"):
        del os.environ[name]
    self.server = self.enter_context(object_server.ObjectServer({"c/x": b"tokens"}))

  def _read(self, url="az://c@account/x", **options):
    """Returns the Authorization header of a request; "" if it has none."""
    storage = remote.RemoteStorage(stores.StoreOptions(endpoint=self.server.url, **options))
    self.assertEqual(storage.read(url, 0, 6), b"tokens")
    return {name.lower(): value for name, value in self.server.headers[-1].items()}.get(
        "authorization", ""
    )

  def test_azure_identity_provides_the_token(self):
    self.assertEqual(self._read(), "Bearer for https://storage.azure.com/.default")

  def test_a_login_that_fails_is_retried(self):
    identity = importlib.import_module("azure.identity")
    token = types.SimpleNamespace(token="later", expires_on=time.time() + 3600)
    failing = mock.Mock(side_effect=[RuntimeError("Please run 'az login'"), token])
    with mock.patch.object(identity.DefaultAzureCredential, "get_token", failing):
      self.assertEqual(self._read("az://c@unknown/x"), "Bearer later")

  def test_a_login_that_keeps_failing_is_reported(self):
    identity = importlib.import_module("azure.identity")
    failing = mock.Mock(side_effect=RuntimeError("Please run 'az login'"))
    self.enter_context(mock.patch.object(identity.DefaultAzureCredential, "get_token", failing))
    with self.assertRaisesRegex(CorpusError, "no credentials could be obtained"):
      self._read("az://c@unknown/x", first_patience=0.0)

  def test_anonymous_reads_and_signed_urls_need_no_token(self):
    self.assertEqual(self._read(anonymous=True), "")
    self.assertEqual(self._read("az://c@other/x?sv=2024&sig=abc"), "")

  @parameterized.parameters(
      "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_FEDERATED_TOKEN_FILE"
  )
  def test_obstore_reads_the_azure_environment_itself(self, name):
    self.assertIsNone(credentials.azure_provider({name: "x"}))
    self.assertIsNotNone(credentials.azure_provider({}))


if __name__ == "__main__":
  absltest.main()
