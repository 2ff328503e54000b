"""Every config key of the data pipeline: its name, its default, and what it does.

This is the one table of them: trainers build their config from it, `options` checks the values, and the configuration guide
prints it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from maxtext_olmo.loader import document_options
from maxtext_olmo.order import mixture
from maxtext_olmo.order import permutations


class Key(NamedTuple):
  """A config key."""

  name: str
  default: Any
  help: str


KEYS: tuple[Key, ...] = (
    Key("dataset_type", "olmo_grain", "Which pipeline feeds the trainer."),
    Key("max_target_length", 2048, "Tokens per row: the index's sequence length, or a divisor of its max_target_sequence_length."),
    Key("global_batch_size_to_load", 8, "Rows of the arrays that the trainer gets, over all hosts."),
    Key("global_batch_size_to_train_on", 0, "Rows the trainer trains on; the rest is padding. 0: all that are loaded."),
    Key("global_batch_size_to_load_eval", 0, "The same for evaluation. 0: as for training."),
    Key("global_batch_size_to_eval_on", 0, "Rows evaluated on. 0: all that are loaded."),
    Key("vocab_size", 0, "A token id at or above it stops the run. 0: only ids that do not fit int32 do."),
    Key("data_shuffle_seed", 0, "Seed of the order."),
    Key("enable_data_shuffling", True, "False: instances in corpus order, whatever olmo_order says."),
    Key("data_sharding", (), "Mesh axes per dimension of a batch, as MaxText has it. Empty: rows over all axes."),
    Key("grain_worker_count", 0, "Worker processes that make batches; 0 or less: threads do, which is the fastest."),
    Key("grain_per_worker_buffer_size", 1, "Batches each worker process prepares ahead."),
    Key("generate_padding_batch_train", False, "After the end of training data, go on with padding batches."),
    Key("generate_padding_batch_eval", False, "After the end of evaluation data, go on with padding batches."),
    Key("eval_interval", -1, "Evaluate every so many steps; 0 or less makes no eval iterator."),
    Key("enable_checkpointing", True, "Whether checkpoint_dir is looked into for initial_step=-1."),
    Key("checkpoint_dir", "", "Where checkpoints are."),
    Key("initial_step", -1, "Steps already trained. -1: those of the latest committed checkpoint, else 0."),
    Key("olmo_index_path", "", "The index JSON that `maxtext-olmo index build` wrote."),
    Key("olmo_path_remap_from", "", "Rewrite the token files' paths that begin with this ..."),
    Key("olmo_path_remap_to", "", "... to begin with this."),
    Key("olmo_order", "feistel", "Which order the instances come in: " + ", ".join(permutations.order_names()) + "."),
    Key("olmo_consumed_path", "", "A bitmap of instances trained on before this run; its first epoch leaves them out."),
    Key("olmo_num_epochs", 0, "End after so many epochs; the last batch is filled up with padding. 0: never."),
    Key("olmo_order_cache_dir", "", "Where olmo_core and maxtext keep their arrays, 4 bytes per instance and epoch. Empty: the user's cache."),
    Key("olmo_order_resume", "exact", "Where a restored position is no whole number of batches: exact goes on there, olmo_core repeats as OLMo-core does."),
    Key("olmo_allow_corpus_change", "no", "When the corpus is not the checkpoint's: no refuses, extend takes appended files in from the next epoch, any goes on."),
    Key("olmo_batch_schedule", (), "(boundary, rows) pairs where the batch size changes, the first at 0. Empty: constant."),
    Key("olmo_batch_rampup_factors", (), "(boundary, factor) pairs instead: factors on global_batch_size_to_train_on, not accumulated."),
    Key("olmo_batch_schedule_unit", "steps", "What those boundaries count: steps, or tokens trained on."),
    Key("olmo_initial_position", -1, "Samples already trained on, where steps cannot tell. -1: from initial_step."),
    Key("olmo_mixture", {}, "How much of each label, or pattern of labels, as {'wiki': 2.0, 'web-*': 0.5}. Empty: the corpus as it is."),
    Key("olmo_mixture_unit", "epochs", "What the numbers of olmo_mixture are: " + ", ".join(mixture.UNITS) + " (of a pass)."),
    Key("olmo_apply_ngram_filter", True, "Take no loss on rows with long repetitions, as OLMo-core does."),
    Key("olmo_document_mask", False, "Segment ids and positions restart at each document, so attention stays inside."),
    Key("olmo_eos_id", -1, "The token that ends a document; olmo_document_mask needs it."),
    Key("olmo_packing", "planned", "Of documents into rows (olmo_documents): " + ", ".join(document_options.PACKINGS) + ", or none: a row each."),
    Key("olmo_packing_bins", 0, "Rows that are packed together. 0: 1024 with a plan, else a host's batch."),
    Key("olmo_long_documents", "split", "What becomes of documents longer than a row: " + ", ".join(document_options.LONG_DOCUMENTS) + "."),
    Key("olmo_shift", "left", "How targets are set against inputs: left moves targets, right inputs behind an EOS."),
    Key("olmo_shard", "batch", "batch: the global batch is the same for any number of hosts. slice: each host has its own documents."),
    Key("olmo_documents_path", "", "Where the documents of the index are kept. Empty: next to it, as INDEX.documents."),
    Key("olmo_eval_index_path", "", "Evaluate on this index ..."),
    Key("olmo_eval_instances", 0, "... or on so many instances held out of training, the same in every run."),
    Key("olmo_prefetch_batches", 2, "Batches prepared ahead by threads; 0: each is made when it is asked for."),
    Key("olmo_device_prefetch", 1, "Batches sent to the devices ahead of the trainer; 0: each when it is asked for."),
    Key("olmo_batch_extras", (), "Optional arrays with one value per row: row_ids, labels."),
    Key("olmo_max_open_files", 0, "Token files kept open by each iterator. 0: as many as `ulimit -n` leaves room for."),
)  # fmt: skip

# Keys that may differ between the processes of a run: where things are on a host, and who prepares its batches.
OF_A_HOST = frozenset(
    (
        "checkpoint_dir",
        "grain_worker_count",
        "grain_per_worker_buffer_size",
        "olmo_index_path",
        "olmo_path_remap_from",
        "olmo_path_remap_to",
        "olmo_eval_index_path",
        "olmo_documents_path",
        "olmo_consumed_path",
        "olmo_order_cache_dir",
        "olmo_prefetch_batches",
        "olmo_device_prefetch",
        "olmo_max_open_files",
    )
)


def defaults() -> dict[str, Any]:
  """Every data key and its default."""
  return {key.name: key.default for key in KEYS}
