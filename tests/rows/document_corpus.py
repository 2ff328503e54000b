"""A small real corpus with its documents, for tests of rows made of documents."""

import dataclasses
import gzip
import pathlib

import numpy as np

from maxtext_olmo.corpus import documents as documents_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.order import permutations
from maxtext_olmo.rows import planned
from tests import corpora

_SIZES = (333, 150, 7, 514)
# The second file has a boundary file, which may name documents without a token.
_BOUNDARIES = [(0, 20), (20, 20), (20, 90), (95, 95), (95, 150)]


@dataclasses.dataclass(frozen=True)
class DocumentCorpus:
  """A corpus: its index, its token files with their contents, and its documents."""

  index: index_lib.OlmoNpyIndex
  files: token_files.TokenFiles
  contents: list[np.ndarray]
  documents: documents_lib.DocumentIndex

  def tokens(self, document: int) -> np.ndarray:
    """Returns the tokens of a document."""
    number = np.array([document])
    files, first = self.documents.locate(number)
    length = int(self.documents.lengths(number)[0])
    return self.contents[int(files[0])][int(first[0]) : int(first[0]) + length]

  def planned(self, row_length: int = 32, *, seed: int = 0, **arguments) -> planned.PlannedRows:
    """Returns the documents packed into rows."""
    order = permutations.FeistelOrder(num_instances=self.documents.num_documents, seed=seed)
    plan = planned.PackingPlan(
        self.documents.lengths,
        order,
        identity="test",
        row_length=row_length,
        window=9,
        locate=self.documents.locate,
        **arguments,
    )
    return planned.PlannedRows(plan, row_length, self.index.fingerprint, documents=self.documents)


def write(directory: str) -> DocumentCorpus:
  """Writes the files and finds their documents, which end with EOS = 0."""
  path, _ = corpora.write_corpus(directory, tokens_per_file=_SIZES)
  index = index_lib.load_index(path)
  files = token_files.TokenFiles.of_index(index)
  boundaries = pathlib.Path(files.paths[1]).with_suffix(".csv.gz")
  with gzip.open(boundaries, "wt") as file:
    file.writelines(f"{start},{end}\n" for start, end in _BOUNDARIES)
  contents = [np.fromfile(path, files.dtype) for path in files.paths]
  return DocumentCorpus(
      index, files, contents, documents_lib.build_documents(index, path + ".documents", 0)
  )
