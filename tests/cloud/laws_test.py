"""The laws of the design over a bucket: batches do not depend on where the files are."""

import json
import os

import jax
import numpy as np
from absl.testing import absltest
from absl.testing import parameterized

import maxtext_olmo
from tests import distributed
from tests import workers as workers_lib
from tests.cloud import cases
from tests.loader import cases as loader_cases
from tests.loader import row_sources

STARTS_PROCESSES = True

_EVERY_SOURCE = parameterized.named_parameters((name, name) for name in row_sources.FROM_FILES)
_STEPS = 20
_runs = {}


def _without_paths(state):
  """Returns a state without the paths of indexes, which are recorded for people."""
  if isinstance(state, dict):
    return {key: _without_paths(value) for key, value in state.items() if key != "index_path"}
  return [_without_paths(value) for value in state] if isinstance(state, list) else state


def setUpModule():
  jax.config.update("jax_num_cpu_devices", 1)
  loader_cases.compile_fast()


class LawsTest(cases.BucketCase):

  @classmethod
  def write_corpus(cls, directory):
    return row_sources.write_corpus(directory)

  def setUp(self):
    super().setUp()
    self.remote_path = self.remote_index()

  def iterator_of(self, source, index_path, **values):
    config = row_sources.config_values(source, index_path, self.directory)
    if "olmo_label_masks" in config:  # A web server cannot list what matches a pattern.
      folder = os.path.join(self.directory, "bucket", "data")
      names = sorted(name for name in os.listdir(folder) if name.endswith(".mask"))
      config["olmo_label_masks"] = tuple(names)
    return self.make(index_path, **{"olmo_instance_filter": True, **config, **values})

  def run_of(self, source):
    """Returns the batches of a run over the files on the disk, and the states around them."""
    if source not in _runs:
      iterator = self.iterator_of(source, self.index_path)
      states, batches = [iterator.get_state()], []
      for _ in range(_STEPS):
        batches += loader_cases.take(iterator, 1)
        states.append(json.loads(json.dumps(iterator.get_state())))
      iterator.close()
      _runs[source] = batches, states
    return _runs[source]

  @_EVERY_SOURCE
  def test_batches_and_states_equal_those_of_the_disk(self, source):
    batches, states = self.run_of(source)
    iterator = self.iterator_of(source, self.remote_path)
    self.assert_equal_batches(loader_cases.take(iterator, _STEPS), batches)
    self.assertEqual(_without_paths(iterator.get_state()), _without_paths(states[-1]))

  @_EVERY_SOURCE
  def test_a_run_continues_from_disk_to_bucket_and_back(self, source):
    batches, states = self.run_of(source)
    places = [self.remote_path, self.index_path, self.remote_path]
    for place, step in zip(places, (3, 9, 15)):
      iterator = self.iterator_of(source, place)
      iterator.set_state(states[step])
      self.assert_equal_batches(loader_cases.take(iterator, 3), batches[step : step + 3])
      self.assertEqual(_without_paths(iterator.get_state()), _without_paths(states[step + 3]))
      iterator.close()

  @parameterized.parameters("windows", "planned", "one_document")
  def test_batches_do_not_depend_on_worker_count(self, source):
    batches, states = self.run_of(source)
    for workers in (1, 2) if cases.LONG else (2,):
      with workers_lib.started_quickly():
        iterator = self.iterator_of(
            source, self.remote_path, grain_worker_count=workers, grain_per_worker_buffer_size=2
        )
        iterator.set_state(states[8])
        self.assert_equal_batches(loader_cases.take(iterator, 4), batches[8:12])
        iterator.close()

  def test_batches_do_not_depend_on_the_number_of_hosts(self):
    for source in ("windows", "planned"):
      batches, _ = self.run_of(source)
      for processes in (1, 2) if cases.LONG else (2,):
        results = distributed.run(
            "tests.cloud.hosts_cases:take_rows",
            processes=processes,
            args=(source, self.remote_path, self.directory, 3),
        )
        for step in range(3):
          rows = np.zeros_like(batches[step]["inputs"])
          for found in results:
            for start, values in found[step]:
              rows[start : start + len(values)] = values
          np.testing.assert_array_equal(rows, batches[step]["inputs"])

  @parameterized.parameters("s3", "gs", "az")
  def test_every_store_gives_the_same_batches(self, scheme):
    batches, _ = self.run_of("windows")
    path = self.remote_index(scheme)
    iterator = self.iterator_of("windows", path, **cases.settings(scheme, self.proxy.url))
    self.assert_equal_batches(loader_cases.take(iterator, 4), batches[:4])
    self.assertEqual(self.proxy.counts().signed, 0)

  def test_paths_on_a_disk_are_remapped_to_a_bucket_and_back(self):
    batches, _ = self.run_of("windows")
    folder = os.path.join(self.directory, "bucket")
    address = f"{self.proxy.url}/bucket"
    for path, before, after in (
        (self.index_path, folder, address),
        (self.remote_path, address, folder),
    ):
      remap = {"olmo_path_remap_from": before, "olmo_path_remap_to": after}
      iterator = self.iterator_of("windows", path, **remap)
      self.assert_equal_batches(loader_cases.take(iterator, 2), batches[:2])
      iterator.close()

  def test_the_index_itself_may_be_in_the_bucket(self):
    batches, _ = self.run_of("windows")
    served = os.path.join(self.directory, "bucket", "remote.json")
    cases.with_base(self.index_path, f"{self.proxy.url}/bucket/data", served)
    iterator = self.iterator_of("windows", f"{self.proxy.url}/bucket/remote.json")
    self.assert_equal_batches(loader_cases.take(iterator, 2), batches[:2])

  def test_the_fingerprint_does_not_depend_on_where_the_files_are(self):
    local = maxtext_olmo.load_index(self.index_path)
    for scheme in ("http", "s3", "gs", "az"):
      remote = maxtext_olmo.load_index(self.remote_index(scheme))
      self.assertEqual(remote.fingerprint, local.fingerprint)
      self.assertEqual(remote.split_key, local.split_key)
      self.assertEqual(
          [(e.path, e.n_tokens, e.size_bytes) for e in remote.files],
          [(e.path, e.n_tokens, e.size_bytes) for e in local.files],
      )
      self.assertTrue(all(entry.etag for entry in remote.files))

  def test_building_an_index_reads_no_tokens(self):
    self.proxy.counts(reset=True)
    self.remote_index()
    counts = self.proxy.counts()
    self.assertLen(counts.objects, len(row_sources.TOKENS_PER_FILE))
    self.assertLessEqual(max(counts.objects.values()), 2)  # Its size, and whether it has a header.
    for request in counts.reads():
      first, last = request.split()[2].split("-")
      self.assertLessEqual(int(last) - int(first), 256)


if __name__ == "__main__":
  absltest.main()
