"""Makes a corpus in OLMo's on-disk format from text.

    out/mix.txt                           wiki,{TOKENIZER}/wiki/part-00000.npy
                                          wiki,{TOKENIZER}/wiki/part-00001.npy
    out/bytes/wiki/part-00000.npy         document, EOS, document, EOS, …  (raw ids, no header)
    out/bytes/wiki/part-00000.csv.gz      position, name, source file and line of each document
    out/bytes/wiki/part-00001.npy         …

Documents stay whole: a part ends with the document that fills it. Memory is bounded by the longest
document.

All files are written to a hidden directory in `out` and moved when they are complete, the manifest
last. So a corpus with a manifest is complete. If making a corpus fails, nothing of it is left, and
a corpus that it would have replaced is unchanged.
"""

import contextlib
import dataclasses
import fnmatch
import gzip
import itertools
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from maxtext_olmo import atomic
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MaxtextOlmoError
from maxtext_olmo.errors import MissingFileError
from maxtext_olmo.progress import progress_bar

DEFAULT_TOKENS_PER_FILE = 1 << 28

# A name that is one path component and contains no character that would split a manifest line.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]*")
_OTHER_NAME = {
    "label": "Give the input another one (LABEL=PATH).",
    "tokenizer's name": "Give it another one (--tokenizer-name).",
}
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024
_LONGEST_NAME = 1000


class TextDocument(NamedTuple):
  """The text of a document, with its name and source.

  Attributes:
    text: Text of the document.
    name: Name of the document; empty if it has none.
    source: File that the text came from; empty if unknown.
    line: First line of the text in that file, counted from 1; None if unknown.
  """

  text: str
  name: str = ""
  source: str = ""
  line: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CorpusSummary:
  """A summary of the corpus that `make_corpus` wrote, with the values that later steps need."""

  mix_file: str
  tokenizer: str
  dtype: str
  vocab_size: int
  eos_id: int
  files: int
  documents: int
  empty_documents: int
  tokens: int


def make_corpus(
    documents: Mapping[str, Iterable[str | TextDocument]],
    out_dir: str | os.PathLike[str],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    tokens_per_file: int = DEFAULT_TOKENS_PER_FILE,
    overwrite: bool = False,
    progress: bool = False,
) -> CorpusSummary:
  """Tokenizes documents and writes token files, their boundary files and a mix manifest.

  Args:
    documents: label → texts, which are read once and in order; empty texts are skipped and counted.
    out_dir: Directory of the corpus, created if it is missing; or a URL, for which all files are
      first written to a temporary directory.
    tokenizer: Tokenizer of the texts.
    tokens_per_file: Number of tokens after which a file ends, with the document that reaches it.
    overwrite: Whether to replace an existing corpus once the new one is complete.
    progress: Whether to show a progress bar.
  """
  out_dir = urls.without_secrets(out_dir)
  if urls.is_url(out_dir):
    settings = {"tokens_per_file": tokens_per_file, "progress": progress}
    return _make_in_store(documents, out_dir.rstrip("/"), tokenizer, overwrite, settings)
  _check_names(documents, tokenizer.name)
  if tokens_per_file < 1:
    raise ConfigError(f"tokens_per_file must be positive, got {tokens_per_file}.")
  mix_file = os.path.join(out_dir, "mix.txt")
  if os.path.exists(mix_file) and not overwrite:
    raise _exists_already(out_dir)
  dtype = tokenizer_lib.dtype_for(tokenizer.vocab_size)
  counts = _Counts()
  lines: list[str] = []
  with _unfinished(out_dir) as unfinished:
    with progress_bar("Tokenizing", None, enabled=progress, unit="documents") as advance:
      for label, texts in documents.items():
        stream = _tokenize(texts, tokenizer, counts, advance)
        directory = os.path.join(unfinished, tokenizer.name, label)
        parts = _write_parts(stream, directory, dtype, tokenizer.eos_id, tokens_per_file)
        if not parts:
          raise CorpusError(f"The label {label!r} has no document with text in it.")
        lines += [f"{label},{{TOKENIZER}}/{label}/{part}\n" for part in parts]
    if not lines:
      raise CorpusError("There are no documents to make a corpus from.")
    # Remove the old manifest before its files change, so that it never describes old and new ones.
    with contextlib.suppress(FileNotFoundError):
      os.unlink(mix_file)
    _move_all(unfinished, out_dir)
  atomic.write_atomically(mix_file, "".join(lines))
  return CorpusSummary(
      mix_file=mix_file,
      tokenizer=tokenizer.name,
      dtype=dtype.name,
      vocab_size=tokenizer.vocab_size,
      eos_id=tokenizer.eos_id,
      files=len(lines),
      documents=counts.documents,
      empty_documents=counts.empty,
      tokens=counts.tokens,
  )


def _exists_already(out_dir: str) -> ConfigError:
  message = f"{out_dir} already contains a corpus (it has a mix.txt). Choose another directory, or"
  return ConfigError(f"{message} overwrite it (--overwrite).")


def _make_in_store(
    documents: Mapping[str, Iterable[str | TextDocument]],
    out_dir: str,
    tokenizer: tokenizer_lib.Tokenizer,
    overwrite: bool,
    settings: dict[str, Any],
) -> CorpusSummary:
  """Makes a corpus in a temporary directory and sends it to a store, its manifest last."""
  mix_file = f"{out_dir}/mix.txt"
  if open_storage().exists(mix_file) and not overwrite:
    raise _exists_already(out_dir)
  with tempfile.TemporaryDirectory(prefix="maxtext_olmo_") as folder:
    summary = make_corpus(documents, folder, tokenizer, **settings)
    writing.remove(mix_file)  # It never describes old and new files.
    paths = [os.path.join(inside, name) for inside, _, names in os.walk(folder) for name in names]
    for path in sorted(paths, key=lambda path: (path == summary.mix_file, path)):
      writing.upload(path, f"{out_dir}/{os.path.relpath(path, folder)}")
  return dataclasses.replace(summary, mix_file=mix_file)


@contextlib.contextmanager
def _unfinished(out_dir: str) -> Iterator[str]:
  """Creates a hidden directory in the output directory; after an error, removes what it created."""
  made = []
  directory = os.path.abspath(out_dir)
  while not os.path.lexists(directory):
    made.append(directory)
    directory = os.path.dirname(directory)
  try:
    with contextlib.ExitStack() as stack:
      with atomic.write_errors(out_dir):
        os.makedirs(out_dir, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".unfinished_", dir=out_dir)
      yield stack.enter_context(temporary)
  except BaseException as error:  # Including Ctrl-C.
    for directory in made:
      with contextlib.suppress(OSError):
        os.rmdir(directory)
    if isinstance(error, MaxtextOlmoError):
      hint = f"No corpus was written to {out_dir}. Fix the problem and run the command again."
      raise type(error)(f"{error} {hint}") from error
    raise


def _move_all(source: str, target: str) -> None:
  """Moves all files of a directory to the same relative paths in another one."""
  for directory, _, names in os.walk(source):
    for name in sorted(names):
      path = os.path.join(directory, name)
      atomic.move(path, os.path.join(target, os.path.relpath(path, source)))


def find_text_files(path: str | os.PathLike[str], pattern: str = "*") -> list[str]:
  """Returns `path` itself if it is a file, else the files below it that match, sorted."""
  path = os.fspath(path)
  if not os.path.isdir(path):
    if not os.path.exists(path):
      raise MissingFileError(f"There is no file or directory {path}. Check the path.")
    return [path]
  found = []
  for directory, subdirectories, names in os.walk(path):
    subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
    found += [
        os.path.join(directory, name)
        for name in names
        if not name.startswith(".") and fnmatch.fnmatch(name, pattern)
    ]
  if not found:
    raise CorpusError(f"No file below {path} matches the pattern {pattern!r}.")
  return sorted(found)


def read_documents(
    path: str, *, separator: str | None = None, text_field: str = "text", id_field: str = "id"
) -> Iterator[TextDocument]:
  """Yields the documents of a text file (UTF-8, optionally `.gz`).

  A `.jsonl` file has one document per line, in a field of a JSON object. Any other file is one
  document unless `separator` is given. A document without an id is named after its file and line.

  Args:
    path: Path of the text file.
    separator: Line that separates documents; "" stands for a blank line. Ignored for `.jsonl`.
    text_field: Field of a `.jsonl` line that contains the text.
    id_field: Field that contains the document's id, a short string or an integer.
  """
  # A file name need not be valid UTF-8.
  source = os.fsencode(path).decode(errors="backslashreplace")
  if os.path.exists(path) and not os.path.isfile(path):
    raise CorpusError(f"{path} is not a regular file.")
  try:
    # Only "\n" ends a line, and no newline is translated, so the corpus has the bytes of the file.
    with _open_text(path) as file:
      if path.endswith(_JSON_SUFFIXES):
        found = _json_documents(file, path, text_field, id_field)
      elif separator is None:
        found = iter([("", 1, file.read())])
      else:
        found = _separated_documents(file, separator)
      for name, line, text in found:
        yield TextDocument(text, name or f"{source}:{line}", source, line)
  except UnicodeDecodeError as error:
    raise CorpusError(
        f"{path} is not UTF-8 text (it contains the byte {error.object[error.start]:#04x}). Convert"
        " it, or exclude it (--pattern)."
    ) from error
  except (OSError, EOFError, zlib.error) as error:
    raise CorpusError(f"Cannot read {path}: {error}.") from error


@dataclasses.dataclass(slots=True)
class _Counts:
  documents: int = 0
  empty: int = 0
  tokens: int = 0


def _check_names(labels: Iterable[str], tokenizer: str) -> None:
  for what, name in [("label", label) for label in labels] + [
      ("tokenizer's name", part) for part in tokenizer.split("/")
  ]:
    if not _NAME.fullmatch(name):
      raise ConfigError(
          f"{name!r} cannot be a {what}: it becomes a directory and part of the manifest, so only"
          f" letters, digits and _.+@=- are allowed. {_OTHER_NAME[what]}"
      )


def _tokenize(
    texts: Iterable[str | TextDocument],
    tokenizer: tokenizer_lib.Tokenizer,
    counts: _Counts,
    advance: Callable[[int], None],
) -> Iterator[tuple[np.ndarray, TextDocument]]:
  """Yields the ids of each document that is not empty; tokenizes many documents per call."""
  for batch in _batches(texts):
    for ids, document in zip(tokenizer.encode([document.text for document in batch]), batch):
      if not ids.size:
        counts.empty += 1
        continue
      counts.documents += 1
      counts.tokens += ids.size + 1
      yield ids, document
    advance(len(batch))


def _batches(texts: Iterable[str | TextDocument]) -> Iterator[list[TextDocument]]:
  batch: list[TextDocument] = []
  characters = 0
  for text in texts:
    document = TextDocument(text) if isinstance(text, str) else text
    batch.append(document)
    characters += len(document.text)
    if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


def _write_parts(
    documents: Iterator[tuple[np.ndarray, TextDocument]],
    directory: str,
    dtype: np.dtype,
    eos_id: int,
    tokens_per_file: int,
) -> list[str]:
  """Writes `part-00000.npy`, `part-00001.npy`, … with boundary files, and returns their names."""
  eos = np.array([eos_id], dtype).tobytes()
  parts: list[str] = []
  for first in documents:
    parts.append(f"part-{len(parts):05d}.npy")
    path = os.path.join(directory, parts[-1])
    with atomic.write_errors(path):
      os.makedirs(directory, exist_ok=True)
    with (
        atomic.atomic_writer(path) as file,
        atomic.atomic_writer(boundaries.boundary_path(path)) as boundary_file,
        contextlib.closing(boundaries.BoundaryWriter(boundary_file)) as bounds,
    ):
      written = 0
      for ids, (_, name, source, line) in itertools.chain([first], documents):
        file.write(ids.astype(dtype, copy=False).tobytes() + eos)
        bounds.add(ids.size + 1, name, source, line)
        written += ids.size + 1
        if written >= tokens_per_file:
          break
  return parts


def _open_text(path: str) -> IO[str]:
  if path.endswith(".gz"):
    return gzip.open(path, "rt", encoding="utf-8", newline="\n")
  return open(path, encoding="utf-8", newline="\n")


def _json_documents(
    file: IO[str], path: str, text_field: str, id_field: str
) -> Iterator[tuple[str, int, str]]:
  """Yields name, line and text of each document."""
  for number, line in enumerate(file, start=1):
    if not line.strip():
      continue
    try:
      values = json.loads(line)
      text = values[text_field]
      if not isinstance(text, str):
        raise TypeError(f"{text_field!r} is not text")
      text.encode()  # JSON can contain lone surrogates, which no tokenizer accepts.
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise CorpusError(
          f"{path}:{number}: expected a JSON object with text in the field {text_field!r}:"
          f" {type(error).__name__}: {error}."
      ) from error
    yield _name(values.get(id_field)), number, text


def _name(value: Any) -> str:
  """Returns the id of a document as a string; empty if it is missing, too long or not a scalar."""
  if type(value) is int and abs(value) < 1 << 64:
    return str(value)
  if not isinstance(value, str) or len(value) > _LONGEST_NAME:
    return ""
  return value.encode(errors="backslashreplace").decode()


def _separated_documents(file: IO[str], separator: str) -> Iterator[tuple[str, int, str]]:
  """Yields an empty name, the first line and the text of each document."""
  lines: list[str] = []
  first = 0
  for number, line in enumerate(file, start=1):
    if line.strip() != separator.strip():
      first = first if lines else number
      lines.append(line)
    elif lines:  # Consecutive separators count as one.
      yield "", first, "".join(lines)
      lines = []
  if lines:
    yield "", first, "".join(lines)
