"""The `--losses` option of `inspect` and `report`: loss spikes, and how their data differs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import english
from maxtext_olmo import errors

_SOURCES = 10


def add_options(option: Callable[..., None]) -> None:
  """Adds `--losses` and the options that belong to it."""
  option(
      "--losses FILE",
      "find the spikes in the losses that the trainer logged, and how their data differs; FILE is"
      " JSON lines, CSV, or a TensorBoard event file or its directory",
      otherwise="none",
  )
  option(
      "--loss-name NAME",
      "with --losses: name of the loss in the log",
      otherwise="`loss`, or the only name that ends with it",
      default="",
  )
  option(
      "--threshold Z",
      "with --losses: lowest robust z-score of a spike, compared with the 100 losses before it",
      default=6.0,
      type=float,
  )
  option("--spikes N", "with --losses: spikes to examine, the highest first", default=20)
  option("--rows N", "with --losses: rows to show", default=10)


def check_options(args: argparse.Namespace) -> None:
  """Raises ConfigError for values that are not positive."""
  for name in ("spikes", "rows"):
    if getattr(args, name) < 1:
      raise errors.ConfigError(f"--{name} must be 1 or more.")
  if not args.threshold > 0:
    raise errors.ConfigError("--threshold must be more than 0.")


def examine(args: argparse.Namespace, found: Any, tokenizer: Callable[[Any], Any]) -> Any:
  """Returns the losses of `--losses`, the findings about their spikes, and the paths of all files.

  Args:
    found: The run.
    tokenizer: Returns the tokenizer of an index, or None if no text is wanted.
  """
  from maxtext_olmo.inspection import losses as losses_lib
  from maxtext_olmo.inspection import run as run_lib
  from maxtext_olmo.inspection import spikes as spikes_lib

  losses = losses_lib.read_losses(args.losses, name=args.loss_name)
  with run_lib.open_iterator(found) as iterator:
    index = None if iterator.provenance is None else iterator.provenance.index
    findings = spikes_lib.examine(
        iterator,
        losses,
        threshold=args.threshold,
        most_spikes=args.spikes,
        most_rows=args.rows,
        tokenizer=tokenizer(index),
        progress=True,
    )
    return losses, findings, () if iterator.files is None else iterator.files.paths


def show(args: argparse.Namespace, found: Any) -> int:
  """Prints the spikes of a run; returns 0."""
  from maxtext_olmo.inspection import text as text_lib

  def tokenizer(index: Any) -> Any:
    return text_lib.tokenizer_of(index, args.tokenizer) if args.text else None

  _, findings, files = examine(args, found, tokenizer)
  if args.json:
    print(json.dumps(findings.to_json(), indent=1))
    return 0
  print(f"{args.losses}: {findings.name!r} of {findings.logged:,} steps has {findings.summary}")
  if findings.together is None:
    return 0
  _print_spikes(findings)
  contrast, suspects = findings.together.contrast, findings.together.shown
  print()
  shown = [source.source[1] for source in (*contrast.files, *contrast.documents)]
  names = cli.announce_base(files, [*shown, *(suspect.place[0] for suspect in suspects)])
  _print_contrast(contrast, len(findings.each), names)
  _print_suspects(suspects, names)
  return 0


def _print_spikes(findings: Any) -> None:
  if len(findings.each) < len(findings.spikes):
    print(f"The highest {len(findings.each):,} are examined (--spikes).")
  rows = []
  for one in findings.each:
    (spike,), contrast = one.spikes, one.contrast
    steps = f"{spike.first}-{spike.last}" if spike.last > spike.first else str(spike.first)
    first = contrast.rows[0] if contrast.notable else None
    rows.append(
        (
            steps,
            f"{spike.loss:.4g}",
            f"{spike.usual:.4g}",
            f"{spike.score:.1f}",
            len(contrast.rows),
            contrast.notable,
            first and first.label,
            first and f"row {first.row} of step {first.step}: {first.reason}",
        )
    )
  heads = ("steps", "loss", "usually", "z-score", "rows", "stand out", "label", "reason")
  cli.print_table(heads, rows)


def _print_contrast(contrast: Any, spikes: int, names: Mapping[str, str]) -> None:
  from maxtext_olmo.inspection import figures as figures_lib

  print(
      f"{'All spikes together' if spikes > 1 else 'This spike'}: {contrast.notable:,} of"
      f" {len(contrast.rows):,} rows in {len(contrast.steps):,} steps stand out from those of"
      f" {len(contrast.calm_steps):,} calm steps nearby."
  )
  if contrast.without_loss:
    more = english.count(contrast.without_loss, "more row")
    print(f"Left out: {more} without loss.")
  if not contrast.notable:
    print(
        "The data looks like that of the steps around it. Other causes of a spike: the learning"
        " rate, the optimizer's state, numerics, hardware."
    )
  rows = []
  for figure in contrast.figures:
    if figure.notable or abs(figure.score) > figures_lib.NOTABLE:
      words = figures_lib.describe(figure.name, figure.found, figure.usual)
      rows.append((*words, figure.notable))
  if rows:
    cli.print_table(("figure", "mean", "usually", "rows that stand out"), rows)
  for heads, sources in (
      (("label",), contrast.labels),
      (("label", "path"), contrast.files),
      (("label", "path", "document"), [d for d in contrast.documents if d.notable > 1]),
  ):
    table = [
        (
            *(names.get(part, part) for part in source.source),
            f"{source.share:.2%}",
            f"{source.usual_share:.2%}" if len(heads) < 3 else None,
            source.notable,
            f"{source.score:.1f}",
        )
        for source in sources[:_SOURCES]
    ]
    if table:
      cli.print_table((*heads, "share", "usually", "rows that stand out", "score"), table)
    if len(sources) > _SOURCES:
      print(f"{len(sources) - _SOURCES:,} more with lower scores (--json has all).")


def _name_documents(suspects: Any) -> list[str]:
  """Returns one line for each named document to which a row is attributed."""
  from maxtext_olmo.inspection import text as text_lib

  lines = []
  for suspect in suspects:
    for part in suspect.row.parts:
      for span in part.documents:
        if span.name and (part.file, span.document) == (suspect.score.file, suspect.score.document):
          name = text_lib.describe_name(span.name, span.source, span.line)
          lines.append(f"document {span.document}{name}")
  return list(dict.fromkeys(lines))


def _print_suspects(suspects: Any, names: Mapping[str, str]) -> None:
  print("\nRows to look at first:")
  table = []
  for suspect in suspects:
    score = suspect.score
    path, *where = suspect.place
    cells = (score.step, score.row, score.label, names.get(path, path), *where)
    table.append((*cells, f"{score.score:.1f}", score.reason))
  cli.print_table(("step", "row", "label", "path", "bytes", "document", "score", "reason"), table)
  for line in _name_documents(suspects):
    print(line)
  for suspect in suspects:
    if suspect.text:
      print(f"\n══ step {suspect.score.step}, row {suspect.score.row} ══")
    for heading, text in suspect.text:
      print(f"── {heading} ──\n{text}")
