"""`maxtext-olmo verify`: is the corpus what its index says?"""

import argparse
from typing import Any

from maxtext_olmo import cli

_EPILOG = """\
exit codes: 0 no errors (there may be warnings); 1 errors were found; 2 the index cannot be read
what each finding means, and what to do: docs/guides/troubleshooting.md

example:
  maxtext-olmo verify olmo-mix-0925.json --vocab-size 100278 --eos-id 100257
"""
_COLOURS = {"error": "red", "warning": "yellow"}


def add_parser(subparsers: Any) -> None:
  """Adds `verify`."""
  option = cli.add_command(
      subparsers,
      "verify",
      run,
      help="check the files of an index: sizes, dtype, ids, EOS, checksums",
      description=(
          "Checks that every file of an index is there with its size, and that its data look like"
          " the index's dtype. With --vocab-size, --eos-id, or checksums in the index, all tokens"
          " are read."
      ),
      epilog=_EPILOG,
  )
  option("INDEX", "the index, a JSON file (MaxText's own too)")
  option("--vocab-size N", "token ids must be below N", otherwise="ids are not checked", type=int)
  option(
      "--eos-id ID",
      "the id that ends documents: it must occur, and documents of unlikely lengths are a warning",
      otherwise="not looked for",
      type=int,
  )
  option("--base DIR", "where the token files are now", otherwise="the base stored in the index")
  option(
      "--path-remap FROM TO",
      "replace FROM at the beginning of full paths by TO; may be given more than once",
      otherwise="none",
      nargs=2,
      action="append",
      default=[],
  )
  option("--workers N", "threads", otherwise="one for each core", type=int)


def run(args: argparse.Namespace) -> int:
  """Verifies a corpus and prints what was found."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import verify

  report = verify.verify_corpus(
      index_lib.load_index(args.index, base=args.base),
      vocab_size=args.vocab_size,
      eos_id=args.eos_id,
      path_remap=dict(args.path_remap),
      workers=args.workers,
      progress=True,
  )
  if report.findings:
    cli.print_table(
        ("level", "path", "finding"),
        [(found.level, found.path or "(all files)", found.message) for found in report.findings],
        style=lambda row: _COLOURS[row[0]],
    )
  print(f"{report.files:,} files, {report.tokens:,} tokens")
  print("checked: " + ", ".join(report.checks))
  if report.documents:
    print(f"documents: {report.documents}")
  for reason in report.unchecked:
    print(f"not checked: {reason}")
  counts = ", ".join(
      f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}"
      for word, findings in (("error", report.errors), ("warning", report.warnings))
  )
  print(f"{'ok' if report.ok else 'NOT OK'}: {counts}")
  return 0 if report.ok else 1
