"""`python -m maxtext_olmo`: the same as the `maxtext-olmo` command."""

import sys

from maxtext_olmo.tools import cli

if __name__ == "__main__":
  sys.exit(cli.main())
