"""Makes a fine-tuning corpus from conversations, in the format of OLMo-core's fine-tuning data.

    out/mix.txt                          sft,token_ids_part_00000.npy
    out/token_ids_part_00000.npy         conversation, EOS, conversation, EOS, …  (raw ids)
    out/labels_mask_part_00000.npy       a byte per token: 1 if it counts in the loss
    out/token_ids_part_00000.csv.gz      position, name, source file and line of each conversation

Conversations are encoded in worker processes and written in the order of the input, so the files do
not depend on the number of workers:

    lines of the files → chunks → workers: parse, render, tokenize, mask → parts, in order
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxtext_olmo import atomic
from maxtext_olmo import english
from maxtext_olmo.corpus import boundaries
from maxtext_olmo.corpus import chat_template
from maxtext_olmo.corpus import conversations
from maxtext_olmo.corpus import publish
from maxtext_olmo.corpus import text_files
from maxtext_olmo.corpus import tokenize
from maxtext_olmo.corpus import tokenizer as tokenizer_lib
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.work import engines
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.progress import progress_bar

_TOKENS, _MASKS = "token_ids_part_", "labels_mask_part_"
MASK_PATTERN = "labels_mask_*.npy"
_CHUNK_BYTES = 1 << 18
_CHUNK_LINES = 256
_CHUNKS_PER_WORKER = 3
_LONGEST_LINE = 1 << 28
_MOST_WORKERS = 256
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings for turning rows into encoded conversations.

  Attributes:
    encoder: The tokenizer and the chat template.
    messages_field: Field of a row that holds the messages.
    id_field: Field of a row that names the conversation.
    max_tokens: Length above which a conversation counts as too long; None sets no limit.
    drop_long: Whether to leave out conversations that are too long.
  """

  encoder: conversations.ConversationEncoder
  messages_field: str = "messages"
  id_field: str = "id"
  max_tokens: int | None = None
  drop_long: bool = False

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the token files."""
    return tokenizer_lib.dtype_for(self.encoder.tokenizer.vocab_size)


@dataclasses.dataclass
class SftSummary:
  """A summary of the corpus that `make_sft` wrote.

  Attributes:
    mix_file: Path or URL of the manifest.
    files: Number of token files.
    conversations: Number of conversations that were written.
    tokens: Number of tokens that were written.
    loss_tokens: Number of written tokens that count in the loss.
    longest: Length of the longest conversation that was written.
    long: Number of conversations with more than `max_tokens` tokens, written or not.
    inner_eos: Number of conversations that have an EOS before their end.
    bad_rows: Each row that was left out, as `file:line: reason`.
  """

  mix_file: str = ""
  files: int = 0
  conversations: int = 0
  tokens: int = 0
  loss_tokens: int = 0
  longest: int = 0
  long: int = 0
  inner_eos: int = 0
  bad_rows: list[str] = dataclasses.field(default_factory=list)


def make_sft(
    files: Mapping[str, Sequence[str]],
    out_dir: str | os.PathLike[str],
    settings: Settings,
    *,
    tokens_per_file: int = tokenize.DEFAULT_TOKENS_PER_FILE,
    max_bad_rows: int = 0,
    workers: int = 1,
    overwrite: bool = False,
    progress: bool = False,
) -> SftSummary:
  """Encodes conversations, and writes token files, mask files, boundary files and a manifest.

  Args:
    files: label → files (`.jsonl`, optionally compressed), with a conversation per line.
    out_dir: Directory or URL of the corpus. A missing directory is created.
    settings: How to turn rows into encoded conversations.
    tokens_per_file: A file ends after the conversation that reaches this number of tokens.
    max_bad_rows: Number of rows without a usable conversation to tolerate; more raise an error.
    workers: Number of processes that encode conversations; 1 encodes them in this process.
    overwrite: Whether to replace an existing corpus once the new one is complete.
    progress: Whether to show a progress bar.

  Raises:
    CorpusError: There are too many bad rows, or no conversation.
  """
  tokenize.check_names(files, settings.encoder.tokenizer.name)
  for name, value, least in (
      ("tokens_per_file", tokens_per_file, 1),
      ("max_bad_rows", max_bad_rows, 0),
      ("workers", workers, 1),
      ("max_tokens", 1 if settings.max_tokens is None else settings.max_tokens, 1),
  ):
    if value < least:
      raise ConfigError(f"{name} must be at least {least}, got {value}.")
  summary = SftSummary()
  replaced = (f"{_TOKENS}*.npy", f"{_TOKENS}*.csv.gz", f"{_MASKS}*.npy")
  with (
      publish.new_corpus(out_dir, overwrite=overwrite, replaces=replaced) as corpus,
      progress_bar("Encoding", None, enabled=progress, unit="conversations") as advance,
      _pool(settings, min(workers, _MOST_WORKERS)) as encode,
  ):
    summary.mix_file = corpus.mix_file
    for label, paths in files.items():
      with _PartWriter(corpus.directory, summary.files, tokens_per_file) as writer:
        for source, chunk in encode(_chunks(paths)):
          _add(chunk, source, settings, summary, writer, max_bad_rows)
          advance(len(chunk.documents) + len(chunk.bad_rows))
      if not writer.parts:
        raise CorpusError(f"The label {label!r} has no usable conversation.{_list_bad(summary)}")
      corpus.lines.extend(f"{label},{part}\n" for part in writer.parts)
      summary.files += len(writer.parts)
  return summary


def _add(
    chunk: _Encoded,
    source: str,
    settings: Settings,
    summary: SftSummary,
    writer: _PartWriter,
    max_bad_rows: int,
) -> None:
  """Writes the conversations of a chunk, and counts them."""
  summary.bad_rows += [f"{source}:{line}: {reason}" for line, reason in chunk.bad_rows]
  if len(summary.bad_rows) > max_bad_rows:
    raise CorpusError(
        f"Found {english.count(len(summary.bad_rows), 'bad row')}; --max-bad-rows allows"
        f" {max_bad_rows:,}:{_list_bad(summary)}"
    )
  first = 0
  for line, length, name in chunk.documents:
    ids, mask = chunk.ids[first : first + length], chunk.mask[first : first + length]
    first += length
    is_long = settings.max_tokens is not None and length > settings.max_tokens
    summary.long += is_long
    if is_long and settings.drop_long:
      continue
    summary.conversations += 1
    summary.tokens += length
    summary.loss_tokens += int(np.count_nonzero(mask))
    summary.longest = max(summary.longest, length)
    eos_id = settings.encoder.tokenizer.eos_id
    summary.inner_eos += conversations.has_inner_eos(ids, eos_id)
    writer.add(ids, mask, name or f"{source}:{line}", source, line)


def _list_bad(summary: SftSummary) -> str:
  shown = "".join(f"\n  {row}" for row in summary.bad_rows[:_SHOWN])
  more = len(summary.bad_rows) - _SHOWN
  return f"{shown}\n  and {english.count(more, 'more row')}\n" if more > 0 else f"{shown}\n"


class _Chunk(NamedTuple):
  """Lines of one file: their numbers from 1, and their bytes."""

  path: str
  lines: list[tuple[int, bytes]]


class _Encoded(NamedTuple):
  """The conversations of a chunk.

  Attributes:
    ids: Ids of all conversations.
    mask: Mask of all conversations.
    documents: Line, length and name of each conversation.
    bad_rows: Line of each row that cannot be used, and the reason.
  """

  ids: np.ndarray
  mask: np.ndarray
  documents: list[tuple[int, int, str]]
  bad_rows: list[tuple[int, str]]


def _encode_chunk(chunk: _Chunk, settings: Settings) -> _Encoded:
  ids, masks = [np.zeros(0, settings.dtype)], [np.zeros(0, np.bool_)]
  documents: list[tuple[int, int, str]] = []
  bad_rows: list[tuple[int, str]] = []
  for number, line in chunk.lines:
    try:
      conversation = conversations.parse_row(
          line, messages_field=settings.messages_field, id_field=settings.id_field
      )
      encoded = settings.encoder.encode(conversation)
    except chat_template.ConversationError as error:
      bad_rows.append((number, str(error)))
      continue
    ids.append(encoded.ids.astype(settings.dtype))
    masks.append(encoded.mask)
    documents.append((number, len(encoded.ids), conversation.name))
  return _Encoded(np.concatenate(ids), np.concatenate(masks), documents, bad_rows)


def _chunks(paths: Sequence[str]) -> Iterator[_Chunk]:
  """Yields the non-blank lines of files, in chunks."""
  for path in paths:
    lines: list[tuple[int, bytes]] = []
    size = 0
    for number, line in enumerate(_lines(path), start=1):
      if line.strip():
        lines.append((number, line))
        size += len(line)
      if size >= _CHUNK_BYTES or len(lines) >= _CHUNK_LINES:
        yield _Chunk(path, lines)
        lines, size = [], 0
    if lines:
      yield _Chunk(path, lines)


def _lines(path: str) -> Iterator[bytes]:
  if not urls.is_url(path) and not os.path.isfile(path):
    raise CorpusError(f"{path} is not a regular file.")
  try:
    with text_files.open_bytes(path) as file:
      number = 0
      while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
          raise CorpusError(
              f"{path}:{number} has more than {_LONGEST_LINE:,} bytes. Expected a JSON object per"
              " line."
          )
        yield line
  except (OSError, EOFError, zlib.error) as error:
    raise CorpusError(f"Cannot read {path}: {error}.") from error


_Encode = Callable[[Iterator[_Chunk]], Iterator[tuple[str, _Encoded]]]


@contextlib.contextmanager
def _pool(settings: Settings, workers: int) -> Iterator[_Encode]:
  """Yields a function that encodes chunks, in worker processes if `workers` exceeds 1."""

  def source(chunk: _Chunk) -> str:
    # A file name need not be valid UTF-8.
    return os.fsencode(chunk.path).decode(errors="backslashreplace")

  if workers == 1:
    yield lambda chunks: ((source(chunk), _encode_chunk(chunk, settings)) for chunk in chunks)
    return
  # Spawns workers, because a fork of a process with threads may hang.
  pool = concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context("spawn"), _start_worker, (settings,)
  )

  def encode(chunks: Iterator[_Chunk]) -> Iterator[tuple[str, _Encoded]]:
    pending: collections.deque[tuple[str, concurrent.futures.Future[_Encoded]]] = (
        collections.deque()
    )
    for chunk in chunks:
      with engines.interrupts_blocked():  # The pool starts its processes here.
        pending.append((source(chunk), pool.submit(_work, chunk)))
      if len(pending) >= workers * _CHUNKS_PER_WORKER:
        path, future = pending.popleft()
        yield path, future.result()
    for path, future in pending:
      yield path, future.result()

  try:
    yield encode
  except concurrent.futures.BrokenExecutor as error:
    raise CorpusError(
        "A worker process died, most likely because the host ran out of memory. Use fewer workers"
        " (--workers)."
    ) from error
  finally:
    pool.shutdown(cancel_futures=True)


_settings: Settings  # Set by `_start_worker`, in worker processes only.


def _start_worker(settings: Settings) -> None:
  global _settings
  _settings = settings
  parent = multiprocessing.parent_process()

  def end_with_parent() -> None:
    if parent is not None:
      parent.join()
      os._exit(1)

  threading.Thread(target=end_with_parent, name="olmo-parent", daemon=True).start()


def _work(chunk: _Chunk) -> _Encoded:
  return _encode_chunk(chunk, _settings)


class _PartWriter:
  """Writes conversations to token, mask and boundary files; a part ends once it is full.

  Args:
    directory: Directory of the files.
    number: Number of the first part.
    tokens_per_file: Number of tokens at which a part is full.

  Attributes:
    parts: Names of the token files so far.
  """

  def __init__(self, directory: str, number: int, tokens_per_file: int):
    self._directory = directory
    self._number = number
    self._tokens_per_file = tokens_per_file
    self._open: contextlib.ExitStack | None = None
    self.parts: list[str] = []

  def __enter__(self) -> _PartWriter:
    return self

  def __exit__(self, kind, error, trace) -> None:
    if self._open is not None:
      self._open.__exit__(kind, error, trace)

  def add(self, ids: np.ndarray, mask: np.ndarray, name: str, source: str, line: int) -> None:
    """Writes a conversation."""
    if self._open is None:
      self._open = self._next_part()
    self._tokens.write(ids.tobytes())
    self._masks.write(mask.tobytes())
    self._bounds.add(len(ids), name, source, line)
    self._written += len(ids)
    if self._written >= self._tokens_per_file:
      self._open.close()
      self._open = None

  def _next_part(self) -> contextlib.ExitStack:
    number = self._number + len(self.parts)
    self.parts.append(f"{_TOKENS}{number:05d}.npy")
    path = os.path.join(self._directory, self.parts[-1])
    masks = os.path.join(self._directory, f"{_MASKS}{number:05d}.npy")
    with contextlib.ExitStack() as stack:
      self._tokens = stack.enter_context(atomic.atomic_writer(path))
      self._masks = stack.enter_context(atomic.atomic_writer(masks))
      bounds = stack.enter_context(atomic.atomic_writer(boundaries.boundary_path(path)))
      self._bounds = stack.enter_context(contextlib.closing(boundaries.BoundaryWriter(bounds)))
      self._written = 0
      return stack.pop_all()
