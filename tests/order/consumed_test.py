"""Tests of the bitmap of consumed instances."""

import os
import pathlib
import pickle

import hypothesis
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus.storage import stores
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import permutations
from maxtext_olmo.order import stream as stream_lib
from tests import corpora
from tests import object_server


class ConsumedTest(parameterized.TestCase):

  def _file(self, flags: np.ndarray, fingerprint: str = "sha256:a") -> str:
    path = os.path.join(self.create_tempdir().full_path, "seen.bits")
    consumed_lib.write_consumed(path, flags, fingerprint)
    return path

  def _open(self, path: str, count: int) -> consumed_lib.Consumed:
    return consumed_lib.Consumed(path, fingerprint="sha256:a", num_instances=count)

  @parameterized.parameters(1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 20_011)
  def test_select_finds_every_instance_that_was_not_consumed(self, count):
    for share in (0.0, 0.02, 0.5, 0.99):
      flags = np.random.default_rng(count).random(count) < share
      bitmap = self._open(self._file(flags), count)
      left = np.flatnonzero(~flags)
      self.assertEqual(bitmap.num_remaining, len(left))
      np.testing.assert_array_equal(bitmap.select(np.arange(len(left))), left)
      ranks = np.full(count + 2, -1)
      ranks[1 + left] = np.arange(len(left))
      np.testing.assert_array_equal(bitmap.ranks(np.arange(-1, count + 1)), ranks)

  @hypothesis.settings(max_examples=30, deadline=None)
  @hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=300), st.randoms())
  def test_select_takes_ranks_in_any_order(self, flags, random):
    bitmap = self._open(self._file(np.array(flags)), len(flags))
    left = np.flatnonzero(~np.array(flags))
    ranks = list(range(len(left)))
    random.shuffle(ranks)
    np.testing.assert_array_equal(bitmap.select(np.array(ranks, np.int64)), left[ranks])

  def test_a_rank_beyond_the_rest_is_an_error(self):
    bitmap = self._open(self._file(np.array([True, False, False])), 3)
    with self.assertRaisesRegex(errors.OrderError, "2 instances remain"):
      bitmap.select(np.array([2]))

  def test_nothing_remains_if_all_are_consumed(self):
    bitmap = self._open(self._file(np.ones(100, bool)), 100)
    self.assertEqual(bitmap.num_remaining, 0)
    self.assertEqual(bitmap.select(np.zeros(0, np.int64)).size, 0)

  def test_a_bitmap_is_written_to_a_store_and_read_from_it(self):
    server = self.enter_context(object_server.ObjectServer())
    self.addCleanup(stores.use_by_default, stores.StoreOptions())
    stores.use_by_default(stores.StoreOptions(server.url, "here", anonymous=True))
    flags = np.random.default_rng(0).random(20_011) < 0.5
    consumed_lib.write_consumed("s3://b/seen.bits", flags, "sha256:a")
    local = pathlib.Path(self._file(flags)).read_bytes()
    self.assertEqual(server.objects["b/seen.bits"], local)
    bitmap = self._open("s3://b/seen.bits", len(flags))
    left = np.flatnonzero(~flags)
    np.testing.assert_array_equal(bitmap.select(np.arange(len(left))), left)

  def test_a_bitmap_in_a_store_is_copied_once_and_then_read_locally(self):
    flags = np.random.default_rng(0).random(20_011) < 0.5
    content = pathlib.Path(self._file(flags)).read_bytes()
    server = self.enter_context(object_server.ObjectServer({"b/seen.bits": content}))
    cache = self.create_tempdir().full_path
    left = np.flatnonzero(~flags)
    for _ in range(2):
      bitmap = consumed_lib.Consumed(
          f"{server.url}/b/seen.bits",
          fingerprint="sha256:a",
          num_instances=len(flags),
          cache_dir=cache,
      )
      requests = len(server.requests)
      for opened in (bitmap, pickle.loads(pickle.dumps(bitmap))):
        np.testing.assert_array_equal(opened.select(np.arange(len(left))), left)
      self.assertLen(server.requests, requests)
    self.assertEqual([server.count("GET"), server.count("HEAD")], [1, 2])

  def test_a_pickle_does_not_contain_the_bits(self):
    flags = np.random.default_rng(1).random(1_000_000) < 0.5
    bitmap = self._open(self._file(flags), len(flags))
    text = pickle.dumps(bitmap)
    self.assertLess(len(text), 1000)
    ranks = np.array([0, 17, 400_000])
    np.testing.assert_array_equal(pickle.loads(text).select(ranks), bitmap.select(ranks))

  def test_the_bitmap_of_another_corpus_is_refused(self):
    path = self._file(np.zeros(10, bool), "sha256:b")
    with self.assertRaisesRegex(errors.CorpusError, "a different corpus"):
      self._open(path, 10)
    with self.assertRaisesRegex(errors.CorpusError, "it has 10 instances, but this index has 11"):
      self._open(self._file(np.zeros(10, bool)), 11)

  def test_a_flipped_bit_and_a_truncated_file_are_detected(self):
    path = pathlib.Path(self._file(np.zeros(10_000, bool)))
    data = bytearray(path.read_bytes())
    data[500] ^= 4
    path.write_bytes(data)
    with self.assertRaisesRegex(errors.CorpusError, "is damaged"):
      self._open(str(path), 10_000)
    path.write_bytes(data[:300])
    with self.assertRaisesRegex(errors.CorpusError, "is damaged"):
      self._open(str(path), 10_000)

  def test_a_flipped_bit_in_any_byte_of_the_header_is_found(self):
    count = 5000
    path = pathlib.Path(self._file(np.arange(count) % 3 == 0))
    data = path.read_bytes()
    for place in range(128):
      damaged = bytearray(data)
      damaged[place] ^= 1 << place % 8
      path.write_bytes(damaged)
      with self.assertRaises(errors.CorpusError, msg=f"byte {place}"):
        self._open(str(path), count)

  def test_truncation_while_in_use_is_an_error(self):
    path = self._file(np.zeros(40_000_000, bool))
    bitmap = self._open(path, 40_000_000)
    os.truncate(path, 200)
    with self.assertRaisesRegex(
        errors.CorpusError, "seen.bits is too short: expected bytes .* at byte 200"
    ):
      bitmap.select(np.array([39_999_999]))

  def test_another_kind_of_file_and_another_format_are_named(self):
    path = pathlib.Path(self.create_tempdir().full_path, "index.json")
    path.write_text("{}")
    with self.assertRaisesRegex(errors.CorpusError, "not a bitmap"):
      self._open(str(path), 10)
    path = pathlib.Path(self._file(np.zeros(10, bool)))
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with self.assertRaisesRegex(errors.CorpusError, "has format 9"):
      self._open(str(path), 10)


class RemainderOrderTest(parameterized.TestCase):

  def _order(
      self, flags: np.ndarray, *, seed: int = 3, plain: str = "feistel", chunk_size: int = 1
  ) -> consumed_lib.RemainderOrder:
    path = os.path.join(self.create_tempdir().full_path, "seen.bits")
    consumed_lib.write_consumed(path, flags, "sha256:a")
    bitmap = consumed_lib.Consumed(path, fingerprint="sha256:a", num_instances=len(flags))
    order = permutations.make_order(
        plain, num_instances=len(flags), seed=seed, chunk_size=chunk_size
    )
    return consumed_lib.RemainderOrder(bitmap, order)

  @parameterized.parameters((50, 0.3), (1000, 0.9), (1000, 0.0), (777, 0.5))
  def test_remaining_instances_come_once_then_whole_epochs(self, count, share):
    flags = np.random.default_rng(count).random(count) < share
    order = self._order(flags)
    left = int((~flags).sum())
    ids = order.at(np.arange(left + 2 * count))
    self.assertCountEqual(ids[:left], np.flatnonzero(~flags))
    for epoch in (0, 1):
      part = ids[left + epoch * count : left + (epoch + 1) * count]
      np.testing.assert_array_equal(np.sort(part), np.arange(count))

  def test_the_epochs_to_come_are_those_of_the_plain_order(self):
    flags = np.random.default_rng(1).random(100) < 0.5
    order = self._order(flags)
    plain = permutations.make_order("feistel", num_instances=100, seed=3)
    np.testing.assert_array_equal(order.ids(1, np.arange(100)), plain.ids(1, np.arange(100)))

  @parameterized.parameters(0.0, 0.4, 1.0)
  def test_places_is_the_inverse_of_ids(self, share):
    flags = np.random.default_rng(5).random(300) < share
    order = self._order(flags)
    for epoch in range(3):
      places = np.arange(order.epochs.length(epoch))
      np.testing.assert_array_equal(order.places(epoch, order.ids(epoch, places)), places)
    if 0 < share < 1:
      self.assertEqual(set(order.places(0, np.flatnonzero(flags))), {-1})

  def test_the_rest_is_shuffled(self):
    order = self._order(np.zeros(1000, bool))
    ids = order.at(np.arange(1000))
    self.assertLess(np.mean(np.diff(ids) == 1), 0.02)

  def test_without_remaining_instances_it_begins_with_the_next_epoch(self):
    order = self._order(np.ones(10, bool))
    plain = permutations.make_order("feistel", num_instances=10, seed=3)
    np.testing.assert_array_equal(order.at(np.arange(10)), plain.ids(1, np.arange(10)))
    np.testing.assert_array_equal(order.at(np.arange(10, 20)), plain.ids(2, np.arange(10)))

  def test_a_place_after_the_rest_is_an_error(self):
    order = self._order(np.array([True, False, False, True]))
    with self.assertRaisesRegex(errors.OrderError, r"are in \[0, 2\)"):
      order.ids(0, np.array([2]))

  def test_epochs_of_another_length_are_refused(self):
    order = self._order(np.array([True, False, False, True]))
    self.assertIs(order.with_epochs(epochs_lib.Epochs.constant(4)), order)
    with self.assertRaisesRegex(errors.ConfigError, "cannot be extended"):
      order.with_epochs(epochs_lib.Epochs(((0, 4), (2, 6))))

  def test_an_order_whose_batches_do_not_span_epochs_is_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, "lets no batch span epochs"):
      self._order(np.zeros(10, bool), plain="olmo_core")

  def test_its_name_distinguishes_bitmaps(self):
    names = {self._order(np.arange(10) < k).name for k in (2, 3)}
    self.assertLen(names, 2)
    self.assertEqual(self._order(np.arange(10) < 2).name, self._order(np.arange(10) < 2).name)

  def test_it_survives_pickling(self):
    order = self._order(np.random.default_rng(1).random(5000) < 0.5)
    positions = np.arange(6000)
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(order)).at(positions), order.at(positions)
    )

  def test_a_bitmap_of_instances_does_not_fit_chunks(self):
    with self.assertRaisesRegex(errors.OrderError, "bitmap has 10 chunks, but the order has 5"):
      self._order(np.zeros(10, bool), chunk_size=2)

  def test_a_stream_ends_after_the_rest_and_its_epochs(self):
    path, rows = corpora.write_corpus(self.create_tempdir().full_path)
    from maxtext_olmo.corpus import index_builder as index_lib

    index = index_lib.load_index(path)
    flags = np.arange(len(rows)) % 3 == 0
    bits = path + ".bits"
    consumed_lib.write_consumed(bits, flags, index.fingerprint)
    stream = stream_lib.train_stream(
        index, order="feistel", seed=1, num_epochs=2, consumed_path=bits
    )
    left = int((~flags).sum())
    self.assertEqual(stream.num_positions, left + len(rows))
    ids = stream.instance_ids(np.arange(left + len(rows)))
    self.assertCountEqual(ids[:left], np.flatnonzero(~flags))
    self.assertIn("bitmap", stream.identity()["order"])


if __name__ == "__main__":
  absltest.main()
