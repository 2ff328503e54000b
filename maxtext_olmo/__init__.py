"""The OLMo data path for JAX trainers.

The public names load what they need when they are first used, so that importing the package imports neither JAX nor Grain.
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
    ),
    "corpus.index": (
        "OlmoNpyFileEntry",
        "OlmoNpyIndex",
        "build_index",
        "global_to_local",
        "load_index",
    ),
    "corpus.document_index": ("DocumentIndex", "build_documents", "load_documents"),
    "corpus.document_source": ("OlmoDocumentSource",),
    "corpus.source": ("OlmoNpyDataSource",),
    "order.permutations": ("make_order",),
    "order.sampler": ("OlmoIndexSampler",),
    "order.schedule": ("BatchSchedule",),
    "batches.collate": ("LLMBatch", "LLMIndexedBatch"),
    "batches.repetition": (
        "NgramFilterTransform",
        "find_periodic_sequences",
        "is_clean_instance",
    ),
    "batches.transforms": ("ShiftToInputsTargets",),
    "devices.multihost": ("MultiHostDataLoadIterator", "get_next_batch_sharded"),
    "batches.tokens": ("AddEndOfDocument", "TokenFeatures"),
    "pipelines.llm": (
        "make_grain_llm_dataset",
        "make_grain_llm_iterator",
        "make_grain_multihost_iterator",
        "shard_grain_dataset",
    ),
    "pipelines.lmeval": (
        "CompleteLLMIndexedBatch",
        "HFTokenizeLogLikelihoodRolling",
        "JaxLM",
        "MultihostSortedRemapDataset",
        "PadBatchDataset",
        "PadSequenceInBatchDataset",
        "ParseLMEval",
        "SortedDataset",
        "empty_llm_indexed_sample",
        "lmeval_preprocessing_pipeline",
        "token_length",
    ),
    "pipelines.olmo": (
        "make_olmo_grain_data_loader",
        "make_olmo_grain_eval_iterator",
        "make_olmo_grain_train_iterator",
    ),
    "pipelines.orbax_state": ("IteratorRestore", "IteratorSave"),
    "pipelines.registry": ("create_data_iterator", "register_dataset_type"),
    "trainers.config": ("get_config",),
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
