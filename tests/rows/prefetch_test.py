"""Elements prepared ahead, and a state that knows nothing of by whom."""

import grain
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import errors
from maxtext_olmo.rows import prefetch

STARTS_PROCESSES = True


def _keep(i):
  return i % 3 != 1


def _square(i):
  return {"i": np.array([i]), "square": np.full(4, i * i)}


def _dataset(n=20):
  return grain.MapDataset.range(n).filter(_keep).map(_square)


class PrefetchTest(parameterized.TestCase):

  @parameterized.parameters((0, 0), (0, 5), (1, 1), (2, 3))
  def test_elements_and_states_do_not_depend_on_who_prepares_them(self, workers, ahead):
    iterator = iter(prefetch.PrefetchedDataset(_dataset(), workers=workers, ahead=ahead))
    found, states = [], []
    for element in iterator:
      found.append(int(element["i"][0]))
      states.append(iterator.get_state()["next_index"])
    iterator.close()
    self.assertEqual(found, [i for i in range(20) if i % 3 != 1])
    self.assertEqual(states, [i + 1 for i in found])

  def test_a_state_restores_with_any_number_of_workers(self):
    one = iter(prefetch.PrefetchedDataset(_dataset(), ahead=2))
    for _ in range(5):
      next(one)
    state = one.get_state()
    rest = [int(e["i"][0]) for e in one]
    for workers in (0, 2):
      other = iter(prefetch.PrefetchedDataset(_dataset(), workers=workers))
      next(other)
      other.set_state(state)
      self.assertEqual([int(e["i"][0]) for e in other], rest)
      other.close()

  def test_an_empty_dict_is_the_end(self):
    dataset = grain.MapDataset.range(10).map(lambda i: {"i": i} if i < 4 else {})
    self.assertLen(list(prefetch.PrefetchedDataset(dataset)), 4)

  def test_what_cannot_be_says_why(self):
    for workers, ahead in ((-1, 1), (0, -1), (1, 0)):
      with self.assertRaisesRegex(errors.ConfigError, "worker_count"):
        prefetch.PrefetchedDataset(_dataset(), workers=workers, ahead=ahead)
    iterator = iter(prefetch.PrefetchedDataset(_dataset()))
    for state in ({}, {"next_index": -1}, 3):
      with self.assertRaisesRegex(errors.ResumeError, "next_index"):
        iterator.set_state(state)
    iterator.close()
    with self.assertRaisesRegex(ValueError, "closed"):
      next(iterator)


if __name__ == "__main__":
  absltest.main()
