"""`maxtext-olmo verify`: checks that a corpus matches its index."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo import english
from maxtext_olmo.corpus import paths

if TYPE_CHECKING:
  from maxtext_olmo.corpus.verify import VerifyReport

_EPILOG = """\
exit codes: 0 no errors (there may be warnings); 1 errors were found; 2 the index cannot be read,
results are missing (--merge), or a file cannot be read (--part); 75 an object store does not
answer. With --part, errors in the corpus do not change the exit code; --merge reports them.
docs/guides/troubleshooting.md explains each finding and what to do about it

example:
  maxtext-olmo verify olmo-mix-0925.json --vocab-size 100278 --eos-id 100257
on many machines: docs/guides/fleet.md
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
          "Checks that every file of an index exists and has the right size, and that its data"
          " looks like the index's dtype. With --vocab-size, --eos-id, or checksums in the index,"
          " all tokens are read."
      ),
      epilog=_EPILOG,
  )
  option("INDEX", "the index, a JSON file (an index made by MaxText works too)")
  option("--vocab-size N", "token ids must be below N", otherwise="ids are not checked", type=int)
  option(
      "--eos-id ID",
      "the token that ends documents; it must occur, and unlikely document lengths cause a warning",
      otherwise="not checked",
      type=int,
  )
  option(
      "--base DIR", "directory or URL of the token files", otherwise="the base stored in the index"
  )
  cli.add_path_remap(option)
  cli.add_storage_options(option)
  cli.add_work_options(option)


def run(args: argparse.Namespace) -> int:
  """Verifies a corpus and prints the findings."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus import verify

  options = cli.work_options(args, args.index)
  if not options.merge:
    # A file that could not be read may be readable by now.
    options = dataclasses.replace(options, retry_failed=True)
  index = index_lib.load_index(args.index, base=args.base)
  outcome = verify.check_pieces(
      index,
      options,
      vocab_size=args.vocab_size,
      eos_id=args.eos_id,
      path_remap=dict(args.path_remap),
      progress=True,
  )
  if options.part is not None:
    return cli.report_part(outcome, options)
  report = verify.make_report(index, outcome, vocab_size=args.vocab_size, eos_id=args.eos_id)
  base = paths.remap(index.base, dict(args.path_remap))
  _print_report(report, base, options.results, 0 if options.merge else outcome.reused)
  if report.ok:
    outcome.discard()
  return 0 if report.ok else 1


def _print_report(report: "VerifyReport", base: str, results: str, reused: int) -> None:
  if report.findings:
    cli.print_table(
        ("level", "path", "finding"),
        [(found.level, found.path or "(all files)", found.message) for found in report.findings],
        style=lambda row: _COLOURS[row[0]],
    )
  where = f" below {cli.plain(base)}" if base else ""
  print(f"{english.count(report.files, 'file')}{where}, {english.count(report.tokens, 'token')}")
  print("checked: " + ", ".join(report.checks))
  if report.documents:
    print(f"documents: {report.documents}")
  for reason in report.unchecked:
    print(f"not checked: {reason}")
  if reused:
    again = "run the command again" if report.ok else f"remove {results}"
    print(
        f"reused: the results of {english.count(reused, 'piece')} whose files have the same size"
        f" and modification time as in an earlier run; to read these too, {again}"
    )
  if not report.ok:
    print(
        f"results: kept in {results}, so that the next run reads only files that have"
        " changed or could not be read"
    )
  counts = ", ".join(
      f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}"
      for word, findings in (("error", report.errors), ("warning", report.warnings))
  )
  print(f"{'ok' if report.ok else 'NOT OK'}: {counts}")
