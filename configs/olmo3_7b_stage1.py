"""OLMo 3 7B, stage 1: windows of 8192 tokens at 4M tokens per step, in the order of AI2's run.

    maxtext-olmo index build --mix-file=OLMo-mix-0625-official.txt --base=/data/ai2-llm \\
      --sequence-length=8192 --max-target-sequence-length=8192 --output=olmo3_7b_stage1.json

    maxtext-olmo train --config=configs/olmo3_7b_stage1.py \\
      --config.olmo_index_path=olmo3_7b_stage1.json --config.checkpoint_dir=/checkpoints/stage1

    maxtext-olmo maxtext train base.yml model_name=olmo3-7b dataset_type=olmo_grain \\
      olmo_index_path=olmo3_7b_stage1.json olmo_order=olmo_core data_shuffle_seed=34521 \\
      olmo_apply_ngram_filter=false max_target_length=8192 per_device_batch_size=4 \\
      base_output_directory=/checkpoints run_name=stage1

Run the training command on every host; the hosts find each other through $JAX_COORDINATOR_ADDRESS,
$JAX_NUM_PROCESSES and $JAX_PROCESS_ID. Not all files of this mix are public. The files of
OLMo-mix-0925-official are public, but they form a different corpus, which has a different order.
The data settings are AI2's. The model has the size of OLMo 3 but is a plain decoder, without
sliding windows and without norms on queries and keys.
"""

import maxtext_olmo


def get_config():
  config = maxtext_olmo.get_trainer_config()

  # Data: as in AI2's official run.
  config.dataset_type = "olmo_grain"
  config.max_target_length = 8192
  config.global_batch_size_to_load = 512  # x 8192 = 4,194,304 tokens
  config.data_shuffle_seed = 34521
  config.olmo_order = "olmo_core"  # for a run of your own, "feistel" starts faster
  config.vocab_size = 100278  # of the dolma2 tokenizer; a token id at or above it stops the run
  config.olmo_eos_id = 100257  # <|endoftext|>, which ends each document
  config.olmo_document_mask = False  # tokens attend to earlier documents in their window
  config.olmo_apply_ngram_filter = False  # the 7B runs had no filter; the 32B runs had one

  # Model.
  config.emb_dim = 4096
  config.num_layers = 32
  config.num_heads = 32
  config.head_dim = 128
  config.mlp_dim = 11008
  config.logits_via_embedding = False
  config.rope_max_timescale = 500_000
  config.dtype = "bfloat16"
  config.remat = True  # 8192 tokens per row leave no room for all activations

  # Optimiser.
  config.steps = 1_192_093  # 5e12 tokens, as first scheduled
  config.learning_rate = 3e-4
  config.warmup_steps = 2000
  config.learning_rate_final_fraction = 0.1
  config.weight_decay = 0.1
  config.adam_b1 = 0.9
  config.adam_b2 = 0.95
  config.grad_clip = 1.0

  # Devices: weights and moments (88 GB in float32) are sharded 64 ways, rows over both mesh axes.
  config.mesh_axes = ("data", "fsdp")
  config.mesh_shape = (-1, 64)

  config.checkpoint_period = 1000
  config.max_checkpoints = 3
  config.log_interval = 10

  return config
