"""OLMo 3 32B, stage 2 (midtraining), ingredient 1: 100B tokens in windows of 8192 tokens.

    maxtext-olmo index build --mix-file=OLMo-midtraining-mix-0925-ingredient1-100B.txt \\
      --base=/data/ai2-llm --sequence-length=8192 --max-target-sequence-length=8192 \\
      --output=olmo3_32b_stage2.json

    maxtext-olmo train --config=configs/olmo3_32b_stage2.py \\
      --config.olmo_index_path=olmo3_32b_stage2.json --config.checkpoint_dir=/checkpoints/stage2

    maxtext-olmo maxtext train base.yml model_name=olmo3-32b dataset_type=olmo_grain \\
      olmo_index_path=olmo3_32b_stage2.json olmo_order=olmo_core data_shuffle_seed=42069 \\
      olmo_apply_ngram_filter=true max_target_length=8192 per_device_batch_size=1 \\
      load_parameters_path=/checkpoints/stage1/checkpoints/STEP/items \\
      base_output_directory=/checkpoints run_name=stage2

For ingredient 2, build the index from that ingredient's manifest. AI2 averaged the weights of both
runs.

The data of this stage starts from its beginning. In both trainers, load_parameters_path loads the
weights of the previous stage. The learning rate is an example, not AI2's.
"""

from maxtext_olmo.configs import olmo3_32b_stage1


def get_config():
  config = olmo3_32b_stage1.get_config()

  config.global_batch_size_to_load = 512  # x 8192 = 4,194,304 tokens
  config.data_shuffle_seed = 42069
  config.olmo_num_epochs = 0  # no limit: the run ends after `steps`

  config.steps = 23_842  # 100e9 tokens
  config.learning_rate = 2e-4
  config.warmup_steps = 0
  config.learning_rate_final_fraction = 0.0

  return config
