"""Tests of the search for text."""

import pathlib
import pickle

import numpy as np
import tokenizers
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus.work import options as options_lib
from maxtext_olmo.corpus.work import reading
from maxtext_olmo.inspection import search
from tests.corpus import tokenizer_test
from tests.inspection import small_run


class PairTokenizer:
  """Encodes two characters at a time, from the beginning of a text: edges differ inside a text."""

  name, vocab_size, eos_id = "pairs", 65536, 0

  def encode(self, texts):
    return [
        np.array(
            [
                ord(t[i]) * 256 + (ord(t[i + 1]) if i + 1 < len(t) else 0)
                for i in range(0, len(t), 2)
            ]
        )
        for t in texts
    ]

  def decode(self, ids):
    pairs = ((int(number) >> 8, int(number) & 255) for number in ids)
    return "".join(chr(char) for pair in pairs for char in pair if char)


def word_tokenizer(path: pathlib.Path) -> tokenizer_lib.HuggingFaceTokenizer:
  """Trains a byte-level tokenizer in which each of a few words is a token, with its space."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=1000,
      special_tokens=["<|endoftext|>"],
      initial_alphabet=alphabet,
      show_progress=False,
  )
  made.train_from_iterator(["cat cat on on mat mat the the"] * 3, trainer)
  made.save(str(path))
  return tokenizer_lib.HuggingFaceTokenizer(path)


class SearchTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)

  def corpus(self, documents):
    index = index_lib.load_index(small_run.write_texts(self.directory, {"a": documents}))
    return index, token_files.TokenFiles.of_index(index)

  def find(self, text, tokenizer, index, files, **arguments):
    return search.find_text(text, tokenizer, index, files, **arguments)

  def test_bytes_are_found_wherever_they_are(self):
    index, files = self.corpus(["xabab", "ab", "b"])
    tokens = np.fromfile(files.paths[0], "<u2")
    hits = self.find("ab", tokenizer_lib.ByteTokenizer(), index, files)
    self.assertEqual([(hit.first, hit.count) for hit in hits], [(1, 2), (3, 2), (6, 2)])
    self.assertEqual(bytes(tokens[1:3].astype(np.uint8)), b"ab")
    self.assertEmpty(self.find("abc", tokenizer_lib.ByteTokenizer(), index, files))

  def test_a_scan_in_pieces_finds_what_a_search_of_the_text_does(self):
    text = "".join(np.random.default_rng(0).choice(list("ab"), 3 << 20))  # 6 MiB: six chunks.
    edge = reading.CHUNK_BYTES // 2  # The first token of the second chunk.
    text = text[: edge - 3] + "seal" + text[edge + 1 :]
    index, files = self.corpus([text])
    for needle in ("seal", "al", "se", "abbabaabbabaabab"):
      hits = self.find(needle, tokenizer_lib.ByteTokenizer(), index, files)
      expected = [i for i in range(len(text)) if text.startswith(needle, i)]
      self.assertEqual([hit.first for hit in hits], expected)

  def test_pieces_on_any_engine_find_what_a_search_of_the_text_does(self):
    text = "".join(np.random.default_rng(0).choice(list("ab"), 5000)) + "seal"
    index, files = self.corpus([text[:2000], text[2000:]])
    tokenizer, results = tokenizer_lib.ByteTokenizer(), str(self.directory / "results")
    for needle in ("seal", "ab", "abbab", "abbabaabbabaabab"):
      expected = self.find(needle, tokenizer, index, files)
      for piece_bytes in (16, 50, 4096):
        arguments = (needle, tokenizer, index, files)
        outcome = search.find_in_pieces(*arguments, piece_bytes=piece_bytes)
        self.assertEqual(search.hits_of(outcome), expected)
      for part in (1, 0):
        options = options_lib.WorkOptions(results=results, part=(part, 2))
        search.find_in_pieces(*arguments, options, piece_bytes=50)
      merge = options_lib.WorkOptions(results=results, merge=True)
      outcome = search.find_in_pieces(*arguments, merge, piece_bytes=50)
      self.assertEqual(search.hits_of(outcome), expected)

  def test_a_search_can_be_sent_to_other_processes_with_its_tokenizer(self):
    path = tokenizer_test.write_tokenizer(self.directory / "tiny" / "tokenizer.json")
    tokenizer = tokenizer_lib.load_tokenizer(str(path))
    work = search.FindWork.of_text("a b", tokenizer, np.dtype("uint16"))
    copy = pickle.loads(pickle.dumps(work))
    self.assertEqual(copy.settings, work.settings)
    ids = tokenizer.encode(["a b"])[0]
    self.assertEqual(copy.tokenizer.decode(ids), tokenizer.decode(ids))

  def test_a_missing_part_of_a_search_is_an_error(self):
    index, files = self.corpus(["abab"])
    options = options_lib.WorkOptions(results=str(self.directory / "results"), merge=True)
    outcome = search.find_in_pieces("ab", tokenizer_lib.ByteTokenizer(), index, files, options)
    with self.assertRaisesRegex(errors.CorpusError, "cannot be searched: 1 of 1 pieces have no"):
      search.hits_of(outcome)

  def test_a_file_that_has_grown_is_an_error_that_names_it(self):
    index, files = self.corpus(["abab"])
    with open(files.paths[0], "ab") as file:
      file.write(b"\0\0")
    outcome = search.find_in_pieces("ab", tokenizer_lib.ByteTokenizer(), index, files)
    with self.assertRaisesRegex(errors.CorpusError, "a.npy: expected 10 bytes, found 12"):
      search.hits_of(outcome)

  def test_text_is_found_where_its_edges_are_tokenized_differently(self):
    tokenizer = PairTokenizer()
    text = "a harbour seal swims here"
    ids = tokenizer.encode(["some " + text + " and there", "other text"])
    path = self.directory / "a.npy"
    np.concatenate(ids).astype("<u2").tofile(path)
    index = index_lib.build_index([(str(path), "a")], 4, tokenizer="pairs", dtype="uint16")
    files = token_files.TokenFiles.of_index(index)
    for part in ("harbour seal swims", "arbour seal swims", "ur seal swims he"):
      (hit,) = self.find(part, tokenizer, index, files)
      found = tokenizer.decode(np.concatenate(ids)[hit.first : hit.first + hit.count])
      self.assertIn(part, found)
      self.assertLessEqual(len(found), len(part) + 2)

  @parameterized.parameters(
      "cat",
      "7",  # A space before it is a token of its own.
      "cat on",
      "on cat on",
      "cat on mat on cat",  # Occurrences overlap, here and below.
      "on on on on",
      "cat on cat on cat on cat",
      "n on mat on o",
  )
  def test_occurrences_next_to_each_other_are_all_found(self, text):
    tokenizer = word_tokenizer(self.directory / "tokenizer.json")
    near = [
        "the cat on cat the",
        "on mat on mat on cat on mat on cat on mat on cat",
        "cat on mat on mat on cat on cat on cat on cat on cat",
        "on on on on on on 7 on 7 7 on",
    ]
    words = np.random.default_rng(0).choice(["cat", "on", "on", "mat", "7"], 3000)
    document = " ".join(["the", *near, *words, "the"])
    (ids,) = tokenizer.encode([document])
    ids.astype("<u2").tofile(self.directory / "a.npy")
    index = index_lib.build_index(
        [(str(self.directory / "a.npy"), "a")], 16, tokenizer="words", dtype="uint16"
    )
    files = token_files.TokenFiles.of_index(index)
    ends = np.cumsum([len(tokenizer.decode(ids[i : i + 1])) for i in range(len(ids))])
    starts = [i for i in range(len(document)) if document.startswith(text, i)]
    firsts = np.searchsorted(ends, starts, side="right")
    lasts = np.searchsorted(ends, np.add(starts, len(text) - 1), side="right")
    expected = [search.TokenRange(0, a, b - a + 1) for a, b in zip(firsts, lasts)]
    self.assertGreater(len(expected), 1)
    self.assertEqual(self.find(text, tokenizer, index, files), expected)

  def test_only_some_files_are_scanned(self):
    path = small_run.write_texts(self.directory, {"a": ["seal"], "b": ["seal"]})
    index = index_lib.load_index(path)
    files = token_files.TokenFiles.of_index(index)
    tokenizer = tokenizer_lib.ByteTokenizer()
    self.assertLen(self.find("seal", tokenizer, index, files), 2)
    self.assertEqual(
        [hit.file for hit in self.find("seal", tokenizer, index, files, only=[1])], [1]
    )

  def test_a_search_can_stop_early_and_reports_the_bytes_it_has_scanned(self):
    index, files = self.corpus(["ab" * 1000])
    tokenizer, scanned = tokenizer_lib.ByteTokenizer(), []
    all_hits = self.find("ab", tokenizer, index, files, progress=scanned.append)
    self.assertLen(all_hits, 1000)
    self.assertEqual(sum(scanned), index.files[0].n_tokens * 2)
    some = self.find("ab", tokenizer, index, files, most=10)
    self.assertEqual(some, all_hits[:10])

    def stop(scanned):
      raise KeyboardInterrupt(scanned)

    with self.assertRaises(KeyboardInterrupt):
      self.find("ab", tokenizer, index, files, progress=stop)

  def test_a_file_is_named_by_its_path_or_the_end_of_it(self):
    index, files = self.corpus(["abcdef"])
    self.assertEqual(search.file_number(files, "data/a.npy"), 0)
    self.assertEqual(search.file_number(files, files.paths[0]), 0)
    with self.assertRaisesRegex(errors.ConfigError, "no file"):
      search.file_number(files, "b.npy")
    self.assertEqual(search.range_of_byte(files, index, 0, 5), search.TokenRange(0, 2, 1))
    with self.assertRaisesRegex(errors.ConfigError, "bytes 0 to 13"):
      search.range_of_byte(files, index, 0, 14)
    with self.assertRaisesRegex(errors.ConfigError, "text that is not empty"):
      self.find("", tokenizer_lib.ByteTokenizer(), index, files)


if __name__ == "__main__":
  absltest.main()
