"""Tests of making a fine-tuning corpus from conversations."""

import csv
import dataclasses
import gzip
import itertools
import json
import os
import pathlib

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo.corpus import chat_template
from maxtext_olmo.corpus import conversations
from maxtext_olmo.corpus import make_sft
from maxtext_olmo.corpus import manifest
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from tests import chats
from tests import object_server

STARTS_PROCESSES = True


class MakeSftTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.out = self.dir / "out"
    tokenizer = chats.write_tokenizer(self.dir / "tokenizer")
    self.encoder = conversations.ConversationEncoder(
        tokenizer_lib.HuggingFaceTokenizer(tokenizer / "tokenizer.json"),
        chat_template.load_template(str(tokenizer)),
    )
    self.settings = make_sft.Settings(self.encoder)

  def make(self, *paths, out=None, settings=None, **options):
    files = {"sft": [str(path) for path in paths]}
    return make_sft.make_sft(files, out or self.out, settings or self.settings, **options)

  def read(self, out=None):
    """Returns ids, mask, name, source and line of each conversation, file by file."""
    out = out or self.out
    found = []
    for entry in manifest.read_mix(str(out / "mix.txt"), tokenizer="t"):
      ids = np.fromfile(out / entry.path, self.settings.dtype)
      masks = out / entry.path.replace("token_ids", "labels_mask")
      mask = np.fromfile(masks, np.bool_)
      self.assertLen(mask, len(ids))
      documents = []
      with gzip.open(out / entry.path.replace(".npy", ".csv.gz"), "rt", newline="") as file:
        for start, end, *place in csv.reader(file):
          span = slice(int(start), int(end))
          documents.append((ids[span].tolist(), mask[span].tolist(), *place))
      self.assertEqual(sum(len(document[0]) for document in documents), len(ids))
      found.append(documents)
    return found

  def expected(self, path, rows):
    found = []
    for line, row in enumerate(rows, start=1):
      ids, mask = self.encoder.encode(conversations.Conversation(row["messages"]))
      found.append((ids.tolist(), mask.tolist(), row["id"], str(path), str(line)))
    return found

  @hypothesis.given(
      count=st.integers(1, 12), tokens_per_file=st.integers(1, 400), zipped=st.booleans()
  )
  @hypothesis.settings(max_examples=25, deadline=None)
  def test_parts_have_all_conversations_whole_and_in_order(self, count, tokens_per_file, zipped):
    rows = chats.sums(count)
    path = chats.write_chats(self.dir / "in.jsonl", rows)
    if zipped:
      path = self.dir / "in.jsonl.gz"
      path.write_bytes(gzip.compress((self.dir / "in.jsonl").read_bytes()))
    summary = self.make(path, tokens_per_file=tokens_per_file, overwrite=True)
    parts = self.read()
    self.assertEqual(list(itertools.chain(*parts)), self.expected(path, rows))
    for part in parts:
      self.assertLess(sum(len(document[0]) for document in part[:-1]), tokens_per_file)
    for part in parts[:-1]:
      self.assertGreaterEqual(sum(len(document[0]) for document in part), tokens_per_file)
    # No file of a corpus with more parts is left.
    self.assertLen(list(self.out.glob("labels_mask_*.npy")), len(parts))
    masks = [mask for part in parts for _, mask, *_ in part]
    self.assertEqual(
        dataclasses.asdict(summary),
        dict(
            mix_file=str(self.out / "mix.txt"),
            files=len(parts),
            conversations=count,
            tokens=sum(map(len, masks)),
            loss_tokens=sum(map(sum, masks)),
            longest=max(map(len, masks)),
            long=0,
            inner_eos=0,
            bad_rows=[],
        ),
    )

  def test_conversations_may_be_objects(self):
    rows = chats.sums(5)
    data = gzip.compress(chats.write_chats(self.dir / "in.jsonl", rows).read_bytes())
    server = self.enter_context(object_server.ObjectServer({"b/in.jsonl.gz": data}))
    url = f"{server.url}/b/in.jsonl.gz"
    self.make(url)
    self.assertEqual(list(itertools.chain(*self.read())), self.expected(url, rows))
    with self.assertRaisesRegex(CorpusError, "b/none.jsonl: it does not exist"):
      self.make(f"{server.url}/b/none.jsonl", out=self.dir / "other")

  def test_the_files_do_not_depend_on_the_number_of_workers(self):
    rows = [*chats.sums(700), "{", *chats.sums(50)]
    path = chats.write_chats(self.dir / "in.jsonl", rows)
    summaries = []
    for workers in (1, 2, 3):
      out = self.dir / f"out-{workers}"
      summary = self.make(path, out=out, workers=workers, tokens_per_file=9000, max_bad_rows=1)
      summaries.append(dataclasses.replace(summary, mix_file=""))
    self.assertLen(summaries[0].bad_rows, 1)
    self.assertEqual(summaries, summaries[:1] * 3)
    names = sorted(os.listdir(self.dir / "out-1"))
    self.assertGreater(len(names), 6)
    for workers in (2, 3):
      out = self.dir / f"out-{workers}"
      self.assertEqual(sorted(os.listdir(out)), names)
      for name in names:
        self.assertEqual((out / name).read_bytes(), (self.dir / "out-1" / name).read_bytes(), name)

  def test_labels_have_parts_of_their_own(self):
    rows = chats.sums(4)
    a = chats.write_chats(self.dir / "a.jsonl", rows[:1])
    b = chats.write_chats(self.dir / "b.jsonl", rows[1:])
    files = {"math": [str(b)], "code": [str(a)]}
    make_sft.make_sft(files, self.out, self.settings, tokens_per_file=1)
    self.assertEqual(
        (self.out / "mix.txt").read_text(),
        "math,token_ids_part_00000.npy\nmath,token_ids_part_00001.npy\n"
        "math,token_ids_part_00002.npy\ncode,token_ids_part_00003.npy\n",
    )
    self.assertEqual(self.read()[3], self.expected(a, rows[:1]))

  def test_bad_rows_up_to_the_limit_are_left_out_and_listed(self):
    good = chats.sums(3)
    role = {"messages": [{"role": "judge", "content": "x"}, {"role": "assistant", "content": "x"}]}
    path = chats.write_chats(self.dir / "in.jsonl", [good[0], "{", "", role, good[1], good[2]])
    for workers in (1, 2):
      summary = self.make(path, max_bad_rows=2, workers=workers, overwrite=True)
      self.assertEqual(
          [row.split(" ", 1)[0] for row in summary.bad_rows], [f"{path}:2:", f"{path}:4:"]
      )
      self.assertEndsWith(summary.bad_rows[1], "the chat template fails: unknown role judge")
      self.assertEqual([document[4] for document in self.read()[0]], ["1", "5", "6"])

  @parameterized.parameters(1, 2)
  def test_more_bad_rows_than_allowed_leave_nothing(self, workers):
    path = chats.write_chats(self.dir / "in.jsonl", [*chats.sums(300), "{", *chats.sums(9), "[]"])
    with self.assertRaisesRegex(
        CorpusError,
        rf"Found 2 bad rows; --max-bad-rows allows 1:\n  {path}:301: not a .*\n  {path}:311: exp",
    ):
      self.make(path, max_bad_rows=1, workers=workers, tokens_per_file=100)
    self.assertFalse(self.out.exists())

  def test_long_conversations_are_counted_or_dropped(self):
    rows = chats.sums(10)
    path = chats.write_chats(self.dir / "in.jsonl", rows)
    lengths = [len(ids) for ids, *_ in self.expected(path, rows)]
    limit = sorted(lengths)[5]
    for drop in (False, True):
      settings = dataclasses.replace(self.settings, max_tokens=limit, drop_long=drop)
      summary = self.make(path, settings=settings, overwrite=True)
      self.assertEqual(summary.long, sum(length > limit for length in lengths))
      kept = [n for n in lengths if not drop or n <= limit]
      self.assertEqual([len(ids) for ids, *_ in self.read()[0]], kept)
      self.assertEqual((summary.conversations, summary.longest), (len(kept), max(kept)))

  def test_an_eos_inside_a_conversation_is_counted(self):
    rows = [{"messages": chats.chat("a", "b")}, {"messages": chats.chat(chats.EOS, "b")}]
    path = chats.write_chats(self.dir / "in.jsonl", rows)
    self.assertEqual(self.make(path).inner_eos, 1)
    self.assertEqual(self.read()[0][1][2:], (f"{path}:2", str(path), "2"))

  def test_inputs_and_settings_that_cannot_be_used_are_errors(self):
    path = chats.write_chats(self.dir / "in.jsonl", chats.sums(1))
    for options, message in (
        ({"tokens_per_file": 0}, "tokens_per_file must be at least 1"),
        ({"max_bad_rows": -1}, "max_bad_rows must be at least 0"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"settings": dataclasses.replace(self.settings, max_tokens=0)}, "max_tokens must be"),
    ):
      with self.assertRaisesRegex(ConfigError, message):
        self.make(path, **options)
    (self.dir / "bad.jsonl.gz").write_bytes(b"no gzip")
    (self.dir / "empty.jsonl").write_text("\n\n")
    for name, message in (
        ("bad.jsonl.gz", "Cannot read .*bad.jsonl.gz"),
        ("empty.jsonl", "The label 'sft' has no usable conversation"),
        (".", "is not a regular file"),
    ):
      with self.assertRaisesRegex(CorpusError, message):
        self.make(self.dir / name)
    with self.assertRaisesRegex(ConfigError, "cannot be a label"):
      make_sft.make_sft({"a/b": [str(path)]}, self.out, self.settings)
    self.assertFalse(self.out.exists())

  def test_rows_keep_names_and_unicode(self):
    row = {"id": "é\ud800", "messages": chats.chat("é", "ü")}
    path = self.dir / "in.jsonl"
    path.write_text(json.dumps(row) + "\n")
    self.make(path)
    self.assertEqual(self.read()[0][0][2], "é\\ud800")


if __name__ == "__main__":
  absltest.main()
