"""The processing of a row's tokens, and what a checkpoint records of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import exclude
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments as segments_lib


@dataclasses.dataclass(frozen=True)
class Content:
  """The processing of a row's tokens; it never changes which row is read.

  Attributes:
    vocab_size: Ids at or above it stop the run; 0 checks only that ids fit into int32.
    ngram_filter: Whether rows with long repetitions are masked in the loss.
    shift: Offset between inputs and targets.
    extras: Optional arrays with one value per row (`batch.EXTRAS`).
    exclusions: Tokens to leave out of the loss.
  """

  vocab_size: int = 0
  ngram_filter: bool = True
  shift: batch_lib.Shift = batch_lib.Shift()
  extras: tuple[str, ...] = ()
  exclusions: exclude.Exclusions | None = None

  def record(self, rule: segments_lib.SegmentRule) -> dict[str, int | bool | str | None]:
    """Returns the values that a checkpoint records, so that a change is noticed."""
    eos_id = None if rule.begins == "nowhere" else rule.eos_id
    return {
        "ngram_filter": self.ngram_filter,
        "document_eos_id": eos_id,
        "exclude": None if self.exclusions is None else self.exclusions.digest,
    }


# What `Content.record` returns; states of other releases may have other members.
RECORD_SCHEMA = {
    "ngram_filter": schema.Maybe(bool),
    "document_eos_id": schema.Maybe(schema.Count(-1)),
    "exclude": schema.Maybe(str),
}


def as_recorded(
    record: Mapping[str, int | bool | str | None], source: row_source.RowSource, content: Content
) -> tuple[row_source.RowSource, Content]:
  """Returns a row source and the processing of its tokens as they were when `record` was made."""
  content = dataclasses.replace(
      content, ngram_filter=bool(record.get("ngram_filter", content.ngram_filter))
  )
  excluded = record.get("exclude")
  if excluded is None:
    content = dataclasses.replace(content, exclusions=None)
  elif content.exclusions is None or content.exclusions.digest != excluded:
    raise errors.OrderError(
        f"The list of exclusions {excluded} was in force at that step, but olmo_exclude does not"
        " name it now. Set olmo_exclude to the file that was used then."
    )
  rule = source.segment_rule
  now = content.record(rule)["document_eos_id"]
  eos_id = record.get("document_eos_id", now)
  if eos_id != now and rule.begins in ("nowhere", "after_eos"):  # Windows, with documents or not.
    rule = segments_lib.SegmentRule()
    if eos_id is not None:
      rule = segments_lib.SegmentRule("after_eos", int(eos_id))
    source = dataclasses.replace(source, segment_rule=rule)  # type: ignore[type-var]
  return source, content
