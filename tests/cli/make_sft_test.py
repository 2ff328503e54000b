"""Tests of `maxtext-olmo corpus make-sft`, up to training on its output."""

import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.loader import registry
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import model
from maxtext_olmo.trainers.tiny import trainer
from tests import chats
from tests.cli import runner
from tests.trainers.tiny import train_cases

STARTS_PROCESSES = True

_LENGTH = 128
_SMALL = {
    "emb_dim": 32,
    "num_layers": 1,
    "num_heads": 2,
    "head_dim": 16,
    "mlp_dim": 64,
    "global_batch_size_to_load": 4,
    "mesh_shape": (-1, 1),
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "remat": False,
    "dtype": "float32",
}


class MakeSftTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.out = self.dir / "out"
    self.tokenizer = chats.write_tokenizer(self.dir / "tok")
    self.chats = chats.write_chats(self.dir / "chats" / "a.jsonl", chats.sums(60))

    train_cases.compile_fast(str(self.dir / "programs"))

  def make(self, *words, tokenizer=None):
    return runner.run(
        *("corpus", "make-sft", "--output", self.out, "--workers", 1),
        *("--tokenizer", tokenizer or self.tokenizer, *words),
    )

  def test_chats_become_a_corpus_and_the_next_commands_train_on_it(self):
    code, out, err = self.make(self.chats, "--max-tokens", _LENGTH)
    self.assertEqual((code, err), (0, ""))
    self.assertRegex(
        out,
        r"^60 conversations, [\d,]+ tokens of uint16 in 1 file; [\d,]+ count in the loss"
        r" \(\d+%\)\. The longest conversation has \d+ tokens\.\n"
        rf"Longer than {_LENGTH} tokens: \d+, kept; a row of that length truncates them\.\n"
        rf"The manifest is {self.out}/mix\.txt\. Next, build an index and train",
    )
    index, train = (shlex.split(line) for line in out.splitlines()[-2:])
    code, _, err = runner.run(*index[1:])
    self.assertEqual((code, err), (0, ""))
    config = config_lib.read_config(["", *train[2:]])
    config.update(_SMALL)
    self.check_rows(config)
    recorder = train_cases.Recorder()
    trainer.train(config, on_step=recorder.on_step)
    steps = sorted(recorder.losses)
    self.assertGreater(len(steps), 10)  # Two epochs, after which the data ends.
    self.assertLess(recorder.losses[steps[-1]], 0.8 * recorder.losses[0])

  def check_rows(self, config):
    """Compares an epoch of the loader's rows with the files that the command wrote."""
    tokens = np.fromfile(self.out / "token_ids_part_00000.npy", np.uint16)
    mask = np.fromfile(self.out / "labels_mask_part_00000.npy", np.bool_)
    ends = np.flatnonzero(tokens == config.olmo_eos_id) + 1
    trained = {}
    for first, end in zip([0, *ends[:-1]], ends):
      kept = slice(first, min(end, first + _LENGTH))
      trained[tokens[kept].tobytes()] = mask[kept]
    self.assertLen(ends, 60)
    mesh = model.make_mesh(config)
    config = config.copy_and_resolve_references()
    config.olmo_num_epochs = 1
    batches, _ = registry.create_data_iterator(config, mesh)
    seen = 0
    for batch in batches:
      rows = {name: np.asarray(array) for name, array in batch.items()}
      for row in range(len(rows["inputs"])):
        inputs, segments = rows["inputs"][row], rows["inputs_segmentation"][row]
        loss = rows["targets_segmentation"][row] != 0
        for segment in np.unique(segments[inputs != config.olmo_pad_id]):
          columns = np.flatnonzero((segments == segment) & (inputs != config.olmo_pad_id))
          expected = trained[inputs[columns].astype(np.uint16).tobytes()]
          # The mask of a token decides on the position before it.
          np.testing.assert_array_equal(loss[columns[:-1]], expected[1:])
          seen += 1
    batches.close()
    self.assertGreater(seen, 50)

  def test_a_template_from_a_file_and_an_eos_inside_conversations(self):
    (self.dir / "own.jinja").write_text(chats.MARKED.replace("<|im_end|>", chats.EOS))
    code, out, _ = self.make(self.chats, "--chat-template", self.dir / "own.jinja")
    self.assertEqual(code, 0)
    self.assertRegex(out, r"\n60 conversations with an EOS before the end: the train command")
    self.assertEndsWith(
        out, "--config.olmo_boundaries=csv --config.olmo_packed_segments=documents\n"
    )
    self.assertIn("--config.max_target_length=32768", out)
    index, train = (shlex.split(line) for line in out.splitlines()[-2:])
    self.assertEqual(runner.run(*index[1:])[0], 0)
    config = config_lib.read_config(["", *train[2:]])
    config.update({**_SMALL, "max_target_length": _LENGTH, "steps": 2})
    self.assertEqual(trainer.train(config).steps_done, 2)

  def test_inputs_are_files_directories_and_patterns_with_labels(self):
    chats.write_chats(self.dir / "chats" / "b.jsonl", chats.sums(2))
    (self.dir / "chats" / "readme.md").write_text("not a chat")
    code, out, _ = self.make(f"x={self.dir}/chats/*.jsonl", self.dir / "chats")
    self.assertEqual(code, 0)
    self.assertStartsWith(out, "124 conversations, ")
    labels = [line.split(",")[0] for line in (self.out / "mix.txt").read_text().splitlines()]
    self.assertEqual(labels, ["x", "sft"])

  def test_rows_that_are_left_out_are_listed_on_stderr(self):
    chats.write_chats(self.chats, [*chats.sums(3), '{"messages": 1}'])
    code, out, err = self.make(self.chats, "--max-bad-rows", 1, "--drop-long", "--max-tokens", 60)
    self.assertEqual(code, 0)
    self.assertRegex(out, r"^1 conversation \(1 bad row left out\), ")
    self.assertRegex(out, r"\nLonger than 60 tokens: \d, left out\.\n")
    self.assertEqual(
        err,
        f"left out: {self.chats}:4: expected a list of messages in the field 'messages', found a"
        " number\n",
    )

  def test_a_bad_row_is_an_error_and_leaves_nothing(self):
    chats.write_chats(self.chats, [*chats.sums(3), "{"])
    code, _, err = self.make(self.chats)
    self.assertEqual(code, 2)
    self.assertRegex(
        err,
        rf"^error: Found 1 bad row; --max-bad-rows allows 0:\n  {self.chats}:4: not a"
        r" line of JSON: .*\n No corpus was written to .*run the command again\.\n$",
    )
    self.assertFalse(self.out.exists())

  def test_a_corpus_is_replaced_only_with_overwrite(self):
    self.assertEqual(self.make(self.chats, "--tokens-per-file", 100)[0], 0)
    code, _, err = self.make(self.chats)
    self.assertEqual(code, 2)
    self.assertIn("already contains a corpus", err)
    self.assertEqual(self.make(self.chats, "--overwrite")[0], 0)
    self.assertLen(list(self.out.iterdir()), 4)

  @parameterized.parameters(
      (("--chat-template", "nowhere"), "The chat template nowhere does not exist"),
      (("--eos-token", "</s>"), "does not have '</s>'"),
      (("--max-tokens", "0"), "max_tokens must be at least 1"),
      (("--workers", "0"), "workers must be at least 1"),
      (("--messages-field", "conversation"), "in the field 'conversation', found nothing"),
  )
  def test_wrong_options_are_errors(self, words, message):
    code, _, err = self.make(self.chats, *words)
    self.assertEqual(code, 2)
    self.assertIn(message, err)
    self.assertFalse(self.out.exists())

  def test_missing_inputs_and_tokenizers_are_errors(self):
    for path, message in (
        (self.dir / "none", "There is no file or directory"),
        (self.dir / "none-*.jsonl", "No file matches"),
        (self.tokenizer, "has one of the suffixes"),
    ):
      code, _, err = self.make(path)
      self.assertEqual(code, 2)
      self.assertIn(message, err)
    for tokenizer, message in (
        ("bytes", "There is no tokenizer bytes"),
        (chats.write_tokenizer(self.dir / "plain", template=None), "has no chat template"),
    ):
      code, _, err = self.make(self.chats, tokenizer=tokenizer)
      self.assertEqual(code, 2)
      self.assertIn(message, err)

  def test_an_interrupt_leaves_neither_files_nor_workers(self):
    row = json.dumps({"messages": chats.chat("What is two?", "It is four. " * 20)})
    self.chats.write_text(f"{row}\n" * 30_000)
    argv = ("--output", self.out, "--tokens-per-file", 1000, "--workers", 2, self.chats)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    self.addCleanup(signal.signal, signal.SIGINT, before)
    command = [sys.executable, "-m", "maxtext_olmo", "corpus", "make-sft", *map(str, argv)]
    process = subprocess.Popen(
        [*command, "--tokenizer", str(self.tokenizer)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    while not list(self.out.rglob("token_ids_part_00003.npy")) and process.poll() is None:
      time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()  # Returns when the workers, which share stderr, have ended too.
    self.assertEqual(process.returncode, 130, err)
    self.assertIn(b"interrupted", err)
    self.assertNotIn(b"Traceback", err)
    self.assertFalse(self.out.exists())


if __name__ == "__main__":
  absltest.main()
