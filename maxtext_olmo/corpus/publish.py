"""Writes a new corpus to a directory or a bucket: complete, or not at all.

    out/.unfinished_x1/…      files are written to a hidden directory first
    out/…                     and moved when all are complete,
    out/mix.txt               the manifest last: a corpus with a manifest is complete

If making a corpus fails before its files are moved, they are removed, and the corpus that it would
have replaced stays unchanged. Then the old manifest is removed: until the new one is written, there
is no complete corpus.

For a URL, the files are first written to a local temporary directory, and uploaded when all are
complete. Workers on many machines write them to their URLs instead (`in_place`), so the old
manifest is removed before the first file is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence

from maxtext_olmo import atomic
from maxtext_olmo.corpus import patterns
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.corpus.storage import writing
from maxtext_olmo.errors import ConfigError
from maxtext_olmo.errors import CorpusError
from maxtext_olmo.errors import MaxtextOlmoError
from maxtext_olmo.errors import MissingFileError


@dataclasses.dataclass(frozen=True)
class NewCorpus:
  """A corpus that is being made.

  Attributes:
    directory: Local directory for its files, or URL if they are written in place.
    mix_file: Path or URL that its manifest will have.
    lines: Lines of the manifest; the caller appends them.
  """

  directory: str
  mix_file: str
  lines: list[str] = dataclasses.field(default_factory=list)

  def remove_manifest(self) -> None:
    """Removes the manifest of an existing corpus, so that it never lists both old and new files."""
    (writing.remove if urls.is_url(self.mix_file) else _remove_file)(self.mix_file)


@contextlib.contextmanager
def new_corpus(
    out_dir: str | os.PathLike[str],
    *,
    overwrite: bool,
    replaces: Sequence[str] = (),
    name: str | None = None,
    in_place: bool = False,
) -> Iterator[NewCorpus]:
  """Yields a directory for the files of a corpus, and publishes them if the block succeeds.

  Args:
    out_dir: Directory or URL of the corpus. A missing directory is created.
    overwrite: Whether to replace an existing corpus.
    replaces: Patterns of the old corpus's files to remove, relative to `out_dir`.
    name: Name of the hidden directory in a local `out_dir`. After a kill, the next call with the
      same name finds the files that were complete. By default, each call has a name of its own.
    in_place: Whether the block writes files directly to their URLs. It must call `remove_manifest`
      before it writes the first one.

  Raises:
    ConfigError: There is already a corpus, and `overwrite` is False.
    CorpusError: The manifest would be empty.
  """
  out_dir = urls.without_secrets(out_dir)
  mix_file = check_target(out_dir, overwrite=overwrite)
  remote = urls.is_url(out_dir)
  out_dir = out_dir.rstrip("/") if remote else out_dir
  in_place = in_place and remote
  with nothing_left(out_dir), _unfinished(out_dir, name, remote=remote) as directory:
    corpus = NewCorpus(out_dir if in_place else directory, mix_file)
    yield corpus
    if not corpus.lines:
      raise CorpusError("There are no documents to make a corpus from.")
    if not in_place:
      corpus.remove_manifest()
      _remove_matches(out_dir, replaces, writing.remove if remote else _remove_file)
      _send_all(directory, out_dir, writing.upload if remote else atomic.move)
  writing.write_file(mix_file, "".join(corpus.lines))


def check_target(out_dir: str | os.PathLike[str], *, overwrite: bool) -> str:
  """Returns the path or URL of the manifest that a new corpus will have.

  Raises:
    ConfigError: There is already a corpus, and `overwrite` is False.
  """
  out_dir = urls.without_secrets(out_dir)
  remote = urls.is_url(out_dir)
  mix_file = f"{out_dir.rstrip('/')}/mix.txt" if remote else os.path.join(out_dir, "mix.txt")
  if (open_storage().exists(mix_file) if remote else os.path.exists(mix_file)) and not overwrite:
    raise ConfigError(
        f"{out_dir} already contains a corpus (it has a mix.txt). Choose another directory, or"
        " overwrite it (--overwrite)."
    )
  return mix_file


def check_writable(out_dir: str) -> None:
  """Writes and removes a test file, in a directory that is created if missing, or in a bucket.

  Raises:
    WriteError: The file cannot be written.
  """
  if urls.is_url(out_dir):
    url = f"{out_dir.rstrip('/')}/.unfinished"
    writing.write_file(url, "")
    writing.remove(url)
    return
  with atomic.write_errors(out_dir):
    os.makedirs(out_dir, exist_ok=True)
    with tempfile.TemporaryFile(dir=out_dir):
      pass


@contextlib.contextmanager
def nothing_left(out_dir: str) -> Iterator[None]:
  """Removes the output directories that the block created and left empty, if it fails.

  Adds to the error that no corpus was written.
  """
  made = []
  directory = os.path.abspath(out_dir)
  while not urls.is_url(out_dir) and not os.path.lexists(directory):
    made.append(directory)
    directory = os.path.dirname(directory)
  try:
    yield
  except BaseException as error:  # Including Ctrl-C.
    for directory in made:
      with contextlib.suppress(OSError):
        os.rmdir(directory)
    hint = f"No corpus was written to {out_dir}. Fix the problem and run the command again."
    if isinstance(error, MaxtextOlmoError) and hint not in str(error):
      raise type(error)(f"{error} {hint}") from error
    raise


@contextlib.contextmanager
def _unfinished(out_dir: str, name: str | None, *, remote: bool) -> Iterator[str]:
  """Creates a directory, inside a local output directory, and removes it at the end."""
  if remote:
    with tempfile.TemporaryDirectory(prefix="maxtext_olmo_") as directory:
      yield directory
    return
  with atomic.write_errors(out_dir):
    os.makedirs(out_dir, exist_ok=True)
    if name is None:
      directory = tempfile.mkdtemp(prefix=".unfinished_", dir=out_dir)
    else:
      directory = os.path.join(out_dir, f".unfinished_{name}")
      os.makedirs(directory, mode=0o700, exist_ok=True)
  try:
    yield directory
  finally:
    shutil.rmtree(directory, ignore_errors=True)


def _send_all(source: str, target: str, send: Callable[[str, str], None]) -> None:
  """Sends all files of a directory to the same relative paths elsewhere."""
  for directory, _, names in os.walk(source):
    for name in sorted(names):
      path = os.path.join(directory, name)
      send(path, f"{target}/{os.path.relpath(path, source)}")


def _remove_matches(out_dir: str, replaces: Sequence[str], remove: Callable[[str], None]) -> None:
  for pattern in replaces:
    with contextlib.suppress(MissingFileError):
      for path in patterns.expand(f"{out_dir}/{pattern}"):
        remove(path)


def _remove_file(path: str) -> None:
  with atomic.write_errors(path), contextlib.suppress(FileNotFoundError):
    os.unlink(path)
