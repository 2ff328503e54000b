"""Tests of what failed requests mean; what servers send is tested with real ones in remote_test."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.corpus.storage import failures
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MissingFileError


class GenericError(Exception):
  """Has the name of obstore's type for everything that has no type of its own."""


def _answer(status, body=""):
  return GenericError(
      f"Generic S3 error: Error performing GET https://h/k?sig=abc in 1ms - Server returned non-2xx"
      f" status code: {status} Something: {body}\n\nDebug source: ..."
  )


class FailuresTest(parameterized.TestCase):

  @parameterized.parameters(
      (_answer(503), "HTTP 503", True),
      (_answer(429, "<Code>SlowDown</Code>"), "HTTP 429 SlowDown", True),
      (_answer(500), "HTTP 500", False),
      (GenericError("x kind: Connect, dns error: failed to lookup"), "cannot be resolved", False),
      (GenericError("x kind: Connect, tcp"), "cannot be reached", False),
      (GenericError("x kind: Timeout, y"), "not answer in time", False),
      (GenericError("x kind: Interrupted"), "connection was interrupted", False),
      (GenericError("Error getting token from metadata"), "no credentials", False),
  )
  def test_what_may_pass_is_repeated(self, error, reason, throttled):
    failure = failures.explain(error, "read gs://b/k")
    self.assertIn(reason, failure.reason)
    self.assertTrue(failure.repeat)
    self.assertEqual(failure.throttled, throttled)

  @parameterized.parameters(
      (FileNotFoundError("x <Code>NoSuchBucket</Code>"), r"does not exist \(NoSuchBucket\)"),
      (_answer(412), "ETag"),
      (_answer(400, "<Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>"),
       "The bucket is in eu-west-1: set olmo_storage_region"),
      (_answer(400, "<Code>ExpiredToken</Code>"), "credentials have expired"),
      (_answer(403, "<Code>AccessDenied</Code>"), "access is denied .HTTP 403 AccessDenied"),
      (_answer(416), "ends before this range"),
      (GenericError("Received non-partial response"), "ignored the requested range"),
      (_answer(405), "HTTP 405"),
      (GenericError("odd"), "odd"),
  )  # fmt: skip
  def test_what_will_not_pass_is_an_error(self, error, message):
    failure = failures.explain(error, "read bytes 0 to 8 of gs://b/k")
    self.assertFalse(failure.repeat)
    self.assertRegex(str(failure.error), f"^Cannot read bytes 0 to 8 of gs://b/k: .*{message}")
    kind = MissingFileError if isinstance(error, FileNotFoundError) else CorpusError
    self.assertIs(type(failure.error), kind)

  def test_a_token_that_expired_during_an_outage_may_be_replaced(self):
    refused = _answer(401, "Invalid Credentials")
    self.assertFalse(failures.explain(refused, "write gs://b/k", 1.0).repeat)
    failure = failures.explain(refused, "write gs://b/k", 600.0)
    self.assertTrue(failure.repeat)
    self.assertRegex(str(failure.error), "the token expired while the store did not answer")

  @parameterized.parameters(400, 405, 501)
  def test_a_server_that_does_not_list_needs_a_manifest(self, status):
    failure = failures.explain(_answer(status), "list https://h/corpus/")
    self.assertFalse(failure.repeat)
    self.assertRegex(str(failure.error), f"does not list its files .HTTP {status}.*--mix-file")
    self.assertNotIn("--mix-file", str(failures.explain(_answer(status), "list s3://b/k").error))

  def test_what_was_signed_is_not_shown(self):
    body = "<Code>SignatureDoesNotMatch</Code><StringToSign>secret</StringToSign>"
    failure = failures.explain(_answer(403, body), "read x")
    self.assertNotIn("secret", str(failure.error))
    self.assertNotIn("sig=abc", str(failure.error))
    self.assertNotIn("sig=abc", str(failures.explain(GenericError("https://h?sig=abc"), "x").error))


if __name__ == "__main__":
  absltest.main()
