"""`maxtext-olmo corpus make` and `corpus copy`; `corpus make-sft` is in `make_sft`."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from maxtext_olmo import cli
from maxtext_olmo import english
from maxtext_olmo.cli import make_sft
from maxtext_olmo.errors import ConfigError

if TYPE_CHECKING:
  from maxtext_olmo.corpus import copy as copy_lib

_DESCRIPTION = """\
Makes a corpus in OLMo's on-disk format from any text: raw token files, a mix.txt that lists them,
and next to each file a .csv.gz with the name, source file and line of each document.

Each input is a text file, a directory whose files are all used, or a quoted pattern such as
'dumps/*/*.jsonl.zst' (`*` within a directory, `**` across directories). A .jsonl file has one
document per line and a .parquet file one per row; any other file is one document. Files are UTF-8
and may be compressed (.gz, .zst). LABEL=PATH gives an input a label; by default, the label is the
name of the file or directory. Inputs with the same label are combined. URLs are inputs too: an
object, all objects below a prefix of a bucket, or a pattern.

The files do not depend on the number of workers. A command that was killed continues when it is run
again: tokenized text stays in OUTPUT.work (or --results) until the corpus is complete.
"""

_EPILOG = """\
examples:
  maxtext-olmo corpus make --output data docs/
  maxtext-olmo corpus make --output data --tokenizer olmo/tokenizer.json wiki=dumps/wiki code=repos/
  files of two kinds, without those of one directory of one label:
    maxtext-olmo corpus make --output data --pattern '*.py' --pattern '*.md' \\
        --exclude 'code=tests/*' wiki=dumps/wiki code=repos/
  on two machines that share a file system, and then on one of them:
    maxtext-olmo corpus make --output data docs/ --part 0 --of 2
    maxtext-olmo corpus make --output data docs/ --part 1 --of 2
    maxtext-olmo corpus make --output data docs/ --merge
"""

_COPY_DESCRIPTION = """\
Copies all or some token files from a bucket, a web server or a disk to a disk or a bucket, and
writes a mix.txt that lists them. The copy keeps the files' paths, so an index of the whole corpus
has the same fingerprint wherever it is.

If the command is interrupted, run it again: it skips complete files and, on a disk, resumes partial
ones. Every read is checked against the ETag of the object, and every copy against its size and, if
the index has one, its checksum.
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
  """Adds `corpus make`, `corpus make-sft` and `corpus copy`."""
  group = subparsers.add_parser("corpus", help="make a corpus from text or chats, or copy one")
  commands = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
  _add_make(commands)
  make_sft.add_parser(commands)
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
  option("INPUTS", "inputs, as PATH or LABEL=PATH; a PATH may be a URL", nargs="+")
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
      "--pattern GLOB",
      "use only these files of a directory, such as '*.txt'; a GLOB with a / is compared with the"
      " path below the input's directory; LABEL=GLOB is for one label; may be repeated",
      otherwise="all except hidden files",
      action="append",
      default=[],
  )
  option(
      "--exclude GLOB",
      "leave out these files of any input; GLOB and LABEL=GLOB are as for --pattern; may be"
      " repeated",
      otherwise="none",
      action="append",
      default=[],
  )
  option(
      "--skip-unreadable",
      "leave out and list files that cannot be read: damaged, not UTF-8, or without the text field",
      otherwise="they are an error",
      action="store_true",
  )
  option(
      "--separator TEXT",
      "line that ends a document in a text file; '' is a blank line",
      otherwise="a file is one document",
  )
  option(
      "--text-field FIELD",
      "the field of a .jsonl line, or the column of a .parquet file, that holds the text",
      default="text",
  )
  option("--id-field FIELD", "the field or column that names the document", default="id")
  option(
      "--overwrite",
      "replace an existing corpus in the output directory once the new one is complete",
      otherwise="an existing corpus is an error",
      action="store_true",
  )
  cli.add_work_options(option, threads=False)


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
      "also copy the .csv.gz that names the documents of each file, if there is one",
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
  option("--output-endpoint URL", "server to write to", otherwise="that of --endpoint")
  option("--output-region NAME", "region of the bucket to write to", otherwise="that of --region")
  option(
      "--output-anonymous",
      "write without credentials",
      otherwise="credentials from the environment are used, even with --anonymous",
      action="store_true",
  )


def run(args: argparse.Namespace) -> int:
  """Makes a corpus, lists the files that were left out, and prints the next command."""
  from maxtext_olmo.corpus import make
  from maxtext_olmo.corpus import text_files
  from maxtext_olmo.corpus import text_inputs
  from maxtext_olmo.corpus import tokenizer as tokenizers
  from maxtext_olmo.corpus import urls

  settings = make.MakeSettings(
      tokenizers.TokenizerSource.find(
          args.tokenizer, name=args.tokenizer_name, eos_token=args.eos_token
      ),
      text_files.TextFormat(args.separator, args.text_field, args.id_field),
      tokens_per_file=args.tokens_per_file,
      skip_unreadable=args.skip_unreadable,
  )
  files = text_inputs.find_inputs(args.inputs, include=args.pattern, exclude=args.exclude)
  summary = make.make_from_files(
      files,
      args.output,
      settings,
      cli.work_options(args, args.output),
      overwrite=args.overwrite,
      progress=True,
  )
  for reason in summary.skipped:
    print(f"left out: {cli.plain(reason)}", file=sys.stderr)
  if isinstance(summary, make.PartSummary):
    print(f"Part {args.part} of {args.of} is done. When all are, run the command with --merge.")
    return 0
  left_out = [
      english.count(number, what) + " left out"
      for number, what in (
          (summary.empty_documents, "empty one"),
          (len(summary.skipped), "unreadable file"),
      )
      if number
  ]
  notes = f" ({', '.join(left_out)})" if left_out else ""
  print(
      f"{english.count(summary.documents, 'document')}{notes},"
      f" {english.count(summary.tokens, 'token')} of {summary.dtype} in"
      f" {english.count(summary.files, 'file')}; vocab_size {summary.vocab_size},"
      f" EOS {summary.eos_id}.\n"
      f"The manifest is {summary.mix_file}. Next, build an index, with your sequence length:\n"
      f"  maxtext-olmo index build --mix-file {summary.mix_file} --tokenizer {summary.tokenizer}"
      f" --dtype {summary.dtype} --sequence-length 256 --output"
      f" {os.path.join(args.output, 'index.json')}"
      + (cli.endpoint_option() if urls.is_url(args.output) else "")
  )
  return 0


def run_copy(args: argparse.Namespace) -> int:
  """Copies files, writes their manifest, and prints the next command."""
  from maxtext_olmo.corpus import copy as copy_lib
  from maxtext_olmo.corpus import paths as paths_lib
  from maxtext_olmo.corpus import urls
  from maxtext_olmo.corpus.storage import open_storage
  from maxtext_olmo.corpus.storage import stores

  source = stores.default_options()
  storage = open_storage(source)
  files, base, details = _source_files(args, storage)
  if args.files_per_label is not None and args.files_per_label < 1:
    raise ConfigError(f"--files-per-label must be at least 1, got {args.files_per_label}.")
  chosen = copy_lib.select(files, labels=args.label, patterns=args.file, first=args.files_per_label)
  output = urls.without_secrets(args.output)
  cli.check_endpoint("--output-endpoint", args.output_endpoint)
  # From here on, only `storage` accesses the source; everything else accesses the output.
  stores.use_by_default(
      stores.StoreOptions(
          endpoint=source.endpoint if args.output_endpoint is None else args.output_endpoint,
          region=source.region if args.output_region is None else args.output_region,
          anonymous=args.output_anonymous,
      )
  )
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
  again = f", {summary.skipped:,} were already there" if summary.skipped else ""
  print(
      f"Copied {summary.copied:,} of {english.count(len(files), 'file')}, {summary.bytes:,} bytes"
      f"{again}.\n"
      f"Checked the size and the ETag or modification time of each file, the index's checksum of"
      f" {summary.checked:,} files, and {summary.reread:,} copies by reading them again.\n"
      f"The manifest is {mix}. Next, build an index"
      f"{', with the dtype and sequence length of the corpus' if 'DTYPE' in details else ''}:\n"
      f"  maxtext-olmo index build --mix-file {mix} {details}--output"
      f" {'index.json' if paths_lib.is_url(output) else os.path.join(output, 'index.json')}"
      + (cli.endpoint_option() if paths_lib.is_url(output) else "")
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
  return files, base, f"--tokenizer {args.tokenizer} --dtype DTYPE --sequence-length LENGTH "
