"""Tests of assembling the parts of a corpus from tokenized units."""

import functools
import itertools
import os
import pathlib

import hypothesis
from absl.testing import absltest
from hypothesis import strategies as st

from maxtext_olmo.corpus import assemble_parts
from maxtext_olmo.corpus import part_files
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.errors import CorpusError


class AssemblePartsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.numbers = itertools.count()

  def write_unit(self, lengths, kept):
    """Writes a unit; `lengths` has a list for each slice, and `kept` whether the slice is kept."""
    path = str(self.dir / "units" / f"{next(self.numbers)}.npy")
    documents = [
        part_files.EncodedDocument(
            bytes([length, number]) * length, length, "n" * (line % 2), f"{number}", line
        )
        for number, some in enumerate(lengths)
        for line, length in enumerate(some, start=1)
    ]
    part_files.write_part(documents, path)
    slices = tuple(
        assemble_parts.UnitSlice(f"f{number}", 10 * number, keeps)
        for number, keeps in enumerate(kept)
    )
    chosen = [one for one in documents if kept[int(one.source)]]
    unit = assemble_parts.TokenizedUnit(
        path,
        n_tokens=sum(one.length for one in documents),
        kept_tokens=sum(one.length for one in chosen),
        kept_documents=len(chosen),
        slices=slices,
    )
    expected = [
        one._replace(
            name=one.name or f"f{one.source}:{10 * int(one.source) + one.line}",
            source=f"f{one.source}",
            line=10 * int(one.source) + one.line,
        )
        for one in chosen
    ]
    return unit, expected

  def assemble(self, units, tokens_per_file, group_tokens):
    """Returns the documents of each part."""
    read_lengths = functools.partial(assemble_parts.read_lengths, open_storage())
    groups = assemble_parts.plan_groups("l", units, tokens_per_file, read_lengths, group_tokens)
    out = str(self.dir / f"out{next(self.numbers)}")
    work = assemble_parts.AssembleParts(out, 2, tokens_per_file)
    # In any order: a group needs nothing from the others.
    names = {group.key: work(group)["parts"] for group in reversed(groups)}
    parts = [name for group in groups for name in names[group.key]]
    return [
        list(part_files.read_part(open_storage(), os.path.join(out, "l", part), 2))
        for part in parts
    ], parts

  @hypothesis.given(
      units=st.lists(
          st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=4), st.booleans()), max_size=3),
          max_size=6,
      ),
      tokens_per_file=st.integers(1, 40),
      group_tokens=st.integers(1, 60),
  )
  @hypothesis.settings(max_examples=60, deadline=None)
  def test_parts_are_those_of_one_writer(self, units, tokens_per_file, group_tokens):
    made = [self.write_unit([s for s, _ in unit], [k for _, k in unit]) for unit in units]
    expected = [document for _, some in made for document in some]
    found, names = self.assemble([unit for unit, _ in made], tokens_per_file, group_tokens)
    reference = str(self.dir / f"reference{next(self.numbers)}")
    self.assertEqual(names, part_files.write_parts(iter(expected), reference, tokens_per_file))
    self.assertEqual(
        found,
        [
            list(part_files.read_part(open_storage(), os.path.join(reference, name), 2))
            for name in names
        ],
    )

  def test_only_units_in_which_a_part_ends_are_read_for_the_plan(self):
    units = [self.write_unit([[5, 5]], [True])[0] for _ in range(9)]
    read = []

    def read_lengths(unit):
      read.append(unit)
      return assemble_parts.read_lengths(open_storage(), unit)

    groups = assemble_parts.plan_groups("l", units, 35, read_lengths, group_tokens=1)
    self.assertEqual(read, [units[3], units[6]])
    self.assertEqual(
        [(one.first_part, one.skipped, one.documents, len(one.units)) for one in groups],
        [(0, 0, 7, 4), (1, 1, 7, 4), (2, 0, 4, 2)],
    )

  def test_a_unit_that_lost_documents_is_an_error(self):
    unit, _ = self.write_unit([[5, 5]], [True])
    (group,) = assemble_parts.plan_groups("l", [unit], 99, lambda unit: [5, 5])
    part_files.write_part([part_files.EncodedDocument(b"ab", 1, "", "0", 1)], unit.path)
    with self.assertRaisesRegex(CorpusError, "part 0 of l have 1 tokens; expected 10. Remove "):
      assemble_parts.AssembleParts(str(self.dir / "out"), 2, 99)(group)
    self.assertEmpty(list((self.dir / "out").rglob("part*")))


if __name__ == "__main__":
  absltest.main()
