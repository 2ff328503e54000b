"""Explains failed requests: whether to retry them, and what to tell the user.

obstore raises few exception types, so the HTTP status and the error code are parsed from the text
of the exception. The rest of the text is left out or redacted: it may contain signatures and key
ids.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\":\s*\"?(\w+)")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_DNS = re.compile(r"dns error|lookup address|name resolution", re.IGNORECASE)
_KIND = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode|Unknown)\b")
# Sources of credentials: the metadata of virtual machines and clusters, and obstore's adapters.
_METADATA = re.compile(
    r"token request|//(169\.254\.169\.254|metadata\.google\.internal)[/:]"
    r"|External \w+ credential provider"
)
_CREDENTIALS = re.compile(
    r"metadata|\btoken\b|credential|InstanceProfile|AssumeRole|IMDS", re.IGNORECASE
)
_EXPIRED = re.compile(r"expired|TokenRefreshRequired|RequestTimeTooSkewed", re.IGNORECASE)
_BUSY = (429, 503)
_NO_LISTING = (400, 405, 501)  # Statuses with which servers without WebDAV answer PROPFIND.
_REPEATED = (408, 429, 500, 502, 503, 504)

_CHECK_CREDENTIALS = (
    "Check the credentials in the environment and their permissions; for a public bucket, set"
    " olmo_storage_anonymous=True (--anonymous)."
)
NO_CREDENTIALS = "no credentials could be obtained"
REPLACED = (
    "The object was replaced or changed since the index was built or since this run began. Restore"
    " it, or build the index again and start a new run."
)


class Failure(NamedTuple):
  """A failed request.

  Attributes:
    error: The error to raise if the request is not retried.
    repeat: Whether the same request may succeed later.
    throttled: Whether the store asks for fewer requests.
    reason: The cause, in a few words.
  """

  error: CorpusError
  repeat: bool
  throttled: bool
  reason: str


def explain(error: BaseException, what: str, retried_seconds: float = 0.0) -> Failure:
  """Explains an obstore error.

  Args:
    error: The error.
    what: What was attempted, without credentials, as in "read bytes 0 to 8 of gs://bucket/file".
    retried_seconds: How long obstore itself has retried the request, with the same token.
  """
  text = str(error)
  name = type(error).__name__
  found = _STATUS.search(text)
  status = int(found[1]) if found else 0
  answer = _answer(status, text)
  if _METADATA.search(text.split("\n")[0]):
    return _passing(what, NO_CREDENTIALS, remedy=_CHECK_CREDENTIALS)
  if isinstance(error, FileNotFoundError):
    return _final(
        what,
        f"it does not exist{_in_brackets(text)}",
        "Check the bucket and the path. If the corpus has moved, remap its paths"
        " (olmo_path_remap_from and olmo_path_remap_to), or load the index with the new base.",
        MissingFileError,
    )
  if name == "PreconditionError" or status == 412:
    return _final(what, f"its ETag is not the expected one ({answer})", REPLACED)
  if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text or status == 301:
    region = _REGION.search(text)
    where = f"The bucket is in {region[1]}: set" if region else "Set"
    return _final(
        what,
        "the bucket is in another region",
        f"{where} olmo_storage_region (--region) or AWS_REGION to the bucket's region.",
    )
  if status == 401 and retried_seconds > stores.RETRIED_TOKEN_SECONDS:
    # The store was away until the token expired; another attempt gets a new one.
    return _passing(what, f"the token expired while the store did not answer ({answer})")
  if status in (400, 401, 403) and _EXPIRED.search(text):
    return _final(
        what,
        f"the credentials have expired ({answer})",
        "Renew them (for a signed URL, give a new one), and start the run again; it resumes where"
        " it stopped.",
    )
  if name in ("UnauthenticatedError", "PermissionDeniedError") or status in (401, 403):
    return _final(what, f"access is denied ({answer})", _CHECK_CREDENTIALS)
  if status == 416:
    return _final(
        what,
        "the object ends before this range (416)",
        "It was truncated or replaced after the index was built: restore it, or build the index"
        " again and start a new run.",
    )
  if name == "NotSupportedError" or "non-partial response" in text:
    return _final(
        what,
        "the server ignored the requested range and sent the whole object",
        "Use a server that supports HTTP range requests, or copy the corpus to one that does.",
    )
  if what.startswith(("list http://", "list https://")) and status in _NO_LISTING:
    return _final(
        what,
        f"this server does not list its files ({answer})",
        "Name the files in a manifest (--mix-file) instead of a pattern, or use the address of a"
        " bucket (s3://, gs://, az://).",
    )
  if status in _REPEATED:
    return _passing(what, answer, throttled=status in _BUSY)
  if status:
    return _final(what, answer, "Check the address, the bucket and the credentials.")
  if _DNS.search(text):
    return _passing(what, "the host name cannot be resolved")
  kind = _KIND.search(text)
  if kind is not None:
    reasons = {
        "Connect": "the server refused the connection or cannot be reached",
        "Timeout": "the server did not answer in time",
        "Interrupted": "the connection was interrupted",
    }
    return _passing(what, reasons.get(kind[1], "the connection failed"))
  if _CREDENTIALS.search(text):
    return _passing(what, NO_CREDENTIALS, remedy=_CHECK_CREDENTIALS)
  first = urls.redact(text.split("\n")[0])[:300].rstrip(".")
  return _final(what, first, "Check the address, the bucket and the credentials.")


def _answer(status: int, text: str) -> str:
  """Returns the status, error code and redacted message of a response, but not its whole body."""
  code, message = _CODE.search(text), _MESSAGE.search(text)
  name = (code[1] or code[2]) if code else ""
  said = urls.redact(message[1]).strip().rstrip(".") if message else ""
  parts = [f"HTTP {status}" if status else "", name, f"“{said}”" if said else ""]
  return " ".join(part for part in parts if part) or "no answer"


def _in_brackets(text: str) -> str:
  code = _CODE.search(text)
  return f" ({code[1] or code[2]})" if code else ""


def _final(what: str, why: str, remedy: str, kind: type[CorpusError] = CorpusError) -> Failure:
  return Failure(kind(f"Cannot {what}: {why}. {remedy}"), False, False, why)


def _passing(what: str, why: str, *, throttled: bool = False, remedy: str = "") -> Failure:
  remedy = remedy or "Check the network, the address and the state of the store."
  return Failure(CorpusError(f"Cannot {what}: {why}. {remedy}"), True, throttled, why)
