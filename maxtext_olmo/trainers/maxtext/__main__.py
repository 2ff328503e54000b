"""`python -m maxtext_olmo.trainers.maxtext`."""

import sys

from maxtext_olmo.trainers.maxtext import main

if __name__ == "__main__":
  sys.exit(main(sys.argv))
