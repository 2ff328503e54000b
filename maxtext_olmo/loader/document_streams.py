"""The streams of `olmo_documents`: rows made of documents, in one order or as a mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxtext_olmo import config as config_lib
from maxtext_olmo import errors
from maxtext_olmo.corpus import index as index_lib
from maxtext_olmo.corpus import source as source_lib
from maxtext_olmo.grain_llm import row_dataset
from maxtext_olmo.loader import stage_config
from maxtext_olmo.loader import stages as stages_lib
from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import mixture as mixture_lib
from maxtext_olmo.order import staged_stream
from maxtext_olmo.order import stages as order_stages
from maxtext_olmo.rows import document_rows
from maxtext_olmo.rows import mixture as mixture_rows
from maxtext_olmo.rows import planned
from maxtext_olmo.rows import row_sequence
from maxtext_olmo.rows import segments

_PLANNED_BINS = 1024


@dataclasses.dataclass(frozen=True)
class DocumentCorpora(corpora_lib.Corpora):
  """The documents of all stages, and the settings that the stages share.

  Attributes:
    sources: Documents of each index, keyed by the fingerprint of the index.
    options: Data keys of the run.
  """

  sources: Mapping[str, source_lib.OlmoDocumentSource] = dataclasses.field(default_factory=dict)
  options: config_lib.Options | None = None

  def source(self, stage: order_stages.Stage) -> source_lib.OlmoDocumentSource:
    """Returns the documents of a stage."""
    settings = stage.settings
    if settings.fingerprint not in self.sources:
      raise errors.CorpusError(
          f"{stage.name} used the index {settings.index_path}, which this config does not name. Add"
          " that stage to olmo_stages again."
      )
    source = self.sources[settings.fingerprint]
    if settings.documents != source.documents.checksum:
      raise errors.CorpusError(
          f"{stage.name} used different documents: the document index of {settings.index_path} had"
          f" the checksum {settings.documents} then, and has {source.documents.checksum} now."
          " Restore the old document index."
      )
    return source

  def index(self, stage: order_stages.Stage) -> index_lib.OlmoNpyIndex:
    """Returns the index of a stage."""
    return self.source(stage).index

  def chunk_size(self, stage: order_stages.Stage, sequence_length: int) -> int:
    """Returns 1, because rows made of documents are not grouped into chunks."""
    del stage, sequence_length
    return 1


class StagedDocuments(staged_stream.StagedStream):
  """Maps positions to rows of documents, over the stages of a run; see `StagedStream`."""

  corpora: DocumentCorpora

  def _make(self, number: int) -> row_sequence.RowSequence:
    stage = self.stages[number]
    options = _options_of(self.corpora.options, stage.settings)  # type: ignore[arg-type]
    num_epochs = self.num_epochs if number + 1 == len(self.stages) else None
    return make_stream(
        options, self.corpora.source(stage), options.order_name, num_epochs, self._taken(number)
    )

  def _taken(self, number: int) -> dict[str, int]:
    """Returns how many rows of each label were taken by earlier stages that this one continues."""
    mine = self.stages[number].settings
    taken: dict[str, int] = {}
    for earlier in range(number):
      settings = self.stages[earlier].settings
      if mine.mixture and settings.mixture and settings.shares_labels == mine.shares_labels:
        taken |= self.stream(earlier).source.taken_until(self.length(earlier))
    return taken


def _options_of(options: config_lib.Options, settings: order_stages.Settings) -> config_lib.Options:
  """Returns the options of a stage: those of the run, with the stage's order, seed and mixture."""
  return options.replace(
      olmo_order=settings.order,
      data_shuffle_seed=settings.seed,
      olmo_mixture=dict(settings.mixture),
      olmo_mixture_unit=settings.unit or options.olmo_mixture_unit,
  )


def policy_of(
    options: config_lib.Options,
    source: source_lib.OlmoDocumentSource,
    open_source: Callable[[str], source_lib.OlmoDocumentSource],
) -> stages_lib.StagePolicy:
  """Returns the stage policy of a config.

  Args:
    options: The data keys of the run.
    source: The documents of the run.
    open_source: Opens the documents of the index at a path, for stages that name their own index.
  """
  sources = {source.index.fingerprint: source}

  def open_index(path: str) -> index_lib.OlmoNpyIndex:
    opened = open_source(path)
    return sources.setdefault(opened.index.fingerprint, opened).index

  base, requests, indexes = stage_config.read_stages(
      options, source.index, open_index, lambda index: sources[index.fingerprint].documents.checksum
  )
  policy = stages_lib.StagePolicy(
      base,
      requests,
      DocumentCorpora(source.index, indexes, sources=sources, options=options),
      options.olmo_num_epochs or None,
      options.olmo_allow_mixture_change,
      StagedDocuments,
  )
  return stage_config.checked(policy)


def make_stream(
    options: config_lib.Options,
    source: source_lib.OlmoDocumentSource,
    order: str,
    num_epochs: int | None,
    taken: Mapping[str, int] | None = None,
) -> row_sequence.RowSequence:
  """Returns a stream over all documents in one order or, for a mixture, in one order per label.

  Args:
    options: The data keys.
    source: The documents.
    order: Name of the order.
    num_epochs: Number of epochs; None for an endless stream.
    taken: For a mixture, the number of rows of each label that earlier stages have taken.
  """
  seed = options.data_shuffle_seed
  kind = f"{options.olmo_packing} rows of {options.max_target_length}"
  if options.olmo_packing == "planned":
    kind += f", bins {options.olmo_packing_bins or _PLANNED_BINS}"
  kind += f", long documents {options.olmo_long_documents}, EOS {options.olmo_eos_id}"
  if options.olmo_mixture:
    mixed, name = _mixed_rows(options, source, order, taken or {})
    return row_sequence.RowSequence(
        mixed, name=f"{name}, {kind}", seed=seed, documents=source.documents.checksum
    )
  ranges = mixture_lib.Ranges([(0, len(source))])
  return _rows(options, source, ranges, order, seed, num_epochs, name=f"{order}, {kind}")


def _mixed_rows(
    options: config_lib.Options,
    source: source_lib.OlmoDocumentSource,
    order: str,
    taken: Mapping[str, int],
) -> tuple[mixture_rows.MixedRows, str]:
  packed = options.olmo_packing == "planned"
  ranges = {label: mixture_lib.Ranges(parts) for label, parts in source.labels().items()}
  # Planned rows are full, so a share of the tokens is a share of the rows, and the size of a label
  # is its number of tokens. Without packing, each row is one document, and the size of a label is
  # its number of documents.
  sizes = dict.fromkeys(ranges, 0)
  for entry in source.index.files:
    sizes[entry.label] += entry.n_tokens
  if not packed:
    sizes = {label: len(part) for label, part in ranges.items()}
  unit = options.olmo_mixture_unit
  values = mixture_lib.share_values(options.olmo_mixture, sizes, unit)
  weights = [value * sizes[label] if unit == "epochs" else value for label, value in values.items()]
  members = []
  for label in values:
    seed = mixture_lib.member_seed(options.data_shuffle_seed, label)
    members.append(_rows(options, source, ranges[label], order, seed, None, name=label))
  shares = ", ".join(f"{label}={float(value):.12g}" for label, value in values.items())
  starts = [taken.get(label, 0) for label in values]
  return mixture_rows.MixedRows(members, weights, starts), f"{order} mixture by {unit} ({shares})"


def _rows(
    options: config_lib.Options,
    source: source_lib.OlmoDocumentSource,
    ranges: mixture_lib.Ranges,
    order_name: str,
    seed: int,
    num_epochs: int | None,
    *,
    name: str,
) -> row_sequence.RowSequence:
  """Returns the rows of the documents in the given ranges."""
  order = mixture_lib.RangesOrder(ranges, order_name, seed)
  length = options.max_target_length
  rule = segments.SegmentRule("part", options.olmo_eos_id)
  if options.olmo_packing == "none":
    rows: Any = document_rows.DocumentRows(
        source.documents,
        length,
        options.olmo_long_documents,
        rule,
    )
    return row_sequence.RowSequence(
        rows,
        name=name,
        seed=seed,
        num_epochs=num_epochs,
        order=order,
        documents=source.documents.checksum,
    )
  bins = options.olmo_packing_bins or _PLANNED_BINS
  plan = planned.PackingPlan(
      source.lengths,
      order,
      identity=f"{source!r}, {source.documents.checksum}, {len(ranges)} of them",
      row_length=length,
      window=row_dataset.window_of(source, len(source), bins, length),
      long_documents=options.olmo_long_documents,
      locate=source.documents.locate,
      counts_path=source.documents.local_path,
      # Hosts do not share local copies, so each host stores its own counts.
      writes_counts=bool(source.documents.copy) or jax.process_index() == 0,
  )
  rows = planned.PlannedRows(plan, length, source.index.fingerprint, rule, source.documents)
  return row_sequence.RowSequence(
      rows, name=name, seed=seed, num_epochs=num_epochs, documents=source.documents.checksum
  )
