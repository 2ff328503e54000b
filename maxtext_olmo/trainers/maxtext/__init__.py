"""Runs this package inside MaxText: after `install()`, `dataset_type=olmo_grain` uses our batches.

    from maxtext_olmo.trainers import maxtext
    maxtext.install()                      # then call MaxText's own main, unchanged

Alternatively, run `maxtext-olmo maxtext train base.yml dataset_type=olmo_grain ...`, or
`python -m maxtext_olmo.trainers.maxtext train ...` with the same arguments.
"""

from maxtext_olmo.trainers.maxtext.adapter import ENTRY_POINTS as ENTRY_POINTS
from maxtext_olmo.trainers.maxtext.adapter import install as install
from maxtext_olmo.trainers.maxtext.adapter import is_installed as is_installed
from maxtext_olmo.trainers.maxtext.adapter import main as main
from maxtext_olmo.trainers.maxtext.adapter import run as run
from maxtext_olmo.trainers.maxtext.adapter import uninstall as uninstall
