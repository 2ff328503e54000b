"""All cases, in the order of the table."""

from __future__ import annotations

import collections

from tests.hostile import bad_arguments
from tests.hostile import bad_corpus
from tests.hostile import bad_derived
from tests.hostile import bad_run
from tests.hostile import bad_states
from tests.hostile import cases
from tests.hostile import config_values
from tests.hostile import faults
from tests.hostile import processes

_MODULES = (
    bad_corpus, bad_derived, bad_run, bad_states, bad_arguments, config_values, faults, processes,
)  # fmt: skip


def all_cases() -> list[cases.Case]:
  """Returns all cases; no two have one name."""
  found = [case for module in _MODULES for case in module.all_cases()]
  counts = collections.Counter(case.name for case in found)
  twice = [name for name, count in counts.items() if count > 1]
  if twice:
    raise AssertionError(f"Cases with one name: {twice}")
  return found
