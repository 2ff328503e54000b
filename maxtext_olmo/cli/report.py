"""`maxtext-olmo report`: a page that shows what a run has seen and will see."""

import argparse
from typing import Any

from maxtext_olmo import cli

_DESCRIPTION = """\
Writes one HTML file about a run: its sources over all steps, past and to come, epochs per label,
changes, the losses with their spikes where --losses is given, and the identity of the stream. The
file opens without a server and without network access. Needs the extra `report`.
"""

_EPILOG = """\
examples:
  maxtext-olmo report configs/olmo3_7b_stage1.py --config.olmo_index_path=index.json \\
      --output report.html
  maxtext-olmo report configs/tiny.py --config.dataset_type=olmo_grain \\
      --config.olmo_index_path=data/index.json --losses metrics.jsonl --output report.html
"""

_MOST_SPIKES = 50


def add_parser(subparsers: Any) -> None:
  """Adds `report`."""
  option = cli.add_command(
      subparsers,
      "report",
      run,
      help="a page that shows what a run has seen and will see",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option("PATH RUN", "the config file of a run, CONFIG.py")
  option("--output FILE", "the page", required=True)
  option("--steps N", "steps of the run", otherwise="as the config says", type=int)
  option(
      "--losses FILE",
      "losses that the trainer logged: JSON lines, CSV, or event files of TensorBoard",
      otherwise="no losses",
  )
  option("--loss-name NAME", "what the log calls the loss", otherwise="found by name", default="")
  option("--title TEXT", "the heading", otherwise="the name of the run")


def run(args: argparse.Namespace) -> int:
  """Writes the page."""
  from maxtext_olmo import atomic
  from maxtext_olmo.errors import ConfigError
  from maxtext_olmo.inspection import losses as losses_lib
  from maxtext_olmo.inspection import report
  from maxtext_olmo.inspection import run_plan

  if not args.path.endswith(".py"):
    raise ConfigError(f"{args.path} is not a config file of a run, CONFIG.py.")
  if args.steps is not None and args.steps < 1:
    raise ConfigError("--steps must be positive.")
  options, steps = cli.read_options(args.path, args.rest)
  plan = run_plan.plan_of_options(options, args.steps or steps)
  losses, spikes = None, []
  if args.losses:
    losses = losses_lib.read_losses(args.losses, name=args.loss_name)
    spikes = losses_lib.find_spikes(losses)
  page = report.make_page(
      plan,
      plan.count_sources(),
      title=args.title or f"Report of {args.path}",
      losses=losses,
      spikes=spikes[:_MOST_SPIKES],
  )
  atomic.write_atomically(args.output, page.encode())
  print(f"{args.output}: {len(page.encode()) / 1e6:.1f} MB, {len(spikes):,} spikes of the loss.")
  return 0
