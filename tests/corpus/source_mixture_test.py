"""Tests of source mixtures, against OLMo-core's own outputs."""

import math
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import index_changes
from maxtext_olmo.corpus import source_mixture
from maxtext_olmo.corpus import token_files
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import windows
from tests import olmo_core_goldens

_CASES = {case["config"]["name"]: case for case in olmo_core_goldens.load("mixture")}


def sources_of(config):
  return [
      source_mixture.MixtureSource(
          source["source_name"],
          source["target_ratio"],
          tuple(source["paths"]),
          source["max_repetition_ratio"],
          source["max_source_fraction"],
      )
      for source in config["sources"]
  ]


def size_of(config):
  return source_mixture.MixtureSize(
      config["requested_tokens"], config["global_batch_size"], config["S"]
  )


class SourceMixtureTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    olmo_core_goldens.write_corpora(cls.folder, "mix")

  def tokens(self, config):
    return [
        [pathlib.Path(self.folder, path).stat().st_size // 2 for path in source["paths"]]
        for source in config["sources"]
    ]

  def build(self, config, **changes):
    return source_mixture.build_mixture_index(
        sources_of(config),
        size_of({**config, **changes}),
        tokenizer="none",
        dtype="uint16",
        base=self.folder,
        max_target_sequence_length=config["max_target_sequence_length"],
    )

  @parameterized.named_parameters(
      (name, case) for name, case in _CASES.items() if "error" not in case
  )
  def test_each_file_gives_as_much_as_in_olmo_core(self, case):
    config, tokens = case["config"], self.tokens(case["config"])
    sources = sources_of(config)
    found = [
        [sources[use.source].paths[use.file], use.tokens, tokens[use.source][use.file]]
        for use in source_mixture.allot_tokens(sources, tokens, size_of(config))
    ]
    self.assertEqual(found, case["path_tokens_before_dropping_empty"])

  @parameterized.named_parameters(
      (name, case) for name, case in _CASES.items() if "error" not in case
  )
  def test_the_rows_of_the_index_are_olmo_cores(self, case):
    index = self.build(case["config"])
    used = [entry for entry in index.files if entry.usable_tokens]
    self.assertEqual([entry.path for entry in used], case["paths"])
    self.assertEqual(
        [[entry.instance_offset, entry.instance_offset + entry.n_instances] for entry in used],
        case["offsets"],
    )
    rows = windows.WindowRows(index)
    reader = reader_lib.FileReader(token_files.TokenFiles.of_index(index))
    tokens = np.empty((index.total_instances, index.sequence_length), "<u2")
    reader.read(
        rows.parts(0, np.arange(index.total_instances)), tokens, reader_lib.Checks(pad_id=0)
    )
    self.assertEqual(olmo_core_goldens.row_hash(tokens), case["items"]["input_ids_int64_sha256"])

  def test_impossible_mixtures_are_errors(self):
    for name, message in (
        ("ratio_not_one", r"the target ratios must sum to 1, but they sum to 0\.8"),
        ("too_few", r"Source 's2' has too few tokens: .* needs 4,633 .* at most 1,033 may be read"),
    ):
      config = _CASES[name]["config"]
      with self.assertRaisesRegex(errors.ConfigError, message):
        source_mixture.allot_tokens(sources_of(config), self.tokens(config), size_of(config))
    source = source_mixture.MixtureSource("a", 1.5, (), 0.5, 2.0)
    with self.assertRaises(errors.ConfigError) as caught:
      source_mixture.allot_tokens([source], [[]], source_mixture.MixtureSize(0, 4, 8))
    for message in (
        "requested_tokens must be positive, got 0",
        "a global batch of 4 tokens holds no row of 8",
        "source 'a' has no files",
        "target_ratio 1.5",
        "max_repetition_ratio 0.5 is below 1",
        "max_source_fraction 2.0",
        "sum to 1.5",
    ):
      self.assertIn(message, str(caught.exception))

  def test_a_mixture_without_a_whole_window_is_an_error(self):
    config = _CASES["one_step"]["config"]
    with self.assertRaisesRegex(errors.CorpusError, "no file contributes 4096 tokens"):
      self.build(config, S=4096, global_batch_size=4096)

  @given(
      st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=5), min_size=1, max_size=4),
      st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4),
      st.integers(1, 3000),
      st.integers(1, 12),
      st.integers(1, 6),
  )
  def test_rows_fill_whole_batches_if_the_files_have_enough(
      self, tokens, weights, requested, length, rows
  ):
    weights = weights[: len(tokens)]
    sources = [
        source_mixture.MixtureSource(
            str(number), weight / sum(weights), ("x",) * len(some), max_repetition_ratio=1e6
        )
        for number, (weight, some) in enumerate(zip(weights, tokens))
    ]
    size = source_mixture.MixtureSize(requested, rows * length, length)
    uses = source_mixture.allot_tokens(sources, tokens, size)
    wanted = math.ceil(requested / (rows * length)) * rows
    most = 0
    for use in uses:
      whole = tokens[use.source][use.file]
      self.assertEqual(use.tokens % length, 0)
      self.assertBetween(use.tokens, 0, whole)
      most += whole // length
    found = sum(use.tokens for use in uses) // length
    # Rounding up gives each file at most one row too many; they are never taken back.
    self.assertGreaterEqual(found, min(wanted, most) if most < wanted else wanted - len(uses))
    self.assertLessEqual(found, wanted + len(uses))


class HeadsTest(absltest.TestCase):
  """What an index of heads of files has in common with all others."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    np.arange(40, dtype="uint16").tofile(pathlib.Path(cls.folder, "a.npy"))
    whole = index_builder.build_index(
        [("a.npy", "a")], 4, tokenizer="none", dtype="uint16", base=cls.folder
    )
    cls.whole, cls.entry = whole, whole.files[0]

  def index(self, *heads):
    entries = [
        index_lib.OlmoNpyFileEntry("a.npy", "a", 40, 0, 0, size_bytes=80, head_tokens=head)
        for head in heads
    ]
    return index_lib.make_index(entries, 4, dtype="uint16", tokenizer="none", base=self.folder)

  def test_instances_come_from_the_head_and_a_file_may_repeat(self):
    index = self.index(8, 0, 40)
    self.assertEqual([entry.n_instances for entry in index.files], [2, 0, 10])
    self.assertEqual(index_lib.global_to_local(index, 3), (2, 4))
    self.assertTrue(index.has_heads)
    self.assertFalse(self.whole.has_heads)
    found = windows.WindowRows(index).rows_of(0, 0, 0, 40)
    self.assertEqual(found.tolist(), [0, 1])

  def test_the_fingerprint_depends_on_the_head(self):
    prints = {self.index(*heads).fingerprint for heads in ((8,), (12,), (None,), (8, 8))}
    self.assertLen(prints, 4)
    self.assertEqual(self.index(None).fingerprint, self.whole.fingerprint)

  def test_it_is_saved_and_loaded(self):
    path = self.create_tempfile().full_path
    index = self.index(8, 0, 40)
    index.save(path)
    self.assertEqual(index_builder.load_index(path), index)
    text = pathlib.Path(path).read_text().replace('"head_tokens": 8', '"head_tokens": 12')
    pathlib.Path(path).write_text(text)
    with self.assertRaisesRegex(errors.CorpusError, "damaged or was edited by hand"):
      index_builder.load_index(path)

  def test_a_head_beyond_the_end_of_its_file_is_refused(self):
    with self.assertRaisesRegex(errors.CorpusError, "head of 41 tokens, but the file has 40"):
      self.index(41)

  def test_changes_are_described_by_occurrence(self):
    lines = index_changes.describe_changes(self.index(8, 40), self.index(12, 40, 4))
    self.assertEqual(
        lines,
        [
            "changed head: a.npy (8 to 12 tokens)",
            "added: a.npy, occurrence 3 (80 bytes, at the end)",
        ],
    )
    lines = index_changes.describe_changes(self.index(None), self.index(12))
    self.assertEqual(lines, ["changed head: a.npy (all to 12 tokens)"])


if __name__ == "__main__":
  absltest.main()
