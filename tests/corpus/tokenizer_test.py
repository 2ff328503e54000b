"""Tests of the tokenizers that make corpora."""

import pathlib
import subprocess
import sys

import hypothesis
import numpy as np
import tokenizers
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.errors import ConfigError

STARTS_PROCESSES = True


def write_tokenizer(path: pathlib.Path, eos: str = "<|endoftext|>") -> str:
  """Writes a real tokenizer.json with a tiny vocabulary of words and an EOS."""
  words = {"<unk>": 0, "a": 1, "b": 2, "c": 3}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens([eos])
  path.parent.mkdir(parents=True, exist_ok=True)
  made.save(str(path))
  return str(path)


class ByteTokenizerTest(parameterized.TestCase):

  @hypothesis.given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
  @hypothesis.settings(deadline=None)
  def test_ids_are_the_bytes_of_the_text(self, texts):
    tokenizer = tokenizer_lib.ByteTokenizer()
    encoded = tokenizer.encode(texts)
    self.assertEqual([ids.tolist() for ids in encoded], [list(text.encode()) for text in texts])
    self.assertEqual([tokenizer.decode(ids) for ids in encoded], texts)

  def test_special_ids_are_above_the_bytes(self):
    tokenizer = tokenizer_lib.ByteTokenizer()
    self.assertEqual((tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size), (256, 257, 258))
    self.assertEqual(tokenizer.decode(np.array([104, 105, 256, 257])), "hi")


class HuggingFaceTokenizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)

  def test_a_tokenizer_json_is_read(self):
    path = write_tokenizer(self.dir / "tiny" / "tokenizer.json")
    tokenizer = tokenizer_lib.HuggingFaceTokenizer(path)
    self.assertEqual((tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id), ("tiny", 5, 4))
    self.assertEqual([ids.tolist() for ids in tokenizer.encode(["c a", ""])], [[3, 1], []])

  def test_name_and_eos_may_be_given(self):
    path = write_tokenizer(self.dir / "words.json", eos="<END>")
    tokenizer = tokenizer_lib.load_tokenizer(path, eos_token="<END>")
    self.assertEqual((tokenizer.name, tokenizer.eos_id), ("words", 4))
    self.assertEqual(tokenizer_lib.load_tokenizer(path, name="o/n", eos_token="a").name, "o/n")

  def test_an_unknown_eos_is_an_error(self):
    path = write_tokenizer(self.dir / "words.json", eos="<END>")
    with self.assertRaisesRegex(
        ConfigError, r"does not have any of <\|endoftext\|>, </s>, .*\(--eos-token\)"
    ):
      tokenizer_lib.HuggingFaceTokenizer(path)
    with self.assertRaisesRegex(
        ConfigError, "does not have '</s>'. Give the token that ends a document"
    ):
      tokenizer_lib.HuggingFaceTokenizer(path, eos_token="</s>")

  def test_a_file_that_is_not_a_tokenizer_is_an_error(self):
    with self.assertRaisesRegex(
        ConfigError, "There is no tokenizer .*none: expected a tokenizer.json, .*, or `bytes`"
    ):
      tokenizer_lib.load_tokenizer(str(self.dir / "none"))
    (self.dir / "x.json").write_text("{}")
    with self.assertRaisesRegex(ConfigError, r"x\.json is not a Hugging Face tokenizer\.json: "):
      tokenizer_lib.load_tokenizer(str(self.dir / "x.json"))

  def test_without_the_package_an_error_names_the_extra(self):
    code = (
        # As Python does for a package that cannot be imported.
        "import sys; sys.modules['tokenizers'] = None\n"
        "from maxtext_olmo.corpus import tokenizer\n"
        "tokenizer.ByteTokenizer()\n"
        f"tokenizer.load_tokenizer({__file__!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    self.assertIn("needs the package `tokenizers`: pip install tokenizers.", done.stderr)


class TokenizerSourceTest(absltest.TestCase):

  def test_a_source_loads_the_tokenizer_that_it_found(self):
    path = write_tokenizer(pathlib.Path(self.create_tempdir().full_path, "words.json"), "</s>")
    source = tokenizer_lib.TokenizerSource.find(path, name="o/n", eos_token="a")
    tokenizer = source.load()
    self.assertEqual((tokenizer.name, tokenizer.eos_id), ("o/n", 1))
    self.assertIs(source.load(), tokenizer)
    self.assertIsInstance(
        tokenizer_lib.TokenizerSource.find("bytes").load(), tokenizer_lib.ByteTokenizer
    )

  def test_a_file_that_changed_since_is_an_error(self):
    path = write_tokenizer(pathlib.Path(self.create_tempdir().full_path, "words.json"))
    source = tokenizer_lib.TokenizerSource.find(path)
    write_tokenizer(pathlib.Path(path), "</s>")
    self.assertNotEqual(tokenizer_lib.TokenizerSource.find(path), source)
    with self.assertRaisesRegex(ConfigError, r"words\.json has the hash .* on this host, but "):
      source.load()


class LoadTokenizerTest(parameterized.TestCase):

  def test_a_directory_stands_for_the_tokenizer_in_it(self):
    directory = pathlib.Path(self.create_tempdir().full_path, "words")
    directory.mkdir()
    write_tokenizer(directory / "tokenizer.json", eos="</s>")
    self.assertEqual(tokenizer_lib.load_tokenizer(str(directory)).name, "words")

  @parameterized.parameters("org/name", "gpt2", "words/tokenizer.json", "./gpt2")
  def test_a_name_without_the_hub_prefix_is_a_path(self, spec):
    with self.assertRaisesRegex(ConfigError, f"no tokenizer {spec}: .*write hf:{spec}"):
      tokenizer_lib.load_tokenizer(spec)

  def test_bytes_need_no_file(self):
    self.assertIsInstance(tokenizer_lib.load_tokenizer("bytes"), tokenizer_lib.ByteTokenizer)

  @parameterized.parameters({"name": "x"}, {"eos_token": "x"})
  def test_bytes_have_their_own_name_and_eos(self, **kwargs):
    with self.assertRaisesRegex(ConfigError, "`bytes` has its own name and EOS"):
      tokenizer_lib.load_tokenizer("bytes", **kwargs)

  @parameterized.parameters(
      (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (100278, "uint32")
  )
  def test_the_smallest_dtype_that_holds_every_id(self, vocab_size, dtype):
    self.assertEqual(tokenizer_lib.dtype_for(vocab_size).name, dtype)


if __name__ == "__main__":
  absltest.main()
