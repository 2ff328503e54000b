"""Fine-tuning as for OLMo 3's "think" models: packed conversations, with loss masks.

    maxtext-olmo index build --mix-file=sft/mix.txt --base=sft --sequence-length=32768 \\
      --output=sft/index.json

    maxtext-olmo train --config=configs/olmo3_sft_think.py \\
      --config.olmo_index_path=sft/index.json --config.checkpoint_dir=/checkpoints/sft

    maxtext-olmo maxtext train base.yml model_name=olmo3-7b dataset_type=olmo_packed \\
      olmo_index_path=sft/index.json olmo_label_masks="['labels_mask_*.npy']" \\
      olmo_order=olmo_core data_shuffle_seed=34521 olmo_eos_id=100257 olmo_pad_id=100277 \\
      olmo_document_mask=true olmo_num_epochs=2 max_target_length=32768 per_device_batch_size=1 \\
      packing=true load_parameters_path=/checkpoints/stage3/checkpoints/STEP/items \\
      base_output_directory=/checkpoints run_name=sft

The directory sft has token_ids_part_*.npy, which mix.txt lists in lexicographic order, and
labels_mask_*.npy, with one byte per token. `maxtext-olmo corpus make-sft` makes both from chats.
The data settings are AI2's for the hybrid 7B; OLMo 3 7B and 32B had rows of 16,384 tokens and 3
epochs. In both trainers, load_parameters_path loads the weights of the previous stage. The learning
rate is an example, not AI2's.
"""

from maxtext_olmo.configs import olmo3_7b_stage1


def get_config():
  config = olmo3_7b_stage1.get_config()

  config.dataset_type = "olmo_packed"
  config.max_target_length = 32768
  config.global_batch_size_to_load = 64  # x 32,768 = 2,097,152 tokens
  config.olmo_pad_id = 100277
  config.olmo_long_documents = "truncate"  # a conversation that does not fit loses its end
  config.olmo_label_masks = ("labels_mask_*.npy",)  # next to the token files
  config.olmo_document_mask = True  # attention stays within a conversation
  config.olmo_num_epochs = 2  # each with the same packed rows, in a different order

  config.steps = 100_000  # more than 2 epochs; the run ends with the last epoch
  config.learning_rate = 2e-5
  config.warmup_steps = 100
  config.learning_rate_final_fraction = 0.0

  return config
