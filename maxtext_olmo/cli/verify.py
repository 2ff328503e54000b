"""`maxtext-olmo verify`: is the corpus what its index says?"""

import argparse
from typing import Any

_EPILOG = """\
exit codes: 0 no errors (there may be warnings); 1 errors were found; 2 the index cannot be read
what each finding means, and what to do: docs/guides/troubleshooting.md

example:
  maxtext-olmo verify olmo-mix-0925.json --vocab-size 100278 --eos-id 100257
"""


def add_parser(subparsers: Any) -> None:
  """Adds `verify`."""
  parser = subparsers.add_parser(
      "verify",
      help="check the files of an index: sizes, dtype, ids, EOS, checksums",
      description=(
          "Checks that every file of an index is there with its size, and that its data look like"
          " the index's dtype.\nWith --vocab-size, --eos-id, or checksums in the index, all tokens"
          " are read."
      ),
      epilog=_EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("index", metavar="INDEX", help="the index, a JSON file (MaxText's own too)")
  parser.add_argument(
      "--vocab-size",
      type=int,
      metavar="N",
      help="token ids must be below N (default: ids are not checked)",
  )
  parser.add_argument(
      "--eos-id",
      type=int,
      metavar="ID",
      help="the id that ends documents, which must occur (default: not looked for)",
  )
  parser.add_argument(
      "--base",
      metavar="DIR",
      help="where the token files are now (default: the base that is stored in the index)",
  )
  parser.add_argument(
      "--path-remap",
      nargs=2,
      action="append",
      default=[],
      metavar=("FROM", "TO"),
      help=(
          "replace FROM at the beginning of full paths by TO; may be given more than once"
          " (default: none)"
      ),
  )
  parser.add_argument(
      "--workers", type=int, metavar="N", help="threads (default: one for each core)"
  )
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Verifies a corpus and prints what was found."""
  from maxtext_olmo.cli import tables
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import verify

  index = index_lib.load_index(args.index, base=args.base)
  report = verify.verify_corpus(
      index,
      vocab_size=args.vocab_size,
      eos_id=args.eos_id,
      path_remap=dict(args.path_remap),
      workers=args.workers,
      progress=True,
  )
  console = tables.console()
  if report.findings:
    table = tables.new_table("level", "path", "finding")
    colours = {"error": "red", "warning": "yellow"}
    for finding in report.findings:
      tables.add_row(
          table,
          finding.level,
          finding.path or "(all files)",
          finding.message,
          style=colours[finding.level],
      )
    console.print(table)
  console.print(f"{report.files:,} files, {report.tokens:,} tokens", markup=False)
  console.print("checked: " + ", ".join(report.checks), markup=False)
  for reason in report.unchecked:
    console.print(f"not checked: {reason}", markup=False)
  counts = ", ".join(
      f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}"
      for word, findings in (("error", report.errors), ("warning", report.warnings))
  )
  console.print(f"{'ok' if report.ok else 'NOT OK'}: {counts}", markup=False)
  return 0 if report.ok else 1
