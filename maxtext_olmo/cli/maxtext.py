"""`maxtext-olmo maxtext`: runs MaxText on this package's data, and migrates runs of MaxText."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo.trainers.maxtext import adapter

if TYPE_CHECKING:
  from maxtext_olmo.trainers.maxtext.migrate import Migration

_DESCRIPTION = """\
Runs unmodified MaxText on batches of this package, and migrates runs that used MaxText's own
olmo_grain loader.

  train CONFIG.yml key=value ...        MaxText's pre-training; all arguments go to MaxText
  sft CONFIG.yml key=value ...          its supervised fine-tuning, which needs google-tunix
  dataloader CONFIG.yml key=value ...   its standalone data loader: batches without training
  migrate --run-config FILE --checkpoint-dir DIR ... key=value ...
                                        continue a run that MaxText's own loader began

A bare name such as base.yml is looked up among MaxText's configs.
"""

_EXAMPLE = """\
example:
  maxtext-olmo maxtext train base.yml dataset_type=olmo_grain olmo_index_path=index.json \\
      max_target_length=8192 model_name=olmo3-7b \\
      base_output_directory=gs://bucket/runs run_name=first
"""

_MIGRATE_EPILOG = """\
examples:
  a run on one host with 8 devices, never restarted:
    maxtext-olmo maxtext migrate --run-config run.yml --devices 8 \\
        --checkpoint-dir out/run/checkpoints
  a run with settings on MaxText's command line; give them again, as migrate cannot find them:
    maxtext-olmo maxtext migrate --run-config base.yml --devices 8 \\
        --checkpoint-dir out/run/checkpoints (the run's own arguments)
  a run on 4 hosts with 16 devices, restarted from checkpoint 500 on 4 hosts and from 900 on 2:
    ... --hosts 4 --devices 16 --restart 500 --restart 900,hosts=2,devices=8
  a run with a log of each start, in order:
    ... --log start1.log --log start2.log
then:
  maxtext-olmo maxtext train run-migrated.yml (the run's own arguments)
"""


def add_parser(subparsers: Any) -> None:
  """Adds `maxtext` with MaxText's entry points and `migrate`."""
  group = subparsers.add_parser(
      "maxtext",
      help="run MaxText on this data, or migrate a run from MaxText's own loader",
      description=_DESCRIPTION,
      epilog=_EXAMPLE,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
  for name in adapter.ENTRY_POINTS:
    cli.add_command(
        commands,
        name,
        functools.partial(_run_maxtext, name),
        help="all arguments go to MaxText",
        description=f"Runs MaxText's {adapter.ENTRY_POINTS[name][0]}; all arguments go to it.",
    )
  _add_migrate(commands)


def _add_migrate(commands: Any) -> None:
  option = cli.add_command(
      commands,
      "migrate",
      _migrate,
      help="continue a run that MaxText's own loader began",
      description=(
          "Reconstructs which instances the model in a checkpoint was trained on, including the"
          " repetitions and gaps of MaxText's own loader. Writes a config that continues training"
          " with the remaining instances of this epoch, each once, and then with whole epochs."
      ),
      epilog=_MIGRATE_EPILOG,
  )
  option(
      "ARGUMENTS",
      "the arguments with which MaxText was started, as key=value; they override the config",
      nargs="*",
  )
  option("--run-config FILE", "MaxText's YAML config of the run", required=True)
  option("--checkpoint-dir DIR", "directory of the run's checkpoints", required=True)
  option(
      "--devices N",
      "total number of devices of the run, which determines its batch size",
      otherwise="taken from --log",
      type=int,
  )
  option("--hosts H", "number of hosts that loaded data", default=1)
  option(
      "--restart LABEL[,hosts=H,devices=N,workers=W,data=LABEL]",
      "a checkpoint from which the run restarted, and what changed; repeat for each, in order",
      otherwise="none",
      action="append",
      default=[],
  )
  option(
      "--log FILE",
      "a log of the run, to read its starts, hosts and batch size from; repeat for each, in order",
      otherwise="none",
      action="append",
      default=[],
  )
  option("--checkpoint LABEL", "the checkpoint to continue from", otherwise="the latest", type=int)
  option("--consumed FILE", "file for the bitmap", otherwise="INDEX.consumed-LABEL")
  option("--output FILE", "file for the new config", otherwise="RUN_CONFIG-migrated.yml")


def _run_maxtext(entry_point: str, args: argparse.Namespace) -> int:
  if args.debug:
    adapter.run(entry_point, args.rest)
    return 0
  return adapter.main(["maxtext-olmo maxtext", entry_point, *args.rest])


def _migrate(args: argparse.Namespace) -> int:
  from maxtext_olmo.trainers.maxtext import migrate

  done = migrate.migrate(
      args.run_config,
      args.checkpoint_dir,
      arguments=args.arguments,
      devices=args.devices,
      hosts=args.hosts,
      restarts=args.restart,
      logs=args.log,
      label=args.checkpoint,
      consumed_path=args.consumed,
      config_path=args.output,
      progress=True,
  )
  sys.stdout.write(_report(done))
  return 0


def _report(done: Migration) -> str:
  found = done.found
  lines = ["What the run was trained on:"]
  for part in done.parts:
    start = part.start
    began = (
        "from the beginning"
        if start.label < 0
        else f"after a restart from checkpoint {start.label}"
    )
    lines.append(
        f"  steps {part.first_step} to {part.last_step}, {began}: {start.hosts} host(s) with"
        f" {start.rows_per_host} rows, {start.workers} worker(s), data from step {start.data_label}"
    )
  lines += [
      f"  rows trained on         {found.num_rows:>14,}",
      f"  instances of the corpus {done.num_instances:>14,}",
      f"  distinct instances seen {found.num_distinct:>14,}",
      f"  rows repeated           {found.num_repeated:>14,}   0 with an exact loader",
      f"  instances missed        {found.num_missing:>14,}   0 with an exact loader",
      f"  whole epochs, by volume {found.num_epochs:>14,}",
      f"  left in this epoch      {done.num_remaining:>14,}   each once, then the next epoch",
      "",
      f"bitmap  {done.consumed_path}",
      f"config  {done.config_path}",
      "",
      f"Continue from checkpoint {done.label}: maxtext-olmo maxtext train {done.config_path}"
      " (the run's own arguments)",
  ]
  return "\n".join(lines) + "\n"
