"""Credentials that obstore does not find by itself: AWS profiles, Google federation, `az login`.

obstore finds access keys, service accounts, the metadata of virtual machines and workload
identities by itself. If the environment selects other credentials, this module uses obstore's
adapters for boto3, google-auth and azure-identity.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from typing import Any

from maxtext_olmo.errors import ConfigError

_GOOGLE_OWN = ("service_account", "authorized_user")
_AWS_OWN = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
# Keys, SAS tokens, bearer tokens, service principals, federated tokens, managed identities.
_AZURE_OWN = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_IDENTITY_ENDPOINT",
    "AZURE_MSI_ENDPOINT",
    "IDENTITY_ENDPOINT",
    "MSI_ENDPOINT",
    "AZURE_STORAGE_USE_EMULATOR",
    "AZURE_USE_AZURE_CLI",
    "AZURE_SKIP_SIGNATURE",
)


def google_provider(environ: Mapping[str, str] = os.environ) -> Any:
  """Returns google-auth's provider, or None if obstore supports the user's type of credentials."""
  path = environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
  if not path:
    folder = environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
  try:
    with open(path, encoding="utf-8") as file:
      kind = json.load(file).get("type")
  except (OSError, ValueError, AttributeError):
    return None  # obstore reports a file that cannot be read.
  if kind in _GOOGLE_OWN:
    return None
  _need("google.auth", "google-auth[requests]", f"Google credentials of the type {kind!r}")
  from obstore.auth import google

  return google.GoogleCredentialProvider()


def aws_provider(environ: Mapping[str, str] = os.environ) -> Any:
  """Returns boto3's provider, or None if obstore finds the AWS credentials by itself.

  boto3 is required if AWS_PROFILE is set. It is used, if installed, when there are AWS config files
  but none of the environment variables that obstore reads.
  """
  if "AWS_PROFILE" not in environ:
    if any(name in environ for name in _AWS_OWN) or not _has_aws_files(environ):
      return None
    if not _is_installed("boto3"):
      return None
  _need("boto3", "boto3", "An AWS profile")
  from obstore.auth import boto3

  return boto3.Boto3CredentialProvider()


def azure_provider(environ: Mapping[str, str] = os.environ) -> Any:
  """Returns azure-identity's provider, or None if obstore should find the credentials by itself.

  azure-identity is used, if installed, when there are none of the environment variables that
  obstore reads. It also finds managed identities, as obstore does, and the account of `az login`.
  """
  if any(name in environ for name in _AZURE_OWN) or not _is_installed("azure.identity"):
    return None
  from obstore.auth import azure

  return azure.AzureCredentialProvider()


def _has_aws_files(environ: Mapping[str, str]) -> bool:
  config = environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config")
  keys = environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
  return os.path.isfile(config) or os.path.isfile(keys)


def _is_installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # Its parent package is missing.
    return False


def _need(module: str, package: str, what: str) -> None:
  if not _is_installed(module):
    raise ConfigError(f"{what} requires {package}: run `pip install '{package}'`.")
