"""The global batch on 1, 2 and 4 processes with 1, 2 and 4 devices each, on all kinds of meshes."""

from absl.testing import absltest
from absl.testing import parameterized

from maxtext_olmo import config as config_lib
from tests import corpora
from tests import distributed
from tests.loader import laws_cases

STARTS_PROCESSES = True

_STEPS = 9


def _meshes(devices):
  """Axes, outermost first, and the axes that rows are sharded over."""
  found = [({"data": devices}, (("data",),))]
  if devices >= 2:
    # The outermost axis passes from process to process, so processes hold the same rows.
    found.append(({"tensor": 2, "data": devices // 2}, (("data",),)))
    found.append(({"tensor": devices}, ()))
  if devices >= 4:
    found.append(({"data": 2, "fsdp": devices // 2}, (("data", "fsdp"),)))
    found.append(({"fsdp": devices // 4, "tensor": 2, "data": 2}, (("fsdp", "data"),)))
  return found


class MeshesTest(parameterized.TestCase):

  @parameterized.product(processes=(1, 2, 4), devices=(1, 2, 4))
  def test_the_global_batch_is_that_of_one_process(self, processes, devices):
    index_path, _ = corpora.write_corpus(self.create_tempdir().full_path)
    config = {
        **config_lib.defaults(),
        "olmo_index_path": index_path,
        "max_target_length": 8,
        "global_batch_size_to_load": 16,
        "olmo_order": "olmo_core",
        "data_shuffle_seed": 3,
    }
    alone = {**config, "olmo_order_cache_dir": self.create_tempdir().full_path}
    batches, expected_state = laws_cases.serve(alone, {"data": 1}, _STEPS)
    expected = laws_cases.assemble([batches])
    meshes = _meshes(processes * devices)
    results = distributed.run(
        "tests.loader.meshes_cases:serve_on_each",
        processes=processes,
        devices=devices,
        # All processes meet the same empty cache, and one of them builds each epoch's order.
        args=(
            {**config, "olmo_order_cache_dir": self.create_tempdir().full_path},
            meshes,
            _STEPS,
        ),
    )
    for place, (axes, _) in enumerate(meshes):
      with self.subTest(axes=axes):
        got = laws_cases.assemble([result[place][0] for result in results])
        for one, other in zip(got, expected, strict=True):
          for name, array in other.items():
            self.assertEqual(one[name].tolist(), array.tolist())
        for result in results:
          self.assertEqual(result[place][1], expected_state)


if __name__ == "__main__":
  absltest.main()
