"""`maxtext-olmo bench`: measurements that anyone can repeat."""

from __future__ import annotations

import argparse
import pathlib
import sys

_PARTS = ("compare", "sizes", "startup", "growth", "cold", "trainer")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
  """Adds the command and its parts."""
  parser = subparsers.add_parser(
      "bench",
      help="measure this library on this machine",
      description="Measures this library on this machine. Without WHAT: `bench throughput`, all of it.",
  )
  parts = parser.add_subparsers(title="measurements", metavar="WHAT")
  parser.set_defaults(
      run=_run_throughput,
      quick=False,
      full=False,
      only=None,
      directory=None,
      megabytes=None,
      reread=False,
      output=None,
      write_docs=False,
  )
  for add in (_add_throughput, _add_startup, _add_order, _add_packing, _add_lmeval):
    add(parts)


def _add_throughput(parts: argparse._SubParsersAction) -> None:
  throughput = parts.add_parser(
      "throughput",
      help="this library beside the copy limit and other loaders",
      description=(
          "Measures loaders in turn, each in a process of its own, over the same tokens in the page cache: this library,"
          " plain copies, MaxText's loader (needs .venv-maxtext), and OLMo-core, torch, mosaicml-streaming and litdata"
          " (need .venv-peers); then start-up, growth, slow sources and the tiny trainer. What is missing is said, not"
          " guessed. About 12 minutes on two cores."
      ),
  )
  amount = throughput.add_mutually_exclusive_group()
  amount.add_argument(
      "--quick",
      action="store_true",
      help="a small corpus, one size, no trials: a few minutes (default: off)",
  )
  amount.add_argument(
      "--full", action="store_true", help="everything at every size: an hour (default: off)"
  )
  throughput.add_argument(
      "--only",
      action="append",
      choices=_PARTS,
      metavar="NAME",
      help=f"measure only this part, one of {', '.join(_PARTS)}; may be repeated (default: all)",
  )
  throughput.add_argument(
      "--directory",
      help="where the corpus goes and stays for the next time (default: a temporary directory)",
  )
  throughput.add_argument(
      "--megabytes", type=int, help="size of the corpus (default: 1000; with --quick 400)"
  )
  throughput.add_argument(
      "--reread",
      action="store_true",
      help="drop the corpus from the page cache and read it back from the disk first, since pages lie otherwise then"
      " (default: off, as it was written)",
  )
  throughput.add_argument(
      "--output",
      help="a directory for bench.json, bench.md and performance.svg (default: nothing is written)",
  )
  throughput.add_argument(
      "--write-docs",
      action="store_true",
      help="put the tables and the picture into docs/guides (run from the root of the repository) (default: off)",
  )
  throughput.set_defaults(run=_run_throughput)


def _run_throughput(args: argparse.Namespace) -> int:
  from maxtext_olmo import errors
  from maxtext_olmo.cli import bench_report
  from maxtext_olmo.cli import bench_run

  if args.write_docs and args.only:
    raise errors.ConfigError("--write-docs writes all parts into the guide; leave out --only.")
  results = bench_run.run(
      quick=args.quick,
      full=args.full,
      parts=tuple(args.only or _PARTS),
      directory=args.directory,
      megabytes=args.megabytes,
      reread=args.reread,
  )
  sys.stdout.write(bench_report.to_markdown(results))
  written = []
  if args.output:
    written += bench_report.write(results, pathlib.Path(args.output))
  if args.write_docs:
    written += bench_report.write_docs(results, pathlib.Path("docs", "guides"))
  for path in written:
    sys.stderr.write(f"wrote {path}\n")
  return 0


def _add_startup(parts: argparse._SubParsersAction) -> None:
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


def _run_startup(args: argparse.Namespace) -> int:
  from maxtext_olmo.cli import bench_startup

  sys.stdout.write(
      bench_startup.measure(files=args.files, instances=args.instances, repeats=args.repeats)
  )
  return 0


def _add_order(parts: argparse._SubParsersAction) -> None:
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
  from maxtext_olmo.cli import bench_order

  for text in bench_order.measure(args.instances, seconds=args.seconds):
    sys.stdout.write(text)
    sys.stdout.flush()
  return 0


def _add_packing(parts: argparse._SubParsersAction) -> None:
  packing = parts.add_parser(
      "packing",
      help="padding and speed of the packings of documents",
      description="Packs the same documents in every way, in turns, and compares padding and rows per second.",
  )
  packing.add_argument(
      "--documents",
      type=int,
      default=20_000,
      help="documents of lognormal length (default: %(default)s)",
  )
  packing.add_argument(
      "--length", type=int, default=8192, help="tokens of a row (default: %(default)s)"
  )
  packing.add_argument(
      "--bins", type=int, default=512, help="rows packed at a time (default: %(default)s)"
  )
  packing.add_argument("--repeats", type=int, default=3, help="runs of each (default: %(default)s)")
  packing.set_defaults(run=_run_packing)


def _run_packing(args: argparse.Namespace) -> int:
  from maxtext_olmo.cli import bench_packing

  sys.stdout.write(
      bench_packing.measure(
          documents=args.documents, length=args.length, bins=args.bins, repeats=args.repeats
      )
  )
  return 0


def _add_lmeval(parts: argparse._SubParsersAction) -> None:
  lmeval = parts.add_parser(
      "lmeval",
      help="padding, compiled shapes and speed of evaluation batches",
      description=(
          "Makes batches of requests with realistic lengths in four ways: unsorted, sorted on each host, sorted"
          " globally, and packed as JaxLM does it, and runs them on a small model. About two minutes on two cores."
      ),
  )
  for flag, default, text in (
      ("--requests", 8192, "requests to count padding and shapes of"),
      ("--timed-requests", 1024, "requests to run"),
      ("--batch-size", 64, "rows of a batch"),
      ("--hosts", 4, "hosts that sort for themselves"),
  ):
    lmeval.add_argument(flag, type=int, default=default, help=f"{text} (default: %(default)s)")
  lmeval.set_defaults(run=_run_lmeval)


def _run_lmeval(args: argparse.Namespace) -> int:
  from maxtext_olmo.cli import bench_lmeval

  sys.stdout.write(
      bench_lmeval.measure(
          requests=args.requests,
          timed_requests=args.timed_requests,
          batch_size=args.batch_size,
          hosts=args.hosts,
      )
  )
  return 0
