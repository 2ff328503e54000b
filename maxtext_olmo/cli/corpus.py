"""`maxtext-olmo corpus make` and `corpus copy`."""

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo import english
from maxtext_olmo.errors import ConfigError

if TYPE_CHECKING:
  from maxtext_olmo.corpus import copy as copy_lib

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

_COPY_DESCRIPTION = """\
Copies token files, all or some, from a bucket, a web server or a disk to a disk or a bucket, and
writes a mix.txt that lists them. The copy keeps the files' paths, so an index of the whole corpus
has the same fingerprint wherever it lies.

If the command is interrupted, run it again: complete files are not copied again, and on a disk a
partial one is continued. Every read is checked against the ETag of the object, and every copy
against its size and, if the index has one, its checksum.
"""

_COPY_EPILOG = """\
examples:
  the first two files of each label, to start with:
    maxtext-olmo corpus copy OLMo-mix-0925-official.txt --base https://olmo-data.org \\
        --files-per-label 2 --output /data/olmo
  all of one label, to a bucket:
    maxtext-olmo corpus copy olmo-mix-0925.json --label 'wiki*' --output gs://bucket/olmo
"""


def add_parser(subparsers: Any) -> None:
  """Adds `corpus make` and `corpus copy`."""
  group = subparsers.add_parser("corpus", help="make a corpus from text, or copy one")
  commands = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
  _add_make(commands)
  _add_copy(commands)


def _add_make(commands: Any) -> None:
  option = cli.add_command(
      commands,
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


def _add_copy(commands: Any) -> None:
  option = cli.add_command(
      commands,
      "copy",
      run_copy,
      help="copy token files from a bucket to a disk or another bucket",
      description=_COPY_DESCRIPTION,
      epilog=_COPY_EPILOG,
  )
  option("SOURCE", "an index (.json), or a manifest with one `label,path` per line")
  option("--output PLACE", "directory or URL for the files and mix.txt", required=True)
  option(
      "--label LABEL",
      "copy the files with this label, which may contain `*` and `?`; may be repeated",
      otherwise="all",
      action="append",
      default=[],
  )
  option(
      "--file PATH",
      "copy the files with this path, which may contain `*` and `?`; may be repeated",
      otherwise="all",
      action="append",
      default=[],
  )
  option(
      "--files-per-label N", "copy only the first N files of each label", otherwise="all", type=int
  )
  option(
      "--base PLACE",
      "directory or URL to which the paths are relative",
      otherwise="the base of the index, or the directory of the manifest",
  )
  option(
      "--tokenizer NAME",
      "value of {TOKENIZER} in a manifest",
      default="allenai/dolma3-tokenizer",
  )
  option(
      "--sidecars",
      "also copy the .csv.gz with the names of the documents, where there is one",
      otherwise="token files only",
      action="store_true",
  )
  option(
      "--reread",
      "read every copy again and compare checksums",
      otherwise="sizes are compared",
      action="store_true",
  )
  option("--workers N", "files to copy at a time", default=8)
  cli.add_storage_options(option)


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
  left_out = english.count(summary.empty_documents, "empty one")
  empty = f" ({left_out} left out)" if summary.empty_documents else ""
  print(
      f"{english.count(summary.documents, 'document')}{empty},"
      f" {english.count(summary.tokens, 'token')} of {summary.dtype} in"
      f" {english.count(summary.files, 'file')}; vocab_size {summary.vocab_size},"
      f" EOS {summary.eos_id}.\n"
      f"The manifest is {summary.mix_file}. Next, build an index, with your sequence length:\n"
      f"  maxtext-olmo index build --mix-file {summary.mix_file} --tokenizer {summary.tokenizer}"
      f" --dtype {summary.dtype} --sequence-length 256 --output"
      f" {os.path.join(args.output, 'index.json')}"
  )
  return 0


def _label_and_path(given: str) -> tuple[str, str]:
  label, equals, path = given.partition("=")
  if equals and not os.path.exists(given):
    return label, path
  name = os.path.basename(os.path.abspath(given))
  return (name if os.path.isdir(given) else name.split(".")[0]), given


def run_copy(args: argparse.Namespace) -> int:
  """Copies files, writes their manifest, and prints the next command."""
  from maxtext_olmo.corpus import copy as copy_lib
  from maxtext_olmo.corpus import paths as paths_lib
  from maxtext_olmo.corpus import urls
  from maxtext_olmo.corpus.storage import open_storage

  storage = open_storage()
  files, base, details = _source_files(args, storage)
  if args.files_per_label is not None and args.files_per_label < 1:
    raise ConfigError(f"--files-per-label must be at least 1, got {args.files_per_label}.")
  chosen = copy_lib.select(files, labels=args.label, patterns=args.file, first=args.files_per_label)
  output = urls.without_secrets(args.output)
  summary = copy_lib.copy_files(
      copy_lib.with_sidecars(chosen) if args.sidecars else chosen,
      base,
      output,
      storage,
      workers=args.workers,
      reread=args.reread,
      progress=True,
  )
  mix = copy_lib.write_manifest(chosen, output)
  again = f", {summary.skipped:,} were there already" if summary.skipped else ""
  print(
      f"Copied {summary.copied:,} of {english.count(len(files), 'file')}, {summary.bytes:,} bytes"
      f"{again}.\n"
      f"Checked: ETag or time of change, and size, of each file; checksums of the index for"
      f" {summary.checked:,}; read again {summary.reread:,}.\n"
      f"The manifest is {mix}. Next, build an index:\n"
      f"  maxtext-olmo index build --mix-file {mix} {details}--output"
      f" {'index.json' if paths_lib.is_url(output) else os.path.join(output, 'index.json')}"
  )
  return 0


def _source_files(
    args: argparse.Namespace, storage: Any
) -> tuple["list[copy_lib.SourceFile]", str, str]:
  """Returns the files of an index or a manifest, their base, and options for the next index."""
  from maxtext_olmo.corpus import copy as copy_lib
  from maxtext_olmo.corpus import index_builder
  from maxtext_olmo.corpus import manifest
  from maxtext_olmo.corpus import paths as paths_lib
  from maxtext_olmo.corpus import urls

  source = urls.without_secrets(args.source)
  base = None if args.base is None else paths_lib.absolute(urls.without_secrets(args.base))
  if source.endswith(".json"):
    index = index_builder.load_index(source, base=base, storage=storage)
    files = [
        copy_lib.SourceFile(
            entry.path,
            entry.label,
            index.expected_size(number),
            entry.checksum,
            entry.etag if base is None else None,
        )
        for number, entry in enumerate(index.files)
    ]
    longest = index.max_target_sequence_length
    more = f" --max-target-sequence-length {longest}" if longest else ""
    details = (
        f"--tokenizer {index.tokenizer} --dtype {index.dtype} --sequence-length"
        f" {index.sequence_length}{more} "
    )
    return files, index.base, details
  entries = manifest.read_mix(source, tokenizer=args.tokenizer, storage=storage)
  if base is None:
    base = paths_lib.absolute(source.rpartition("/")[0] or ".")
  files = [copy_lib.SourceFile(paths_lib.relative_to(base, e.path), e.label) for e in entries]
  return files, base, f"--tokenizer {args.tokenizer} --sequence-length 8192 "
