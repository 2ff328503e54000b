"""Other loaders of training tokens, each over the same tokens, for `maxtext-olmo bench throughput`.

`bench_loaders` imports this module under the interpreter that a loader needs. Each `open_NAME` builds a loader at one setting;
the driver tries the sensible ones and goes on with the best. Loaders with a format of their own get the tokens converted to
it first, by `convert_NAME`, outside the clock.
"""

import importlib.machinery
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import bench_loaders
import numpy as np

_PREFETCH = 2


class Endless:
  """Epoch after epoch of a loader; a new one is begun outside the clock where the rest is too short for a measurement."""

  def __init__(self, begin: Callable[[], Iterable[Any]], length: int):
    self._begin = begin
    self._length = length
    self._taken = 0
    self._batches: Iterator[Any] = iter(begin())

  def take(self) -> Any:
    try:
      batch = next(self._batches)
    except StopIteration:
      self._restart()
      batch = next(self._batches)
    self._taken += 1
    return batch

  def prepare(self, batches: int) -> None:
    """Sees to it that so many batches come without a new epoch, if an epoch has that many."""
    if self._taken and self._taken + batches > self._length:
      self._restart()

  def _restart(self) -> None:
    self._batches = iter(())  # Ends the workers of the epoch before new ones start.
    self._batches = iter(self._begin())
    self._taken = 0


class Windows:
  """Row i is window i of the files, as a fresh array: what most people write over `np.memmap`."""

  def __init__(self, files: Sequence[str], length: int):
    self._files = list(files)
    self._length = length
    counts = [os.path.getsize(path) // (4 * length) for path in files]
    self._ends = np.cumsum(counts)
    self._maps: dict[int, np.ndarray] = {}

  def __len__(self) -> int:
    return int(self._ends[-1])

  def __getitem__(self, i: int) -> np.ndarray:
    return np.array(self.view(i))

  def view(self, i: int) -> np.ndarray:
    """Window i as it lies in the mapping."""
    file = int(np.searchsorted(self._ends, i, side="right"))
    tokens = self._maps.get(file)
    if tokens is None:
      # Token ids are far below the sign bit, so int32 is what they are, and what most frameworks take.
      tokens = self._maps[file] = np.memmap(self._files[file], np.int32, mode="r")
    start = (i - int(self._ends[file - 1]) if file else i) * self._length
    return tokens[start : start + self._length]

  def forget(self) -> None:
    """Lets go of the mappings, so that each window is touched for the first time again.

    A corpus for training is larger than memory, and an epoch reads each window once. Were the pages of a small one left in
    the process's page table from the epoch before, its reads would be cheaper than any that a trainer sees.
    """
    self._maps = {}

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "_maps": {}}

  def __repr__(self) -> str:
    return f"Windows({len(self)} x {self._length})"


def open_maxtext(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """MaxText's own `olmo_grain`: its Grain DataLoader, or with `way` "device" its multi-host iterator over that."""
  loader = _maxtext_loader(spec)
  ready = _ready_in_data_loader(spec)
  if spec["way"] != "device":
    batches = iter(loader)
    return bench_loaders.Opened(lambda: next(batches), dict, ready)
  import jax
  from maxtext.input_pipeline import multihost_dataloading

  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  arrays = multihost_dataloading.MultiHostDataLoadIterator(loader, mesh)
  sent = 0

  def take() -> Any:
    nonlocal sent
    batch = jax.block_until_ready(next(arrays))
    sent += sum(array.nbytes for array in batch.values())
    return batch

  return bench_loaders.Opened(take, dict, ready, counters=lambda: {"bytes_to_device": sent})


def _maxtext_loader(spec: Mapping[str, Any]) -> Any:
  from absl import flags
  from maxtext.input_pipeline import olmo_data
  from maxtext.input_pipeline import olmo_data_grain

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  index = olmo_data.build_index(
      [(path, "web") for path in spec["files"]],
      spec["length"],
      tokenizer="dolma2",
      header_reader=lambda path: olmo_data.read_raw_metadata_from_path(path, "uint32"),
  )
  return olmo_data_grain.make_olmo_grain_data_loader(
      index,
      seed=0,
      batch_size=spec["batch"],
      shard_index=0,
      shard_count=1,
      apply_ngram_filter=spec["filter"],
      grain_worker_count=spec["workers"],
      grain_worker_buffer_size=_PREFETCH,
  )


def _ready_in_data_loader(spec: Mapping[str, Any]) -> int:
  """Grain's DataLoader reads 500 records ahead, in each worker, and each worker keeps some batches beside."""
  return (500 // spec["batch"] + _PREFETCH + 2) * max(1, spec["workers"]) + 2


def open_olmo_core(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """OLMo-core's fixed-length dataset and loader, with its own threads, or with worker processes."""
  from olmo_core.data import collator as collator_lib
  from olmo_core.data import data_loader
  from olmo_core.data import numpy_dataset

  dataset = numpy_dataset.NumpyFSLDataset(
      *spec["files"],
      sequence_length=spec["length"],
      pad_token_id=0,
      eos_token_id=spec["eos_id"],
      vocab_size=spec["vocab_size"],
      dtype=np.uint32,
      include_instance_metadata=False,
      generate_doc_lengths=spec["documents"],
      instance_filter_config=numpy_dataset.InstanceFilterConfig() if spec["filter"] else None,
  )
  dataset.work_dir = os.path.join(spec["directory"], "olmo_core")
  dataset.prepare()
  loader = data_loader.NumpyDataLoaderBase.wrap_numpy_dataset(
      dataset,
      global_batch_size=spec["batch"] * spec["length"],
      collator=collator_lib.DataCollator(pad_token_id=0, vocab_size=spec["vocab_size"]),
      work_dir=dataset.work_dir,
      num_threads=spec["threads"],
      num_workers=spec["workers"],
      prefetch_factor=_PREFETCH if spec["workers"] else None,
  )

  def begin() -> Any:
    loader.reset()
    loader.reshuffle(epoch=1)
    return loader

  return _endless(begin, loader.total_batches, spec, _tensors)


def open_grain(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """A pipeline of Grain's Dataset API over `np.memmap`, record by record, batched, with threads or processes."""
  import grain
  from absl import flags

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  source = Windows(spec["files"], spec["length"])
  rows = grain.MapDataset.source(source).shuffle(seed=0).repeat()
  threads = grain.ReadOptions(num_threads=spec["threads"], prefetch_buffer_size=2 * spec["batch"])
  if spec["workers"]:
    batches = iter(
        rows.batch(spec["batch"])
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH))
        .mp_prefetch(grain.MultiprocessingOptions(spec["workers"], _PREFETCH))
    )
  else:
    batches = iter(rows.to_iter_dataset(threads).batch(spec["batch"]))
  ready = (2 * _PREFETCH + 2) * max(1, spec["workers"]) + 2
  return bench_loaders.Opened(
      lambda: next(batches),
      lambda b: {"tokens": b},
      ready,
      batches.close,
      prepare=lambda _: source.forget(),
  )


def open_grain_loader(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """Grain's DataLoader with an IndexSampler over `np.memmap`."""
  import grain
  from absl import flags

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  source = Windows(spec["files"], spec["length"])
  loader = grain.DataLoader(
      data_source=source,
      sampler=grain.samplers.IndexSampler(len(source), shuffle=True, seed=0, num_epochs=None),
      operations=[grain.transforms.Batch(spec["batch"], drop_remainder=True)],
      worker_count=spec["workers"],
      worker_buffer_size=_PREFETCH,
  )
  batches = iter(loader)
  return bench_loaders.Opened(
      lambda: next(batches),
      lambda b: {"tokens": b},
      _ready_in_data_loader(spec),
      prepare=lambda _: source.forget(),
  )


def open_torch(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """torch's DataLoader over `np.memmap`, with its default collation of rows."""
  import torch
  from torch.utils import data

  windows = Windows(spec["files"], spec["length"])

  class Rows(data.Dataset):

    def __len__(self) -> int:
      return len(windows)

    def __getitem__(self, i: int) -> Any:
      return torch.from_numpy(windows[i])

  loader = data.DataLoader(
      Rows(), spec["batch"], shuffle=True, drop_last=True, **_worker_settings(spec)
  )
  return _endless(
      lambda: loader, len(loader), spec, lambda batch: {"tokens": batch}, windows.forget
  )


def open_torch_batches(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """torch's DataLoader as one may tune it by hand: a dataset that takes the ids of a whole batch and fills one tensor."""
  import torch
  from torch.utils import data

  windows = Windows(spec["files"], spec["length"])
  length = spec["length"]

  class Batches(data.Dataset):

    def __len__(self) -> int:
      return len(windows)

    def __getitem__(self, ids: Sequence[int]) -> Any:
      out = torch.empty((len(ids), length), dtype=torch.int32)
      array = out.numpy()
      for row, i in enumerate(ids):
        array[row] = windows.view(i)
      return out

  dataset = Batches()
  sampler = data.BatchSampler(data.RandomSampler(dataset), spec["batch"], drop_last=True)
  loader = data.DataLoader(dataset, batch_size=None, sampler=sampler, **_worker_settings(spec))
  return _endless(
      lambda: loader, len(sampler), spec, lambda batch: {"tokens": batch}, windows.forget
  )


def convert_streaming(spec: Mapping[str, Any]) -> str:
  """The windows as MDS shards, uncompressed."""
  streaming = _import_streaming()
  out = os.path.join(spec["directory"], "converted", f"streaming_{spec['length']}")
  if not os.path.exists(os.path.join(out, "index.json")):
    shutil.rmtree(out, ignore_errors=True)
    columns = {"tokens": f"ndarray:int32:{spec['length']}"}
    windows = Windows(spec["files"], spec["length"])
    with streaming.MDSWriter(out=out, columns=columns, compression=None) as writer:
      for i in range(len(windows)):
        writer.write({"tokens": windows[i]})
  return out


def _import_streaming() -> Any:
  """The package needs torchvision for its image datasets; where that is broken, an empty one will do for tokens."""
  try:
    import torchvision
  except (ImportError, RuntimeError):
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms")
    for name in (*names, "torchvision.transforms.functional"):
      sys.modules[name] = types.ModuleType(name)
      sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    functional = sys.modules["torchvision.transforms.functional"]
    functional.to_tensor = None  # type: ignore[attr-defined]
  else:
    del torchvision
  import streaming

  return streaming


def open_streaming(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """mosaicml-streaming from local, uncompressed shards, under torch's DataLoader."""
  from torch.utils import data

  streaming = _import_streaming()
  streaming.base.util.clean_stale_shared_memory()
  dataset = streaming.StreamingDataset(
      local=convert_streaming(spec), shuffle=True, batch_size=spec["batch"]
  )
  loader = data.DataLoader(dataset, spec["batch"], drop_last=True, **_worker_settings(spec))
  count = len(dataset) // spec["batch"]
  return _endless(lambda: loader, count, spec, dict)


def convert_litdata(spec: Mapping[str, Any]) -> str:
  """The tokens in litdata's chunks, as its token loader takes them."""
  import litdata

  out = os.path.join(spec["directory"], "converted", "litdata")
  if not os.path.exists(os.path.join(out, "index.json")):
    shutil.rmtree(out, ignore_errors=True)
    litdata.optimize(
        fn=_tokens_of_file,
        inputs=list(spec["files"]),
        output_dir=out,
        chunk_bytes="64MB",
        item_loader=litdata.TokensLoader(),
        num_workers=1,
    )
  return out


def _tokens_of_file(path: str) -> Any:
  import torch

  return torch.from_numpy(np.fromfile(path, np.int32))


def open_litdata(spec: Mapping[str, Any]) -> bench_loaders.Opened:
  """litdata's streaming dataset of tokens, from local chunks, under its own loader."""
  import litdata

  dataset = litdata.StreamingDataset(
      input_dir=convert_litdata(spec),
      item_loader=litdata.TokensLoader(block_size=spec["length"]),
      shuffle=True,
      drop_last=True,
  )
  loader = litdata.StreamingDataLoader(
      dataset, batch_size=spec["batch"], drop_last=True, **_worker_settings(spec)
  )
  count = len(dataset) // spec["batch"]
  return _endless(lambda: loader, count, spec, lambda batch: {"tokens": batch})


def _worker_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
  workers = spec["workers"]
  if not workers:
    return {"num_workers": 0}
  return {"num_workers": workers, "prefetch_factor": _PREFETCH, "persistent_workers": True}


def _endless(
    begin: Callable[[], Iterable[Any]],
    length: int,
    spec: Mapping[str, Any],
    arrays: Callable[[Any], Mapping[str, Any]],
    forget: Callable[[], None] = lambda: None,
) -> bench_loaders.Opened:
  endless = Endless(begin, length)
  ready = _PREFETCH * spec["workers"] + 1

  def prepare(batches: int) -> None:
    forget()
    endless.prepare(batches)

  return bench_loaders.Opened(endless.take, arrays, ready, prepare=prepare)


def _tensors(batch: Mapping[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in batch.items() if hasattr(value, "dtype")}
