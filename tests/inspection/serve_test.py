"""Tests of the server, by real requests to a real socket."""

import concurrent.futures
import http.client
import pathlib
import socket
import tempfile
import threading
import unittest
import urllib.parse

from absl.testing import absltest

from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.inspection import run as run_lib
from maxtext_olmo.inspection import serve
from maxtext_olmo.inspection import views
from tests.inspection import small_run
from tests.loader import cases

_run: small_run.SmallRun
_server: serve.Server


def setUpModule():
  global _run, _server
  cases.compile_fast()
  directory = tempfile.TemporaryDirectory(prefix="serve_test_")
  unittest.addModuleCleanup(directory.cleanup)
  _run = small_run.write(directory.name, documents=small_run.hostile_texts())
  run = run_lib.find_run(_run.checkpoints)
  iterator = unittest.enterModuleContext(run_lib.open_iterator(run))
  tokenizer = tokenizer_lib.ByteTokenizer()
  _server = unittest.enterModuleContext(serve.Server(views.Views(run, iterator, tokenizer)))
  thread = threading.Thread(target=_server.serve_forever)
  thread.start()
  unittest.addModuleCleanup(thread.join)
  unittest.addModuleCleanup(_server.shutdown)


class ServeTest(absltest.TestCase):

  def ask(self, path, method="GET", host=None, token=None):
    """Returns the status, the headers and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", _server.server_port)
    self.addCleanup(connection.close)
    headers = {} if host is None else {"Host": host}
    connection.request(method, f"/{token or _server.token}/{path}", headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()

  def test_it_answers_on_the_address_it_names(self):
    address = urllib.parse.urlsplit(_server.address)
    self.assertEqual(address.hostname, "127.0.0.1")
    self.assertEqual(_server.server_address[0], "127.0.0.1")
    self.assertEqual(address.path, f"/{_server.token}/")
    status, _, text = self.ask("")
    self.assertEqual(status, 200)
    self.assertIn("15 steps, 60 samples", text)

  def test_a_wrong_token_gets_no_information(self):
    for token in ("x", _server.token[:-1], _server.token.lower() + "é".encode().hex(), "%00", "."):
      status, _, text = self.ask("step?n=1", token=token)
      self.assertEqual(status, 404)
      self.assertNotIn("<form", text)
      self.assertNotIn(_server.token, text)

  def test_a_request_for_another_host_is_refused(self):
    port = _server.server_port
    for host in ("example.org", f"example.org:{port}", f"127.0.0.1.example.org:{port}", "", ":"):
      self.assertEqual(self.ask("", host=host)[0], 403)
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:8080"):
      self.assertEqual(self.ask("", host=host)[0], 200)

  def test_only_get_is_served(self):
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"):
      status, headers, _ = self.ask("", method=method)
      self.assertEqual((status, headers["Allow"]), (405, "GET"))

  def test_every_answer_forbids_scripts_frames_and_caches(self):
    for path, method, token in (
        ("", "GET", None),
        ("step?n=1", "GET", None),
        ("step?n=x", "GET", None),
        ("", "POST", None),
        ("", "GET", "wrong"),
    ):
      _, headers, _ = self.ask(path, method=method, token=token)
      policy = headers["Content-Security-Policy"]
      self.assertStartsWith(policy, "default-src 'none'; style-src 'sha256-")
      self.assertNotIn("script-src", policy)
      self.assertNotIn("unsafe", policy)
      self.assertIn("frame-ancestors 'none'", policy)
      self.assertEqual(headers["Cache-Control"], "no-store")
      self.assertEqual(headers["Referrer-Policy"], "no-referrer")
      self.assertEqual(headers["X-Content-Type-Options"], "nosniff")

  def test_rows_of_scripts_are_text(self):
    texts = [self.ask(f"row?step={step}&row=0")[2] for step in range(15)]
    self.assertTrue(any("&lt;script&gt;" in text for text in texts))
    self.assertFalse(any("<script" in text or "<img" in text for text in texts))
    for path in (
        "find?text=%3Cscript%3E",
        "step?n=%3Cscript%3E",
        "%3Cscript%3E",
        "file?name=%3Cb%3E",
    ):
      _, _, text = self.ask(path)
      self.assertNotIn("<script>", text)
      self.assertNotIn("<b>", text)

  def test_a_request_without_an_answer_gets_a_message(self):
    for path, status, message in (
        ("nowhere", 404, "There is no page"),
        ("step", 400, "must be a whole number"),
        ("step?n=-3", 400, "must be a whole number"),
        ("step?n=" + "9" * 400, 400, "must be a whole number"),
        ("row?step=1&row=99", 400, "has rows 0 to 3"),
        ("document?id=100000", 400, "no document has this number or name"),
        ("?" + "a=1&" * 50, 400, ""),
    ):
      found, _, text = self.ask(path)
      self.assertEqual(found, status, path)
      self.assertIn(message, text)
    self.assertLess(self.ask(f"step?n={10**17}")[0], 500)

  def test_a_step_after_the_end_says_so(self):
    run = run_lib.find_run(_run.checkpoints, config={**_run.config, "olmo_num_epochs": 2})
    with run_lib.open_iterator(run) as iterator, serve.Server(views.Views(run, iterator)) as server:
      thread = threading.Thread(target=server.serve_forever)
      thread.start()
      try:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", f"/{server.token}/step?n=100000")
        answer = connection.getresponse()
        self.assertEqual(answer.status, 400)
        self.assertIn("outside the stream", answer.read().decode())
        connection.close()
      finally:
        server.shutdown()
        thread.join()

  def test_malformed_requests_do_not_end_the_server(self):
    for request in (b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff\xfe" * 40000):
      with socket.create_connection(("127.0.0.1", _server.server_port)) as connection:
        try:
          connection.sendall(request)
          connection.shutdown(socket.SHUT_WR)
          while connection.recv(1 << 16):
            pass
        except OSError:  # It may hang up before it has read everything.
          pass
    self.assertEqual(self.ask("")[0], 200)

  def test_requests_are_answered_concurrently(self):
    expected = {step: self.ask(f"step?n={step}")[2] for step in range(15)}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      for _ in range(3):
        found = pool.map(lambda step: (step, self.ask(f"step?n={step}")[2]), range(15))
        self.assertEqual(dict(found), expected)

  def test_nothing_is_written(self):
    def files():
      return {path: path.stat().st_mtime_ns for path in pathlib.Path(_run.directory).rglob("*")}

    before = files()
    for path in ("", "step?n=3", "row?step=3&row=0", "document?id=3", "find?text=lorem"):
      self.ask(path)
    self.assertEqual(files(), before)


if __name__ == "__main__":
  absltest.main()
