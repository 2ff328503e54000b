"""Tests of `maxtext-olmo storage test`."""

import os

import numpy as np
from absl.testing import absltest

from maxtext_olmo.corpus import index_builder as index_lib
from tests import object_server
from tests.cli import runner


class StorageTestTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    tokens = np.arange(10_000, dtype="<u4").tobytes()
    self.server = self.enter_context(object_server.ObjectServer({"b/x.npy": tokens}))
    self.url = f"{self.server.url}/b/x.npy"

  def run_test(self, *words):
    return runner.run("storage", "test", *words, "--requests", "60", "--seconds", "5")

  def test_a_file_is_measured_and_an_epoch_priced(self):
    code, out, err = self.run_test(self.url, "--sequence-length", "100", "--price-per-million", "5")
    self.assertEqual((code, err), (0, ""))
    self.assertRegex(out, r"first request \d+ ms; then reads of 400 bytes:\n")
    self.assertRegex(out, r"fast enough for [\d,]+ tokens/s on this host")
    self.assertIn("an epoch of 100 rows of fixed length: 100 requests, $0.00 at $5", out)
    self.assertIn("see `maxtext-olmo plan --hosts N CONFIG`", out)
    self.assertLess(len(self.server.requests), 120)

  def test_the_files_of_an_index_are_measured(self):
    index = index_lib.build_index([(self.url, "web")], 50, tokenizer="none", base=self.server.url)
    path = os.path.join(self.create_tempdir().full_path, "index.json")
    index.save(path)
    code, out, err = self.run_test(path, "--tokens", "1e12")
    self.assertEqual((code, err), (0, ""))
    self.assertIn("reads of 200 bytes", out)
    self.assertIn("rows of fixed length: 20,000,000,000 requests, $8,000.00", out)

  def test_the_rows_of_a_chunk_are_priced_as_one_request(self):
    index = index_lib.build_index(
        [(self.url, "web")],
        50,
        tokenizer="none",
        base=self.server.url,
        max_target_sequence_length=200,
    )
    path = os.path.join(self.create_tempdir().full_path, "index.json")
    index.save(path)
    for words, rows, requests in (
        ((), "200", "50"),
        (("--sequence-length", "100"), "100", "50"),
        (("--sequence-length", "400"), "25", "25"),
        (("--tokens", "1e12"), "20,000,000,000", "5,000,000,000"),
    ):
      code, out, err = self.run_test(path, *words)
      self.assertEqual((code, err), (0, ""))
      self.assertIn(f"an epoch of {rows} rows of fixed length: {requests} requests", out)

  def test_the_verdict_is_the_exit_code(self):
    words = ("--sequence-length", "100", "--tokens-per-second")
    code, out, _ = self.run_test(self.url, *words, "1")
    self.assertEqual(code, 0)
    self.assertRegex(out, r"fast enough: 1 tokens/s need 0 reads/s, about 1 in flight; measured ")
    code, out, _ = self.run_test(self.url, *words, "1e12")
    self.assertEqual(code, 1)
    self.assertRegex(out, r"TOO SLOW: 1,000,000,000,000 tokens/s need 10,000,000,000 reads/s")

  def test_what_cannot_be_measured_is_an_error(self):
    for words, message in (
        (("/data/part.npy",), "is not a URL"),
        ((f"{self.server.url}/b/none.npy",), "does not exist"),
        ((f"{self.server.url}/b",), "If it is a folder: Give an index (.json), or the URL of"),
        ((f"{self.server.url}/b/",), "is a bucket or a folder. Give an index"),
        (("gs://bucket",), "gs://bucket is a bucket or a folder. Give an index"),
        ((self.url, "--sequence-length", "0"), "--sequence-length must be positive"),
        ((self.url, "--tokens-per-second", "nan"), "--tokens-per-second must be positive"),
    ):
      code, out, err = self.run_test(*words)
      self.assertEqual((code, out), (2, ""))
      self.assertIn(message, err)

  def test_an_index_of_local_files_is_refused(self):
    folder = self.create_tempdir().full_path
    np.arange(100, dtype="<u4").tofile(f"{folder}/a.npy")
    index = index_lib.build_index([("a.npy", "web")], 10, tokenizer="none", base=folder)
    index.save(f"{folder}/index.json")
    code, _, err = self.run_test(f"{folder}/index.json")
    self.assertEqual(code, 2)
    self.assertRegex(err, "The files of .* are not in a store")


class EndpointTest(absltest.TestCase):

  def test_an_endpoint_that_is_no_url_is_refused_by_every_command(self):
    for words in (["verify", "index.json"], ["storage", "test", "gs://bucket/file"]):
      code, _, err = runner.run(*words, "--endpoint", "127.0.0.1:9000")
      self.assertEqual(code, 2)
      self.assertIn("must begin with http:// or https://", err)


if __name__ == "__main__":
  absltest.main()
