"""`maxtext-olmo eval`: evaluates a checkpoint on lm-eval tasks, or its perplexity on corpora."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from maxtext_olmo import atomic
from maxtext_olmo import cli
from maxtext_olmo import errors

_DESCRIPTION = """\
Evaluates a checkpoint of the embedded trainer.

--tasks runs tasks of lm-evaluation-harness and prints its table (needs the extra `eval`).
--ppl scores every token of a corpus once, and prints perplexity and bits per byte for each label.

Evaluates the latest checkpoint in checkpoint_dir. Give the same --config and --config.KEY=VALUE as
in training.
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

_AVERAGINGS = ("exact", "olmo_core")
_PACKINGS = {"auto": "auto", "on": True, "off": False}


def add_parser(subparsers: Any) -> None:
  """Adds `eval`."""
  option = cli.add_command(
      subparsers,
      "eval",
      run,
      help="evaluate a checkpoint on harness tasks, or its perplexity on a corpus",
      description=_DESCRIPTION,
      epilog=_EPILOG,
      allow_abbrev=False,
  )
  option("--config FILE", "config file of the run", otherwise="the defaults of all keys")
  option(
      "--tasks NAMES",
      "harness tasks, separated by commas: names, patterns such as 'arc_*', or YAML files",
      otherwise="none",
      default="",
  )
  option(
      "--task-dir DIR",
      "directory of your own task files",
      otherwise="only tasks of the harness",
      default="",
  )
  option(
      "--ppl INDEX",
      "index (JSON file) of a corpus to score; may be repeated",
      otherwise="none",
      action="append",
      default=[],
  )
  option(
      "--averaging HOW",
      "how --ppl averages: `exact` scores every token once; `olmo_core` reproduces OLMo-core's"
      " in-loop evaluation, with the same rows (of --max-length tokens) and the same divisor",
      default="exact",
  )
  option(
      "--olmo-core-batch ROWS",
      "rows of OLMo-core's evaluation batch over all its ranks; with --averaging=olmo_core, rows"
      " that do not fill a batch are left out",
      otherwise="1, so no rows are left out",
      default=1,
  )
  option(
      "--tokenizer T",
      "`bytes`, a tokenizer.json, a directory with one, or `hf:NAME` on the Hugging Face Hub",
      otherwise="the key eval_tokenizer; --ppl prints bits per byte only if olmo_eos_id is its EOS",
  )
  option("--step N", "step of the checkpoint to evaluate", otherwise="the latest", type=int)
  option("--batch-size N", "rows per batch, over all processes", default=64)
  option("--max-length N", "maximum tokens per row", otherwise="max_target_length", type=int)
  option(
      "--truncation HOW",
      "how to treat contexts that are too long: `left` drops their beginning, `error` stops",
      default="left",
  )
  option(
      "--packing WHEN",
      "pack several requests into a row: `on`, `off`, or `auto`, which packs only if a test shows"
      " that scores stay the same",
      default="auto",
  )
  option(
      "--limit N",
      "maximum documents per task, and per label of each --ppl; below 1, a share of them",
      otherwise="all",
      type=float,
  )
  option("--num-fewshot N", "examples before each question", otherwise="set by the task", type=int)
  option("--output FILE", "write the results to a JSON file", otherwise="only print them")
  option(
      "--log-samples",
      "include each document and answer in the JSON",
      otherwise="off",
      action="store_true",
  )
  option(
      "--cache FILE",
      "file that stores finished requests, so that a killed evaluation can resume",
      otherwise="no cache",
  )
  option("--processes N", "run in N processes on this machine", default=1)


def run(args: argparse.Namespace) -> int:
  """Evaluates, and reports on process 0."""
  _check(args)
  if args.processes > 1:
    return _on_processes(args)
  import jax

  try:
    results = evaluate(args)
  except (errors.MaxtextOlmoError, OSError) as error:
    if jax.distributed.is_initialized() and jax.process_count() > 1:
      # An ordinary exit waits for the other processes, which wait for this one in a collective.
      sys.stderr.write(f"error: {error}\n")
      sys.stderr.flush()
      os._exit(2)
    raise
  if jax.process_index() == 0:
    _report(results)
    if args.output:
      _write(results, args.output)
  return 0


def _check(args: argparse.Namespace) -> None:
  """Raises ConfigError for invalid arguments, before anything is loaded."""
  if not args.tasks and not args.ppl:
    raise errors.ConfigError(
        "There is nothing to evaluate. Give --tasks=NAMES, --ppl=INDEX, or both."
    )
  if args.packing not in _PACKINGS:
    raise errors.ConfigError(
        f"--packing={args.packing} is unknown; choose from {', '.join(_PACKINGS)}."
    )
  if args.averaging not in _AVERAGINGS:
    raise errors.ConfigError(
        f"--averaging={args.averaging} is unknown; choose from {', '.join(_AVERAGINGS)}."
    )
  if args.averaging == "olmo_core" and args.limit:
    raise errors.ConfigError(
        "--averaging=olmo_core evaluates the same documents as OLMo-core; remove --limit."
    )
  if args.averaging != "olmo_core" and args.olmo_core_batch != 1:
    raise errors.ConfigError("--olmo-core-batch needs --averaging=olmo_core.")
  for flag in ("batch_size", "max_length", "limit", "processes", "olmo_core_batch"):
    value = getattr(args, flag)
    if value is not None and value <= 0:
      raise errors.ConfigError(f"--{flag.replace('_', '-')}={value:g} must be positive.")


def _on_processes(args: argparse.Namespace) -> int:
  from maxtext_olmo.trainers import launch

  run = launch.LocalRun(
      [*args.argv, "--processes=1"], processes=args.processes, module="maxtext_olmo"
  )
  outcome = run.wait()
  if outcome.code:
    sys.stderr.write(f"eval: {outcome.reason}\n")
  return outcome.code


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
  """Evaluates the tasks and corpora of the command line; returns the results on each process."""
  import jax

  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.evaluation import perplexity
  from maxtext_olmo.evaluation import scoring
  from maxtext_olmo.evaluation import tokenizer as tokenizer_lib
  from maxtext_olmo.trainers import cluster
  from maxtext_olmo.trainers.tiny import config as config_lib
  from maxtext_olmo.trainers.tiny import evaluation
  from maxtext_olmo.trainers.tiny import model
  from maxtext_olmo.trainers.tiny import report
  from maxtext_olmo.trainers.tiny import trainer

  report.show_on_stderr(0)
  config_file = [f"--config={args.config}"] if args.config else []
  config = config_lib.read_config(["maxtext-olmo eval", *config_file, *args.rest])
  # Look up names first, so that a wrong one fails before the slow part.
  tasks = evaluation.Tasks(args.tasks.split(","), args.task_dir) if args.tasks else None
  indexes = {path: index_lib.load_index(path) for path in args.ppl}
  tokenizer = tokenizer_lib.load_eval_tokenizer(args.tokenizer or config.eval_tokenizer)
  corpus_tokenizer: Any = _corpus_tokenizer(args, config, tokenizer) if indexes else None
  trainer.connect(config)
  report.show_on_stderr(jax.process_index())
  cluster.check_processes()
  mesh = model.make_mesh(config)
  step, params = evaluation.load_params(config, mesh, args.step)
  options: dict[str, Any] = {
      "batch_size": args.batch_size,
      "max_length": args.max_length or config.max_target_length,
      "packing": _PACKINGS[args.packing],
  }
  limit = int(args.limit) if args.limit and args.limit >= 1 else args.limit
  results: dict[str, Any] = {"checkpoint": step}
  if tasks is not None:
    lm = evaluation.make_lm(
        config,
        params,
        mesh,
        tokenizer=tokenizer,
        truncation=args.truncation,
        cache_file=args.cache,
        **options,
    )
    results |= tasks.run(
        lm, limit=limit, num_fewshot=args.num_fewshot, log_samples=args.log_samples
    )
  if indexes:
    scorer = scoring.Scorer(evaluation.make_apply(config), mesh, padding_multiple=16, **options)
    rule = None
    if args.averaging == "olmo_core":
      rule = perplexity.OlmoCoreRule(options["max_length"], args.olmo_core_batch)
    remap = {config.olmo_path_remap_from: config.olmo_path_remap_to}
    results["perplexity"] = {
        path: perplexity.score_index(
            scorer,
            params,
            index,
            corpus_tokenizer,
            path_remap=remap if config.olmo_path_remap_from else None,
            limit=limit,
            olmo_core=rule,
            progress=True,
        )
        for path, index in indexes.items()
    }
  return results


def _corpus_tokenizer(args: argparse.Namespace, config: Any, tokenizer: Any) -> Any:
  """Returns the tokenizer of the corpora, with the EOS that the run was trained on."""
  from maxtext_olmo.evaluation import perplexity

  if config.olmo_eos_id in (-1, tokenizer.eos_id):
    return tokenizer
  if args.tokenizer or config.eval_tokenizer != "bytes":
    raise errors.ConfigError(
        f"The tokenizer {args.tokenizer or config.eval_tokenizer} has the EOS {tokenizer.eos_id},"
        f" but the documents of this run end with olmo_eos_id={config.olmo_eos_id}. Give the"
        " tokenizer of the corpus, or set --config.olmo_eos_id."
    )
  return perplexity.UnknownTokenizer(config.olmo_eos_id)


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
    return "There were no requests to score."
  return (
      f"Scored in rows of {', '.join(map(str, lengths))} tokens:"
      f" {len(lengths)} shape{'s' if len(lengths) > 1 else ''} compiled,"
      f" {config['padding_share']:.1%} of the processed tokens were padding."
  )


def _report_perplexity(path: str, labels: dict[str, Any]) -> None:
  from maxtext_olmo.evaluation import perplexity

  scores = dict(labels)
  if len(labels) > 1:
    scores["all"] = sum(labels.values(), perplexity.LabelScore())
  print(path)
  cli.print_table(
      ("label", "documents", "tokens", "bytes", "loss", "perplexity", "bits per byte"),
      [
          (
              label,
              score.documents,
              score.tokens,
              score.bytes or "unknown",
              f"{score.cross_entropy:.4f}",
              f"{score.perplexity:.4f}",
              f"{score.bits_per_byte:.4f}" if score.bytes else "unknown",
          )
          for label, score in scores.items()
      ],
      style=lambda row: "bold" if row[0] == "all" else "",
  )


def _write(results: dict[str, Any], path: str) -> None:
  from maxtext_olmo.evaluation import perplexity

  def plain(value: Any) -> Any:
    if isinstance(value, perplexity.LabelScore):
      return value.to_json_dict()
    return value.item() if hasattr(value, "item") else str(value)

  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  atomic.write_atomically(path, json.dumps(results, indent=2, default=plain) + "\n")
