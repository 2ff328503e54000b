"""`python -m maxtext_olmo`: the same as the `maxtext-olmo` command."""

import sys

from maxtext_olmo.cli import main as main_lib

if __name__ == "__main__":
  sys.exit(main_lib.main())
