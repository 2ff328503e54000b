"""The epochs that batches must not cross, in a run with stages.

Only some orders, such as `olmo_core`, keep batches within epochs. Consecutive stages with other
orders count as one long epoch, which ends when a stage with an order like `olmo_core` begins:

    stage                 feistel, 100 positions    olmo_core, epochs of 40, 100 positions
    epochs for batches    100                       40  40  20 (cut, because the next stage begins)
"""

from __future__ import annotations

from collections.abc import Sequence

from maxtext_olmo.order import corpora as corpora_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import stages as stages_lib

# Length of the last epoch, if batches may span epochs in the last stage.
_ENDLESS = 1 << 61


def batch_epochs(
    stages: Sequence[stages_lib.Stage], corpora: corpora_lib.Corpora
) -> epochs_lib.Epochs | None:
  """Returns the epochs whose ends no batch crosses; None if batches may span epochs in all stages.

  Args:
    stages: Stages sorted by position.
    corpora: Indexes of the stages.
  """
  if not any(stage.settings.drops_tails for stage in stages):
    return None
  lengths: list[tuple[int, int]] = []
  cut: list[int] = []
  epoch, spanning = 0, False
  for number, stage in enumerate(stages):
    length = None
    if number + 1 < len(stages):
      length = stages[number + 1].position - stage.position
    if not stage.settings.drops_tails:
      before = lengths.pop()[1] if spanning else 0
      epoch -= spanning
      lengths.append((epoch, _ENDLESS if length is None else before + length))
      cut = [*(e for e in cut if e != epoch), *([] if length is None else [epoch])]
      epoch, spanning = epoch + 1, True
      continue
    spanning = False
    whole = corpora.split(corpora.index(stage)).num_train
    epochs, rest = divmod(length or 0, whole)
    if epochs or length is None:
      lengths.append((epoch, whole))
      epoch += epochs
    if rest:
      lengths.append((epoch, rest))
      cut.append(epoch)
      epoch += 1
  return epochs_lib.Epochs(tuple(lengths), tuple(cut))
