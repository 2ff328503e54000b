"""What may be wrong with the keys of `dataset_type=olmo_documents`."""

from __future__ import annotations

from typing import Any

from maxtext_olmo.rows import packing as packing_lib
from maxtext_olmo.rows import records as tokens_lib

PACKINGS = packing_lib.PACKINGS
LONG_DOCUMENTS = tokens_lib.LONG_DOCUMENTS

_CHOICES = {
    "olmo_packing": (*PACKINGS, "none"),
    "olmo_long_documents": LONG_DOCUMENTS,
    "olmo_shift": ("left", "right"),
    "olmo_shard": ("batch", "slice"),
}


def problems(options: Any) -> list[str]:
  """What cannot work, of `pipelines.options.Options`."""
  found = [
      f"{name}={getattr(options, name)!r} is unknown; known are {', '.join(known)}."
      for name, known in _CHOICES.items()
      if getattr(options, name) not in known
  ]
  if options.order_name not in ("feistel", "sequential"):
    found.append(
        f"olmo_order={options.olmo_order!r} is an order of instances; documents have feistel or sequential."
    )
  if options.olmo_eos_id < 0:
    found.append("olmo_documents needs olmo_eos_id, the token that ends a document.")
  if options.olmo_packing_bins < 0:
    found.append(f"olmo_packing_bins={options.olmo_packing_bins} must not be negative.")
  if options.olmo_eval_instances:
    found.append(
        "olmo_eval_instances holds out instances, not documents; set olmo_eval_index_path."
    )
  if options.olmo_allow_corpus_change != "no":
    found.append(
        f"olmo_allow_corpus_change={options.olmo_allow_corpus_change!r}: documents cannot go on with another corpus."
    )
  streams = not options.random_access_documents
  if streams and (options.initial_step > 0 or options.olmo_initial_position > 0):
    found.append(
        f"olmo_packing={options.olmo_packing!r} with olmo_shard={options.olmo_shard!r} goes on from a state alone:"
        " initial_step and olmo_initial_position need olmo_packing='planned' and olmo_shard='batch'."
    )
  if options.olmo_mixture and (streams or options.olmo_num_epochs):
    found.append(
        "olmo_mixture over documents needs olmo_packing='planned' and olmo_shard='batch', and goes on without end"
        " (olmo_num_epochs=0)."
    )
  return found
