"""`maxtext-olmo stats`: counts the tokens, documents and ids of a corpus, by label."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo.errors import ConfigError

if TYPE_CHECKING:
  from maxtext_olmo.corpus.stats import Stats

_DESCRIPTION = """\
Reads all tokens of a corpus once, and prints for each label: tokens, documents and their lengths,
the number of distinct ids, and the entropy of the ids. Low entropy means repetitive text. --json
also includes the histogram of document lengths and the count of each id.

Large corpora are counted piece by piece. If the command is killed, run it again: it continues where
it stopped. --part, --dask and --ray use several machines.
"""

_EPILOG = """\
examples:
  maxtext-olmo stats index.json --eos-id 100257 --html stats.html
  maxtext-olmo stats index.json --eos-id 100257 --part 3 --of 64 --results gs://bucket/stats
  maxtext-olmo stats index.json --eos-id 100257 --merge --results gs://bucket/stats --json
"""


def add_parser(subparsers: Any) -> None:
  """Adds `stats`."""
  option = cli.add_command(
      subparsers,
      "stats",
      run,
      help="count tokens, documents and token ids by label",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("INDEX", "the index of the corpus")
  option("--eos-id ID", "id that ends documents", otherwise="no documents are counted", type=int)
  option("--top N", "show the N most frequent ids of the corpus", default=10)
  option(
      "--tokenizer T",
      "tokenizer that shows these ids as text: `bytes`, or the path of a tokenizer.json",
      otherwise="`bytes` if the index names it, otherwise no text",
      default="",
  )
  option("--json", "print everything as JSON", otherwise="tables", action="store_true")
  option(
      "--html FILE",
      "write an HTML page with plots; needs the extra `report`",
      otherwise="no page",
  )
  option(
      "--base DIR", "directory or URL of the token files", otherwise="the base stored in the index"
  )
  cli.add_path_remap(option)
  cli.add_storage_options(option)
  cli.add_work_options(option)


def run(args: argparse.Namespace) -> int:
  """Counts the tokens and prints the statistics."""
  from maxtext_olmo.corpus import index_builder
  from maxtext_olmo.corpus import stats as stats_lib

  if args.top < 0:
    raise ConfigError(f"--top must be 0 or more, got {args.top}.")
  if args.html:
    from maxtext_olmo.inspection import report_page

    report_page.check_bokeh()  # Before hours of work.
  options = cli.work_options(args, args.index)
  index = index_builder.load_index(args.index, base=args.base)
  outcome = stats_lib.count_pieces(
      index, options, eos_id=args.eos_id, path_remap=dict(args.path_remap), progress=True
  )
  if options.part is not None:
    return cli.report_part(outcome, options)
  labels = stats_lib.make_stats(outcome)
  whole = stats_lib.add_up(labels)
  frequent = _frequent_tokens(whole, index, args)
  if args.html:
    from maxtext_olmo import atomic
    from maxtext_olmo.inspection import stats_page

    page = stats_page.make_page(labels, whole, title=f"Statistics of {args.index}", tokens=frequent)
    atomic.write_atomically(args.html, page.encode())
  if args.json:
    print(json.dumps({"labels": [_as_json(s) for s in labels], "all": _as_json(whole)}, indent=1))
  else:
    _print_tables(labels, whole, frequent)
  outcome.discard()
  return 0


def _frequent_tokens(whole: Stats, index: Any, args: argparse.Namespace) -> list[tuple[str, int]]:
  """Returns the most frequent ids, with their text if the tokenizer is known."""
  import numpy as np

  from maxtext_olmo.inspection import text as text_lib

  tokenizer = text_lib.tokenizer_if_known(index, args.tokenizer)
  found = []
  for number, count in whole.most_frequent(args.top):
    text = "" if tokenizer is None else tokenizer.decode(np.array([number]))
    found.append((f"{number} {text!r}" if text else str(number), count))
  return found


def _print_tables(labels: list[Stats], whole: Stats, frequent: list[tuple[str, int]]) -> None:
  from maxtext_olmo.inspection import stats_page

  rows = [(stats.label, *stats_page.row_of(stats, whole)) for stats in labels]
  if len(labels) > 1:
    rows.append(("all", *stats_page.row_of(whole, whole)))
  used = [i for i in range(len(stats_page.HEADS)) if any(row[i] for row in rows)]
  cli.print_table([stats_page.HEADS[i] for i in used], [[row[i] for i in used] for row in rows])
  if frequent:
    cells = [(text, f"{count:,}", f"{count / whole.tokens:.2%}") for text, count in frequent]
    cli.print_table(("token", "count", "share"), cells)
  if whole.outside:
    print(
        f"{whole.outside:,} tokens have ids that no tokenizer has: the dtype of the index is wrong,"
        " or files are damaged. Run `maxtext-olmo verify`."
    )


def _as_json(stats: Stats) -> dict[str, Any]:
  found: dict[str, Any] = {
      "label": stats.label,
      "files": stats.files,
      "tokens": stats.tokens,
      "distinct_ids": stats.distinct,
      "bits_per_token": stats.bits,
      "outside": stats.outside,
  }
  if stats.lengths is not None:
    bounds, counts = stats.lengths.octaves()
    found |= {
        "documents": stats.lengths.documents,
        "mean_length": stats.mean_length,
        "median_length": stats.lengths.median,
        "longest_document": stats.lengths.longest,
        "lengths": [
            {"from": int(bound), "documents": int(count)} for bound, count in zip(bounds, counts)
        ],
    }
  return {**found, "ids": stats.ids.tolist()}
