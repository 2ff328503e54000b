"""`maxtext-olmo index pack`: packs the documents of a run before it starts."""

from __future__ import annotations

import argparse
import os
import sys
import types
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import errors

_DESCRIPTION = """\
Packs the documents of a run with dataset_type=olmo_packed, and writes the plan of its rows to the
place where the run looks for it: next to the index. Otherwise, the run packs them when it first
starts, on one machine. --part, --dask and --ray use several machines.

CONFIG is the config file of the run (.py, .yml, .json, with --config.KEY=VALUE as in training).
"""

_EPILOG = """\
examples:
  maxtext-olmo index pack configs/olmo3_7b_stage3_long_context.py \\
      --config.olmo_index_path=index.json
  maxtext-olmo index pack config.yml --part 3 --of 64 --results gs://bucket/packing
  maxtext-olmo index pack config.yml --merge --results gs://bucket/packing
"""


def add_parser(commands: Any) -> None:
  """Adds `index pack`."""
  option = cli.add_command(
      commands,
      "pack",
      run,
      help="pack the documents of a run before it first starts",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option("CONFIG", "the config file of the run")
  cli.add_work_options(option)


def run(args: argparse.Namespace) -> int:
  """Packs the documents and writes the plan."""
  from maxtext_olmo import atomic
  from maxtext_olmo import config as config_lib
  from maxtext_olmo.config_key import PACKED
  from maxtext_olmo.corpus import index_builder
  from maxtext_olmo.loader import olmo_packed
  from maxtext_olmo.rows import packed_plan

  values, _ = cli.read_config(args.config, args.rest)
  options = config_lib.Options.read(types.SimpleNamespace(**values))
  if options.dataset_type != PACKED:
    raise errors.ConfigError(
        f"{args.config} has dataset_type={options.dataset_type!r}; only {PACKED!r} has a plan that"
        " is kept in a file."
    )
  index_path, rule = options.olmo_index_path, olmo_packed.packing_rule(options)
  index = index_builder.load_index(index_path)
  path = olmo_packed.plan_path(options, index, index_path, rule)
  url = olmo_packed.plan_url(options, index, index_path, rule)
  if url is not None and _exists(url):
    print(f"{url} already exists: nothing to do.")
    return 0
  if os.path.exists(path):
    print(f"{path} already exists: nothing to pack.")
    _upload(path, url)
    return 0
  with atomic.write_errors(path):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  work = cli.work_options(args, path)
  outcome = packed_plan.pack_groups(
      index,
      rule,
      work,
      cache_dir=options.olmo_packing_cache_dir,
      path_remap=options.path_remap,
      progress=True,
  )
  if work.part is not None:
    return cli.report_part(outcome, work)
  plan = packed_plan.write_plan(index, path, rule, outcome)
  outcome.discard()
  print(
      f"{path}: {plan.num_rows:,} rows with {plan.num_parts:,} documents,"
      f" {plan.num_tokens / max(1, plan.num_rows * rule.row_length):.2%} full"
  )
  _upload(path, url)
  return 0


def _exists(url: str) -> bool:
  from maxtext_olmo.corpus.storage import open_storage

  try:
    return open_storage().exists(url)
  except errors.CorpusError:  # Some stores refuse access to an object that does not exist.
    return False


def _upload(path: str, url: str | None) -> None:
  """Writes a plan next to an index in a store, from where each host downloads it."""
  from maxtext_olmo.corpus.storage import writing

  if url is None:
    return
  try:
    writing.upload(path, url)
  except (errors.WriteError, errors.ConfigError) as error:
    sys.stderr.write(
        f"warning: {error}\nwarning: The plan is only on this machine: copy {path} to {url} with"
        " another tool, or each host packs the documents again.\n"
    )
  else:
    print(f"Wrote {url}")
