"""`maxtext-olmo bench`: measurements that anyone can repeat."""

from __future__ import annotations

import argparse
import sys


def add_parser(subparsers: argparse._SubParsersAction) -> None:
  """Adds the command and its parts."""
  parser = subparsers.add_parser("bench", help="measure this library on this machine")
  parts = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
  startup = parts.add_parser(
      "startup",
      help="time and memory from a mix to the first batch",
      description=(
          "Makes sparse files with the sizes of the real mix and of a small one, and measures, in fresh processes that"
          " take turns, building the index, create_data_iterator and the first batch."
      ),
  )
  startup.add_argument(
      "--files", type=int, default=950, help="token files of the large mix (default: %(default)s)"
  )
  startup.add_argument(
      "--instances",
      type=int,
      default=724_000_000,
      help="instances of the large mix (default: %(default)s)",
  )
  startup.add_argument(
      "--repeats", type=int, default=3, help="measurements of each (default: %(default)s)"
  )
  startup.set_defaults(run=_run_startup)
  order = parts.add_parser(
      "order",
      help="time to the first id, ids per second and memory of each order",
      description=(
          "Measures each order, and Grain's index_shuffle, in fresh processes that take turns, and the building of"
          " olmo_core's file beside NumPy's bare shuffle."
      ),
  )
  order.add_argument(
      "--instances",
      type=int,
      nargs="+",
      default=[1_000_000, 50_000_000, 724_000_000],
      metavar="N",
      help="sizes of the corpus; 724M needs 3 GB of memory and of disk (default: 1000000 50000000 724000000)",
  )
  order.add_argument(
      "--seconds", type=float, default=0.5, help="CPU time for each rate (default: %(default)s)"
  )
  order.set_defaults(run=_run_order)


def _run_order(args: argparse.Namespace) -> int:
  from maxtext_olmo.tools import bench_order

  for text in bench_order.measure(args.instances, seconds=args.seconds):
    sys.stdout.write(text)
    sys.stdout.flush()
  return 0


def _run_startup(args: argparse.Namespace) -> int:
  from maxtext_olmo.tools import bench_startup

  sys.stdout.write(
      bench_startup.measure(files=args.files, instances=args.instances, repeats=args.repeats)
  )
  return 0
