"""`maxtext-olmo report`: writes a page that shows what a run has seen and will see."""

import argparse
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo.cli import spikes

_DESCRIPTION = """\
Writes one HTML file about a run: its sources over all past and future steps, epochs per label,
changes, and the identity of the stream. With --losses, the file also shows the loss, its spikes,
how the data of the spikes differs, and the rows to look at first, with their text if the tokenizer
is known. The file opens without a server and without network access. Needs the extra `report`.

PATH is a checkpoint, a directory of checkpoints (of any trainer), the directory above it, or a
config file (.py, .yml, .json, with --config.KEY=VALUE as in training).
"""

_EPILOG = """\
examples:
  maxtext-olmo report checkpoints --losses metrics.jsonl --output report.html
  maxtext-olmo report output/run_name --losses output/run_name/tensorboard --output report.html \\
      --tokenizer tokenizer.json
  maxtext-olmo report configs/olmo3_7b_stage1.py --config.olmo_index_path=index.json \\
      --output report.html
"""


def add_parser(subparsers: Any) -> None:
  """Adds `report`."""
  option = cli.add_command(
      subparsers,
      "report",
      run,
      help="write a page that shows what a run has seen and will see",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option("PATH", "the run: a checkpoint, a directory with checkpoints, or a config file")
  option("--output FILE", "the HTML file to write", required=True)
  cli.add_run_options(option)
  option(
      "--steps N",
      "number of steps of the run",
      otherwise="from the config, or up to the end of the epoch",
      type=int,
  )
  spikes.add_options(option)
  option(
      "--tokenizer T",
      "tokenizer for the text of rows: `bytes`, or the path of a tokenizer.json",
      otherwise="`bytes` if the index names it, or no text",
      default="",
  )
  option("--title TEXT", "the heading", otherwise="the name of the run")


def run(args: argparse.Namespace) -> int:
  """Writes the page."""
  from maxtext_olmo import atomic
  from maxtext_olmo.errors import ConfigError

  if args.steps is not None and args.steps < 1:
    raise ConfigError("--steps must be positive.")
  spikes.check_options(args)
  cli.use_cpu()
  from maxtext_olmo.inspection import report
  from maxtext_olmo.inspection import run_plan
  from maxtext_olmo.inspection import text

  found = cli.find_run(args.path, args)
  losses = findings = None
  if args.losses:
    losses, findings, _ = spikes.examine(
        args, found, lambda index: text.tokenizer_if_known(index, args.tokenizer)
    )
  with run_plan.open_plan(found, args.steps) as plan:
    page = report.make_page(
        plan,
        plan.count_sources(),
        title=args.title or f"Report of {args.path}",
        losses=losses,
        findings=findings,
    ).encode()
  atomic.write_atomically(args.output, page)
  said = "" if findings is None else f", {len(findings.spikes):,} loss spikes"
  print(f"{args.output}: {len(page) / 1e6:.1f} MB{said}.")
  return 0
