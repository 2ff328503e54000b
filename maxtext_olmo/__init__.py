"""The OLMo data path for JAX trainers.

The public names load what they need when they are first used, so that importing the package imports
neither JAX nor Grain.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "errors": (
        "ConfigError",
        "CorpusError",
        "MaxtextOlmoError",
        "OrderError",
        "ResumeError",
        "WorkerError",
        "WriteError",
    ),
    "corpus.index": ("OlmoNpyFileEntry", "OlmoNpyIndex", "global_to_local"),
    "corpus.index_builder": ("build_index", "load_index"),
    "corpus.documents": ("DocumentIndex", "build_documents", "load_documents"),
    "corpus.source": ("OlmoDocumentSource", "OlmoNpyDataSource"),
    "order.permutations": ("make_order",),
    "order.sampler": ("OlmoIndexSampler",),
    "order.schedule": ("BatchSchedule",),
    "rows.repetition": (
        "NgramFilterTransform",
        "find_periodic_sequences",
        "is_clean_instance",
    ),
    "rows.batch": ("LLMBatch", "LLMIndexedBatch", "ShiftToInputsTargets"),
    "devices.global_batch": ("get_next_batch_sharded",),
    "devices.multihost": ("MultiHostDataLoadIterator",),
    "grain_llm.records": ("AddEndOfDocument", "TokenFeatures"),
    "grain_llm.pipeline": (
        "make_grain_llm_dataset",
        "make_grain_llm_iterator",
        "make_grain_multihost_iterator",
        "shard_grain_dataset",
    ),
    "evaluation.datasets": (
        "CompleteLLMIndexedBatch",
        "MultihostSortedRemapDataset",
        "PadBatchDataset",
        "PadSequenceInBatchDataset",
        "SortedDataset",
        "empty_llm_indexed_sample",
        "token_length",
    ),
    "evaluation.requests": ("HFTokenizeLogLikelihoodRolling", "ParseLMEval"),
    "evaluation.model": ("JaxLM",),
    "evaluation.pipeline": ("lmeval_preprocessing_pipeline",),
    "loader.olmo_grain": (
        "make_olmo_grain_data_loader",
        "make_olmo_grain_eval_iterator",
        "make_olmo_grain_train_iterator",
    ),
    "loader.registry": (
        "DataIterator",
        "DatasetType",
        "create_data_iterator",
        "register_dataset_type",
    ),
    "loader.resume": ("IteratorRestore", "IteratorSave"),
    "trainers.tiny.config": ("get_config",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
  if name not in _MODULE_OF:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_MODULE_OF})
