"""OLMo 3 32B, stage 3 (long context): documents packed into rows of 65,536 tokens, 100B tokens.

    maxtext-olmo index build --mix-file=OLMo-longmino-mix-0925.txt --base=/data/ai2-llm \\
      --sequence-length=65536 --source-permutation-seed=123 --output=olmo3_32b_stage3.json

    maxtext-olmo train --config=configs/olmo3_32b_stage3_long_context.py \\
      --config.olmo_index_path=olmo3_32b_stage3.json --config.checkpoint_dir=/checkpoints/stage3

    maxtext-olmo maxtext train base.yml model_name=olmo3-32b dataset_type=olmo_packed \\
      olmo_index_path=olmo3_32b_stage3.json olmo_order=olmo_core data_shuffle_seed=34521 \\
      olmo_eos_id=100257 olmo_pad_id=100277 olmo_source_group_size=8 olmo_document_mask=true \\
      olmo_apply_ngram_filter=true max_target_length=65536 per_device_batch_size=1 packing=true \\
      load_parameters_path=/checkpoints/stage2/checkpoints/STEP/items \\
      base_output_directory=/checkpoints run_name=stage3

The first start packs all documents, and saves the plan next to the index.

The data of this stage starts from its beginning. In both trainers, load_parameters_path loads the
weights of the previous stage. The learning rate is an example, not AI2's.
"""

from maxtext_olmo.configs import olmo3_32b_stage1


def get_config():
  config = olmo3_32b_stage1.get_config()

  config.dataset_type = "olmo_packed"
  config.max_target_length = 65536
  config.global_batch_size_to_load = 128  # x 65,536 = 8,388,608 tokens
  config.olmo_pad_id = 100277
  config.olmo_long_documents = "truncate"
  config.olmo_source_group_size = 8  # documents of 8 consecutive files are packed together
  config.olmo_boundaries = "eos"  # "csv" for remote files with a .csv.gz, as in AI2's run
  config.olmo_packing_ties = "avx512"  # AI2's hosts presumably had CPUs with AVX-512
  config.olmo_document_mask = True  # attention stays within documents
  # The filter sees the padding, as in AI2's run: a row with 32 or more padding tokens has no loss.
  config.olmo_apply_ngram_filter = True
  config.olmo_num_epochs = 0  # no limit: the run ends after `steps`

  config.steps = 11_921  # 100e9 tokens
  config.learning_rate = 2e-4
  config.warmup_steps = 200
  config.learning_rate_final_fraction = 0.0

  return config
