"""Trains a tiny model on random tokens: runs anywhere, in seconds, without data.

    python -m maxtext_olmo.trainers.tiny --config=configs/tiny.py --config.steps=200

On a corpus of your own (`maxtext-olmo corpus make`, `maxtext-olmo index build`):

    python -m maxtext_olmo.trainers.tiny --config=configs/tiny.py \\
      --config.dataset_type=olmo_grain --config.olmo_index_path=index.json \\
      --config.max_target_length=256 --config.checkpoint_dir=checkpoints

With two processes on this machine (a later run with one process resumes where they stopped):

    python -m maxtext_olmo.trainers.launch --processes=2 -- --config=configs/tiny.py ...
"""

import maxtext_olmo


def get_config():
  config = maxtext_olmo.get_trainer_config()

  config.dataset_type = "synthetic"
  config.vocab_size = 512  # room for 256 bytes and the special tokens
  config.max_target_length = 128
  config.global_batch_size_to_load = 8  # can be split over 1, 2, 4 or 8 devices
  config.data_shuffle_seed = 0

  config.emb_dim = 64
  config.num_layers = 2
  config.num_heads = 2
  config.head_dim = 32
  config.mlp_dim = 192  # 3 x emb_dim: SwiGLU has three matrices where a plain MLP has two

  config.steps = 100
  config.learning_rate = 3e-3  # small models train well at high learning rates
  config.warmup_steps = 10

  config.checkpoint_period = 20
  config.log_interval = 10

  return config
