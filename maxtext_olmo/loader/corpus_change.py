"""The policy for a corpus that changed after a run started.

A run keeps a copy of its index next to its checkpoints. If the corpus no longer matches, the copy
shows which files changed, and `olmo_allow_corpus_change` decides what happens:

    no       resuming is refused, with a list of the changes
    extend   appended files are used from the next epoch on; the held-out part stays the same
    any      the run continues at its position in the new corpus, after a warning

The state of an extended run lists every extent that its corpus has had, as `[first epoch, number of
files, fingerprint]`. An extent can be checked against the current index alone, because the index
determines the fingerprint of its first k files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import jax
from absl import logging
from etils import epath

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import index_changes
from maxtext_olmo.loader import run_files
from maxtext_olmo.order import stream as stream_lib
from maxtext_olmo.order import timeline

_COPIES = "olmo_corpus"


@dataclasses.dataclass(frozen=True)
class CorpusPolicy:
  """Chooses the stream that a run resumes with if its corpus may have changed.

  Attributes:
    index: The corpus as it is now.
    allow: The changes to accept: "no", "extend" or "any".
    checkpoint_dir: Checkpoint directory, which also holds copies of indexes; empty if none.
  """

  index: index_lib.OlmoNpyIndex
  allow: str = "no"
  checkpoint_dir: str = ""

  def stream_for(
      self, entry: timeline.Entry, stream: stream_lib.Stream, position: Callable[[], int]
  ) -> stream_lib.Stream:
    """Returns the stream to continue with; raises ResumeError if the change is not allowed.

    Args:
      entry: The history entry in force when the state was saved.
      stream: The stream of the corpus as it is now.
      position: Function that returns the position of the state, counted in samples of `stream`.
    """
    was = str(entry.identity.get("fingerprint", ""))
    extents = list(entry.extents)
    if was == stream.fingerprint:
      self._check_content(was)
      self._check_extents(extents)
      return self._with_extents(stream, extents)
    files_then = index_lib.find_prefix(self.index, was)
    what = _indented(self._describe(was, files_then, entry.sequence_length))
    if self.allow == "any":
      logging.warning(
          "The corpus has changed since the checkpoint:\n%s\nolmo_allow_corpus_change=any: the run"
          " continues at position %d of a new order over %d instances. In this epoch, some data"
          " that was already trained on is repeated, and some of the rest is skipped%s.",
          what,
          position(),
          stream.order.num_instances,
          "; held-out instances may have been trained on" if stream.split.num_held_out else "",
      )
      return stream.with_history(self.index, ())
    if self.allow == "extend" and files_then is not None:
      return self._extended(was, files_then, extents, position(), stream, what)
    raise errors.ResumeError(
        "The corpus has changed since the checkpoint, so resuming would repeat and skip data:\n"
        f"{what}\n" + _advice(self.allow, files_then is not None)
    )

  def changes(self, fingerprint: str) -> list[str] | None:
    """Returns what changed since the index with this fingerprint; None if no copy was kept."""
    old = self._old_index(fingerprint)
    return None if old is None else index_changes.describe_changes(old, self.index)

  def keep_copy(self, *, resumed: bool) -> None:
    """Keeps a copy of the index next to the checkpoints, on process 0.

    Args:
      resumed: Whether the run has accepted a state. Until then, an older copy is not overwritten,
        because it shows which files of the corpus changed since the state was saved.
    """
    if jax.process_index() != 0 or not self.checkpoint_dir:
      return
    path = self._copy(self.index.fingerprint)
    with atomic.write_errors(path):
      missing = not path.exists()
    if missing or (resumed and self.allow == "any"):
      run_files.write(path, index_builder.dump_index(self.index))

  def _copy(self, fingerprint: str) -> epath.Path:
    # A state is untrusted: its fingerprint may be any text, such as a path.
    name = re.sub(r"[^0-9A-Za-z]", "_", fingerprint.rpartition(":")[2])[:100] + ".json"
    return epath.Path(self.checkpoint_dir) / _COPIES / name

  def _extended(
      self,
      was: str,
      files_then: int,
      extents: Sequence[stream_lib.Extent],
      position: int,
      stream: stream_lib.Stream,
      what: str,
  ) -> stream_lib.Stream:
    extents = list(extents) or [(0, files_then, was)]
    self._check_extents(extents, last_must_be_present=False)
    epochs = self._with_extents(stream, extents).order.epochs
    epoch = epochs.epoch(position)
    first = epoch if position == epochs.start(epoch) else epoch + 1
    kept = [extent for extent in extents if extent[0] < first]
    history = [*kept, (first, len(self.index.files), self.index.fingerprint)] if kept else []
    extended = stream.with_history(self.index, history)
    logging.warning(
        "The corpus has been extended since the checkpoint:\n%s\nEpoch %d (counted from 0) is the"
        " first with the new files, and has %d instances; until then nothing changes, and the"
        " held-out part stays the same.",
        what,
        first,
        extended.order.num_instances,
    )
    return extended

  def _with_extents(
      self, stream: stream_lib.Stream, extents: Sequence[stream_lib.Extent]
  ) -> stream_lib.Stream:
    try:
      return stream.with_history(self.index, extents)
    except errors.OrderError as error:
      raise schema.damaged(f"its corpus cannot have had the extents {extents} ({error})") from error

  def _check_extents(
      self, extents: Sequence[stream_lib.Extent], last_must_be_present: bool = True
  ) -> None:
    """Raises ResumeError unless each extent is a prefix of this corpus.

    If `last_must_be_present`, the last extent must be the whole corpus.
    """
    for _, num_files, fingerprint in extents:
      if index_lib.find_prefix(self.index, fingerprint) != num_files:
        raise errors.ResumeError(
            f"The checkpoint's run had a corpus of {num_files} files with the fingerprint"
            f" {fingerprint} in earlier epochs, but the first files of this index have a different"
            " fingerprint. Use the index that the run was extended with."
        )
    if extents and last_must_be_present and extents[-1][1] != len(self.index.files):
      raise errors.ResumeError(
          f"The checkpoint's run had {extents[-1][1]} files, but this index has"
          f" {len(self.index.files)}. Use the index that the run was extended with."
      )

  def _check_content(self, fingerprint: str) -> None:
    """Raises ResumeError, or warns, if files were replaced by others of the same size.

    Only the checksums in the two indexes can show this, because the fingerprint is the same.
    """
    old = self._old_index(fingerprint)
    found = index_changes.describe_changes(old, self.index) if old is not None else []
    if not found:
      return
    what = _indented(found)
    if self.allow == "any":
      logging.warning(
          "Files of the corpus were replaced since the checkpoint:\n%s\n"
          "olmo_allow_corpus_change=any: the same instances come in the same order, with different"
          " tokens.",
          what,
      )
      return
    raise errors.ResumeError(
        f"Files of the corpus were replaced since the checkpoint:\n{what}\n" + _advice("no", False)
    )

  def _describe(self, fingerprint: str, files_then: int | None, sequence_length: int) -> list[str]:
    index = self.index
    old = self._old_index(fingerprint)
    if old is not None:
      return index_changes.describe_changes(old, index)
    if files_then is not None:
      return [f"added: {len(index.files) - files_then} files after the first {files_then}"]
    lines = []
    if index.max_target_sequence_length is None and sequence_length != index.sequence_length:
      lines.append(
          f"windows: the run had rows of {sequence_length} tokens, but this index cuts files into"
          f" {index.sequence_length} tokens each and has no max_target_sequence_length, so the"
          " instances and their order differ"
      )
    return [
        *lines,
        f"fingerprint: the checkpoint has {fingerprint!r}, this run has {index.fingerprint!r} (no"
        " copy of the old index is in checkpoint_dir, so the files that changed cannot be named)",
    ]

  def _old_index(self, fingerprint: str) -> index_lib.OlmoNpyIndex | None:
    if not self.checkpoint_dir or not (path := self._copy(fingerprint)).exists():
      return None
    try:
      return index_builder.parse_index(run_files.read(path).decode(), str(path))
    except (OSError, ValueError) as error:  # The run can resume without a list of changed files.
      logging.warning("The copy of the run's index cannot be read: %s", error)
      return None


def _indented(lines: Sequence[str]) -> str:
  return "\n".join(f"  {line}" for line in lines)


def _advice(allow: str, appended: bool) -> str:
  lines = ["Use the corpus that the run was started with, or, to continue with this one:"]
  if appended:
    lines.append(
        "  olmo_allow_corpus_change=extend   the new files are used from the next epoch on; nothing"
        " is repeated or skipped"
    )
  elif allow == "extend":
    lines = [
        "olmo_allow_corpus_change=extend allows new files only after the old ones, which must not"
        " change. To continue anyway:"
    ]
  lines.append(
      "  olmo_allow_corpus_change=any      some data of this epoch is repeated, some is skipped"
  )
  return "\n".join(lines)
