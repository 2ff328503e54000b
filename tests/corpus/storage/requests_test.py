"""Tests of repeated requests."""

import threading
import types

from absl.testing import absltest

from maxtext_olmo.corpus.storage import requests
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.errors import CorpusError

_BUSY = "Server returned non-2xx status code: 503 Busy"
_ANSWER = types.SimpleNamespace(data=b"1234")


class RequestsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    options = stores.StoreOptions("http://127.0.0.1:1", "here", True, first_patience=0.2)
    self.requests = requests.Requests(options)
    self.target = self.requests.locate("s3://b/x")

  def _send(self, *errors, known=False):
    coming = list(errors)

    def ask():
      if coming:
        raise coming.pop(0)
      return _ANSWER

    return self.requests.send(self.target, lambda: "read x", ask, known=known)

  def test_a_request_is_repeated_until_it_is_answered(self):
    self.assertIs(self._send(), _ANSWER)
    self.assertIs(self._send(RuntimeError(_BUSY), RuntimeError(_BUSY)), _ANSWER)
    counts = self.requests.traffic.counts()
    self.assertEqual(
        [counts[name] for name in ("requests", "retries", "throttled", "bytes", "in_flight")],
        [4, 2, 2, 8, 0],
    )
    self.assertEqual(self.requests.traffic.outage, "")

  def test_a_store_that_never_answers_is_given_up(self):
    with self.assertRaisesRegex(CorpusError, "HTTP 503.*Gave up after"):
      self._send(*[RuntimeError(_BUSY)] * 100)
    self.assertRegex(self.requests.traffic.outage, "^s3://b has not answered for .* HTTP 503")

  def test_an_outage_is_waited_for_if_the_object_is_known(self):
    self.assertIs(self._send(*[RuntimeError(_BUSY)] * 4, known=True), _ANSWER)

  def test_a_host_without_credentials_gives_up_even_for_known_objects(self):
    with self.assertRaisesRegex(CorpusError, "no credentials could be obtained.*Gave up after"):
      self._send(*[RuntimeError("error in the token request")] * 100, known=True)

  def test_a_lasting_error_has_no_cause_that_could_show_secrets(self):
    with self.assertRaisesRegex(CorpusError, "access is denied") as caught:
      self._send(RuntimeError("https://h/x?sig=abc status code: 403"))
    self.assertIsNone(caught.exception.__cause__)
    self.assertIsNone(caught.exception.__context__)

  def test_errors_of_the_caller_pass_through(self):
    with self.assertRaisesRegex(CorpusError, "^mine$"):
      self._send(CorpusError("mine"))
    self.assertEqual(self.requests.traffic.counts()["in_flight"], 0)

  def test_a_measurement_can_do_without_the_slow_start(self):
    fast = requests.Requests(stores.StoreOptions("http://127.0.0.1:1", "here", slow_start=False))
    slow = self.requests.locate("s3://new/x").pace.rate
    self.assertGreater(fast.locate("s3://new/x").pace.rate, 10 * slow)

  def test_all_storages_of_a_process_share_the_pace_of_a_store(self):
    options = stores.StoreOptions("http://127.0.0.1:1", "here", True, patience=1)
    other = requests.Requests(options)
    self.assertIs(other.locate("s3://b/y").pace, self.target.pace)
    self.assertIsNot(other.locate("s3://c/y").pace, self.target.pace)
    elsewhere = requests.Requests(stores.StoreOptions("http://127.0.0.1:2", "here", True))
    self.assertIsNot(elsewhere.locate("s3://b/x").pace, self.target.pace)

  def test_threads_share_one_target(self):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(self.requests.locate("s3://b/y")))
        for _ in range(8)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertLen({id(one.pace) for one in found}, 1)
    self.assertEqual((found[0].name, found[0].key), ("s3://b", "y"))


if __name__ == "__main__":
  absltest.main()
