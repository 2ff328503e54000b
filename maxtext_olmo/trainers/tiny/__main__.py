"""`python -m maxtext_olmo.trainers.tiny`."""

import sys

from maxtext_olmo.trainers.tiny import trainer

if __name__ == "__main__":
  sys.exit(trainer.main_from_argv(sys.argv))
