"""Tests of the names of documents: stored, read as needed, and looked up."""

import itertools
import os
import pathlib
import tracemalloc

import numpy as np
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from maxtext_olmo import errors
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import document_names
from maxtext_olmo.corpus import file_array
from maxtext_olmo.corpus.storage import LocalStorage

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
_DOCUMENT = st.tuples(_TEXT, _TEXT, st.integers(-1, 2**63 - 1))
# None is a file without a boundary file, which has two documents.
_FILES = st.lists(st.none() | st.lists(st.lists(_DOCUMENT, max_size=6), max_size=3), max_size=4)


class DocumentNamesTest(parameterized.TestCase):

  def write(self, files):
    """Writes and opens the names of files, each a list of blocks of (name, source, line)."""
    folder = self.create_tempdir().full_path
    counts, named = [], 0
    for number, blocks in enumerate(files):
      with document_names.NameSpool(folder, number) as spool:
        for block in blocks or ():
          names, sources, lines = zip(*block) if block else ((), (), ())
          nothing = np.zeros(len(block), np.int64)
          some = boundaries.Boundaries(
              nothing, nothing, names, sources, np.array(lines, np.int64).reshape(-1)
          )
          spool.add(some)
        named += spool.named
      counts.append(2 if blocks is None else sum(map(len, blocks)))
    self.path = os.path.join(folder, "names")
    with open(self.path, "wb") as file:
      sizes = document_names.write_names(
          folder, counts, named, lambda array: file.write(np.ascontiguousarray(array))
      )
    self.layout = sizes.layout(sum(counts))
    return self.open()

  def open(self):
    arrays, offset = [], 0
    for dtype, count in self.layout:
      arrays.append(file_array.FileArray(LocalStorage(), self.path, dtype, offset, count))
      offset += count * np.dtype(dtype).itemsize
    self.assertEqual(os.path.getsize(self.path), offset)
    return document_names.DocumentNames(self.path, arrays)

  @settings(deadline=None, max_examples=60)
  @given(_FILES, st.data())
  def test_names_round_trip_through_a_file(self, files, data):
    expected = []
    for blocks in files:
      documents = itertools.chain(*([[("", "", -1)] * 2] if blocks is None else blocks))
      for name, source, line in documents:
        expected.append(document_names.DocumentName(name, source, None if line < 0 else line))
    names = self.write(files)
    numbers = data.draw(
        st.lists(st.sampled_from(range(len(expected)))) if expected else st.just([])
    )
    found = names.describe(np.array(numbers, np.int64))
    self.assertEqual(found, [expected[number] for number in numbers])
    wanted = [*sorted({one.name for one in expected if one.name}), "no such name", "\ud800"]
    for name, documents in zip(wanted, names.find(wanted), strict=True):
      self.assertEqual(
          documents.tolist(), [i for i, one in enumerate(expected) if one.name == name]
      )

  def test_a_source_evicted_from_the_cache_keeps_its_name(self):
    block = [(f"n{i}", f"s{i % 5000}", i) for i in range(12_000)]
    names = self.write([[block[:7000], block[7000:]]])
    found = names.describe(np.arange(12_000))
    self.assertEqual([one.source for one in found], [source for _, source, _ in block])

  def test_a_place_is_source_and_line(self):
    self.assertEqual(document_names.DocumentName("n", "s", 3).place, "s:3")
    self.assertEqual(document_names.DocumentName("n", "s", None).place, "s")
    self.assertEqual(document_names.DocumentName("n", "", 3).place, "")

  def test_damage_gives_an_error_or_another_name(self):
    files = [[[(f"name-{i}", f"source-{i % 3}", i) for i in range(9)]]]
    self.write(files)
    whole = pathlib.Path(self.path).read_bytes()
    wrong = 0
    for place in range(len(whole)):
      damaged = bytearray(whole)
      damaged[place] ^= 0x80
      pathlib.Path(self.path).write_bytes(damaged)
      names = self.open()
      try:
        names.describe(np.arange(9))
        names.find([f"name-{i}" for i in range(9)])
      except errors.CorpusError as error:
        self.assertIn("index documents", str(error))
        wrong += 1
    self.assertGreater(wrong, 9 * 12)

  def test_lookups_do_not_load_the_names(self):
    block = [(f"name-{i:060}", "source", i) for i in range(150_000)]
    names = self.write([[block]])
    tracemalloc.start()
    self.addCleanup(tracemalloc.stop)
    ((found,),) = names.find([block[123_456][0]])
    self.assertEqual(found, 123_456)
    self.assertLess(tracemalloc.get_traced_memory()[1], 8 << 20)  # The names have 10 MB.


if __name__ == "__main__":
  absltest.main()
