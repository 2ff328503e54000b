"""`maxtext-olmo corpus make-sft`."""

import argparse
import os
import sys
from typing import Any

from maxtext_olmo import cli
from maxtext_olmo import cores
from maxtext_olmo import english

_DESCRIPTION = """\
Makes a fine-tuning corpus from chats: token files, mask files with a byte per token, and a mix.txt,
as OLMo-core's fine-tuning reads them. Each conversation is one document that ends with an EOS. Only
the assistant's tokens count in the loss, including those that end its turns.

Each input is a .jsonl file (or .jsonl.gz, .jsonl.zst), a directory of such files, or a pattern such
as 'chats/*.jsonl'. Each line is a JSON object with a list of messages, each with a role and
content. The chat template determines which roles are allowed. LABEL=PATH gives an input a label.
"""

_EPILOG = """\
examples:
  maxtext-olmo corpus make-sft --output sft --tokenizer olmo3/ chats.jsonl
  maxtext-olmo corpus make-sft --output sft --tokenizer olmo3/ --chat-template olmo.jinja \\
      --max-tokens 32768 --drop-long math='math/*.jsonl.gz' code=code/
"""

_LABEL = "sft"
_ROW_LENGTH = 32768  # The row length of configs/olmo3_sft_think.py.


def add_parser(commands: Any) -> None:
  """Adds `corpus make-sft`."""
  option = cli.add_command(
      commands,
      "make-sft",
      run,
      help="make token files and loss masks from chats",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("INPUTS", "inputs, as PATH or LABEL=PATH", nargs="+")
  option("--output DIR", "directory or URL for mix.txt and the token and mask files", required=True)
  cli.add_storage_options(option)
  option(
      "--tokenizer",
      "the path of a Hugging Face tokenizer.json or of a directory with one, or `hf:NAME` on the"
      " Hugging Face Hub",
      required=True,
  )
  option(
      "--tokenizer-name NAME",
      "name of the tokenizer in the index",
      otherwise="the directory of the tokenizer.json",
  )
  option(
      "--chat-template FILE",
      "Jinja template that turns messages into text",
      otherwise="the tokenizer's own",
  )
  option(
      "--eos-token TOKEN",
      "the token that ends a conversation",
      otherwise="the eos_token of the tokenizer's config, or a well-known one",
  )
  option(
      "--max-tokens N",
      "count conversations of more than N tokens; N is usually the length of a row",
      otherwise="no limit",
      type=int,
  )
  option(
      "--drop-long",
      "leave out conversations that are longer than --max-tokens",
      otherwise="they are kept, and a row truncates them",
      action="store_true",
  )
  option(
      "--max-bad-rows N",
      "leave out and list up to N rows that cannot be used; with more, nothing is written",
      default=0,
  )
  option("--messages-field FIELD", "the field that holds the messages", default="messages")
  option("--id-field FIELD", "the field that names the conversation", default="id")
  option(
      "--tokens-per-file N",
      "begin a new file after the conversation that reaches N tokens",
      default=1 << 28,
  )
  option(
      "--workers N",
      "number of processes that encode conversations",
      otherwise="the number of cores",
      type=int,
  )
  option(
      "--overwrite",
      "replace an existing corpus in the output directory once the new one is complete",
      otherwise="an existing corpus is an error",
      action="store_true",
  )


def run(args: argparse.Namespace) -> int:
  """Makes a corpus, lists the rows that were left out, and prints the next commands."""
  from maxtext_olmo.corpus import chat_template
  from maxtext_olmo.corpus import conversations
  from maxtext_olmo.corpus import make_sft
  from maxtext_olmo.corpus import text_files
  from maxtext_olmo.corpus import text_inputs
  from maxtext_olmo.corpus import tokenizer as tokenizers

  path, configs = tokenizers.find_files(args.tokenizer)
  special = chat_template.special_tokens(tokenizers.read_configs(configs))
  name = args.tokenizer_name
  if name is None and args.tokenizer.startswith(tokenizers.HUB):
    name = args.tokenizer.removeprefix(tokenizers.HUB)
  tokenizer = tokenizers.HuggingFaceTokenizer(
      path, name=name, eos_token=args.eos_token or special.get("eos_token")
  )
  template = chat_template.load_template(
      args.tokenizer, args.chat_template, eos_token=tokenizer.eos_token
  )
  settings = make_sft.Settings(
      conversations.ConversationEncoder(tokenizer, template),
      messages_field=args.messages_field,
      id_field=args.id_field,
      max_tokens=args.max_tokens,
      drop_long=args.drop_long,
  )
  summary = make_sft.make_sft(
      text_inputs.find_inputs(args.inputs, label=_LABEL, suffixes=text_files.JSON_SUFFIXES),
      args.output,
      settings,
      tokens_per_file=args.tokens_per_file,
      max_bad_rows=args.max_bad_rows,
      workers=cores.available_cores() if args.workers is None else args.workers,
      overwrite=args.overwrite,
      progress=True,
  )
  for row in summary.bad_rows:
    print(f"left out: {cli.plain(row)}", file=sys.stderr)
  pad_id = tokenizer.token_id(special.get("pad_token", ""))
  _print_summary(args, settings, summary, tokenizer.eos_id if pad_id is None else pad_id)
  return 0


def _print_summary(args: argparse.Namespace, settings: Any, summary: Any, pad_id: int) -> None:
  tokenizer = settings.encoder.tokenizer
  left_out = english.count(len(summary.bad_rows), "bad row")
  bad = f" ({left_out} left out)" if summary.bad_rows else ""
  print(
      f"{english.count(summary.conversations, 'conversation')}{bad},"
      f" {english.count(summary.tokens, 'token')} of {settings.dtype.name} in"
      f" {english.count(summary.files, 'file')}; {summary.loss_tokens:,} count in the loss"
      f" ({summary.loss_tokens / summary.tokens:.0%}). The longest conversation has"
      f" {english.count(summary.longest, 'token')}."
  )
  if args.max_tokens is not None:
    what = "left out" if args.drop_long else "kept; a row of that length truncates them"
    print(f"Longer than {args.max_tokens:,} tokens: {summary.long:,}, {what}.")
  keys = {
      "vocab_size": tokenizer.vocab_size,
      "olmo_eos_id": tokenizer.eos_id,
      "olmo_pad_id": pad_id,
  }
  if summary.inner_eos:
    print(
        f"{english.count(summary.inner_eos, 'conversation')} with an EOS before the end: the train"
        " command below reads document boundaries from the .csv.gz files."
    )
    keys |= {"olmo_boundaries": "csv", "olmo_packed_segments": "documents"}
  length = args.max_tokens or _ROW_LENGTH
  # The index must have at least one window. Packed rows do not depend on the window length.
  window = min(length, summary.longest)
  index = os.path.join(args.output, "index.json")
  words = " ".join(f"--config.{key}={value}" for key, value in keys.items())
  print(
      f"The manifest is {summary.mix_file}. Next, build an index and train:\n"
      f"  maxtext-olmo index build --mix-file {summary.mix_file} --tokenizer {tokenizer.name}"
      f" --dtype {settings.dtype.name} --sequence-length {window} --output {index}\n"
      f"  maxtext-olmo train --config=olmo3_sft_think --config.olmo_index_path={index}"
      f" --config.max_target_length={length} {words}"
  )
