"""`maxtext-olmo corpus make`: token files and a mix manifest from text."""

import argparse
import os
from collections.abc import Iterator
from typing import Any

from maxtext_olmo import cli

_DESCRIPTION = """\
Makes a corpus in OLMo's on-disk format from any text: raw token files, a mix.txt that lists them,
and next to each file a .csv.gz with the name, source file and line of each document.

Each input is a text file, or a directory whose files are all used. A .jsonl file has one document
per line; any other file is one document. Files are UTF-8 and may be compressed (.gz). LABEL=PATH
gives an input a label; by default, the label is the name of the file or directory. Inputs with the
same label are combined.
"""

_EPILOG = """\
examples:
  maxtext-olmo corpus make --output data docs/
  maxtext-olmo corpus make --output data --tokenizer olmo/tokenizer.json wiki=dumps/wiki code=repos/
"""


def add_parser(subparsers: Any) -> None:
  """Adds `corpus make`."""
  group = subparsers.add_parser("corpus", help="make a corpus from text")
  option = cli.add_command(
      group.add_subparsers(title="commands", metavar="COMMAND", required=True),
      "make",
      run,
      help="make token files and a mix manifest from text files",
      description=_DESCRIPTION,
      epilog=_EPILOG,
  )
  option("INPUTS", "inputs, as PATH or LABEL=PATH", nargs="+")
  option(
      "--output DIR",
      "directory or URL for mix.txt and TOKENIZER/LABEL/part-00000.npy",
      required=True,
  )
  cli.add_storage_options(option)
  option(
      "--tokenizer",
      "`bytes` (ids are UTF-8 bytes, EOS is 256), the path of a Hugging Face tokenizer.json or of a"
      " directory with one, or `hf:NAME` on the Hugging Face Hub",
      default="bytes",
  )
  option(
      "--tokenizer-name NAME",
      "value of {TOKENIZER} in the manifest",
      otherwise="the directory of the tokenizer.json",
  )
  option(
      "--eos-token TOKEN",
      "the token that ends a document, for a tokenizer.json",
      otherwise="a well-known one, such as <|endoftext|>",
  )
  option(
      "--tokens-per-file N",
      "begin a new file after the document that reaches N tokens",
      default=1 << 28,
  )
  option(
      "--pattern",
      "pattern of the files to use from a directory, such as '*.txt'",
      otherwise="all except hidden files",
      default="*",
  )
  option(
      "--separator TEXT",
      "line that ends a document in a text file; '' is a blank line",
      otherwise="a file is one document",
  )
  option("--text-field FIELD", "the field of a .jsonl line that holds the text", default="text")
  option("--id-field FIELD", "the field of a .jsonl line that names the document", default="id")
  option(
      "--overwrite",
      "replace an existing corpus in the output directory once the new one is complete",
      otherwise="an existing corpus is an error",
      action="store_true",
  )


def run(args: argparse.Namespace) -> int:
  """Makes a corpus and prints the next command."""
  from maxtext_olmo.corpus import tokenize
  from maxtext_olmo.corpus import tokenizer as tokenizers

  tokenizer = tokenizers.load_tokenizer(
      args.tokenizer, name=args.tokenizer_name, eos_token=args.eos_token
  )
  files: dict[str, list[str]] = {}
  for given in args.inputs:
    label, path = _label_and_path(given)
    files.setdefault(label, []).extend(tokenize.find_text_files(path, args.pattern))

  def documents(label: str) -> "Iterator[tokenize.TextDocument]":
    for path in files[label]:
      yield from tokenize.read_documents(
          path, separator=args.separator, text_field=args.text_field, id_field=args.id_field
      )

  summary = tokenize.make_corpus(
      {label: documents(label) for label in files},
      args.output,
      tokenizer,
      tokens_per_file=args.tokens_per_file,
      overwrite=args.overwrite,
      progress=True,
  )
  empty = f" ({summary.empty_documents:,} empty ones left out)" if summary.empty_documents else ""
  print(
      f"{summary.documents:,} documents{empty}, {summary.tokens:,} tokens of {summary.dtype} in"
      f" {summary.files:,} files; vocab_size {summary.vocab_size}, EOS {summary.eos_id}.\n"
      f"The manifest is {summary.mix_file}. Next, build an index:\n"
      f"  maxtext-olmo index build --mix-file {summary.mix_file} --tokenizer {summary.tokenizer}"
      f" --dtype {summary.dtype} --sequence-length 1024 --output"
      f" {os.path.join(args.output, 'index.json')}"
  )
  return 0


def _label_and_path(given: str) -> tuple[str, str]:
  label, equals, path = given.partition("=")
  if equals and not os.path.exists(given):
    return label, path
  name = os.path.basename(os.path.abspath(given))
  return (name if os.path.isdir(given) else name.split(".")[0]), given
