"""Settings for processing the tokens of rows, and how a checkpoint records these settings."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping

from maxtext_olmo import errors
from maxtext_olmo import schema
from maxtext_olmo.rows import batch as batch_lib
from maxtext_olmo.rows import exclude
from maxtext_olmo.rows import repetition
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import segments as segments_lib


@dataclasses.dataclass(frozen=True)
class Content:
  """Settings for processing the tokens of rows; they never change which rows are read.

  Attributes:
    vocab_size: A token id at or above this stops the run; 0 checks only that ids fit into int32.
    ngram_filter: Whether rows with long repetitions are masked in the loss.
    shift: Offset between inputs and targets.
    extras: Names of optional arrays with one value per row (`batch.EXTRAS`).
    exclusions: Tokens to leave out of the loss.
    repetition: Repetitions that the filter masks.
    label_masks: Digest of the row source's mask files; empty without mask files.
  """

  vocab_size: int = 0
  ngram_filter: bool = True
  shift: batch_lib.Shift = batch_lib.Shift()
  extras: tuple[str, ...] = ()
  exclusions: exclude.Exclusions | None = None
  repetition: repetition.RepetitionRule = repetition.OLMO_RULE
  label_masks: str = ""

  def record(self, rule: segments_lib.SegmentRule) -> dict[str, int | bool | str | None]:
    """Returns the values that a checkpoint records, so that a resume notices a change."""
    documents = rule.begins != "nowhere"
    periods = dataclasses.astuple(self.repetition)
    return {
        "ngram_filter": self.ngram_filter,
        "repetition": ",".join(map(str, periods)) if self.ngram_filter else None,
        "document_eos_id": rule.eos_id if documents else None,
        "document_bos_id": rule.bos_id if documents and rule.bos_id >= 0 else None,
        "documents_by_part": rule.begins == "part_and_padding",
        "exclude": None if self.exclusions is None else self.exclusions.digest,
        "label_masks": self.label_masks or None,
    }


# Schema of the result of `Content.record`. States of other releases may have more or fewer members.
RECORD_SCHEMA = {
    "ngram_filter": schema.Maybe(bool),
    "repetition": schema.Maybe(str),
    "document_eos_id": schema.Maybe(schema.Count(-1)),
    "document_bos_id": schema.Maybe(schema.Count(0)),
    "documents_by_part": schema.Maybe(bool),
    "exclude": schema.Maybe(str),
    "label_masks": schema.Maybe(str),
}
_NO_NAMES: Mapping[str, str] = types.MappingProxyType({})
_WITH_DOCUMENTS_OR_NOT = ("nowhere", "after_eos", "part_and_padding")


def describe_record(
    record: Mapping[str, int | bool | str | None], names: Mapping[str, str] = _NO_NAMES
) -> dict[str, str]:
  """Returns the settings of a record in words; leaves out settings that are not set.

  >>> describe_record({"ngram_filter": True, "repetition": "1,13,32", "document_eos_id": None})
  {'repetition filter': 'on'}
  >>> describe_record({"document_eos_id": 7, "exclude": "3297e51f"}, {"3297e51f": "bad.jsonl"})
  {'documents': 'end with token 7', 'olmo_exclude': 'bad.jsonl'}

  Args:
    record: Result of `Content.record`.
    names: Paths of known exclusion files, by digest.
  """
  found: dict[str, str] = {}
  if (filtered := record.get("ngram_filter")) is not None:
    rule, usual = record.get("repetition"), dataclasses.astuple(repetition.OLMO_RULE)
    is_usual = rule is None or rule == ",".join(map(str, usual))
    periods = "" if is_usual else f" ({_repetition_rule(str(rule))})"
    found["repetition filter"] = f"on{periods}" if filtered else "off"
  if (eos_id := record.get("document_eos_id")) is not None:
    bos_id = record.get("document_bos_id")
    begin = "" if bos_id is None else f"begin with token {bos_id}, "
    parts = ", one for each part of a row" if record.get("documents_by_part") else ""
    found["documents"] = f"{begin}end with token {eos_id}{parts}"
  if (excluded := record.get("exclude")) is not None:
    found["olmo_exclude"] = names.get(str(excluded), f"a list with digest {excluded}")
  if (masks := record.get("label_masks")) is not None:
    found["label masks"] = f"files with digest {masks}"
  return found


def describe_changes(
    was: Mapping[str, int | bool | str | None],
    now: Mapping[str, int | bool | str | None],
    names: Mapping[str, str] = _NO_NAMES,
) -> list[str]:
  """Returns descriptions of the differences between two records.

  >>> describe_changes({"exclude": None}, {"exclude": "3297e51f"}, {"3297e51f": "bad.jsonl"})
  ['olmo_exclude: none → bad.jsonl']
  """
  before, after = (describe_record(record, names) for record in (was, now))
  return [
      f"{name}: {before.get(name, 'none')} → {after.get(name, 'none')}"
      for name in dict.fromkeys([*before, *after])
      if before.get(name) != after.get(name)
  ]


def as_recorded(
    record: Mapping[str, int | bool | str | None], source: row_source.RowSource, content: Content
) -> tuple[row_source.RowSource, Content]:
  """Returns the row source and the settings that were in force when `record` was made."""
  now = content.record(source.segment_rule)
  then = {**now, **record}
  content = dataclasses.replace(content, ngram_filter=bool(then["ngram_filter"]))
  if isinstance(then["repetition"], str):
    content = dataclasses.replace(content, repetition=_repetition_rule(then["repetition"]))
  excluded = record.get("exclude")
  if excluded is None:
    content = dataclasses.replace(content, exclusions=None)
  elif content.exclusions is None or content.exclusions.digest != excluded:
    raise errors.OrderError(
        f"The list of exclusions with digest {excluded} was in force at that step, but olmo_exclude"
        " does not name it now. Set olmo_exclude to the file that was used then."
    )
  rule = source.segment_rule
  if rule.begins in _WITH_DOCUMENTS_OR_NOT:
    was = segments_lib.SegmentRule()
    if then["document_eos_id"] is not None:
      bos_id = -1 if then["document_bos_id"] is None else int(then["document_bos_id"])
      was = segments_lib.SegmentRule(
          "part_and_padding" if then["documents_by_part"] else "after_eos",
          int(then["document_eos_id"]),
          bos_id,
      )
    if was != rule:
      source = dataclasses.replace(source, segment_rule=was)  # type: ignore[type-var]
  return source, content


def _repetition_rule(text: str) -> repetition.RepetitionRule:
  try:
    shortest, longest, count = (int(number) for number in text.split(","))
    return repetition.RepetitionRule(shortest, longest, count)
  except ValueError as error:
    raise schema.damaged(f"its repetition filter is {text!r}, expected 3 integers") from error
