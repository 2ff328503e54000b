"""Fresh random cases against the real OLMo-core: packed rows, label masks, document lengths.

Cases differ from run to run; `PEER_SEED` repeats a run, and `PEER_CASES` sets their number. Ties
are those of the CPU that this runs on, and those of the cache files that OLMo-core writes.
"""

import dataclasses
import gzip
import itertools
import json
import pathlib
import random
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
from absl.testing import absltest
from olmo_core.data import InstanceFilterConfig
from olmo_core.data import LongDocStrategy
from olmo_core.data import NumpyFSLDatasetConfig
from olmo_core.data import NumpyPackedFSLDatasetConfig
from olmo_core.data import TokenizerConfig
from olmo_core.data.collator import DataCollator
from olmo_core.data.data_loader import NumpyDataLoaderBase
from olmo_core.data.utils import get_labels

import maxtext_olmo
from maxtext_olmo import config as config_lib
from maxtext_olmo.loader import olmo_core_import
from maxtext_olmo.loader import olmo_packed
from maxtext_olmo.rows import tie_order
from tests.peers import tally

_CASES = tally.num_cases(80)
_ORDERS = "order of equally long documents"
_VOCABULARY, _EOS, _BOS = 200, 2, 3


def ties_of_this_cpu() -> str:
  """Returns the order in which NumPy leaves equally long documents on this CPU."""
  from numpy._core._multiarray_umath import __cpu_features__ as features

  if features.get("X86_V4") or features.get("AVX512_SKX"):
    return "avx512"
  return "avx2" if features.get("X86_V3") or features.get("AVX2") else "scalar"


class Case:
  """A random corpus, and a run over its windows or its packed documents."""

  def __init__(self, directory: str, number: int):
    rng = self.rng = random.Random(f"{tally.SEED}-{number}")
    self.directory = pathlib.Path(directory)
    self.packed = rng.random() < 0.75
    self.dtype = rng.choice(("uint8", "uint16", "uint32"))
    self.length = rng.choice((8, 16, 32, 64))
    self.seed = rng.randrange(2**31)
    self.source_seed = rng.choice((None, rng.randrange(1000)))
    self.bos = rng.choice((None, None, _BOS))
    self.pad = rng.choice((1, 1, _EOS))
    self.group = rng.choice((1, 1, 2, 3, 8))
    self.splits = rng.random() < 0.5
    self.by_csv = self.packed and rng.random() < 0.3
    self.masked = rng.random() < 0.5
    self.document_lengths = rng.random() < 0.7
    self.filter = rng.choice((None, (1, 13, 32), (1, 4, 6), (2, 5, 4)))
    self.kind = "packed: boundaries by csv.gz" if self.by_csv else "packed: boundaries by EOS"
    if not self.packed:
      self.kind = "windows: masks, filters, documents"
    self.paths, self.masks = [], []
    for i in range(rng.randrange(1, 7)):
      self._write_file(i, np.random.default_rng(rng.randrange(10**9)))

  def _write_file(self, number: int, rng: np.random.Generator) -> None:
    lengths = rng.integers(1, int(rng.choice([4, 20, 2 * self.length + 2])), rng.integers(1, 300))
    lengths = np.append(lengths, 3 * self.length)
    ends = np.cumsum(lengths)
    tail = int(rng.integers(0, 6))
    tokens = rng.integers(4, _VOCABULARY, int(ends[-1]) + tail)
    for place in rng.integers(0, len(tokens), 6):  # Repetitions, for the filter.
      period = int(rng.integers(1, 5))
      tokens[place : place + 40] = np.resize(tokens[place : place + period], 40)[
          : len(tokens) - place
      ]
    tokens[(ends - lengths)[lengths > 1]] = _BOS
    has_eos = (rng.random(len(ends)) < 0.8) | (not self.by_csv)
    tokens[ends[has_eos] - 1] = _EOS
    path = self.directory / f"part-{number}.npy"
    tokens.astype(self.dtype).tofile(path)
    self.paths.append(str(path))
    mask = self.directory / f"mask-{number}.npy"
    (rng.random(len(tokens)) < 0.7).astype(np.bool_).tofile(mask)
    self.masks.append(str(mask))
    lines = "".join(f"{end - size},{end}\n" for end, size in zip(ends, lengths))
    (self.directory / f"part-{number}.csv.gz").write_bytes(gzip.compress(lines.encode()))

  def dataset(self) -> Any:
    """Returns the dataset of the real OLMo-core."""
    common: dict[str, Any] = {
        "paths": self.paths,
        "tokenizer": TokenizerConfig(
            vocab_size=_VOCABULARY, eos_token_id=_EOS, pad_token_id=self.pad, bos_token_id=self.bos
        ),
        "sequence_length": self.length,
        "source_permutation_seed": self.source_seed,
        "dtype": self.dtype,
        "work_dir": str(self.directory / "work"),
        "generate_doc_lengths": self.document_lengths,
    }
    if self.masked:
      common["label_mask_paths"] = self.masks
    if self.filter is not None:
      shortest, longest, count = self.filter
      common["instance_filter_config"] = InstanceFilterConfig(
          repetition_min_period=shortest,
          repetition_max_period=longest,
          repetition_max_count=count,
      )
    if not self.packed:
      dataset = NumpyFSLDatasetConfig(**common).build()
    else:
      dataset = NumpyPackedFSLDatasetConfig(
          **common,
          source_group_size=self.group,
          long_doc_strategy=(LongDocStrategy.fragment if self.splits else LongDocStrategy.truncate),
          use_array_if_local=not self.by_csv,
      ).build()
    dataset.prepare()
    return dataset

  def loader(self, dataset: Any, rows: int) -> NumpyDataLoaderBase:
    return NumpyDataLoaderBase.wrap_numpy_dataset(
        dataset,
        global_batch_size=rows * self.length,
        collator=DataCollator(pad_token_id=self.pad),
        work_dir=str(self.directory / "work"),
        seed=self.seed,
        dp_world_size=1,
        dp_rank=0,
        fs_local_rank=0,
        num_threads=0,
    )

  def config(self, rows: int, ties: str) -> Any:
    """Returns the config of the same run in this package."""
    paths = self.paths
    if self.source_seed is not None:
      paths = olmo_core_import.permute_sources(paths, self.source_seed)
    index = maxtext_olmo.build_index(
        [(path, "x") for path in paths],
        self.length,
        tokenizer="t",
        dtype=self.dtype,
        base=str(self.directory),
    )
    index.save(self.directory / "index.json")
    config = maxtext_olmo.get_config()
    config.update(
        olmo_index_path=str(self.directory / "index.json"),
        max_target_length=self.length,
        global_batch_size_to_load=rows,
        data_shuffle_seed=self.seed,
        olmo_order="olmo_core",
        olmo_order_cache_dir=str(self.directory / "cache"),
        olmo_eos_id=_EOS,
        olmo_bos_id=-1 if self.bos is None else self.bos,
        olmo_document_mask=self.document_lengths,
        olmo_apply_ngram_filter=self.filter is not None,
    )
    if self.filter is not None:
      names = ("olmo_ngram_min_period", "olmo_ngram_max_period", "olmo_ngram_max_count")
      config.update(dict(zip(names, self.filter)))
    if self.masked:
      config.olmo_label_masks = tuple(self.masks)
      config.olmo_label_masks_seed = -1 if self.source_seed is None else self.source_seed
    if self.packed:
      config.update(
          dataset_type="olmo_packed",
          olmo_pad_id=self.pad,
          olmo_source_group_size=self.group,
          olmo_long_documents="split" if self.splits else "truncate",
          olmo_boundaries="csv" if self.by_csv else "eos",
          olmo_packed_segments="documents",
          olmo_packing_ties=ties,
          olmo_packing_cache_dir=str(self.directory / "work") if ties == "cache" else "",
      )
    return config

  def __repr__(self) -> str:
    shown = {name: value for name, value in vars(self).items() if isinstance(value, (int, str))}
    return json.dumps({**shown, "filter": self.filter})


def _lengths(segments: np.ndarray) -> list[int]:
  borders = np.flatnonzero(np.diff(segments)) + 1
  return np.diff(borders, prepend=0, append=len(segments)).tolist()


class PackedCheck(absltest.TestCase):

  def check(self, case: Case, dataset: Any, rows: int) -> None:
    """Compares an epoch and the beginning of the next."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    config = case.config(rows, ties_of_this_cpu())
    iterator, _ = maxtext_olmo.create_data_iterator(config, mesh)
    loader = case.loader(dataset, rows)
    tally.case(case.kind)
    try:
      for epoch, steps in ((1, None), (2, 3)):
        loader.reshuffle(epoch)
        for theirs in itertools.islice(loader, steps):
          ours = {name: np.asarray(array) for name, array in next(iterator).items()}
          counted = ours["targets_segmentation"] != 0
          labels = np.where(counted, ours["targets"], -100)
          pairs: list[tuple[Any, Any]] = [
              (ours["inputs"], theirs["input_ids"].numpy()),
              (labels, get_labels(theirs).numpy()),
          ]
          if case.document_lengths:
            lengths = [[n for n in row if n] for row in theirs["doc_lens"].tolist()]
            pairs.append((list(map(_lengths, ours["inputs_segmentation"])), lengths))
          tally.compare_rows(case.kind, *pairs)
        loader.reset()
    finally:
      iterator.close()

  def check_cache(self, case: Case) -> None:
    """Compares the rows that OLMo-core's cache files give with those of this CPU's ties."""
    plans = []
    for ties in (ties_of_this_cpu(), "cache"):
      options = config_lib.Options.read(case.config(1, ties))
      rows = olmo_packed.open_rows(options, options.olmo_index_path).rows
      plans.append(rows.parts(0, np.arange(rows.num_rows(0))))
    for field in dataclasses.fields(plans[0]):
      np.testing.assert_array_equal(*(getattr(plan, field.name) for plan in plans))

  def test_random_cases_are_equal_row_by_row(self):
    for number in range(_CASES):
      directory = tempfile.mkdtemp(prefix="peer_")
      try:
        case = Case(directory, number)
        dataset = case.dataset()
        rows = min(case.rng.choice((4, 7, 16, 33)), len(dataset))
        with self.subTest(f"PEER_SEED={tally.SEED}, case {number}: {case!r}"):
          self.check(case, dataset, rows)
          if case.packed:
            self.check_cache(case)
      finally:
        shutil.rmtree(directory)

  def test_equally_long_documents_are_ordered_as_by_numpy_on_this_cpu(self):
    for number in range(_CASES):
      rng = np.random.default_rng([tally.SEED, number])
      count, longest = int(rng.integers(1, 5000)), int(rng.integers(1, 200))
      lengths = rng.integers(0, longest, count)
      with self.subTest(f"PEER_SEED={tally.SEED}, case {number}"):
        tally.case(_ORDERS)
        found = tie_order.longest_first(lengths, ties_of_this_cpu())
        tally.compare(_ORDERS, found.tolist(), np.argsort(-lengths).tolist())


if __name__ == "__main__":
  absltest.main()
