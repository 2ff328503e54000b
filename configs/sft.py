"""Trains for three epochs on one document per row, as in supervised fine-tuning.

Short documents are padded, and long ones are truncated.

    python -m maxtext_olmo.trainers.tiny --config=configs/sft.py \\
      --config.olmo_index_path=data/index.json --config.olmo_eval_index_path=held_out/index.json \\
      --config.eval_interval=50

`configs/packed_midtraining.py` shows how to make an index of your own texts.
"""

import maxtext_olmo


def get_config():
  config = maxtext_olmo.get_trainer_config()

  config.dataset_type = "olmo_documents"
  config.vocab_size = 512  # room for 256 bytes and the special tokens
  config.olmo_eos_id = 256  # EOS of the tokenizer `bytes`

  config.olmo_packing = "none"
  config.olmo_long_documents = "truncate"  # a conversation that does not fit loses its end
  config.olmo_shift = "right"  # the model also predicts the first token, from an EOS
  config.olmo_num_epochs = 3  # the run ends after 3 epochs or `steps`, whichever comes first

  config.max_target_length = 128
  config.global_batch_size_to_load = 8
  config.steps = 300
  config.learning_rate = 3e-4  # lower than in pretraining

  return config
