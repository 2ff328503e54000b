"""`maxtext-olmo plan`: what a run will see of each label, before it runs."""

import argparse
from typing import Any

from maxtext_olmo import cli

_DESCRIPTION = """\
Prints, for each label of an index, what a run will see of it: tokens, share, epochs, and the step
after which all of it has been seen once. Reads only the index. With --mixture the numbers are those
of the run itself. Without it each label is taken once per pass, in its exact share; the plain
shuffle of a corpus has these shares on average.
"""

_EPILOG = """\
examples:
  maxtext-olmo plan index.json --batch-size 512 --steps 20000
  maxtext-olmo plan index.json --batch-size 512 --steps 20000 --unit epochs \\
      --mixture wikipedia=2.0 'stack-edu_*=0.5' '*=1'
"""


def add_parser(subparsers: Any) -> None:
  """Adds `plan`."""
  option = cli.add_command(
      subparsers,
      "plan",
      run,
      help="what a run will see of each label: tokens, share, epochs, when seen once",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("INDEX", "the index, a JSON file")
  option(
      "--mixture LABEL=NUMBER",
      "the mixture, as olmo_mixture: a label or a pattern, and how much of it",
      otherwise="the corpus as it is",
      nargs="+",
      default=[],
  )
  option(
      "--unit",
      "what the numbers are, as olmo_mixture_unit",
      default="epochs",
      choices=("epochs", "weights", "tokens"),
  )
  option("--batch-size ROWS", "rows per step", required=True, type=int)
  option("--steps N", "steps of the run", otherwise="as many as one pass takes", type=int)
  option("--sequence-length S", "tokens per row", otherwise="the index's", type=int)
  option("--held-out N", "instances held out, as olmo_eval_instances", default=0)


def run(args: argparse.Namespace) -> int:
  """Prints the plan."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.errors import ConfigError
  from maxtext_olmo.order import mixture as mixture_lib

  if args.batch_size < 1 or (args.steps is not None and args.steps < 1):
    raise ConfigError("--batch-size and --steps must be positive.")
  index = index_lib.load_index(args.index)
  if args.sequence_length:
    index = index.with_sequence_length(args.sequence_length)
  values = dict(map(_label_and_number, args.mixture)) or {"*": 1.0}
  unit = args.unit if args.mixture else "epochs"
  stream = mixture_lib.mixture_stream(
      index, values, unit, order="feistel", seed=0, held_out_instances=args.held_out
  )
  order = stream.order
  if not isinstance(order, mixture_lib.MixtureOrder):
    raise TypeError(type(order))
  steps = args.steps or -(-order.num_instances // args.batch_size)
  samples = steps * args.batch_size
  rows = []
  # A sample may end inside a chunk; its label has then begun the chunk, so chunks are counted up.
  taken = order.interleave.taken(-(-samples // order.chunk_size))
  for number, (member, chunks) in enumerate(zip(order.members, taken)):
    size = len(member.chunks)
    last = order.interleave.position_of(number, size - 1) * order.chunk_size + order.chunk_size
    complete = -(-last // args.batch_size)
    row = (
        member.label,
        size * order.chunk_size * index.sequence_length,
        f"{order.interleave.counts[number] / order.interleave.period:.2%}",
        chunks * order.chunk_size * index.sequence_length,
        f"{chunks / size:.3f}",
        complete if complete <= steps else f"not in this run ({complete:,})",
    )
    rows.append(row)
  cli.print_table(
      ("label", "tokens", "share", "tokens seen", "epochs", "all seen after step"), rows
  )
  left_out = sorted(
      {e.label for e in index.files if e.n_instances} - {m.label for m in order.members}
  )
  print(
      f"{steps:,} steps of {args.batch_size:,} × {index.sequence_length:,} ="
      f" {samples * index.sequence_length:,} tokens; one pass is {order.num_instances:,} instances,"
      f" {order.num_instances / args.batch_size:,.1f} steps."
      + (f" Left out: {', '.join(left_out)}." if left_out else "")
  )
  return 0


def _label_and_number(text: str) -> tuple[str, float]:
  from maxtext_olmo.errors import ConfigError

  label, equals, number = text.rpartition("=")
  try:
    return label, float(number) if equals and label else float("")
  except ValueError as error:
    raise ConfigError(f"{text!r} is not LABEL=NUMBER, such as wikipedia=2.0.") from error
