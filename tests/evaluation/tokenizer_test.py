"""Tests for the tokenizers of evaluation, with real tokenizer files and a real server."""

import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import tokenizers as hf
from absl.testing import absltest

from maxtext_olmo import errors
from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
from tests import distributed

STARTS_PROCESSES = True

_WORDS = ["<|endoftext|>", "<s>", "[UNK]", "the", "cat", "sat", " "]


def write_tokenizer(directory, *, adds_bos=False, config=None) -> str:
  """A word tokenizer in a directory, as Hugging Face keeps them."""
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  vocabulary = {word: i for i, word in enumerate(_WORDS)}
  tokenizer = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token="[UNK]"))
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(" ", "isolated")
  tokenizer.add_special_tokens(["<|endoftext|>", "<s>"])
  tokenizer.decoder = hf.decoders.Fuse()
  if adds_bos:
    tokenizer.post_processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
  tokenizer.save(str(directory / "tokenizer.json"))
  if config is not None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
  return str(directory)


def serve(directory, requests):
  """A server that hands out a directory's files as the Hub does, and notes who asked for what."""

  class Handler(http.server.BaseHTTPRequestHandler):

    def do_HEAD(self):
      self._answer(body=False)

    def do_GET(self):
      self._answer(body=True)

    def _answer(self, body):
      requests.append((self.path, self.headers.get("Authorization")))
      path = pathlib.Path(directory, self.path.rsplit("/", 1)[-1])
      private = self.path.startswith("/org/")
      if private and self.headers.get("Authorization") != "Bearer hf_secret":
        self._head(401, {"X-Error-Code": "GatedRepo"}, 0)
      elif not path.is_file():
        self._head(404, {"X-Error-Code": "EntryNotFound"}, 0)
      else:
        data = path.read_bytes()
        headers = {"X-Repo-Commit": "a" * 40, "ETag": f'"{len(data)}-{path.name}"'}
        self._head(200, headers, len(data))
        if body:
          self.wfile.write(data)

    def _head(self, code, headers, length):
      self.send_response(code)
      for name, value in {**headers, "Content-Length": str(length)}.items():
        self.send_header(name, value)
      self.end_headers()

    def log_message(self, *args):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  return server


class LMEvalTokenizerTest(absltest.TestCase):

  def test_bytes_need_no_files(self):
    tokenizer = tokenizer_lib.load_eval_tokenizer("bytes")
    self.assertEqual(tokenizer.encode(["é"])[0].tolist(), [0xC3, 0xA9])
    self.assertEqual((tokenizer.eos_id, tokenizer.prefix_id, tokenizer.vocab_size), (256, 256, 258))
    self.assertEqual(tokenizer.decode(np.array([0xC3, 0xA9, 256])), "é")
    self.assertEqual(tokenizer.byte_count(np.array([0xC3, 0xA9, 256])), 2)

  def test_a_directory_and_its_tokenizer_json_are_the_same_tokenizer(self):
    directory = write_tokenizer(self.create_tempdir().full_path)
    for spec in (directory, os.path.join(directory, "tokenizer.json")):
      tokenizer = tokenizer_lib.load_eval_tokenizer(spec)
      ids = tokenizer.encode(["the cat"])[0]
      self.assertEqual(ids.tolist(), [3, 6, 4])
      self.assertEqual(tokenizer.decode(ids), "the cat")
      self.assertEqual(tokenizer.byte_count(np.append(ids, tokenizer.eos_id)), 7)
      self.assertEqual((tokenizer.eos_id, tokenizer.prefix_id, tokenizer.vocab_size), (0, 0, 7))

  def test_the_config_of_a_directory_names_bos_and_eos(self):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "sat"}
    directory = write_tokenizer(self.create_tempdir().full_path, config=config)
    tokenizer = tokenizer_lib.load_eval_tokenizer(directory)
    self.assertEqual((tokenizer.eos_id, tokenizer.prefix_id), (5, 1))

  def test_given_ids_come_before_the_tokenizers_own(self):
    tokenizer = tokenizer_lib.load_eval_tokenizer("bytes", eos_token_id=5)
    self.assertEqual((tokenizer.eos_id, tokenizer.prefix_id), (5, 5))
    tokenizer = tokenizer_lib.load_eval_tokenizer("bytes", eos_token_id=5, bos_token_id=6)
    self.assertEqual((tokenizer.eos_id, tokenizer.prefix_id), (5, 6))

  def test_a_bos_that_the_tokenizer_adds_is_added_once(self):
    directory = write_tokenizer(
        self.create_tempdir().full_path, adds_bos=True, config={"bos_token": "<s>"}
    )
    tokenizer = tokenizer_lib.load_eval_tokenizer(directory)
    found = tokenizer.encode(["cat", "<s>cat", "sat"])
    self.assertEqual([ids.tolist() for ids in found], [[1, 4], [1, 4], [1, 5]])
    found = tokenizer.encode(["cat"], special_tokens=False)
    self.assertEqual(found[0].tolist(), [4])

  def run_with_hub(self, code):
    """Runs code that may ask a Hub of our own; returns what it printed, logged, and asked for."""
    directory = write_tokenizer(self.create_tempdir().full_path, config={"bos_token": "<s>"})
    requests: list = []
    server = serve(directory, requests)
    self.addCleanup(server.shutdown)
    imports = (
        "from absl import logging\n"
        "from maxtext_olmo import errors\n"
        "from maxtext_olmo.corpus import tokenizer as corpus_tokenizer\n"
        "from maxtext_olmo.evaluation import tokenizer\n"
        "logging.set_verbosity(logging.INFO)\n"
        "load = tokenizer.load_eval_tokenizer\n"
    )
    # The Hub's address is read when its package is imported, hence a process of its own.
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": self.create_tempdir().full_path,
    }
    done = subprocess.run(
        [sys.executable, "-c", imports + code],
        env=distributed.child_environment(env),
        cwd=self.create_tempdir().full_path,
        capture_output=True,
        text=True,
        check=False,
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    return done.stdout.splitlines(), done.stderr, requests

  def test_a_marked_name_is_fetched_with_access_token_and_cache_directory(self):
    cache = self.create_tempdir().full_path
    printed, logged, requests = self.run_with_hub(
        f"options = dict(hf_access_token='hf_secret', tokenizer_cache_dir={cache!r})\n"
        "print(load('hf:org/name', **options).prefix_id)\n"
        "try:\n"
        f"  load('hf:org/private', tokenizer_cache_dir={cache!r})\n"
        "except errors.ConfigError as error:\n"
        "  print(error)\n"
        "print(load('gpt2').prefix_id)\n"
        "print(corpus_tokenizer.load_tokenizer('hf:gpt2').name)\n"
    )
    self.assertEqual([printed[0], *printed[2:]], ["1", "1", "gpt2"])
    self.assertIn("tokenizer.json of org/private cannot be fetched", printed[1])
    self.assertIn(("/org/name/resolve/main/tokenizer.json", "Bearer hf_secret"), requests)
    self.assertIn("/gpt2/resolve/main/tokenizer.json", [path for path, _ in requests])
    self.assertNotEmpty(list(pathlib.Path(cache).rglob("tokenizer.json")))
    self.assertIn("looking for hf:gpt2 on the Hub", logged)

  def test_a_misspelt_path_never_reaches_the_network(self):
    specs = ("org/name", "models/gpt2", "./gpt2", "gpt2.json", "/models/gpt2", "a/b/c.json", "..")
    printed, _, requests = self.run_with_hub(
        f"for spec in {specs!r}:\n"
        "  for function in (load, corpus_tokenizer.load_tokenizer):\n"
        "    try:\n"
        "      function(spec)\n"
        "    except errors.ConfigError as error:\n"
        "      print(error)\n"
        "try:\n"
        "  corpus_tokenizer.load_tokenizer('gpt2')\n"
        "except errors.ConfigError as error:\n"
        "  print(error)\n"
    )
    self.assertLen(printed, 2 * len(specs) + 1)
    self.assertIn("write hf:org/name", printed[0])
    self.assertEqual(requests, [])

  def test_what_is_no_tokenizer_is_an_error_that_says_so(self):
    empty = self.create_tempdir().full_path
    for spec, message in (
        ("", "No tokenizer was given"),
        (empty, "has no tokenizer.json"),
        ("./nowhere", "There is no tokenizer ./nowhere"),
        ("a/b/c.json", "There is no tokenizer a/b/c.json"),
    ):
      with self.assertRaisesRegex(errors.ConfigError, message):
        tokenizer_lib.load_eval_tokenizer(spec)
    directory = write_tokenizer(self.create_tempdir().full_path)
    pathlib.Path(directory, "tokenizer_config.json").write_text("{")
    with self.assertRaisesRegex(errors.ConfigError, "tokenizer_config.json is not JSON"):
      tokenizer_lib.load_eval_tokenizer(directory)


if __name__ == "__main__":
  absltest.main()
