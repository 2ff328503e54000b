"""Tests of who prepares the batches of an iterator; what it serves is tested in olmo_test and laws_test."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo.loader import iterator
from maxtext_olmo.rows import crew
from tests import corpora
from tests import distributed

STARTS_PROCESSES = True


class ExitTest(absltest.TestCase):

  def test_nothing_is_said_when_a_program_ends_without_closing_its_iterators(self):
    path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    code = f"""
import jax, numpy as np, maxtext_olmo
config = maxtext_olmo.get_config()
config.update(olmo_index_path={path!r}, max_target_length=8, global_batch_size_to_load=8, vocab_size=100, checkpoint_dir="")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
held = [maxtext_olmo.create_data_iterator(config, mesh)[0] for _ in range(3)]
next(held[0]), held[1].start_prefetch()
held[0].itself = held[0]
print("done")
"""
    done = distributed.run_python(code)
    self.assertEqual((done.returncode, done.stdout.strip()), (0, "done"), done.stderr)
    self.assertNotIn("Exception ignored", done.stderr)
    self.assertNotIn("Error", done.stderr)


class PrefetchTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("a_core_is_left_to_who_sends", {}, 8, 4),
      ("also_of_two", {}, 2, 1),
      ("nobody_sends", {"on_device": 0}, 2, 2),
      ("workers_read_beside_each_other", {"workers": 2}, 8, 1),
      ("what_the_user_says", {"read_threads": 6, "workers": 2}, 2, 6),
  )
  def test_how_many_threads_read_a_batch(self, values, cores, expected):
    with mock.patch.object(crew, "cores", return_value=cores):
      self.assertEqual(iterator.Prefetch(**values).threads(), expected)


if __name__ == "__main__":
  absltest.main()
