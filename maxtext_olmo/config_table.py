"""`KEYS`, the table of all keys of the data path.

Each key has a name, a default, a help text, a check, and the dataset types that read it. To add a
key, add it here; `config_checks` finds values that cannot work together. Trainers build their
configs from this table, and the configuration guide prints it.
"""

from __future__ import annotations

import os
from typing import Any

from maxtext_olmo import config_stages
from maxtext_olmo.config_key import BOOLEAN
from maxtext_olmo.config_key import DATASET_TYPES as DATASET_TYPES
from maxtext_olmo.config_key import DOCUMENTS
from maxtext_olmo.config_key import GRAIN
from maxtext_olmo.config_key import MOST_ROWS
from maxtext_olmo.config_key import PACKED
from maxtext_olmo.config_key import PADDED
from maxtext_olmo.config_key import TEXT
from maxtext_olmo.config_key import TEXTS
from maxtext_olmo.config_key import Key
from maxtext_olmo.config_key import Kind
from maxtext_olmo.config_key import at_least
from maxtext_olmo.config_key import one_of
from maxtext_olmo.config_key import read_number
from maxtext_olmo.config_key import read_whole_number
from maxtext_olmo.config_key import some_of
from maxtext_olmo.corpus import document_spans
from maxtext_olmo.corpus import urls
from maxtext_olmo.order import mixture
from maxtext_olmo.order import permutations
from maxtext_olmo.order import skips
from maxtext_olmo.rows import batch
from maxtext_olmo.rows import packing
from maxtext_olmo.rows import tie_order

_CORPUS = (GRAIN, DOCUMENTS, PACKED, PADDED)
_MIXED = (GRAIN, DOCUMENTS)
_LIKE_OLMO_CORE = (GRAIN, PACKED, PADDED)
_SEGMENTED = (GRAIN, PACKED)
_FILLED = (PACKED, PADDED)
_MOST_WORKERS = 512
_MOST_AHEAD = 1024
_LONGEST_PERIOD = 2**20
ORDERS = permutations.order_names()
PACKINGS = (*packing.PACKINGS, "none")
CORPUS_CHANGES = ("no", "extend", "any")
PACKING_TIES = (*tie_order.TIES, "cache")
_UNKNOWN_SCHEME = f"must be a path, or begin with {', '.join(f'{s}://' for s in urls.SCHEMES)}"


def _is_file(path: str) -> str:
  if not path or os.path.isfile(path):
    return ""
  if urls.is_url(path):  # Its existence is checked when it is opened.
    return "" if path.split("://")[0] in urls.SCHEMES else _UNKNOWN_SCHEME
  return "is not a regular file" if os.path.exists(path) else "does not exist"


def _is_directory(path: str) -> str:
  return "is not a directory" if os.path.exists(path) and not os.path.isdir(path) else ""


def _is_spool_directory(path: str) -> str:
  if urls.is_url(path):
    return "is a URL, but a spool must be on a disk of this host"
  return _is_directory(path)


def _is_local_directory(path: str) -> str:
  if urls.is_url(path):
    return "is a URL, but stored orders are read at random places and must be on a local disk"
  return _is_directory(path)


def _is_endpoint(url: str) -> str:
  good = not url or url.startswith(("http://", "https://"))
  return "" if good else "must begin with http:// or https://"


def _fits_int32(vocab_size: int) -> str:
  return "" if 0 <= vocab_size <= 2**31 else "must be from 0 to 2**31: batches are int32 arrays"


def _read_mesh_axes(value: Any) -> Any:
  """Checks the axes of each dimension: a name, a list of names, or None. Returns them unchanged."""
  dimensions = [value] if isinstance(value, str) else list(value)
  for axes in dimensions:
    for name in axes if isinstance(axes, (list, tuple)) else [axes]:
      if not isinstance(name, str) and axes is not None:
        raise TypeError(f"{name!r} is not the name of an axis.")
  return value


_MESH_AXES = Kind("a list of mesh axes, or of lists of them", list, _read_mesh_axes)
_SCHEDULE = Kind(
    "a list of (boundary, rows) pairs",
    list,
    lambda value: tuple(
        (read_whole_number(first), read_whole_number(rows)) for first, rows in value
    ),
)
_RANGES = Kind(
    "a list of (first, end) pairs",
    list,
    lambda value: tuple((read_whole_number(first), read_whole_number(end)) for first, end in value),
)
_FACTORS = Kind(
    "a list of (boundary, factor) pairs",
    list,
    lambda value: tuple((read_whole_number(first), read_number(factor)) for first, factor in value),
)
KEYS: tuple[Key, ...] = (
    # Keys with the names that MaxText uses.
    Key("dataset_type", GRAIN,
        "Source of the batches: olmo_grain (windows of an OLMo corpus), olmo_documents (its"
        " documents, packed or one per row), olmo_packed and olmo_padded (its documents, packed or"
        " padded as in OLMo-core), synthetic (random tokens), or a registered type."),
    Key("max_target_length", 2048,
        "Tokens per row. For olmo_grain, the sequence length of the index or a divisor of its"
        " max_target_sequence_length.", at_least(1, 2**26)),
    Key("global_batch_size_to_load", 8, "Rows of the global batch arrays.", at_least(1, MOST_ROWS)),
    Key("global_batch_size_to_train_on", 0,
        "Rows that are trained on; the remaining rows are padding. 0: all rows.",
        at_least(0, MOST_ROWS)),
    Key("global_batch_size_to_load_eval", 0,
        "Rows of the global batch arrays in evaluation. 0: as in training.",
        at_least(0, MOST_ROWS)),
    Key("global_batch_size_to_eval_on", 0,
        "Rows that are evaluated; the remaining rows are padding. 0: all rows.",
        at_least(0, MOST_ROWS)),
    Key("vocab_size", 0,
        "A token id at or above this stops the run. 0: check only that ids fit int32.",
        _fits_int32),
    Key("data_shuffle_seed", 0, "Seed of the order."),
    Key("enable_data_shuffling", True,
        "False reads the corpus in its own order, whatever olmo_order is.", read_by=_CORPUS),
    Key("data_sharding", (),
        "Mesh axes of each batch dimension, as in MaxText. Empty: rows are sharded over all axes.",
        kind=_MESH_AXES),
    Key("grain_worker_count", 0,
        "Worker processes that prepare batches. 0 or less: threads of the trainer's process"
        " prepare them, which is fastest.", at_least(-_MOST_WORKERS, _MOST_WORKERS), per_host=True),
    Key("grain_per_worker_buffer_size", 1,
        "Batches that each worker process prepares in advance.",
        at_least(0, _MOST_AHEAD), per_host=True),
    Key("generate_padding_batch_train", False,
        "Continue with padding batches when the training data is exhausted.", read_by=_CORPUS),
    Key("generate_padding_batch_eval", False,
        "Continue with padding batches when the evaluation data is exhausted."),
    Key("eval_interval", -1,
        "Steps between evaluations. 0 or less: no evaluation; create_data_iterator returns None as"
        " the eval iterator."),
    Key("enable_checkpointing", True,
        "Whether initial_step=-1 looks for a checkpoint in checkpoint_dir."),
    Key("checkpoint_dir", "", "Directory of the run's checkpoints.", _is_directory, per_host=True),
    Key("initial_step", -1,
        "First step of this start: the number of steps already done. -1: the step after the latest"
        " committed checkpoint, or 0 if there is none.",
        at_least(-1, 2**32)),
    # The corpus.
    Key("olmo_index_path", "", "Index file, written by `maxtext-olmo index build`.", _is_file,
        read_by=_CORPUS, per_host=True),
    Key("olmo_path_remap_from", "",
        "Token files whose path starts with this are read from olmo_path_remap_to instead.",
        read_by=_CORPUS, per_host=True),
    Key("olmo_path_remap_to", "", "Replacement for the prefix olmo_path_remap_from.",
        read_by=_CORPUS, per_host=True),
    Key("olmo_max_open_files", 0,
        "Token files that each iterator keeps open. 0: as many as `ulimit -n` allows.", at_least(0),
        read_by=_CORPUS, per_host=True),
    Key("olmo_storage_endpoint", "",
        "URL of the server for gs://, s3:// and az:// paths, if it is not the provider's own.",
        _is_endpoint, read_by=_CORPUS, per_host=True),
    Key("olmo_storage_region", "",
        "Region of s3:// buckets. Empty: AWS_REGION, or us-east-1.", read_by=_CORPUS,
        per_host=True),
    Key("olmo_storage_anonymous", False,
        "Read gs://, s3:// and az:// paths without credentials, as for public buckets.",
        read_by=_CORPUS, per_host=True),
    Key("olmo_allow_corpus_change", "no",
        "Policy for a corpus that changed since the checkpoint: 'no' refuses to resume, 'extend'"
        " accepts appended files from the next epoch on, 'any' continues at the same position.",
        one_of(*CORPUS_CHANGES), read_by=(GRAIN,)),
    Key("olmo_eval_index_path", "", "Index file of the evaluation data.", _is_file,
        read_by=_CORPUS, per_host=True),
    Key("olmo_eval_instances", 0,
        "Instances held out of training for evaluation, the same ones in every run.", at_least(0),
        read_by=(GRAIN,)),
    Key("olmo_spool_dir", "",
        "Directory on a local disk in which a run stores, in advance, what its next steps will read"
        " from an object store. The run can then continue during an outage. A restarted run uses"
        " the directory again. Empty: no spool.",
        _is_spool_directory, read_by=_CORPUS, per_host=True),
    Key("olmo_spool_gib", 16.0,
        "Size of olmo_spool_dir in GiB, for all processes of a host together. An hour at 2 million"
        " tokens per second takes 27 GiB.", at_least(0.0625, 2**20), read_by=_CORPUS,
        per_host=True),
    # The order.
    Key("olmo_order", "feistel",
        f"Order of the instances: {', '.join(ORDERS)}. For olmo_documents: feistel or sequential.",
        one_of(*ORDERS), read_by=_CORPUS),
    Key("olmo_order_cache_dir", "",
        "Directory that stores the olmo_core and maxtext orders, 4 bytes per instance and epoch,"
        " and local copies of document indexes, packing plans and bitmaps that are URLs. Empty: the"
        " user's cache directory.", _is_local_directory, read_by=_CORPUS,
        per_host=True),
    Key("olmo_order_resume", "exact",
        "When the restored position is not a multiple of the batch size: 'exact' continues there,"
        " 'olmo_core' rounds down as OLMo-core does.", one_of("exact", "olmo_core"),
        read_by=_LIKE_OLMO_CORE),
    Key("olmo_num_epochs", 0,
        "Epochs to train for; padding completes the last batch. 0: unlimited.", at_least(0, 10**6),
        read_by=_CORPUS),
    Key("olmo_initial_position", -1,
        "Position at which to start: the samples already consumed. -1: computed from initial_step.",
        at_least(-1)),
    Key("olmo_consumed_path", "",
        "Bitmap of the instances consumed before this run; the first epoch omits them.", _is_file,
        read_by=(GRAIN,), per_host=True),
    Key("olmo_mixture", {},
        "Amount to read of each label or label pattern, such as {'wiki': 2.0, 'web-*': 0.5}. Empty:"
        " the corpus as it is.", kind=config_stages.MIXTURE, read_by=_MIXED),
    Key("olmo_mixture_unit", "epochs",
        f"Unit of the amounts in olmo_mixture: {', '.join(mixture.UNITS)} per pass.",
        one_of(*mixture.UNITS), read_by=_MIXED),
    Key("olmo_stages", (),
        "Later stages of the run: dicts with from_step (or from_tokens) and the keys that change"
        " there: olmo_mixture, olmo_mixture_unit, olmo_index_path, olmo_order, data_shuffle_seed,"
        " leave_out_seen.",
        kind=config_stages.STAGES, read_by=_MIXED, per_host=True),
    Key("olmo_allow_mixture_change", False,
        "Whether a changed olmo_mixture takes effect on resume; otherwise it is refused.",
        read_by=_MIXED),
    Key("olmo_batch_schedule", (),
        "(boundary, rows) pairs at which the batch size changes; the first boundary is 0. Empty: a"
        " constant batch size.", kind=_SCHEDULE),
    Key("olmo_batch_rampup_factors", (),
        "(boundary, factor) pairs, an alternative to olmo_batch_schedule: each factor multiplies"
        " global_batch_size_to_train_on.", kind=_FACTORS),
    Key("olmo_batch_schedule_unit", "steps",
        "Unit of the boundaries: 'steps', or 'tokens' trained on.", one_of("steps", "tokens")),
    # The rows.
    Key("olmo_apply_ngram_filter", None,
        "Exclude rows with long repetitions from the loss, as OLMo-core does.", kind=BOOLEAN,
        read_by=_CORPUS,
        default_by_type={GRAIN: True, DOCUMENTS: False, PACKED: False, PADDED: False}),
    Key("olmo_ngram_min_period", 1, "Tokens in the shortest n-gram whose repetition is filtered.",
        at_least(1, _LONGEST_PERIOD), read_by=_CORPUS),
    Key("olmo_ngram_max_period", 13, "Tokens in the longest n-gram whose repetition is filtered.",
        at_least(1, _LONGEST_PERIOD), read_by=_CORPUS),
    Key("olmo_ngram_max_count", 32,
        "A row is masked if an n-gram repeats this often in succession. Values below 3 act as 3.",
        at_least(1, _LONGEST_PERIOD), read_by=_CORPUS),
    Key("olmo_document_mask", False,
        "Restart segment ids and positions at each document, so that attention stays within it."
        " Needs olmo_eos_id. olmo_documents always does this.", read_by=_SEGMENTED),
    Key("olmo_label_masks", (),
        "Mask files, or patterns such as masks/*.npy. A mask file has one byte per token, which"
        " says whether the token counts in the loss. The n-th file belongs to the n-th token file.",
        kind=TEXTS, read_by=_LIKE_OLMO_CORE, per_host=True),
    Key("olmo_label_masks_seed", -1,
        "The --source-permutation-seed with which the index was built, to shuffle the mask files in"
        " the same way. -1: not shuffled.", at_least(-1), read_by=_LIKE_OLMO_CORE),
    Key("olmo_skip", (),
        "(first, end) pairs of steps or samples to skip; the end is exclusive.",
        kind=_RANGES, read_by=_CORPUS),
    Key("olmo_skip_unit", skips.UNITS[0],
        "Unit of olmo_skip: 'steps' as the run logged them, or 'samples', given as positions.",
        one_of(*skips.UNITS), read_by=_CORPUS),
    Key("olmo_skip_mode", skips.MODES[0],
        "What to do with skipped samples: 'drop' continues with the samples after them, 'mask'"
        " delivers them without loss.",
        one_of(*skips.MODES), read_by=_CORPUS),
    Key("olmo_exclude", "",
        "File that lists documents, files, byte ranges, rows or labels to leave out of the loss.",
        _is_file, read_by=_CORPUS, per_host=True),
    Key("olmo_eos_id", -1, "Token that ends each document. -1: unknown.", at_least(-1),
        read_by=_CORPUS),
    Key("olmo_bos_id", -1,
        "Token that begins each document. If set, an EOS ends a document only if a BOS follows."
        " -1: none.", at_least(-1), read_by=_SEGMENTED),
    Key("olmo_pad_id", -1, "Token that fills rows after their documents. -1: unknown.",
        at_least(-1), read_by=_FILLED),
    Key("olmo_boundaries", "eos",
        "Source of the document boundaries: 'eos' scans the tokens; 'csv' reads the .csv.gz file"
        " next to each token file, as OLMo-core does for remote files.",
        one_of(*document_spans.SOURCES), read_by=_FILLED),
    Key("olmo_documents_path", "",
        "Document index. Empty: the file INDEX.documents next to the index, or, for olmo_padded,"
        " INDEX.documents.eos or .csv.",
        read_by=(DOCUMENTS, PADDED), per_host=True),
    Key("olmo_packing", "planned",
        f"How documents are packed into rows: {', '.join(packing.PACKINGS)}; 'none' gives each"
        " document a row of its own.", one_of(*PACKINGS), read_by=(DOCUMENTS,)),
    Key("olmo_packing_bins", 0,
        "Rows packed at a time. 0: 1024 for 'planned'; otherwise the global batch size, or that of"
        " one host for olmo_shard='slice'.",
        at_least(0, 2**20), read_by=(DOCUMENTS,)),
    Key("olmo_source_group_size", 1, "Consecutive files whose documents are packed together.",
        at_least(1, 2**20), read_by=(PACKED,)),
    Key("olmo_packing_ties", "avx512",
        "Order in which equally long documents are packed. In OLMo-core, it depends on how NumPy"
        " sorts on the CPU: 'avx512' (emulated), 'avx2', or 'scalar' for CPUs with neither. 'cache'"
        " uses the order that a run has stored; 'stable' is the order of the files.",
        one_of(*PACKING_TIES), read_by=(PACKED,)),
    Key("olmo_packing_cache_dir", "",
        "The work_dir of a run of OLMo-core, for olmo_packing_ties='cache'.", _is_directory,
        read_by=(PACKED,), per_host=True),
    Key("olmo_packed_segments", "rescan",
        "Segments of a packed row: 'rescan' finds document ends in the padded row, as OLMo-core 2.5"
        " does; 'documents' takes them from .csv.gz boundaries, as 3.0 does.",
        one_of("rescan", "documents"), read_by=(PACKED,)),
    Key("olmo_long_documents", None,
        f"What happens to documents longer than a row: {', '.join(packing.LONG_DOCUMENTS)}. For"
        " olmo_packed: truncate or split, which OLMo-core calls 'fragment'.",
        one_of(*packing.LONG_DOCUMENTS), kind=TEXT, read_by=(DOCUMENTS, PACKED),
        default_by_type={DOCUMENTS: "split", PACKED: "truncate"}),
    Key("olmo_shift", "left",
        "'left' shifts the targets left; 'right' shifts the inputs right and puts an EOS first.",
        one_of("left", "right"), read_by=(DOCUMENTS,)),
    Key("olmo_shard", "batch",
        "How documents are divided among hosts. 'batch': global batches are the same for any number"
        " of hosts. 'slice': each host reads its own documents.", one_of("batch", "slice"),
        read_by=(DOCUMENTS,)),
    # The batches.
    Key("olmo_batch_extras", (),
        f"Additional arrays in each batch, one value per row: {', '.join(batch.EXTRAS)}.",
        some_of(*batch.EXTRAS), read_by=_CORPUS),
    Key("olmo_prefetch_batches", 2,
        "Batches that threads prepare in advance. 0: each batch is made on request.",
        at_least(0, _MOST_AHEAD), per_host=True),
    Key("olmo_device_prefetch", 1,
        "Batches sent to the devices in advance. 0: each batch is sent on request.",
        at_least(0, _MOST_AHEAD), per_host=True),
)  # fmt: skip
