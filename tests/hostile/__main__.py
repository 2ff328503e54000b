"""Tries everything hostile that this folder knows, and ends with a table.

    python -m tests.hostile -j 2                         everything: about 9,600 cases
    python -m tests.hostile --only index/cut-to-half     one case, or those that match a pattern
    python -m tests.hostile --list                       their names

The exit code is 1 if a case ended with an error that is not of this package (FOREIGN), did not end
(HANGS), or was accepted though the data are wrong (SILENT).
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import sys
from collections.abc import Sequence

from tests.hostile import cases
from tests.hostile import catalogue
from tests.hostile import pool

Results = list[tuple[cases.Case, cases.Verdict, str]]


def _rows(results: Results) -> list[list[str]]:
  """Returns the table: a heading, a row for each kind, and the sums."""
  by_kind: dict[str, collections.Counter[cases.Verdict]] = {}
  for case, verdict, _ in results:
    by_kind.setdefault(case.kind, collections.Counter())[verdict] += 1
  by_kind["all"] = sum(by_kind.values(), collections.Counter())
  rows = [["kind", "tried", *cases.Verdict]]
  for kind, counts in by_kind.items():
    tried = counts.total() - counts[cases.Verdict.SKIPPED]
    rows.append([kind, str(tried), *(str(counts[verdict]) for verdict in cases.Verdict)])
  return rows


def _print_table(rows: list[list[str]], *, markdown: bool) -> None:
  widths = [max(map(len, column)) for column in zip(*rows)]
  edge, between = ("| ", " | ") if markdown else ("", "  ")
  for number, row in enumerate(rows):
    cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]
    print(edge + between.join(cells) + edge[::-1])
    if number == 0 and markdown:
      print("|---|" + "---:|" * (len(row) - 1))


def _print_offences(results: Results) -> None:
  for offence in cases.OFFENCES:
    for case, verdict, detail in results:
      if verdict == offence:
        print(f"{verdict}  {case.name}\n    {detail.strip()}")
        print(f"    python -m tests.hostile --only '{case.name}'")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the chosen cases; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("-j", "--jobs", type=int, default=2, help="interpreters at a time")
  parser.add_argument("--only", action="append", help="names or patterns of cases")
  parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
  parser.add_argument("--list", action="store_true", help="print the names and leave")
  parser.add_argument("--verbose", action="store_true", help="show each outcome and all output")
  args = parser.parse_args(argv)
  chosen = [
      case
      for case in catalogue.all_cases()
      if not args.only
      or any(fnmatch.fnmatchcase(case.name, p) or case.name == p for p in args.only)
  ]
  if args.list:
    print("\n".join(case.name for case in chosen))
    return 0
  outcomes = pool.run(chosen, args.jobs, verbose=args.verbose)
  results = [(case, *outcomes[case.name]) for case in chosen]
  skipped = {detail for _, verdict, detail in results if verdict == cases.Verdict.SKIPPED}
  _print_offences(results)
  print("".join(f"skipped: {reason}\n" for reason in sorted(skipped)))
  _print_table(_rows(results), markdown=args.markdown)
  return int(not results or any(verdict in cases.OFFENCES for _, verdict, _ in results))


if __name__ == "__main__":
  sys.exit(main())
