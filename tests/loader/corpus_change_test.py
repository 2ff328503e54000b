"""Tests of runs whose corpus changes under them."""

import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder as index_lib
from tests import corpora
from tests.loader import cases


class CorpusChangeTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    self.checkpoints = pathlib.Path(self.create_tempdir().full_path)
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    self.cache = self.create_tempdir().full_path
    for i, name in enumerate("abc"):
      corpora.write_tokens(self.directory / name, (83, 50, 61)[i], seed=i)
    self.old = self.build("a", "b", "c")

  def build(self, *names, extends=None, **values):
    index = index_lib.build_index(
        [(str(self.directory / name), "x") for name in names],
        8,
        tokenizer="t",
        dtype="uint16",
        base=str(self.directory),
        extends=extends,
        **values,
    )
    index.save(self.directory / "index.json")
    return index

  def iterator(self, **values):
    config = cases.data_config(
        **{
            "olmo_index_path": str(self.directory / "index.json"),
            "max_target_length": 8,
            "global_batch_size_to_load": 3,
            "checkpoint_dir": str(self.checkpoints),
            "olmo_order_cache_dir": self.cache,
            "data_shuffle_seed": 5,
            **values,
        }
    )
    iterator, _ = maxtext_olmo.create_data_iterator(config, self.mesh)
    self.addCleanup(iterator.close)
    return iterator

  def take(self, iterator, count):
    ids = []
    for _ in range(count):
      ids += iterator.row_numbers(iterator.step).tolist()
      next(iterator)
    return ids

  def checkpoint(self, iterator):
    with ocp.CheckpointManager(self.checkpoints) as manager:
      manager.save(
          iterator.step - 1, args=ocp.args.Composite(data=ocp.args.JsonSave(iterator.get_state()))
      )

  def test_a_run_keeps_a_copy_of_its_index_next_to_its_checkpoints(self):
    self.iterator()
    (copy,) = (self.checkpoints / "olmo_corpus").iterdir()
    self.assertEqual(index_lib.load_index(copy), self.old)
    self.assertEqual(copy.name, self.old.fingerprint.removeprefix("sha256:") + ".json")

  def test_no_copy_is_kept_where_checkpointing_is_off(self):
    self.iterator(enable_checkpointing=False)
    self.assertEmpty(list(self.checkpoints.iterdir()))

  @parameterized.named_parameters(
      ("grown", {"b": 58}, "abc", r"grown: b \(100 to 116 bytes\)"),
      ("shrunk", {"b": 40}, "abc", r"shrunk: b \(100 to 80 bytes\)"),
      ("reordered", {}, "acb", "reordered: b came before c"),
      ("removed", {}, "ab", r"removed: c \(122 bytes\)"),
      ("inserted", {"d": 16}, "abdc", r"added: d \(32 bytes, at place 2\)"),
  )
  def test_a_changed_corpus_is_refused_and_what_changed_is_listed(self, sizes, names, message):
    iterator = self.iterator()
    self.take(iterator, 4)
    self.checkpoint(iterator)
    for name, count in sizes.items():
      corpora.write_tokens(self.directory / name, count, seed=9)
    self.build(*names)
    for allow in ("no", "extend"):
      with self.assertRaisesRegex(errors.ResumeError, message) as caught:
        self.iterator(olmo_allow_corpus_change=allow)
      self.assertIn("olmo_allow_corpus_change=any", str(caught.exception))
    with self.assertLogs(level="WARNING") as logs:
      again = self.iterator(olmo_allow_corpus_change="any")
    self.assertRegex(logs.output[0], message)
    self.assertIn("some data that was already trained on", logs.output[0].replace("\n", " "))
    self.assertEqual((again.step, again.position), (4, 12))
    next(again)
    # The state is now of the new corpus, and needs no permission any more.
    self.checkpoint(again)
    self.assertEqual(self.iterator().step, 5)

  def test_a_file_replaced_by_another_of_its_size_is_noticed_by_its_checksum(self):
    self.build("a", "b", "c", checksums="xxh3")
    iterator = self.iterator()
    self.take(iterator, 2)
    self.checkpoint(iterator)
    corpora.write_tokens(self.directory / "b", 50, seed=77)
    self.build("a", "b", "c", checksums="xxh3")
    with self.assertRaisesRegex(errors.ResumeError, "replaced: b"):
      self.iterator()
    with self.assertLogs(level="WARNING") as logs:
      self.iterator(olmo_allow_corpus_change="any")
    self.assertIn("with different tokens", logs.output[0].replace("\n", " "))
    self.iterator()

  def test_a_replaced_file_is_noticed_by_a_trainer_that_restores_the_state_itself(self):
    self.build("a", "b", "c", checksums="xxh3")
    state = self.iterator().get_state()
    corpora.write_tokens(self.directory / "b", 50, seed=77)
    self.build("a", "b", "c", checksums="xxh3")
    for _ in range(2):
      with self.assertRaisesRegex(errors.ResumeError, "replaced: b"):
        self.iterator(initial_step=0).set_state(state)
    iterator = self.iterator(initial_step=0, olmo_allow_corpus_change="any")
    with self.assertLogs(level="WARNING") as logs:
      iterator.set_state(state)
    self.assertIn("with different tokens", logs.output[0].replace("\n", " "))
    self.iterator(initial_step=0).set_state(state)

  @parameterized.product(order=("feistel", "olmo_core"), held_out=(0, 3))
  def test_appended_files_take_part_from_the_next_epoch(self, order, held_out):
    if order == "olmo_core" and held_out:
      return  # A foreign order has no held-out part.
    values = dict(olmo_order=order, olmo_eval_instances=held_out)
    old = self.iterator(**values)
    epoch = 23 - held_out
    whole_epochs = old.stream.order.epochs
    uninterrupted = self.take(old, 7)
    again = self.iterator(**values)
    begun = self.take(again, 4)
    self.checkpoint(again)
    held = set(range(23)) - set(old.stream.instance_ids(np.arange(epoch)).tolist())
    self.assertLen(held, held_out)

    corpora.write_tokens(self.directory / "d", 90, seed=4)
    self.build("a", "b", "c", "d", extends=self.old)
    with self.assertRaisesRegex(
        errors.ResumeError, r"added: d \(180 bytes, at the end\)[\s\S]*=extend"
    ):
      self.iterator(**values)
    with self.assertLogs(level="WARNING") as logs:
      extended = self.iterator(**values, olmo_allow_corpus_change="extend")
    self.assertIn("Epoch 1 (counted from 0) is the first", logs.output[0].replace("\n", " "))
    self.assertEqual(begun + self.take(extended, 2), uninterrupted[:18])
    self.assertEqual(extended.stream.order.epochs.lengths, ((0, epoch), (1, epoch + 11)))
    self.assertEqual(whole_epochs.lengths, ((0, epoch),))
    # Each instance once per epoch, old ones in the first, all in the second.
    train = [i for i in range(34) if i not in held]
    stream = extended.stream
    self.assertEqual(sorted(stream.instance_ids(np.arange(epoch)).tolist()), train[:epoch])
    self.assertEqual(sorted(stream.instance_ids(epoch + np.arange(epoch + 11)).tolist()), train)
    # The state carries the history, so a later restart needs no permission.
    self.checkpoint(extended)
    state = extended.get_state()
    extents = state["history"][-1]["extents"]
    self.assertEqual([extent[:2] for extent in extents], [[0, 3], [1, 4]])
    self.assertEqual(json.loads(json.dumps(state)), state)
    expected = self.take(extended, 20)
    restarted = self.iterator(**values)
    self.assertEqual(self.take(restarted, 20), expected)
    # And again: one more file, two epochs later.
    self.checkpoint(restarted)
    corpora.write_tokens(self.directory / "e", 16, seed=4)
    self.build("a", "b", "c", "d", "e", extends=index_lib.load_index(self.directory / "index.json"))
    third = self.iterator(**values, olmo_allow_corpus_change="extend")
    first = third.stream.order.epochs.epoch(third.position) + 1
    self.assertEqual(
        third.stream.order.epochs.lengths, ((0, epoch), (1, epoch + 11), (first, epoch + 13))
    )
    self.assertEqual(third.position, restarted.position)

  def test_two_extensions_within_an_epoch_are_one(self):
    iterator = self.iterator()
    self.take(iterator, 1)
    self.checkpoint(iterator)
    for names in ("abcd", "abcde"):
      corpora.write_tokens(self.directory / names[-1], 16, seed=4)
      self.build(*names)
      extended = self.iterator(olmo_allow_corpus_change="extend")
      next(extended)
      self.checkpoint(extended)
    self.assertEqual(extended.stream.order.epochs.lengths, ((0, 23), (1, 27)))

  def test_a_run_that_stands_at_the_beginning_of_an_epoch_takes_new_files_at_once(self):
    iterator = self.iterator(global_batch_size_to_load=23)
    self.take(iterator, 1)
    state = iterator.get_state()
    corpora.write_tokens(self.directory / "d", 16, seed=4)
    self.build("a", "b", "c", "d")
    extended = self.iterator(olmo_allow_corpus_change="extend")
    extended.set_state(state)
    self.assertEqual(extended.stream.order.epochs.lengths, ((0, 23), (1, 25)))
    extended.reset()
    self.assertEqual(extended.stream.order.epochs.lengths, ((0, 25),))
    extended.set_state({**state, "step": 0, "position": 0})
    self.assertEqual(extended.stream.order.epochs.lengths, ((0, 25),))
    self.assertEmpty(extended.get_state()["history"][-1]["extents"])

  def test_a_history_that_this_index_does_not_have_is_refused(self):
    iterator = self.iterator()
    state = iterator.get_state()
    state["history"][-1]["extents"] = [[0, 2, "sha256:00"], [1, 3, self.old.fingerprint]]
    with self.assertRaisesRegex(errors.ResumeError, "the first files of this index have a diff"):
      iterator.set_state(state)

  def test_without_a_copy_the_fingerprints_are_named(self):
    iterator = self.iterator()
    self.take(iterator, 2)
    self.checkpoint(iterator)
    (copy,) = (self.checkpoints / "olmo_corpus").iterdir()
    copy.write_text("{")
    corpora.write_tokens(self.directory / "b", 58, seed=9)
    self.build("a", "b", "c")
    with self.assertRaisesRegex(errors.ResumeError, "cannot be named"):
      self.iterator()
    copy.unlink()
    corpora.write_tokens(self.directory / "b", 50, seed=1)
    corpora.write_tokens(self.directory / "d", 16, seed=9)
    self.build("a", "b", "c", "d")
    with self.assertRaisesRegex(errors.ResumeError, "added: 1 files after the first 3"):
      self.iterator()


if __name__ == "__main__":
  absltest.main()
