"""Fresh random cases against the real OLMo-core: streams, ranks, epochs, fingerprints and resumes.

Cases differ from run to run; the seed is in the name of each, and `PEER_SEED` repeats a run.
"""

import itertools
import pathlib
import random
import shutil
import tempfile

import jax
import ml_collections
import numpy as np
from absl import logging
from absl.testing import absltest
from olmo_core.data import NumpyFSLDatasetConfig
from olmo_core.data import TokenizerConfig
from olmo_core.data.collator import DataCollator
from olmo_core.data.data_loader import NumpyDataLoaderBase

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import index_builder as index_lib
from maxtext_olmo.loader import olmo_core_fingerprint
from maxtext_olmo.loader import olmo_core_import
from tests.peers import tally

_CASES = tally.num_cases(25)
_RANKS, _RESUMES = "windows: ranks, 3 epochs", "windows: resumes"
_VOCABULARY = 200


class Case:
  """A random corpus and run."""

  def __init__(self, directory: str, number: int):
    rng = self.rng = random.Random(f"{tally.SEED}-{number}")
    self.directory = pathlib.Path(directory)
    self.dtype = rng.choice(("uint8", "uint16", "uint32"))
    self.length = rng.choice((2, 4, 8))
    self.longest = rng.choice((None, None, self.length, 2 * self.length, 4 * self.length))
    self.seed = rng.choice((0, 1, 34521, rng.randrange(2**32)))
    self.source_seed = rng.choice((None, None, rng.randrange(1000)))
    self.bos = rng.choice((None, 3))
    self.paths = []
    for i in range(rng.randrange(1, 6)):
      path = self.directory / f"{i}" / f"part-{rng.randrange(3)}.npy"
      path.parent.mkdir()
      count = rng.choice((rng.randrange(1, 40), rng.randrange(200, 900)))
      rows = np.random.Generator(np.random.PCG64(rng.randrange(10**6)))
      rows.integers(4, _VOCABULARY, count).astype(self.dtype).tofile(path)
      self.paths.append(str(path))
    big = self.directory / "last.npy"  # So that there is always something to train on.
    np.arange(400).astype(self.dtype).tofile(big)
    self.paths.append(str(big))

  def index(self, length: int | None = None) -> index_lib.OlmoNpyIndex:
    paths = self.paths
    if self.source_seed is not None:
      paths = olmo_core_import.permute_sources(paths, self.source_seed)
    return index_lib.build_index(
        [(path, "x") for path in paths],
        length or self.length,
        tokenizer="t",
        dtype=self.dtype,
        base=str(self.directory),
        max_target_sequence_length=self.longest,
    )

  def iterator(self, rows: int, length: int | None = None, **values):
    path = self.directory / f"index-{length}.json"
    self.index(length).save(path)
    config = ml_collections.ConfigDict(
        {
            **config_lib.defaults(),
            "olmo_index_path": str(path),
            "max_target_length": length or self.length,
            "global_batch_size_to_load": rows,
            "olmo_order": "olmo_core",
            "olmo_order_cache_dir": str(self.directory / "cache"),
            "olmo_apply_ngram_filter": False,
            "data_shuffle_seed": self.seed,
            **values,
        }
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return maxtext_olmo.create_data_iterator(config, mesh)[0]

  def loaders(self, rows: int, world: int, length: int | None = None) -> list[NumpyDataLoaderBase]:
    """Returns the loaders of the real OLMo-core, one for each rank."""
    length = length or self.length
    made = []
    for rank in range(world):
      dataset = NumpyFSLDatasetConfig(
          paths=self.paths,
          tokenizer=TokenizerConfig(
              vocab_size=_VOCABULARY, eos_token_id=0, pad_token_id=1, bos_token_id=self.bos
          ),
          sequence_length=length,
          max_target_sequence_length=self.longest,
          source_permutation_seed=self.source_seed,
          dtype=self.dtype,
          work_dir=str(self.directory / "work"),
      ).build()
      dataset.prepare()
      made.append(
          NumpyDataLoaderBase.wrap_numpy_dataset(
              dataset,
              global_batch_size=rows * length,
              collator=DataCollator(pad_token_id=1),
              work_dir=str(self.directory / "work"),
              seed=self.seed,
              dp_world_size=world,
              dp_rank=rank,
              fs_local_rank=0,
              num_threads=0,
          )
      )
    return made


def _batches(loaders, count=None):
  """Global batches: rank r of W holds rows r, r + W, …"""
  found = []
  # Not one batch more than asked for: the loader counts what it hands out.
  for parts in itertools.islice(zip(*loaders), count):
    rows = [part["input_ids"].numpy() for part in parts]
    found.append(np.stack(rows, axis=1).reshape(-1, rows[0].shape[1]))
  return found


class OlmoCoreCheck(absltest.TestCase):

  def case(self, number: int) -> Case:
    directory = tempfile.mkdtemp(prefix="peer_")
    self.addCleanup(shutil.rmtree, directory)
    return Case(directory, number)

  def assert_serves(self, kind, iterator, batches):
    for expected in batches:
      tally.compare_rows(kind, (np.asarray(next(iterator)["inputs"]), expected))

  def test_streams_ranks_epochs_and_fingerprints_are_olmo_cores(self):
    for number in range(_CASES):
      with self.subTest(seed=tally.SEED, case=number):
        case = self.case(number)
        world = case.rng.choice((1, 2, 3))
        rows = world * case.rng.randrange(1, 5)
        loaders = case.loaders(rows, world)
        ids = olmo_core_fingerprint.TokenizerIds(_VOCABULARY, 1, 0, case.bos)
        tally.case(_RANKS)
        tally.compare(
            _RANKS,
            olmo_core_fingerprint.windows(case.index(), ids).fingerprint,
            loaders[0].dataset.fingerprint,
        )
        iterator = case.iterator(rows)
        for epoch in (1, 2, 3):
          for loader in loaders:
            loader.reshuffle(epoch=epoch)
          self.assert_serves(_RANKS, iterator, _batches(loaders))
          for loader in loaders:
            loader.reset()
        iterator.close()

  def test_resumes_continue_as_olmo_core_does_or_exactly(self):
    repeated = 0
    for number in range(_CASES):
      with self.subTest(seed=tally.SEED, case=number):
        case = self.case(number)
        rows, taken, epoch = (
            case.rng.randrange(1, 8),
            case.rng.randrange(1, 6),
            case.rng.choice((1, 2)),
        )
        (before,) = case.loaders(rows, 1)
        before.reshuffle(epoch=epoch)
        seen = _batches([before], taken)
        state = before.state_dict()
        # Another world, another batch, and, where the corpus allows for it, another length.
        length = case.length
        if (
            case.longest is not None
            and case.longest > case.length
            and state["tokens_processed"] % (2 * length) == 0
        ):
          length = case.rng.choice((length, 2 * length))
        world = case.rng.choice((1, 2))
        rows_after = world * case.rng.randrange(1, 5)
        after = case.loaders(rows_after, world, length)
        for loader in after:
          loader.load_state_dict(state)
          loader.reshuffle(epoch=epoch)
        theirs = _batches(after, 3)

        index = case.index(length)
        position = olmo_core_import.LoaderState.from_json(state, "state").position(index)
        unaligned = bool(state["tokens_processed"] % (rows_after * length))
        repeated += unaligned
        first = case.iterator(rows_after, length, olmo_initial_position=position)
        saved = first.get_state()
        self.assertEqual(saved["position"], position)
        tally.case(_RESUMES)
        as_theirs = case.iterator(rows_after, length, olmo_order_resume="olmo_core")
        as_theirs.set_state(saved)
        self.assert_serves(_RESUMES, as_theirs, theirs)
        # Ours: what was seen and what comes make the epoch, without a repeat.
        whole = np.concatenate(seen).ravel()
        exact = []
        end = epoch * index.total_instances
        while first.history.present.schedule.start(first.step) < end:
          exact.append(np.asarray(next(first)["inputs"]).ravel())
        (plain,) = case.loaders(1, 1)
        plain.reshuffle(epoch=epoch)
        order = np.concatenate(_batches([plain])).ravel()
        served = np.concatenate([whole, *exact])
        tally.compare_rows(
            _RESUMES,
            (served.reshape(-1, case.length), order[: len(served)].reshape(-1, case.length)),
        )
        if not unaligned and theirs:
          self.assertGreaterEqual(len(exact), len(theirs))
        first.close()
        as_theirs.close()
    self.assertGreater(repeated, 0)


if __name__ == "__main__":
  print(f"PEER_SEED={tally.SEED}", flush=True)
  logging.set_verbosity(logging.ERROR)
  absltest.main()
