"""OLMo 3 32B, stage 1: windows of 8192 tokens at 8M tokens per step, in the order of AI2's run.

    maxtext-olmo index build --mix-file=OLMo-mix-0925-official.txt --base=/data/ai2-llm \\
      --sequence-length=8192 --max-target-sequence-length=8192 --output=olmo3_32b_stage1.json

    maxtext-olmo train --config=configs/olmo3_32b_stage1.py \\
      --config.olmo_index_path=olmo3_32b_stage1.json --config.checkpoint_dir=/checkpoints/stage1

    maxtext-olmo maxtext train base.yml model_name=olmo3-32b dataset_type=olmo_grain \\
      olmo_index_path=olmo3_32b_stage1.json olmo_order=olmo_core data_shuffle_seed=34521 \\
      olmo_apply_ngram_filter=true olmo_num_epochs=1 max_target_length=8192 \\
      per_device_batch_size=1 \\
      base_output_directory=/checkpoints run_name=stage1

The data settings are AI2's. The model has the size of OLMo 3 32B but is a plain decoder, without
grouped-query attention. The optimiser's settings come from the 7B config.
"""

from maxtext_olmo.configs import olmo3_7b_stage1


def get_config():
  config = olmo3_7b_stage1.get_config()

  config.global_batch_size_to_load = 1024  # x 8192 = 8,388,608 tokens
  config.olmo_apply_ngram_filter = True  # n-grams of 1 to 13 tokens that repeat 32 times
  config.olmo_num_epochs = 1

  config.emb_dim = 5120
  config.num_layers = 64
  config.num_heads = 40
  config.mlp_dim = 27648
  config.steps = 707_000  # more than one epoch; the run ends with the epoch
  config.mesh_shape = (-1, 256)

  return config
