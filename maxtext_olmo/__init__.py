"""The OLMo data path for JAX trainers.

Each public name imports its module on first use, so importing the package imports neither JAX nor
Grain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "errors": (
        "ConfigError",
        "CorpusError",
        "MaxtextOlmoError",
        "MissingFileError",
        "OrderError",
        "ResumeError",
        "StoreUnavailableError",
        "WorkerError",
        "WriteError",
    ),
    "corpus.index": ("OlmoNpyFileEntry", "OlmoNpyIndex", "global_to_local"),
    "corpus.index_builder": ("build_index", "load_index"),
    "corpus.document_index": ("DocumentIndex",),
    "corpus.documents": ("build_documents", "load_documents"),
    "corpus.source": ("OlmoDocumentSource", "OlmoNpyDataSource"),
    "corpus.storage": ("LocalStorage", "Storage"),
    "order.permutations": ("make_order",),
    "order.sampler": ("OlmoIndexSampler",),
    "order.schedule": ("BatchSchedule",),
    "order.status": ("RunStatus",),
    "rows.repetition": (
        "NgramFilterTransform",
        "find_periodic_sequences",
        "is_clean_instance",
    ),
    "rows.batch": ("LLMBatch", "LLMIndexedBatch", "ShiftToInputsTargets"),
    "rows.explain": ("DocumentSpan", "PartExplanation", "RowExplanation", "StepExplanation"),
    "rows.parts": ("Parts",),
    "rows.row_source": ("RowSource",),
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
    "loader.olmo_core_run": ("from_olmo_core",),
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
    "config": ("get_config",),
    "trainers.tiny.config": ("get_trainer_config",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:  # The same names for type checkers and editors, which do not run `__getattr__`.
  from maxtext_olmo.config import get_config as get_config
  from maxtext_olmo.corpus.document_index import DocumentIndex as DocumentIndex
  from maxtext_olmo.corpus.documents import build_documents as build_documents
  from maxtext_olmo.corpus.documents import load_documents as load_documents
  from maxtext_olmo.corpus.index import OlmoNpyFileEntry as OlmoNpyFileEntry
  from maxtext_olmo.corpus.index import OlmoNpyIndex as OlmoNpyIndex
  from maxtext_olmo.corpus.index import global_to_local as global_to_local
  from maxtext_olmo.corpus.index_builder import build_index as build_index
  from maxtext_olmo.corpus.index_builder import load_index as load_index
  from maxtext_olmo.corpus.source import OlmoDocumentSource as OlmoDocumentSource
  from maxtext_olmo.corpus.source import OlmoNpyDataSource as OlmoNpyDataSource
  from maxtext_olmo.corpus.storage import LocalStorage as LocalStorage
  from maxtext_olmo.corpus.storage import Storage as Storage
  from maxtext_olmo.devices.global_batch import get_next_batch_sharded as get_next_batch_sharded
  from maxtext_olmo.devices.multihost import MultiHostDataLoadIterator as MultiHostDataLoadIterator
  from maxtext_olmo.errors import ConfigError as ConfigError
  from maxtext_olmo.errors import CorpusError as CorpusError
  from maxtext_olmo.errors import MaxtextOlmoError as MaxtextOlmoError
  from maxtext_olmo.errors import MissingFileError as MissingFileError
  from maxtext_olmo.errors import OrderError as OrderError
  from maxtext_olmo.errors import ResumeError as ResumeError
  from maxtext_olmo.errors import StoreUnavailableError as StoreUnavailableError
  from maxtext_olmo.errors import WorkerError as WorkerError
  from maxtext_olmo.errors import WriteError as WriteError
  from maxtext_olmo.evaluation.datasets import CompleteLLMIndexedBatch as CompleteLLMIndexedBatch
  from maxtext_olmo.evaluation.datasets import (
      MultihostSortedRemapDataset as MultihostSortedRemapDataset,
  )
  from maxtext_olmo.evaluation.datasets import PadBatchDataset as PadBatchDataset
  from maxtext_olmo.evaluation.datasets import (
      PadSequenceInBatchDataset as PadSequenceInBatchDataset,
  )
  from maxtext_olmo.evaluation.datasets import SortedDataset as SortedDataset
  from maxtext_olmo.evaluation.datasets import empty_llm_indexed_sample as empty_llm_indexed_sample
  from maxtext_olmo.evaluation.datasets import token_length as token_length
  from maxtext_olmo.evaluation.model import JaxLM as JaxLM
  from maxtext_olmo.evaluation.pipeline import (
      lmeval_preprocessing_pipeline as lmeval_preprocessing_pipeline,
  )
  from maxtext_olmo.evaluation.requests import (
      HFTokenizeLogLikelihoodRolling as HFTokenizeLogLikelihoodRolling,
  )
  from maxtext_olmo.evaluation.requests import ParseLMEval as ParseLMEval
  from maxtext_olmo.grain_llm.pipeline import make_grain_llm_dataset as make_grain_llm_dataset
  from maxtext_olmo.grain_llm.pipeline import make_grain_llm_iterator as make_grain_llm_iterator
  from maxtext_olmo.grain_llm.pipeline import (
      make_grain_multihost_iterator as make_grain_multihost_iterator,
  )
  from maxtext_olmo.grain_llm.pipeline import shard_grain_dataset as shard_grain_dataset
  from maxtext_olmo.grain_llm.records import AddEndOfDocument as AddEndOfDocument
  from maxtext_olmo.grain_llm.records import TokenFeatures as TokenFeatures
  from maxtext_olmo.loader.olmo_core_run import from_olmo_core as from_olmo_core
  from maxtext_olmo.loader.olmo_grain import (
      make_olmo_grain_data_loader as make_olmo_grain_data_loader,
  )
  from maxtext_olmo.loader.olmo_grain import (
      make_olmo_grain_eval_iterator as make_olmo_grain_eval_iterator,
  )
  from maxtext_olmo.loader.olmo_grain import (
      make_olmo_grain_train_iterator as make_olmo_grain_train_iterator,
  )
  from maxtext_olmo.loader.registry import DataIterator as DataIterator
  from maxtext_olmo.loader.registry import DatasetType as DatasetType
  from maxtext_olmo.loader.registry import create_data_iterator as create_data_iterator
  from maxtext_olmo.loader.registry import register_dataset_type as register_dataset_type
  from maxtext_olmo.loader.resume import IteratorRestore as IteratorRestore
  from maxtext_olmo.loader.resume import IteratorSave as IteratorSave
  from maxtext_olmo.order.permutations import make_order as make_order
  from maxtext_olmo.order.sampler import OlmoIndexSampler as OlmoIndexSampler
  from maxtext_olmo.order.schedule import BatchSchedule as BatchSchedule
  from maxtext_olmo.order.status import RunStatus as RunStatus
  from maxtext_olmo.rows.batch import LLMBatch as LLMBatch
  from maxtext_olmo.rows.batch import LLMIndexedBatch as LLMIndexedBatch
  from maxtext_olmo.rows.batch import ShiftToInputsTargets as ShiftToInputsTargets
  from maxtext_olmo.rows.explain import DocumentSpan as DocumentSpan
  from maxtext_olmo.rows.explain import PartExplanation as PartExplanation
  from maxtext_olmo.rows.explain import RowExplanation as RowExplanation
  from maxtext_olmo.rows.explain import StepExplanation as StepExplanation
  from maxtext_olmo.rows.parts import Parts as Parts
  from maxtext_olmo.rows.repetition import NgramFilterTransform as NgramFilterTransform
  from maxtext_olmo.rows.repetition import find_periodic_sequences as find_periodic_sequences
  from maxtext_olmo.rows.repetition import is_clean_instance as is_clean_instance
  from maxtext_olmo.rows.row_source import RowSource as RowSource
  from maxtext_olmo.trainers.tiny.config import get_trainer_config as get_trainer_config

else:

  def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
