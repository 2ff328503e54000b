"""Random runs of the real OLMo-core, taken over by the config that it writes itself.

Windows with masks and filters, packed rows, padded rows and source mixtures are compared over two
epochs, each rank by itself, and resumed from a state, whose fingerprint must be that of the import.
Cases differ from run to run; `PEER_SEED` repeats a run, and `PEER_CASES` sets the number of cases
of each kind.
"""

import json
import pathlib
import random
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
from absl import logging
from absl.testing import absltest
from absl.testing import parameterized
from olmo_core.data import LongDocStrategy
from olmo_core.data import NumpyDataLoaderConfig
from olmo_core.data import NumpyFSLDatasetConfig
from olmo_core.data import NumpyPackedFSLDatasetConfig
from olmo_core.data import NumpyPaddedFSLDatasetConfig
from olmo_core.data import TokenizerConfig
from olmo_core.data.collator import DataCollator
from olmo_core.data.data_loader import NumpyDataLoaderBase
from olmo_core.data.numpy_dataset import InstanceFilterConfig
from olmo_core.data.source_mixture import SourceMixtureConfig
from olmo_core.data.source_mixture import SourceMixtureDatasetConfig
from olmo_core.data.source_mixture import SourceMixtureList
from olmo_core.data.utils import get_labels
from olmo_core.exceptions import OLMoConfigurationError

import maxtext_olmo
from maxtext_olmo import errors
from maxtext_olmo.loader import olmo_core_run
from tests.peers import packed_check
from tests.peers import tally

_CASES = tally.num_cases(25)
_VOCABULARY = 300
_EOS, _PAD, _BOS = 0, 1, 2


class Case:
  """A random corpus and the config of a run over it."""

  def __init__(self, directory: str, kind: str, number: int):
    self.rng = random.Random(f"{tally.SEED}-{kind}-{number}")
    self.directory = pathlib.Path(directory)
    self.numbers = np.random.Generator(np.random.PCG64(self.rng.randrange(10**9)))
    self.length = self.rng.choice((4, 8, 16))
    self.ranks = self.rng.choice((1, 1, 2))
    self.rows = self.ranks * self.rng.randrange(1, 4)
    self.bos = self.rng.choice((None, None, _BOS))
    count = self.rng.randrange(2, 7)
    self.files = [self._write(f"part-{i}.npy") for i in range(count)]
    self.dataset = getattr(self, f"_{kind}")()
    self.loader = NumpyDataLoaderConfig(
        global_batch_size=self.rows * self.length, seed=self.rng.randrange(10**6), num_threads=0
    )

  def _write(self, name: str) -> str:
    """Writes documents of random lengths, some of them repetitive, and a mask."""
    tokens: list[int] = []
    for _ in range(self.rng.randrange(1, 12)):
      document = self.numbers.integers(3, _VOCABULARY, self.rng.randrange(0, 60)).tolist()
      if self.rng.random() < 0.2:
        document = document[:2] * 20
      begin = [_BOS] if self.bos is not None and self.rng.random() < 0.8 else []
      tokens += [*begin, *document, _EOS]
    if self.rng.random() < 0.4:
      tokens += self.numbers.integers(3, _VOCABULARY, self.rng.randrange(1, 30)).tolist()
    path = self.directory / name
    np.array(tokens, "<u2").tofile(path)
    mask = self.numbers.integers(0, 2, len(tokens)).astype(np.bool_)
    mask.tofile(path.with_suffix(".mask"))
    return str(path)

  def _common(self) -> dict[str, Any]:
    rule = None
    if self.rng.random() < 0.6:
      rule = InstanceFilterConfig(
          repetition_max_period=self.rng.randrange(2, 6),
          repetition_min_period=self.rng.randrange(1, 3),
          repetition_max_count=self.rng.randrange(2, 8),
      )
    return dict(
        tokenizer=TokenizerConfig(
            vocab_size=_VOCABULARY, eos_token_id=_EOS, pad_token_id=_PAD, bos_token_id=self.bos
        ),
        sequence_length=self.length,
        instance_filter_config=rule,
        work_dir=str(self.directory / "work"),
    )

  def _listed(self) -> dict[str, Any]:
    """Names the files in one of the ways that a config has."""
    masks = self.rng.random() < 0.5
    listed: dict[str, Any] = {"source_permutation_seed": self.rng.choice((None, 123))}
    if self.rng.random() < 0.5:
      listed |= dict(paths=[f"{self.directory}/*.npy"], expand_glob=True)
      listed |= dict(label_mask_paths=[f"{self.directory}/*.mask"]) if masks else {}
    else:
      files = self.rng.choices(self.files, k=self.rng.randrange(1, 8))  # Some repeat.
      listed["paths"] = files
      if masks:
        listed["label_mask_paths"] = [file.replace(".npy", ".mask") for file in files]
    return listed

  def _windows(self) -> Any:
    longest = self.rng.choice((None, self.length, 2 * self.length))
    return NumpyFSLDatasetConfig(
        **self._common(),
        **self._listed(),
        max_target_sequence_length=longest,
        generate_doc_lengths=self.rng.random() < 0.5,
    )

  def _padded(self) -> Any:
    return NumpyPaddedFSLDatasetConfig(**self._common(), **self._listed())

  def _packed(self) -> Any:
    strategies = (LongDocStrategy.fragment, LongDocStrategy.truncate)
    return NumpyPackedFSLDatasetConfig(
        **self._common(),
        **self._listed(),
        generate_doc_lengths=self.rng.random() < 0.5,
        long_doc_strategy=self.rng.choice(strategies),
        source_group_size=self.rng.randrange(1, 4),
    )

  def _mixture(self) -> Any:
    count = self.rng.randrange(1, len(self.files) + 1)
    weights = [self.rng.random() + 0.05 for _ in range(count)]
    sources = [
        SourceMixtureConfig(
            source_name=f"s{number}",
            target_ratio=weight / sum(weights),
            paths=self.files[number::count],
            max_repetition_ratio=self.rng.choice((1.0, 2.0, 10.0)),
            max_source_fraction=self.rng.choice((1.0, 1.0, 0.7)),
        )
        for number, weight in enumerate(weights)
    ]
    return NumpyFSLDatasetConfig(
        **self._common(),
        max_target_sequence_length=self.rng.choice((None, 2 * self.length)),
        generate_doc_lengths=self.rng.random() < 0.5,
        source_mixture_config=SourceMixtureDatasetConfig(
            source_list=SourceMixtureList(sources=sources),
            requested_tokens=self.rng.randrange(50, 900),
            global_batch_size=self.rows * self.length,
            render_tables=False,
            quiet=True,
        ),
    )

  @property
  def content(self) -> dict[str, Any]:
    """What OLMo-core writes into config.json."""
    sections = {"dataset": self.dataset, "data_loader": self.loader}
    written = {name: section.as_config_dict() for name, section in sections.items()}
    return json.loads(json.dumps(written))

  def loaders(self, dataset: Any) -> list[NumpyDataLoaderBase]:
    """Returns the loaders of the real OLMo-core, one for each rank."""
    return [
        NumpyDataLoaderBase.wrap_numpy_dataset(
            dataset,
            global_batch_size=self.loader.global_batch_size,
            collator=DataCollator(pad_token_id=_PAD),
            work_dir=str(self.directory / "work"),
            seed=self.loader.seed,
            dp_world_size=self.ranks,
            dp_rank=rank,
            fs_local_rank=0,
            num_threads=0,
        )
        for rank in range(self.ranks)
    ]

  @property
  def fingerprint(self) -> str:
    """The fingerprint that an import shows."""
    run = olmo_core_run.import_run(self.content, index_path=self.directory / "index.json")
    return dict(run.understood)["OLMo-core's fingerprint"]

  def imported(self, state: Any = None) -> Any:
    config = maxtext_olmo.from_olmo_core(
        self.content, state=state, index_path=self.directory / "index.json"
    )
    config.olmo_order_cache_dir = str(self.directory / "cache")
    if config.dataset_type == "olmo_packed":
      config.olmo_packing_ties = packed_check.ties_of_this_cpu()
    return config

  def iterator(self, state: Any = None) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return maxtext_olmo.create_data_iterator(self.imported(state), mesh)[0]


def _lengths(segments: np.ndarray) -> list[list[int]]:
  found = []
  for row in segments:
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    found.append(np.diff(starts, append=len(row)).tolist())
  return found


def _check(kind: str, batch: dict[str, Any], ranks: tuple[dict[str, Any], ...]) -> None:
  """Compares a batch with those of all ranks: rank r of W has rows r, r + W, …"""
  arrays = {name: np.asarray(array) for name, array in batch.items()}
  labels = np.where(arrays["targets_segmentation"] != 0, arrays["targets"], -100)
  for rank, expected in enumerate(ranks):
    mine = slice(rank, None, len(ranks))
    pairs: list[tuple[Any, Any]] = [
        (arrays["inputs"][mine], expected["input_ids"].numpy()),
        (labels[mine], get_labels(expected).numpy()),
    ]
    if "doc_lens" in expected:
      lengths = [[n for n in row if n] for row in expected["doc_lens"].tolist()]
      pairs.append((_lengths(arrays["inputs_segmentation"][mine]), lengths))
    tally.compare_rows(kind, *pairs)


class RunCheck(parameterized.TestCase):

  @parameterized.parameters("windows", "packed", "padded", "mixture")
  def test_two_epochs_and_a_resume_are_olmo_cores(self, kind):
    compared, name = 0, f"imported config.json: {kind}"
    for number in range(_CASES):
      with self.subTest(seed=tally.SEED, case=number):
        directory = tempfile.mkdtemp(prefix="peer_")
        self.addCleanup(shutil.rmtree, directory)
        case = Case(directory, kind, number)
        try:
          dataset = case.dataset.build()
        except OLMoConfigurationError:  # A source with too few tokens.
          with self.assertRaises(errors.ConfigError):
            case.imported()
          continue
        dataset.prepare()
        if len(dataset) < case.rows:
          continue
        tally.case(name)
        tally.compare(name, case.fingerprint, dataset.fingerprint)
        loaders = case.loaders(dataset)
        iterator = case.iterator()
        for epoch in (1, 2):
          for loader in loaders:
            loader.reshuffle(epoch=epoch)
          for step, expected in enumerate(zip(*loaders)):
            _check(name, next(iterator), expected)
            if step == 1:
              state = json.loads(json.dumps(loaders[0].state_dict()))
          for loader in loaders:
            loader.reset()
        iterator.close()
        if len(dataset) >= 3 * case.rows:
          again = case.iterator(state)
          for loader in loaders:
            loader.load_state_dict(state)
            loader.reshuffle(epoch=state["epoch"])
          _check(name, next(again), tuple(next(iter(loader)) for loader in loaders))
          again.close()
        compared += 1
    self.assertGreater(compared, _CASES // 3)


if __name__ == "__main__":
  print(f"PEER_SEED={tally.SEED}", flush=True)
  logging.set_verbosity(logging.ERROR)
  absltest.main()
