"""OLMo 3 7B, stage 2 (midtraining): 100B tokens of a different mix, in windows of 8192 tokens.

    maxtext-olmo index build --mix-file=OLMo-midtraining-mix-0625-100B.txt --base=/data/ai2-llm \\
      --sequence-length=8192 --max-target-sequence-length=8192 --output=olmo3_7b_stage2.json

    maxtext-olmo train --config=configs/olmo3_7b_stage2.py \\
      --config.olmo_index_path=olmo3_7b_stage2.json --config.checkpoint_dir=/checkpoints/stage2

    maxtext-olmo maxtext train base.yml model_name=olmo3-7b dataset_type=olmo_grain \\
      olmo_index_path=olmo3_7b_stage2.json olmo_order=olmo_core data_shuffle_seed=1337 \\
      olmo_apply_ngram_filter=false max_target_length=8192 per_device_batch_size=4 \\
      load_parameters_path=/checkpoints/stage1/checkpoints/STEP/items \\
      base_output_directory=/checkpoints run_name=stage2

The data of this stage starts from its beginning. In both trainers, load_parameters_path loads the
weights of the previous stage. The learning rate is an example, not AI2's.
"""

from maxtext_olmo.configs import olmo3_7b_stage1


def get_config():
  config = olmo3_7b_stage1.get_config()

  config.global_batch_size_to_load = 256  # x 8192 = 2,097,152 tokens
  config.data_shuffle_seed = 1337

  config.steps = 47_684  # 100e9 tokens
  config.learning_rate = 2e-4
  config.warmup_steps = 0
  config.learning_rate_final_fraction = 0.0

  return config
