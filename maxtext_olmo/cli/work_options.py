"""The options of commands that work on a whole corpus, on one machine or on many."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from maxtext_olmo import english
from maxtext_olmo.errors import ConfigError

if TYPE_CHECKING:
  from maxtext_olmo.corpus.work.options import WorkOptions
  from maxtext_olmo.corpus.work.run import Outcome


def add_work_options(option: Callable[..., None], *, threads: bool = True) -> None:
  """Adds the options of commands that work on a whole corpus; `work_options` reads them.

  Args:
    option: Adds an option, as `add_command` returns it.
    threads: Whether the command can use threads instead of processes.
  """
  if threads:
    option(
        "--workers N",
        "threads, or processes with --processes or --dask local",
        otherwise="one per core",
        type=int,
    )
    option(
        "--processes",
        "use processes on this machine instead of threads",
        otherwise="threads",
        action="store_true",
    )
  else:
    option("--workers N", "number of processes", otherwise="one per core", type=int)
  option(
      "--dask ADDRESS",
      "use the workers of a Dask scheduler, such as tcp://10.0.0.1:8786; 'local' starts a cluster"
      " on this machine",
      otherwise="none",
      default="",
  )
  option(
      "--ray ADDRESS",
      "use the workers of a Ray cluster; 'auto' is the one that this machine belongs to",
      otherwise="none",
      default="",
  )
  option(
      "--results PLACE",
      "directory or URL for the results of the pieces, which later runs reuse; with several"
      " machines, a place that all of them can reach",
      otherwise="a directory next to the output or the index; removed when everything is done",
      default="",
  )
  option(
      "--part I",
      "process only every Nth piece, starting with piece I (counted from 0), and leave the results"
      " for --merge",
      otherwise="all pieces",
      type=int,
  )
  option("--of N", "number of parts, each done by a command with --part", otherwise="1", type=int)
  option(
      "--merge",
      "read no data; only merge the results of the parts",
      otherwise="off",
      action="store_true",
  )
  option(
      "--retry-failed",
      "retry pieces that failed in an earlier run",
      otherwise="they are only listed",
      action="store_true",
  )


def add_path_remap(option: Callable[..., None]) -> None:
  """Adds --path-remap, whose value is a list of (prefix, replacement)."""
  option(
      "--path-remap FROM TO",
      "replace FROM at the beginning of full paths with TO; may be repeated",
      otherwise="none",
      nargs=2,
      action="append",
      default=[],
  )


def has_work_options(args: argparse.Namespace) -> bool:
  """Returns whether the command line has any of the options of `add_work_options`."""
  numbers = (args.workers, args.part, args.of)
  others = (args.processes, args.dask, args.ray, args.results, args.merge, args.retry_failed)
  return any(number is not None for number in numbers) or any(others)


def work_options(args: argparse.Namespace, path: str) -> WorkOptions:
  """Returns how to do the work, from the options of `add_work_options`.

  Args:
    args: The parsed command line.
    path: Path or URL of the output or, if there is none, of the index; results go next to it.
  """
  from maxtext_olmo.corpus.work import options as options_lib

  if (args.part is None) != (args.of is None):
    raise ConfigError("Use --part and --of together: --part I --of N, with I from 0 to N - 1.")
  results = args.results or options_lib.default_results(path)
  options = options_lib.WorkOptions(
      workers=args.workers,
      processes=getattr(args, "processes", False),
      dask=args.dask,
      ray=args.ray,
      results=results,
      part=None if args.part is None else (args.part, args.of),
      merge=args.merge,
      retry_failed=args.retry_failed,
  )
  if options.on_other_machines and not args.results and not options_lib.is_next_to(results, path):
    raise ConfigError(
        f"There is no place next to {path} for results that other machines can reach. Name one with"
        " --results: a directory on a shared file system, or a gs://, s3:// or az:// URL."
    )
  return options


def report_part(outcome: Outcome, options: WorkOptions) -> int:
  """Prints what a command with --part has done; returns its exit code."""
  part, parts = options.part or (0, 1)
  print(
      f"part {part} of {parts}: {english.count(len(outcome.done), 'piece')} of"
      f" {len(outcome.items):,} done, {outcome.reused:,} of them before this run"
  )
  for failure in outcome.failures:
    print(f"failed: {failure.reason}")
  if outcome.failures:
    print(
        f"The other results are in {options.results}. Fix the problem, and run this part again"
        f"{'' if options.retry_failed else ' with --retry-failed'}."
    )
    return 2
  print(f"The results are in {options.results}. When all parts are done, use --merge.")
  return 0
