"""OLMo hybrid 7B, midtraining, ingredient 1: a mixture of 61 sources by ratio, 100B tokens.

    maxtext-olmo index mixture OLMo3-32B-midtraining-modelnamefilter.yaml \\
      --base=/data/ai2-llm/preprocessed --requested-tokens=100000000000 \\
      --global-batch-size=4194304 --sequence-length=8192 --output=hybrid_midtrain.json

    maxtext-olmo train --config=configs/hybrid_midtrain.py \\
      --config.olmo_index_path=hybrid_midtrain.json --config.checkpoint_dir=/checkpoints/midtrain

    maxtext-olmo maxtext train base.yml model_name=olmo3-7b dataset_type=olmo_grain \\
      olmo_index_path=hybrid_midtrain.json olmo_order=olmo_core data_shuffle_seed=1337 \\
      olmo_apply_ngram_filter=true olmo_num_epochs=1 max_target_length=8192 \\
      per_device_batch_size=4 steps=23842 \\
      load_parameters_path=/checkpoints/stage1/checkpoints/STEP/items \\
      base_output_directory=/checkpoints run_name=midtrain

For ingredient 2, use the seed 683. The model is OLMo 3 7B, because MaxText has no hybrid model.

The data of this stage starts from its beginning. In both trainers, load_parameters_path loads the
weights of the previous stage. The learning rate is an example, not AI2's.
"""

from maxtext_olmo.configs import olmo3_7b_stage1


def get_config():
  config = olmo3_7b_stage1.get_config()

  config.global_batch_size_to_load = 512  # x 8192 = 4,194,304 tokens
  config.data_shuffle_seed = 1337
  config.olmo_apply_ngram_filter = True  # n-grams of 1 to 13 tokens that repeat 32 times
  config.olmo_num_epochs = 1  # an epoch of the mixture takes 23,842 steps

  config.steps = 23_842
  config.learning_rate = 2e-4
  config.warmup_steps = 0
  config.learning_rate_final_fraction = 0.0

  return config
