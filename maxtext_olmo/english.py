"""Singular and plural nouns for messages."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
  """Returns a count followed by its noun, which is singular for 1 and otherwise plural.

  >>> count(1, "file"), count(1200, "file"), count(0, "more row")
  ('1 file', '1,200 files', '0 more rows')
  """
  return f"{number:,} {noun}{'' if number == 1 else 's'}"
