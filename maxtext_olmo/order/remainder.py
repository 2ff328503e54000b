"""The rest of an epoch that another loader began, and then the epochs of a plain order.

Epoch 0 has only the instances that were not consumed, each once, shuffled. From epoch 1 on, all
instances follow in the plain order's own epochs:

    10 instances, consumed {0, 3, 4, 7, 8, 9}        position   0 1 2 3 | 4 5 6 … 13 | 14 …
                                                     epoch      0       | 1          | 2
                                                     instances  5 1 6 2 | all ten    | all ten
"""

from __future__ import annotations

from typing import Self

import numpy as np

from maxtext_olmo import errors
from maxtext_olmo.order import base
from maxtext_olmo.order import consumed as consumed_lib
from maxtext_olmo.order import epochs as epochs_lib
from maxtext_olmo.order import feistel


class RemainderOrder(base.Order):
  """What a bitmap left over, as epoch 0, and a plain order after it.

  Args:
    consumed: Which instances were trained on before.
    plain: The order of the epochs to come, over the same instances.
  """

  def __init__(self, consumed: consumed_lib.Consumed, plain: base.Order):
    count = plain.num_instances
    # An epoch has at least one place, so if nothing is left the first epoch is the plain order's
    # second.
    rest = ((0, consumed.num_remaining), (1, count)) if consumed.num_remaining else ((0, count),)
    super().__init__(num_instances=count, seed=plain.seed, epochs=epochs_lib.Epochs(rest))
    if plain.drops_tails:
      raise errors.ConfigError(
          f"olmo_order={plain.name} lets no batch span epochs, so it cannot continue after the rest"
          " of one (olmo_consumed_path)."
      )
    if plain.chunk_size != 1:
      raise errors.ConfigError(
          "A bitmap of consumed instances (olmo_consumed_path) belongs to windows of one length;"
          f" this index has chunks of {plain.chunk_size}."
      )
    if consumed.num_instances != plain.num_instances:
      raise errors.OrderError(
          f"The bitmap has {consumed.num_instances} instances, the order {plain.num_instances}."
      )
    self.name = f"{plain.name} after the rest of bitmap {consumed.digest[:16]}"
    self.remaining = consumed.num_remaining
    self._consumed = consumed
    self._plain = plain
    self._shuffle = (
        feistel.Bijection(self.remaining, "remainder", self.seed, consumed.digest)
        if self.remaining
        else None
    )

  def _chunks(self, epoch: int, places: np.ndarray) -> np.ndarray:
    if self._shuffle is None:
      return self._plain.ids(epoch + 1, places)
    if epoch > 0:
      return self._plain.ids(epoch, places)
    return self._consumed.select(self._shuffle(places))

  def with_epochs(self, epochs: epochs_lib.Epochs) -> Self:
    """Returns this order: its bitmap belongs to one extent of the corpus, the present one."""
    if epochs != epochs_lib.Epochs.constant(self.num_instances):
      raise errors.ConfigError(
          "The corpus cannot be extended under olmo_consumed_path, whose bitmap belongs to the"
          " corpus as it was."
      )
    return self
