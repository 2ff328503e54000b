"""Midtraining on packed documents, with a mixture over labels; attention stays within documents.

    maxtext-olmo corpus make --output data code=src/ text=docs/
    maxtext-olmo index build --mix-file data/mix.txt --tokenizer bytes --dtype uint16 \\
      --sequence-length 256 --output data/index.json
    python -m maxtext_olmo.trainers.tiny --config=configs/packed_midtraining.py \\
      --config.olmo_index_path=data/index.json --config.checkpoint_dir=checkpoints
"""

import maxtext_olmo


def get_config():
  config = maxtext_olmo.get_trainer_config()

  config.dataset_type = "olmo_documents"
  config.vocab_size = 512  # room for 256 bytes and the special tokens
  config.olmo_eos_id = 256  # EOS of the tokenizer `bytes`
  config.max_target_length = 256

  config.olmo_packing = "planned"  # rows addressed by position, with less than 0.5 % padding
  config.olmo_long_documents = "split"  # nothing is discarded
  # An amount for each label, such as {"wiki": 2.0, "web-*": 0.5}; see `maxtext-olmo plan`.
  config.olmo_mixture = {"*": 1.0}
  config.olmo_mixture_unit = "epochs"

  config.global_batch_size_to_load = 8
  config.steps = 200
  config.learning_rate = 1e-3

  return config
