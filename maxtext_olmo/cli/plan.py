"""`maxtext-olmo plan`: shows what a run sees of each label, before and while it runs."""

import argparse
import contextlib
import json
import os
import types
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo.cli import plan_fleet
from maxtext_olmo.corpus import urls

# More than any run has. Their product still fits into 64 bits.
_MOST, _MOST_ROWS = 2**32, 2**24

_DESCRIPTION = """\
Prints what a run will see of each label: tokens, share, epochs, and the step after which all of it
has been seen once. Reads only the index. --svg and --html also draw the shares over the steps.

PATH is a config file (.py, .yml, .json, with --config.KEY=VALUE as in training), a checkpoint, a
directory of checkpoints (of any trainer) or the one above it, or an index.
The plan of a run follows its schedule, order, mixture and held-out part. If the run has begun, it
also includes its history: what it has seen so far, what changed when, and what it skips. If the
corpus is shuffled as a whole, tokens seen and epochs are averages over shuffles, unless the run is
short enough to count.

For an index, the options below describe the run. With --mixture, the numbers are those of the run
itself. Without it, each label is taken once per pass, in its exact share; a plain shuffle of the
corpus has these shares on average.

With --hosts, prints what the data path needs on that many hosts instead: rows, reads, bytes,
memory, open files, requests and their price, and which limit it reaches first. It is computed from
the index, for real steps of simulated hosts; no token file is read. Exits with 1 if a limit breaks.
"""

_EPILOG = """\
examples:
  maxtext-olmo plan configs/olmo3_7b_stage1.py --config.olmo_index_path=index.json --svg plan.svg
  maxtext-olmo plan checkpoints --steps 100000 --html plan.html
  maxtext-olmo plan index.json --batch-size 512 --steps 20000
  maxtext-olmo plan index.json --batch-size 512 --steps 20000 --unit epochs \\
      --mixture wikipedia=2.0 'stack-edu_*=0.5' '*=1'
  maxtext-olmo plan gs://bucket/olmo-mix-0925.json --batch-size 4096 --hosts 1024 \\
      --tokens-per-second 2e8
"""


def add_parser(subparsers: Any) -> None:
  """Adds `plan`."""
  option = cli.add_command(
      subparsers,
      "plan",
      run,
      help="show what a run sees of each label: tokens, share, epochs",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option(
      "PATH", "the run: a config file, a checkpoint or a directory with checkpoints; or an index"
  )
  cli.add_run_options(option)
  option(
      "--mixture LABEL=NUMBER",
      "the mixture, as in olmo_mixture: a label or a pattern, and its amount",
      otherwise="the corpus as it is",
      nargs="+",
      default=[],
  )
  option(
      "--unit",
      "unit of the amounts, as in olmo_mixture_unit",
      default="epochs",
      choices=("epochs", "weights", "tokens"),
  )
  option("--batch-size ROWS", "rows per step", otherwise="required for an index", type=int)
  option(
      "--steps N",
      "number of steps of the run",
      otherwise="from the config, or up to the end of the epoch",
      type=int,
  )
  option("--sequence-length S", "tokens per row", otherwise="as in the index", type=int)
  option("--held-out N", "instances held out, as in olmo_eval_instances", default=0)
  option("--svg FILE", "draw the shares over the steps as an SVG picture", otherwise="no picture")
  option(
      "--html FILE",
      "draw the shares as a zoomable HTML page; needs the extra `report`",
      otherwise="no page",
  )
  option("--json", "print the plan as JSON", otherwise="a table", action="store_true")
  plan_fleet.add_options(option)


def run(args: argparse.Namespace) -> int:
  """Prints the plan."""
  from maxtext_olmo import atomic
  from maxtext_olmo.errors import ConfigError
  from maxtext_olmo.inspection import picture

  if args.steps is not None and not 1 <= args.steps <= _MOST:
    raise ConfigError(f"--steps must be from 1 to {_MOST:,}.")
  if args.hosts is not None:
    return plan_fleet.run(args, *_options_and_steps(args))
  with _open_plan(args) as plan:
    sources = plan.count_sources(**({} if args.html else {"bins": 400}))
    if args.json:
      _print_json(plan, sources)
    else:
      _print_table(plan, sources)
    title = f"Plan of {args.path}"
    if args.svg:
      drawn = picture.draw_svg(sources, plan.find_changes(), title=title)
      atomic.write_atomically(args.svg, drawn.encode())
    if args.html:
      from maxtext_olmo.inspection import report

      page = report.make_page(plan, sources, title=title)
      atomic.write_atomically(args.html, page.encode())
  return 0


def _open_plan(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
  """Returns the plan of the run or of the index that the command line names."""
  if _is_index(args.path):
    return contextlib.nullcontext(_plan_of_index(args))
  found = _find_run(args)
  from maxtext_olmo.inspection import run_plan

  return run_plan.open_plan(found, args.steps)


def _find_run(args: argparse.Namespace) -> Any:
  """Returns the run that the command line names; raises if an option contradicts its config."""
  from maxtext_olmo.errors import ConfigError

  cli.use_cpu()
  found = cli.find_run(args.path, args)  # Raises if there is no such path.
  names = ("mixture", "batch_size", "sequence_length", "held_out")
  given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
  if given:
    raise ConfigError(
        f"{', '.join(given)}: the config of a run sets this; change it with" " --config.KEY=VALUE."
    )
  return found


def _options_and_steps(args: argparse.Namespace) -> tuple[Any, int | None]:
  """Returns the data keys of the run or of the index, and the number of steps if it is known."""
  from maxtext_olmo import config as config_lib
  from maxtext_olmo.errors import ConfigError

  if _is_index(args.path):
    cli.use_cpu()
    index = _load_index(args)
    keys = {
        "olmo_index_path": args.path,
        "max_target_length": index.sequence_length,
        "global_batch_size_to_load": args.batch_size,
        "olmo_mixture": dict(map(_label_and_number, args.mixture)),
        "olmo_eval_instances": args.held_out,
    }
    if args.mixture:
      keys["olmo_mixture_unit"] = args.unit
    values, steps = {**config_lib.defaults(), **keys}, args.steps
  else:
    found = _find_run(args)
    if found.config is None:
      raise ConfigError(f"The config of {args.path} is unknown. Give a config file with --config.")
    values, steps = found.config, args.steps or found.steps
  return config_lib.Options.read(types.SimpleNamespace(**values | {"eval_interval": -1})), steps


def _is_index(path: str) -> bool:
  """Returns whether a path names an index rather than a run: a JSON file without keys of a run."""
  if urls.is_url(path):  # A run at a URL is a directory.
    return path.endswith(".json")
  if not path.endswith(".json") or not os.path.isfile(path):
    return False
  from maxtext_olmo import config as data_keys

  with open(path, "rb") as file:
    try:
      values = json.load(file)
    except (ValueError, RecursionError):
      return True  # Loading it as an index reports what is wrong.
  return not (isinstance(values, dict) and values.keys() & data_keys.defaults().keys())


def _load_index(args: argparse.Namespace) -> Any:
  """Returns the index, in instances of the sequence length that was asked for."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.errors import ConfigError

  if args.rest:
    raise ConfigError(f"{args.rest[0]} changes a config file; {args.path} is an index.")
  if args.batch_size is None:
    raise ConfigError("The plan of an index needs --batch-size.")
  if not 1 <= args.batch_size <= _MOST_ROWS:
    raise ConfigError(f"--batch-size must be from 1 to {_MOST_ROWS:,}.")
  index = index_lib.load_index(args.path)
  return index.with_sequence_length(args.sequence_length) if args.sequence_length else index


def _plan_of_index(args: argparse.Namespace) -> Any:
  from maxtext_olmo.inspection import changes as changes_lib
  from maxtext_olmo.inspection import plan as plan_lib
  from maxtext_olmo.order import mixture as mixture_lib
  from maxtext_olmo.order import schedule as schedule_lib

  index = _load_index(args)
  values = dict(map(_label_and_number, args.mixture)) or {"*": 1.0}
  unit = args.unit if args.mixture else "epochs"
  stream = mixture_lib.mixture_stream(
      index, values, unit, order="feistel", seed=0, held_out_instances=args.held_out
  )
  schedule = schedule_lib.BatchSchedule.constant(args.batch_size)
  steps = args.steps or -(-stream.order.num_instances // args.batch_size)
  return plan_lib.Plan((changes_lib.Stretch(0, steps, schedule, stream, index),))


def _print_json(plan: Any, sources: Any) -> None:
  shares, so_far = _shares(plan, sources), _seen_so_far(plan, sources)
  labels = [
      {
          "label": label,
          "tokens": round(sources.available[number]),
          "share": float(shares[number]),
          "tokens_seen_so_far": round(so_far[number]) if plan.step else 0,
          "tokens_seen": round(sources.seen[-1, number]),
          "epochs": float(sources.epochs[-1, number]),
          "all_seen_after_step": sources.complete[number],
      }
      for number, label in enumerate(sources.labels)
  ]
  changes = [{"step": change.step, "text": change.text} for change in plan.find_changes()]
  found = {
      "steps": int(sources.edges[-1]),
      "step": plan.step,
      "exact": sources.exact,
      "labels": labels,
      "changes": changes,
  }
  print(json.dumps(found, indent=2))


def _shares(plan: Any, sources: Any) -> Any:
  """Returns the share of each label in the tokens of the run."""
  interleave = getattr(getattr(plan.stretches[-1].stream, "order", None), "interleave", None)
  if interleave is not None and len(plan.stretches) == 1:
    return [count / interleave.period for count in interleave.counts]
  return sources.seen[-1] / max(1.0, sources.seen[-1].sum())


def _seen_so_far(plan: Any, sources: Any) -> Any:
  """Returns the tokens of each label that the run has seen."""
  import numpy as np

  # The bins have an edge at the step that the run has reached.
  return sources.seen[min(np.searchsorted(sources.edges, plan.step), len(sources.edges) - 1)]


def _print_table(plan: Any, sources: Any) -> None:
  steps = int(sources.edges[-1])
  shares, so_far = _shares(plan, sources), _seen_so_far(plan, sources)
  rows = []
  for number, label in enumerate(sources.labels):
    complete = sources.complete[number]
    after: Any = complete
    if complete is None or complete > steps:
      after = "not in this run" + (f" ({complete:,})" if complete is not None else "")
    row = (
        label,
        round(sources.available[number]),
        f"{shares[number]:.2%}",
        *([round(so_far[number])] if plan.step else []),
        round(sources.seen[-1, number]),
        f"{sources.epochs[-1, number]:.3f}",
        after,
    )
    rows.append(row)
  seen = ("seen so far", "seen by the end") if plan.step else ("tokens seen",)
  cli.print_table(("label", "tokens", "share", *seen, "epochs", "all seen after step"), rows)
  _print_summary(plan, sources, steps)


def _print_summary(plan: Any, sources: Any, steps: int) -> None:
  last = plan.stretches[-1]
  length = last.stream.sequence_length
  sizes = sorted({size for stretch in plan.stretches for size in stretch.schedule.sizes})
  batch = " to ".join(f"{size:,}" for size in {sizes[0]: 0, sizes[-1]: 0})
  line = f"{steps:,} steps of {batch} × {length:,} = {int(sources.rows[-1]) * length:,} tokens"
  order = getattr(last.stream, "order", None)
  if order is not None:
    line += f"; one pass is {order.num_instances:,} instances"
    if len(sizes) == 1:
      line += f", {order.num_instances / sizes[0]:,.1f} steps"
  used = {entry.label for entry in last.index.files if entry.n_instances}
  left_out = sorted(used - set(sources.labels))
  print(line + "." + (f" Left out: {', '.join(left_out)}." if left_out else ""))
  if plan.step:
    print(f"{plan.step:,} steps are done.")
  first = int(sources.edges[0])
  if first:
    print(f"Steps before {first:,} belong to another stream and are not counted.")
  for change in plan.find_changes():
    print(f"step {change.step:,}: {change.text}")
  if not sources.exact:
    print(sources.note)


def _label_and_number(text: str) -> tuple[str, float]:
  from maxtext_olmo.errors import ConfigError

  label, equals, number = text.rpartition("=")
  try:
    return label, float(number) if equals and label else float("")
  except ValueError as error:
    raise ConfigError(f"{text!r} is not LABEL=NUMBER, such as wikipedia=2.0.") from error
