"""`maxtext-olmo eval`: evaluates a checkpoint on harness tasks, and its perplexity on corpora."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

# The config's flags (--config, --config.KEY) are read as the trainer reads them.
PASSES_ARGUMENTS_ON = True

_DESCRIPTION = """\
Evaluates a checkpoint of the embedded trainer.

--tasks runs tasks of lm-evaluation-harness and prints its table (needs the extra `eval`).
--ppl scores every token of a corpus once, and prints perplexity and bits per byte for each label.

The checkpoint is the latest in checkpoint_dir; --config and --config.KEY=VALUE are those it was
trained with.
"""

_EPILOG = """\
examples:
  maxtext-olmo eval --config=configs/tiny.py --config.checkpoint_dir=checkpoints \\
      --tasks=tasks/colours.yaml
  maxtext-olmo eval --config=configs/tiny.py --config.checkpoint_dir=checkpoints \\
      --tasks=arc_easy,hellaswag --tokenizer=olmo/tokenizer.json --limit=100 --output=results.json
  maxtext-olmo eval --config=configs/tiny.py --config.checkpoint_dir=checkpoints \\
      --ppl validation/index.json
"""


_PACKINGS = {"auto": "auto", "on": True, "off": False}


def add_parser(subparsers: Any) -> None:
  """Adds `eval`."""
  parser = subparsers.add_parser(
      "eval",
      help="evaluate a checkpoint: harness tasks, perplexity",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  _add_arguments(parser)
  parser.set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
      "--config", metavar="FILE", help="a config file (default: all keys' defaults)"
  )
  parser.add_argument(
      "--tasks",
      default="",
      metavar="NAMES",
      help=(
          "harness tasks, by comma: names, patterns such as 'arc_*', or YAML files (default: none)"
      ),
  )
  parser.add_argument(
      "--task-dir",
      default="",
      metavar="DIR",
      help="where task files of your own are (default: the harness's alone)",
  )
  parser.add_argument(
      "--ppl",
      action="append",
      default=[],
      metavar="INDEX",
      help="an index JSON; may be repeated (default: none)",
  )
  parser.add_argument(
      "--tokenizer",
      metavar="T",
      help=(
          "`bytes`, a tokenizer.json, a directory with one, or a name on the Hub (default:"
          " eval_tokenizer)"
      ),
  )
  parser.add_argument(
      "--step", type=int, metavar="N", help="which checkpoint (default: the latest)"
  )
  parser.add_argument(
      "--batch-size", type=int, metavar="N", help="rows, over all processes (default: 64)"
  )
  parser.add_argument(
      "--max-length", type=int, metavar="N", help="tokens per row (default: max_target_length)"
  )
  parser.add_argument(
      "--truncation",
      default="left",
      metavar="HOW",
      help=(
          "of contexts that are too long: `left` drops their beginning, `error` stops (default:"
          " left)"
      ),
  )
  parser.add_argument(
      "--packing",
      default="auto",
      metavar="WHEN",
      help=(
          "several requests in a row: `on`, `off`, or `auto`, which tests whether the scores stay"
          " the same (default: auto)"
      ),
  )
  parser.add_argument(
      "--limit",
      type=float,
      metavar="N",
      help="documents per task, or below 1 a share of them (default: all)",
  )
  parser.add_argument(
      "--num-fewshot",
      type=int,
      metavar="N",
      help="examples before each question (default: the task's own)",
  )
  parser.add_argument(
      "--output",
      metavar="FILE",
      help="write the results here, as JSON (default: they are only printed)",
  )
  parser.add_argument(
      "--log-samples",
      action="store_true",
      help="with each document and answer in the JSON (default: off)",
  )
  parser.add_argument(
      "--cache",
      metavar="FILE",
      help=(
          "keep finished requests here, so that a killed evaluation resumes (default: nothing is"
          " kept)"
      ),
  )
  parser.add_argument(
      "--processes",
      type=int,
      default=1,
      metavar="N",
      help="run on N processes of this machine (default: 1)",
  )


def run(args: argparse.Namespace) -> int:
  """Evaluates, and reports on process 0."""
  from maxtext_olmo import errors

  parser = argparse.ArgumentParser(
      prog="maxtext-olmo eval",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
  )
  _add_arguments(parser)
  own, rest = parser.parse_known_args(args.rest)
  unknown = [word for word in rest if not word.startswith("--config.")]
  if unknown:
    parser.error(f"unknown: {' '.join(unknown)}; config keys are set with --config.KEY=VALUE")
  if not own.tasks and not own.ppl:
    raise errors.ConfigError("Evaluate on what? Give --tasks=NAMES, --ppl=INDEX, or both.")
  _check(own)
  if own.processes != 1:
    return _on_processes(own.processes, args.rest)
  config_flags = [*([f"--config={own.config}"] if own.config else []), *rest]
  import jax

  try:
    results = evaluate(own, config_flags)
  except (errors.MaxtextOlmoError, OSError) as error:
    if jax.distributed.is_initialized() and jax.process_count() > 1:
      # An ordinary exit waits for the other processes, which wait for this one in a collective.
      sys.stderr.write(f"error: {error}\n")
      sys.stderr.flush()
      os._exit(2)
    raise
  if jax.process_index() == 0:
    _report(results)
    if own.output:
      _write(results, own.output)
  return 0


def _check(own: argparse.Namespace) -> None:
  """What can be told to be wrong before anything is loaded."""
  from maxtext_olmo import errors

  if own.packing not in _PACKINGS:
    raise errors.ConfigError(
        f"--packing={own.packing} is unknown; known are {', '.join(_PACKINGS)}."
    )
  for flag in ("batch_size", "max_length", "limit"):
    value = getattr(own, flag)
    if value is not None and value <= 0:
      raise errors.ConfigError(f"--{flag.replace('_', '-')}={value:g} must be positive.")


def evaluate(own: argparse.Namespace, config_flags: list[str]) -> dict[str, Any]:
  """The results of the command line's tasks and corpora; each process gets them."""
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.evaluation import perplexity
  from maxtext_olmo.evaluation import scoring
  from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
  from maxtext_olmo.trainers.tiny import config as config_lib
  from maxtext_olmo.trainers.tiny import evaluation
  from maxtext_olmo.trainers.tiny import model
  from maxtext_olmo.trainers.tiny import report
  from maxtext_olmo.trainers.tiny import trainer

  report.show_on_stderr(int(os.environ.get("JAX_PROCESS_ID", "0")))
  config = config_lib.read_config(["maxtext-olmo eval", *config_flags])
  # What is looked for by name is looked for before the slow part begins.
  tasks = evaluation.Tasks(own.tasks.split(","), own.task_dir) if own.tasks else None
  indexes = {path: index_lib.load_index(path) for path in own.ppl}
  tokenizer = tokenizer_lib.load_eval_tokenizer(own.tokenizer or config.eval_tokenizer)
  trainer.connect(config)
  mesh = model.make_mesh(config)
  step, params = evaluation.load_params(config, mesh, own.step)
  options: dict[str, Any] = {
      "batch_size": 64 if own.batch_size is None else own.batch_size,
      "max_length": config.max_target_length if own.max_length is None else own.max_length,
      "packing": _PACKINGS[own.packing],
  }
  results: dict[str, Any] = {"checkpoint": step}
  if tasks is not None:
    lm = evaluation.make_lm(
        config,
        params,
        mesh,
        tokenizer=tokenizer,
        truncation=own.truncation,
        cache_file=own.cache,
        **options,
    )
    limit = int(own.limit) if own.limit and own.limit >= 1 else own.limit
    results |= tasks.run(lm, limit=limit, num_fewshot=own.num_fewshot, log_samples=own.log_samples)
  if indexes:
    scorer = scoring.Scorer(evaluation.make_apply(config), mesh, padding_multiple=16, **options)
    remap = {config.olmo_path_remap_from: config.olmo_path_remap_to}
    results["perplexity"] = {
        path: perplexity.score_index(
            scorer,
            params,
            index,
            tokenizer,
            path_remap=remap if config.olmo_path_remap_from else None,
            progress=True,
        )
        for path, index in indexes.items()
    }
  return results


def _on_processes(count: int, arguments: list[str]) -> int:
  from maxtext_olmo import errors
  from maxtext_olmo.trainers import launch

  if count < 1:
    raise errors.ConfigError(f"--processes={count} must be at least 1.")
  words = iter(arguments)
  kept = []
  for word in words:
    if word == "--processes":
      next(words)
    elif not word.startswith("--processes="):
      kept.append(word)
  outcome = launch.LocalRun(["eval", *kept], processes=count, module="maxtext_olmo").wait()
  if outcome.code:
    sys.stderr.write(f"eval: {outcome.reason}\n")
  return outcome.code


def _report(results: dict[str, Any]) -> None:
  if "results" in results:
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
      print(make_table(results, "groups"))
    print(_how_it_was_scored(results["config"]))
  for path, labels in results.get("perplexity", {}).items():
    _report_perplexity(path, labels)


def _how_it_was_scored(config: dict[str, Any]) -> str:
  lengths = config["compiled_lengths"]
  if not lengths:
    return "No request had to be scored."
  return (
      f"Scored in rows of {', '.join(map(str, lengths))} tokens:"
      f" {len(lengths)} shape{'s' if len(lengths) > 1 else ''} compiled,"
      f" {config['padding_share']:.1%} of the tokens run were padding."
  )


def _report_perplexity(path: str, labels: dict[str, Any]) -> None:
  from maxtext_olmo.cli import tables
  from maxtext_olmo.evaluation import perplexity

  table = tables.new_table("label", "documents", "tokens", "bytes", "perplexity", "bits per byte")
  rows = list(labels.items())
  if len(rows) > 1:
    rows.append(("all", sum(labels.values(), perplexity.LabelScore())))
  for label, score in rows:
    tables.add_row(
        table,
        label,
        f"{score.documents:,}",
        f"{score.tokens:,}",
        f"{score.bytes:,}",
        f"{score.perplexity:.4f}",
        f"{score.bits_per_byte:.4f}",
        style="bold" if label == "all" else "",
    )
  console = tables.console()
  console.print(path)
  console.print(table)


def _write(results: dict[str, Any], path: str) -> None:
  from maxtext_olmo import atomic
  from maxtext_olmo.evaluation import perplexity

  def plain(value: Any) -> Any:
    if isinstance(value, perplexity.LabelScore):
      return value.to_json_dict()
    return value.item() if hasattr(value, "item") else str(value)

  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  atomic.write_atomically(path, json.dumps(results, indent=2, default=plain) + "\n")
