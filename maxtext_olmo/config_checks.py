"""Checks of a whole config: combinations of values that cannot work together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from maxtext_olmo import config_key
from maxtext_olmo import errors
from maxtext_olmo.corpus import urls
from maxtext_olmo.order import permutations

_PACKAGES_FOR_GCS = ("gcsfs", "tensorflow")  # Either lets `epath` reach gs:// buckets.


def problems(options: Any, defaults: Mapping[str, Any]) -> Iterator[str]:
  """Yields a sentence for each combination of values that cannot work together.

  Args:
    options: A `config.Options`.
    defaults: The default of each key.
  """
  yield from _batch_sizes(options)
  yield from _schedule(options)
  yield from _checkpoints(options)
  if (
      options.dataset_type != config_key.SYNTHETIC
      and options.dataset_type in config_key.DATASET_TYPES
  ):
    yield from _corpus(options)
  if options.dataset_type == config_key.GRAIN:
    yield from _windows(options)
  if options.dataset_type == config_key.DOCUMENTS:
    yield from _documents(options, defaults)
  if options.dataset_type in (config_key.PACKED, config_key.PADDED):
    yield from _packed_or_padded(options)
  if options.dataset_type == config_key.PACKED:
    yield from _packed(options)


def _batch_sizes(options: Any) -> Iterator[str]:
  for used, loaded in (
      ("global_batch_size_to_train_on", "global_batch_size_to_load"),
      ("global_batch_size_to_eval_on", "global_batch_size_to_load_eval"),
  ):
    if getattr(options, used) > getattr(options, loaded):
      yield f"{used}={getattr(options, used)} exceeds {loaded}={getattr(options, loaded)}."
    tokens = getattr(options, loaded) * options.max_target_length
    if tokens > config_key.MOST_TOKENS:
      yield (
          f"{loaded}={getattr(options, loaded)} rows of max_target_length="
          f"{options.max_target_length} are {tokens} tokens; a batch may have at most"
          f" {config_key.MOST_TOKENS}."
      )


def _schedule(options: Any) -> Iterator[str]:
  if options.olmo_batch_schedule and options.olmo_batch_rampup_factors:
    yield "olmo_batch_schedule and olmo_batch_rampup_factors are both set; set only one."
  name = "olmo_batch_schedule" if options.olmo_batch_schedule else "olmo_batch_rampup_factors"
  try:
    largest = options.schedule().sizes[-1]
    if largest * options.max_target_length > config_key.MOST_TOKENS:
      yield f"{name}: a batch of {largest} rows has more than {config_key.MOST_TOKENS} tokens."
  except errors.ConfigError as error:
    yield f"{name}: {error}"
  trained, loaded = options.global_batch_size_to_train_on, options.global_batch_size_to_load
  if options.has_batch_schedule and trained != loaded:
    yield (
        f"{name} needs global_batch_size_to_train_on={trained} to equal"
        f" global_batch_size_to_load={loaded}."
    )


def _checkpoints(options: Any) -> Iterator[str]:
  """Yields a sentence if checkpoints cannot be saved to the configured URL."""
  directory = options.checkpoint_dir
  if not (options.enable_checkpointing and urls.is_url(directory)):
    return
  if directory.partition("://")[0] not in urls.GCS:
    yield (
        f"checkpoint_dir={config_key.show(directory)} is a URL, but Orbax completes a checkpoint"
        " atomically only on a file system and in gs:// buckets; elsewhere, a killed save could"
        " look complete. Use a shared file system or gs://, or set enable_checkpointing=False and"
        " keep the state of the iterator (get_state) with your own checkpoints."
    )
  elif not any(map(importlib.util.find_spec, _PACKAGES_FOR_GCS)):
    yield (
        f"checkpoint_dir={config_key.show(directory)} needs gcsfs, which Orbax uses to access gs://"
        " buckets. It is not installed: run `pip install gcsfs`."
    )


def _corpus(options: Any) -> Iterator[str]:
  for first, end in options.olmo_skip:
    if not 0 <= first < end < 1 << 62:
      yield f"olmo_skip: a range must begin at 0 or later and not be empty, got {first} to {end}."
  if not options.olmo_index_path:
    yield "olmo_index_path is empty; build an index with `maxtext-olmo index build`."
  for one, other in (("to", "from"), ("from", "to")):
    if getattr(options, f"olmo_path_remap_{one}") and not getattr(
        options, f"olmo_path_remap_{other}"
    ):
      yield f"olmo_path_remap_{one} is set without olmo_path_remap_{other}; set both or neither."
  for name in ("olmo_eos_id", "olmo_bos_id", "olmo_pad_id"):
    token = getattr(options, name)
    if options.vocab_size and token >= options.vocab_size:
      yield f"{name}={token} is outside the vocabulary: vocab_size={options.vocab_size}."
  if options.olmo_ngram_min_period > options.olmo_ngram_max_period:
    yield (
        f"olmo_ngram_min_period={options.olmo_ngram_min_period} exceeds olmo_ngram_max_period="
        f"{options.olmo_ngram_max_period}."
    )


def _like_olmo_core(options: Any) -> Iterator[str]:
  order = options.order_name
  if options.olmo_order_resume == "olmo_core" and order != "olmo_core":
    yield f"olmo_order_resume='olmo_core' needs olmo_order='olmo_core', not {order!r}."
  if options.olmo_document_mask and options.olmo_eos_id < 0:
    yield "olmo_document_mask needs olmo_eos_id, the token that ends a document."
  if options.olmo_label_masks_seed >= 0 and not options.olmo_label_masks:
    yield "olmo_label_masks_seed is set without olmo_label_masks."


def _packed_or_padded(options: Any) -> Iterator[str]:
  yield from _like_olmo_core(options)
  name = options.dataset_type
  if options.olmo_pad_id < 0:
    yield f"dataset_type={name} needs olmo_pad_id, the token that fills rows."
  if options.olmo_eos_id < 0 and (options.olmo_boundaries == "eos" or name == config_key.PADDED):
    unless = "" if name == config_key.PADDED else ", unless olmo_boundaries='csv'"
    yield f"dataset_type={name} needs olmo_eos_id{unless}."
  if options.eval_interval > 0 and not options.olmo_eval_index_path:
    yield f"eval_interval={options.eval_interval} needs olmo_eval_index_path."


def _packed(options: Any) -> Iterator[str]:
  if options.olmo_long_documents == "error":
    yield "olmo_long_documents='error': olmo_packed needs 'truncate' or 'split'."
  if (options.olmo_packing_ties == "cache") != bool(options.olmo_packing_cache_dir):
    yield "olmo_packing_ties='cache' and olmo_packing_cache_dir work only together; set both."


def _windows(options: Any) -> Iterator[str]:
  order = options.order_name
  yield from _like_olmo_core(options)
  if options.olmo_label_masks and options.olmo_stages:
    yield "olmo_label_masks and olmo_stages are both set; masks belong to a single index."
  if options.eval_interval > 0 and not (
      options.olmo_eval_index_path or options.olmo_eval_instances
  ):
    yield (
        f"eval_interval={options.eval_interval} needs olmo_eval_index_path or olmo_eval_instances."
    )
  if options.olmo_eval_instances and options.olmo_eval_index_path:
    yield "olmo_eval_index_path and olmo_eval_instances are both set; set only one."
  known = order in permutations.order_names()
  if options.olmo_eval_instances and known and permutations.order_class(order).foreign:
    yield (
        f"olmo_eval_instances={options.olmo_eval_instances} cannot be held out of the {order}"
        " order, which always covers the whole corpus; evaluate on olmo_eval_index_path."
    )
  if options.olmo_eval_instances and options.olmo_consumed_path:
    yield (
        "olmo_eval_instances cannot hold out instances that were consumed already"
        " (olmo_consumed_path); evaluate on olmo_eval_index_path."
    )
  if options.olmo_mixture and options.olmo_consumed_path:
    yield "olmo_mixture and olmo_consumed_path are both set; a mixture always reads whole labels."
  if options.olmo_mixture and options.olmo_allow_corpus_change != "no":
    yield (
        "olmo_mixture needs olmo_allow_corpus_change='no', not"
        f" {options.olmo_allow_corpus_change!r}: if the sizes of the labels change, so does the"
        " whole order of the mixture."
    )


def _documents(options: Any, defaults: Mapping[str, Any]) -> Iterator[str]:
  if options.order_name not in ("feistel", "sequential"):
    yield f"olmo_order={options.olmo_order!r}: olmo_documents needs feistel or sequential."
  if options.olmo_eos_id < 0:
    yield "dataset_type=olmo_documents needs olmo_eos_id, the token that ends a document."
  if options.eval_interval > 0 and not options.olmo_eval_index_path:
    yield f"eval_interval={options.eval_interval} needs olmo_eval_index_path."
  last = options.olmo_stages[-1] if options.olmo_stages else {}
  if last.get("olmo_mixture", options.olmo_mixture) and options.olmo_num_epochs:
    yield "olmo_mixture over documents has no end: it needs olmo_num_epochs=0."
  if options.random_access_documents:
    return
  # All other packings stream: a row depends on all rows before it, so it cannot be computed from
  # its position alone.
  needs_positions = {
      "initial_step": options.initial_step > 0,
      "olmo_initial_position": options.olmo_initial_position > 0,
      "olmo_mixture": bool(options.olmo_mixture),
      "olmo_apply_ngram_filter": options.olmo_apply_ngram_filter,
      "olmo_batch_extras": bool(options.olmo_batch_extras),
      "olmo_exclude": bool(options.olmo_exclude),
      "olmo_skip": bool(options.olmo_skip),
      "olmo_stages": bool(options.olmo_stages),
      "olmo_allow_mixture_change": options.olmo_allow_mixture_change,
      "olmo_spool_dir": bool(options.olmo_spool_dir),
      "olmo_batch_schedule_unit": options.olmo_batch_schedule_unit == "tokens",
      "generate_padding_batch_train": options.generate_padding_batch_train,
      "global_batch_size_to_train_on": (
          options.global_batch_size_to_train_on != options.global_batch_size_to_load
      ),
  }
  for name in ("olmo_prefetch_batches", "olmo_device_prefetch"):
    needs_positions[name] = getattr(options, name) != defaults[name]
  for name in (name for name, needed in needs_positions.items() if needed):
    yield (
        f"{name}={getattr(options, name)!r} needs rows that are addressed by position:"
        " olmo_shard='batch' and olmo_packing='planned', or 'none' with olmo_long_documents other"
        " than 'split'."
    )
