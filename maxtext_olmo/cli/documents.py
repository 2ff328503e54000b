"""`maxtext-olmo index documents`: find the documents of an index, once."""

import argparse
import os
from typing import Any

_DESCRIPTION = """\
Finds the documents of a corpus by their EOS (or by dolma's csv.gz boundary files, if they are next
to the token files) and writes where each begins to a sidecar file, which
dataset_type=olmo_documents maps into memory. Reads all tokens once.
"""


def add_parser(commands: Any) -> None:
  """Adds `index documents`."""
  parser = commands.add_parser(
      "documents",
      help="find the documents of an index, for dataset_type=olmo_documents",
      description=_DESCRIPTION,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("index", metavar="INDEX", help="the index, a JSON file")
  parser.add_argument(
      "--eos-id", type=int, required=True, help="the token that ends a document (required)"
  )
  parser.add_argument(
      "--output", metavar="FILE", help="the sidecar file (default: INDEX.documents)"
  )
  parser.add_argument(
      "--workers", type=int, metavar="N", help="threads that read files (default: as many as cores)"
  )
  parser.add_argument(
      "--verify",
      action="store_true",
      help="check the sidecar file that is there, all of it, instead of making one (default: off)",
  )
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Builds or checks the sidecar file and says what is in it."""
  import numpy as np

  from maxtext_olmo.corpus import documents as documents_lib
  from maxtext_olmo.corpus import index_builder as index_lib
  from maxtext_olmo.corpus.storage import LocalStorage
  from maxtext_olmo.errors import CorpusError

  index = index_lib.load_index(args.index)
  path = args.output or documents_lib.default_path(args.index)
  directory = os.path.dirname(os.path.abspath(path))
  if not os.path.isdir(directory):
    raise CorpusError(f"The directory of the output does not exist: {directory}.")
  if args.verify:
    documents = documents_lib.load_documents(path, index, args.eos_id)
    documents.verify()
  else:
    documents = documents_lib.build_documents(
        index, path, args.eos_id, workers=args.workers, progress=True
    )
  count = documents.num_documents
  sample = documents.lengths(np.linspace(0, count - 1, min(count, 100_000)).astype(np.int64))
  middle, long = np.percentile(sample, [50, 99]) if count else (0, 0)
  by_csv = documents.num_boundary_files
  print(
      f"{count:,} documents, {documents.num_tokens:,} tokens; half of them have up to"
      f" {middle:,.0f} tokens, 99 % up to {long:,.0f}.\n"
      + (f"{by_csv} of {documents.num_files} files by dolma's boundary files.\n" if by_csv else "")
      + f"{path} {'is whole' if args.verify else 'is written'}:"
      f" {LocalStorage().size(path):,} bytes."
  )
  return 0
