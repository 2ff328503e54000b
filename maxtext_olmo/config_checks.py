"""Checks of data keys against each other: combinations of values that cannot work.

Bounds and choices of a single value are part of the table in `config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from maxtext_olmo import errors
from maxtext_olmo.order import permutations


def problems(options: Any) -> Iterator[str]:
  """Yields a sentence for each combination that cannot work, given a `config.Options`."""
  yield from _batch_sizes(options)
  yield from _schedule(options)
  if options.dataset_type in ("olmo_grain", "olmo_documents"):
    yield from _corpus(options)
  if options.dataset_type == "olmo_grain":
    yield from _windows(options)
  if options.dataset_type == "olmo_documents":
    yield from _documents(options)


def _batch_sizes(options: Any) -> Iterator[str]:
  for used, loaded in (
      ("global_batch_size_to_train_on", "global_batch_size_to_load"),
      ("global_batch_size_to_eval_on", "global_batch_size_to_load_eval"),
  ):
    if getattr(options, used) > getattr(options, loaded):
      yield f"{used}={getattr(options, used)} exceeds {loaded}={getattr(options, loaded)}."


def _schedule(options: Any) -> Iterator[str]:
  if options.olmo_batch_schedule and options.olmo_batch_rampup_factors:
    yield "olmo_batch_schedule and olmo_batch_rampup_factors are both set; a run takes one."
  name = "olmo_batch_schedule" if options.olmo_batch_schedule else "olmo_batch_rampup_factors"
  try:
    options.schedule()
  except errors.ConfigError as error:
    yield f"{name}: {error}"
  trained, loaded = options.global_batch_size_to_train_on, options.global_batch_size_to_load
  if options.has_batch_schedule and trained != loaded:
    yield (
        f"{name} needs global_batch_size_to_train_on={trained} to equal"
        f" global_batch_size_to_load={loaded}."
    )


def _corpus(options: Any) -> Iterator[str]:
  if not options.olmo_index_path:
    yield "olmo_index_path is empty; build an index with `maxtext-olmo index build`."
  if options.olmo_path_remap_to and not options.olmo_path_remap_from:
    yield "olmo_path_remap_to is set without olmo_path_remap_from."
  if options.vocab_size and options.olmo_eos_id >= options.vocab_size:
    yield (
        f"olmo_eos_id={options.olmo_eos_id} is outside the vocabulary: vocab_size="
        f"{options.vocab_size}."
    )


def _windows(options: Any) -> Iterator[str]:
  order = options.order_name
  if options.olmo_order_resume == "olmo_core" and order != "olmo_core":
    yield f"olmo_order_resume='olmo_core' needs olmo_order='olmo_core', not {order!r}."
  if options.olmo_document_mask and options.olmo_eos_id < 0:
    yield "olmo_document_mask needs olmo_eos_id, the token that ends a document."
  if options.eval_interval > 0 and not (
      options.olmo_eval_index_path or options.olmo_eval_instances
  ):
    yield (
        f"eval_interval={options.eval_interval} needs olmo_eval_index_path or olmo_eval_instances."
    )
  if options.olmo_eval_instances and options.olmo_eval_index_path:
    yield "olmo_eval_index_path and olmo_eval_instances are both set; evaluation takes one."
  known = order in permutations.order_names()
  if options.olmo_eval_instances and known and permutations.order_class(order).foreign:
    yield (
        f"olmo_eval_instances={options.olmo_eval_instances} cannot be held out of the {order}"
        " order, which is exact over the whole corpus; evaluate on olmo_eval_index_path."
    )
  if options.olmo_eval_instances and options.olmo_consumed_path:
    yield (
        "olmo_eval_instances cannot hold out instances that were consumed already"
        " (olmo_consumed_path); evaluate on olmo_eval_index_path."
    )
  if options.olmo_mixture and options.olmo_consumed_path:
    yield "olmo_mixture and olmo_consumed_path are both set; a mixture draws on whole labels."
  if options.olmo_mixture and options.olmo_allow_corpus_change != "no":
    yield (
        "olmo_mixture needs olmo_allow_corpus_change='no', not"
        f" {options.olmo_allow_corpus_change!r}: another corpus has labels of other sizes, and so"
        " another order."
    )


def _documents(options: Any) -> Iterator[str]:
  if options.order_name not in ("feistel", "sequential"):
    yield f"olmo_order={options.olmo_order!r}: documents have feistel and sequential."
  if options.olmo_eos_id < 0:
    yield "dataset_type=olmo_documents needs olmo_eos_id, the token that ends a document."
  if options.eval_interval > 0 and not options.olmo_eval_index_path:
    yield f"eval_interval={options.eval_interval} needs olmo_eval_index_path."
  if options.olmo_mixture and options.olmo_num_epochs:
    yield "olmo_mixture over documents has no end: it needs olmo_num_epochs=0."
  if options.random_access_documents:
    return
  # What is left streams: a row depends on all rows before it, so it has no position of its own.
  needs_positions = {
      "initial_step": options.initial_step > 0,
      "olmo_initial_position": options.olmo_initial_position > 0,
      "olmo_mixture": bool(options.olmo_mixture),
      "olmo_apply_ngram_filter": options.olmo_apply_ngram_filter,
      "olmo_batch_extras": bool(options.olmo_batch_extras),
  }
  for name in (name for name, needed in needs_positions.items() if needed):
    yield (
        f"{name}={getattr(options, name)!r} needs rows that are addressed by position:"
        " olmo_shard='batch' and olmo_packing='planned', or 'none' with olmo_long_documents other"
        " than 'split'."
    )
