"""`maxtext-olmo inspect`: shows what a run has seen and will see."""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import json
from collections.abc import Iterable, Mapping
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.cli import spikes

_DESCRIPTION = """\
Shows what a run has seen and will see, without replaying it and without a log.

PATH names a run: a checkpoint, a directory of checkpoints (of any trainer), the directory above
it, or a config file (.py, .yml, .json). With a second run, the two are compared. Nothing is written
next to the run, and no accelerator is used. --find scans the corpus piece by piece, also on several
machines; a search that is killed continues where it stopped.

The config is the one saved next to the checkpoints. --config=FILE replaces it, and
--config.KEY=VALUE changes single keys, for example if the corpus is mounted elsewhere.
"""

_EPILOG = """\
examples:
  maxtext-olmo inspect checkpoints                        a summary of the latest data state
  maxtext-olmo inspect checkpoints --step 41200           the rows of a step
  maxtext-olmo inspect checkpoints --step 41200 --row 3 --text
  maxtext-olmo inspect checkpoints --steps 41190:41210    a line for each step
  maxtext-olmo inspect run_a/checkpoints run_b/checkpoints
  maxtext-olmo inspect checkpoints --find "harbour seal"  every step that has it, or why none does
  maxtext-olmo inspect checkpoints --document 901         a document by its number, or its name
  maxtext-olmo inspect checkpoints --serve                the same in a browser
  maxtext-olmo inspect checkpoints --file wiki/part-003.npy --byte 32768
  maxtext-olmo inspect checkpoints --losses metrics.jsonl  the loss spikes, and the data around them
"""


def add_parser(subparsers: Any) -> None:
  """Adds `inspect`."""
  option = cli.add_command(
      subparsers,
      "inspect",
      run,
      help="show what a run has seen and will see: any past or future step, down to its text",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option("PATH", "the run: a checkpoint, a directory with checkpoints, or a config file")
  option("OTHER", "a second run to compare with the first", nargs="?")
  cli.add_run_options(option)
  option("--step N", "show the rows of a step", otherwise="a summary", type=int)
  option("--row R", "show one row of the step, with all its parts", otherwise="all rows", type=int)
  option("--steps A:B", "show steps A to B - 1, one line each", otherwise="a summary")
  option("--find TEXT", "show every step that has a text; scans the corpus", otherwise="a summary")
  option("--label PATTERN", "with --find: scan only these labels", otherwise="all", default="*")
  option(
      "--document ID",
      "show every step that has a document, given by number or name",
      otherwise="a summary",
  )
  option("--file F", "with --byte: a token file of the corpus", otherwise="a summary")
  option("--byte B", "show every step that has this byte of --file", otherwise="none", type=int)
  option(
      "--until STEP",
      "with --find, --document or --file: the step up to which to look",
      otherwise="the end of the next epoch",
      type=int,
  )
  spikes.add_options(option)
  option("--text", "also show the text of the rows", otherwise="no text", action="store_true")
  option(
      "--tokenizer T",
      "tokenizer of the corpus: `bytes`, or the path of a tokenizer.json",
      otherwise="`bytes` if the index names it",
      default="",
  )
  option("--read N", "maximum rows to read in a search, to apply the filter to them", default=1000)
  option(
      "--serve",
      "serve pages about the run on 127.0.0.1, for a browser, until Ctrl-C",
      otherwise="print to stdout",
      action="store_true",
  )
  option("--json", "print all details as JSON", otherwise="text", action="store_true")
  cli.add_work_options(option)


def run(args: argparse.Namespace) -> int:
  """Prints the requested view of the run."""
  _check(args)
  cli.use_cpu()
  from maxtext_olmo.inspection import comparison
  from maxtext_olmo.inspection import summary

  found = cli.find_run(args.path, args)
  if args.other:
    compared = comparison.compare(found, cli.find_run(args.other, args))
    _print(args, compared.to_json(), compared.lines())
    return 0 if compared.same_until is None else 1
  if args.losses:
    return spikes.show(args, found)
  if args.step is not None or args.steps:
    return _show_steps(args, found)
  if args.find is not None or args.document is not None or args.file:
    return _show_visits(args, found)
  if args.serve:
    return _serve(args, found)
  described = summary.summarize(found)
  _print(args, described.to_json(), described.lines())
  return 0


def _check(args: argparse.Namespace) -> None:
  spikes.check_options(args)
  asked = (args.other, args.step, args.row, args.steps, args.find, args.document, args.file)
  if args.losses and any(value is not None for value in asked):
    raise errors.ConfigError(
        "--losses chooses the steps itself: remove --losses, or remove --step, --steps, --find,"
        " --document, --file and the second run."
    )
  if args.row is not None and args.step is None:
    raise errors.ConfigError("--row needs --step, the step of the row.")
  if bool(args.file) != (args.byte is not None):
    raise errors.ConfigError("--file and --byte work only together; give both.")
  if args.step is not None and args.steps:
    raise errors.ConfigError("Give --step or --steps, not both.")
  if args.find is None and cli.has_work_options(args):
    raise errors.ConfigError(
        "--workers, --processes, --dask, --ray, --results, --part, --of, --merge and --retry-failed"
        " work only with --find."
    )
  if args.read < 0:
    raise errors.ConfigError(f"--read={args.read} must be 0 or more.")
  shown = (*asked, args.losses)
  if args.serve and (args.json or any(value is not None for value in shown)):
    raise errors.ConfigError("--serve shows everything about one run; remove the other options.")
  if args.other and (args.step is not None or args.steps):
    raise errors.ConfigError("Two runs are compared as a whole; remove --step and --steps.")


def _show_steps(args: argparse.Namespace, found: Any) -> int:
  from maxtext_olmo.inspection import run as run_lib
  from maxtext_olmo.inspection import text as text_lib

  with run_lib.open_iterator(found) as iterator:
    named = None if iterator.provenance is None else iterator.provenance.index
    tokenizer = text_lib.tokenizer_of(named, args.tokenizer) if args.text else None
    steps = range(args.step, args.step + 1) if args.step is not None else _range(args.steps)
    if args.json:
      values = [_json(iterator.explain(step), args, tokenizer) for step in steps]
      print(json.dumps(values[0] if args.step is not None else values, indent=1))
      return 0
    if args.step is None and not args.text:
      _print_overview(iterator.explain(step) for step in steps)
      return 0
    for step in steps:
      _print_step(args, iterator.explain(step), iterator, tokenizer)
  return 0


def _show_visits(args: argparse.Namespace, found: Any) -> int:
  """Shows the steps that have a text, a document or a byte; returns 1 if there are none."""
  from maxtext_olmo.inspection import run as run_lib
  from maxtext_olmo.inspection import search
  from maxtext_olmo.inspection import visits as visits_lib

  with run_lib.open_iterator(found) as iterator:
    if args.find is not None:
      outcome, options = _search(args, found, iterator)
      if options.part is not None:
        return cli.report_part(outcome, options)
      targets = search.hits_of(outcome)
      outcome.discard()
    else:
      targets = _targets(args, iterator)
    all_visits, left = [], args.read
    for target in targets:
      all_visits.append(visits_lib.find_visits(iterator, target, args.until, left))
      left -= all_visits[-1].rows_read
  if args.json:
    print(json.dumps([visits.to_json() for visits in all_visits], indent=1))
  elif not targets:
    part = "" if args.label == "*" else f"--label={args.label} part of the "
    print(f"This text does not occur in the {part}corpus.")
  else:
    for visits in all_visits:
      _print_visits(visits)
    unread = sum(visits.unread for visits in all_visits)
    if unread:
      print(
          f"{unread:,} rows were not read, so it is unknown whether they are in the loss; --read"
          " reads more."
      )
  return 0 if any(visits.visits for visits in all_visits) else 1


def _targets(args: argparse.Namespace, iterator: Any) -> list[Any]:
  """Returns the token ranges of the document or the byte that the command line asks about."""
  from maxtext_olmo.inspection import search
  from maxtext_olmo.inspection import visits as visits_lib

  if args.document is not None:
    numbers = visits_lib.find_documents(iterator, args.document)
    return [visits_lib.document_range(iterator, number) for number in numbers]
  index = _index_of(iterator)
  number = search.file_number(iterator.files, args.file)
  return [search.range_of_byte(iterator.files, index, number, args.byte)]


def _search(args: argparse.Namespace, found: Any, iterator: Any) -> tuple[Any, Any]:
  """Looks for a text; returns the results of the pieces, and how the work was done."""
  from maxtext_olmo.inspection import search
  from maxtext_olmo.inspection import text as text_lib

  index = _index_of(iterator)
  tokenizer = text_lib.tokenizer_of(index, args.tokenizer)
  only = [i for i, f in enumerate(index.files) if fnmatch.fnmatchcase(f.label, args.label)]
  if not only:
    raise errors.ConfigError(f"--label={args.label} matches no label of the corpus.")
  options = cli.work_options(args, found.config["olmo_index_path"])
  outcome = search.find_in_pieces(
      args.find, tokenizer, index, iterator.files, options, only=only, progress=True
  )
  return outcome, options


def _index_of(iterator: Any) -> Any:
  if iterator.provenance is None:
    raise errors.ConfigError("This run does not read files, so it cannot be searched.")
  return iterator.provenance.index


def _print_visits(visits: Any) -> None:
  from maxtext_olmo.inspection import text as text_lib
  from maxtext_olmo.inspection import visits as visits_lib

  print(
      f"{cli.plain(visits.file)}, bytes {visits.first_byte}-{visits.end_byte} ("
      f"{english.count(visits.tokens, 'token')}, label {cli.plain(visits.label)}"
      f"{visits.describe_documents()})"
  )
  if not visits.visits:
    print(f"  {visits.reason}")
    return
  rows = []
  for visit in visits.visits:
    when = "seen" if visit.seen else "to come"
    if visit.step is None:
      when = visits_lib.describe_unseen(visit)
    columns = f"{visit.columns[0]}-{visit.columns[1]}"
    cut = visit.tokens < visits.tokens
    held = f"{visit.tokens:,} of {visits.tokens:,}" if cut else "all"
    kept = text_lib.describe_verdict(visit.kept, visit.excluded, visit.tokens)
    cells = (visit.step, visit.row, visit.position, _epoch(visit))
    rows.append((*cells, when, columns, held, kept))
  cli.print_table(("step", "row", "position", "epoch", "when", "columns", "tokens", "kept"), rows)


def _serve(args: argparse.Namespace, found: Any) -> int:
  """Serves pages about the run until Ctrl-C."""
  from maxtext_olmo.inspection import run as run_lib
  from maxtext_olmo.inspection import serve
  from maxtext_olmo.inspection import text as text_lib
  from maxtext_olmo.inspection import views

  with run_lib.open_iterator(found) as iterator:
    index = None if iterator.provenance is None else iterator.provenance.index
    tokenizer = text_lib.tokenizer_if_known(index, args.tokenizer)
    with serve.Server(views.Views(found, iterator, tokenizer, args.until)) as server:
      text = "" if tokenizer else ", without text because --tokenizer is not given"
      print(f"Serving {args.path}{text}; press Ctrl-C to stop:\n{server.address}", flush=True)
      with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
  return 0


def _range(text: str) -> range:
  first, colon, end = text.partition(":")
  if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
    raise errors.ConfigError(f"--steps={text} is not a range of steps, such as 100:120.")
  return range(int(first), int(end))


def _rows(explanation: Any, row: int | None) -> Any:
  if row is None:
    return explanation.rows
  if not 0 <= row < len(explanation.rows):
    raise errors.ConfigError(
        f"--row={row}: step {explanation.step} has rows 0 to {len(explanation.rows) - 1}."
    )
  return explanation.rows[row : row + 1]


def _json(explanation: Any, args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
  from maxtext_olmo.inspection import text as text_lib

  values = explanation.to_json()
  chosen = _rows(explanation, args.row)
  values["rows"] = [values["rows"][row.row] for row in chosen]
  if tokenizer is not None:
    for shown, row in zip(values["rows"], chosen):
      shown["text"] = [
          {"heading": heading, "text": text} for heading, text in text_lib.pieces(row, tokenizer)
      ]
  return values


def _print(args: argparse.Namespace, values: dict[str, Any], lines: list[str]) -> None:
  print(json.dumps(values, indent=1) if args.json else "\n".join(lines))


def _print_overview(explanations: Iterable[Any]) -> None:
  """Prints a line for each step."""
  rows = []
  for explanation in explanations:
    labels = collections.Counter(row.label for row in explanation.rows if row.parts)
    shown = ", ".join(f"{label or '-'} {count}" for label, count in labels.most_common())
    masked = sum(not row.kept for row in explanation.rows)
    loss = sum(row.loss_tokens for row in explanation.rows)
    epochs = dict.fromkeys(_epoch(row) for row in explanation.rows if row.epoch >= 0)
    excluded = sum(row.excluded for row in explanation.rows)
    cells = (explanation.position, "/".join(epochs), len(explanation.rows))
    rows.append((explanation.step, *cells, masked, excluded, loss, shown))
  heads = ("rows", "masked", "excluded tokens", "loss tokens", "label")
  cli.print_table(("step", "position", "epoch", *heads), rows)


def _print_step(args: argparse.Namespace, explanation: Any, iterator: Any, tokenizer: Any) -> None:
  """Prints the rows of a step."""
  from maxtext_olmo.inspection import text as text_lib

  when = "seen" if explanation.step < iterator.step else "to come"
  print(
      f"step {explanation.step:,} ({when}): {len(explanation.rows):,} rows of"
      f" {explanation.sequence_length:,} tokens from position {explanation.position:,}, repetition"
      f" filter {'on' if explanation.ngram_filter else 'off'}"
  )
  rows = _rows(explanation, args.row)
  names: Mapping[str, str] = {}
  if iterator.files is not None:
    names = cli.announce_base(iterator.files.paths, [p.file for row in rows for p in row.parts])
  table = []
  for row in rows:
    for part in row.parts or [None]:
      first = part is None or part is row.parts[0]
      own = (row.row, row.position, _epoch(row), row.number) if first else (None,) * 4
      kept = ""
      if first and row.parts:
        kept = text_lib.describe_verdict(row.kept, row.excluded, row.used)
      table.append(
          (
              *own,
              "padding" if part is None else part.label,
              "" if part is None else names.get(part.file, part.file),
              "" if part is None or part.first_byte is None else _bytes(part),
              "" if part is None else _documents(part),
              kept,
              f"{row.loss_share:.2%}" if first else "",
          )
      )
  cli.print_table(
      ("row", "position", "epoch", "number", "label", "path", "bytes", "documents", "kept", "loss"),
      table,
  )
  if args.row is not None:
    for part in rows[0].parts:
      for span in part.documents:
        print(f"  {text_lib.describe_span(span)}")
  for row in rows if tokenizer is not None else ():
    print(f"\n══ step {explanation.step}, row {row.row} ══")
    for heading, text in text_lib.pieces(row, tokenizer):
      print(f"── {heading} ──\n{text}")


def _bytes(part: Any) -> str:
  return f"{part.first_byte}-{part.end_byte}"


def _documents(part: Any) -> str:
  """Returns the documents of a part; `…` marks a document that continues outside the part."""
  names = [
      ("" if span.first == 0 else "…") + str(span.document) + ("" if _ends(span) else "…")
      for span in part.documents
  ]
  return " ".join(names if len(names) <= 4 else [*names[:2], f"({len(names) - 3} more)", names[-1]])


def _ends(span: Any) -> bool:
  return span.last == span.length - 1


def _epoch(found: Any) -> str:
  from maxtext_olmo.inspection import text as text_lib

  return text_lib.describe_epoch(found)
