"""Other loaders over the same tokens, as they come. Runs in their environments.

Loaders with a format of their own get the tokens converted to it first, outside the clock.
"""

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.benchmarks import child

Spec = Mapping[str, Any]
_PREFETCH = 2


class Windows:
  """Row i is window i of the files, as a fresh array: what most people write over `np.memmap`."""

  def __init__(self, files: Sequence[str], length: int):
    self._files = list(files)
    self._length = length
    self._ends = np.cumsum([os.path.getsize(path) // (4 * length) for path in files])
    self._maps: dict[int, np.ndarray] = {}

  def __len__(self) -> int:
    return int(self._ends[-1])

  def __getitem__(self, i: int) -> np.ndarray:
    file = int(np.searchsorted(self._ends, i, side="right"))
    if file not in self._maps:
      self._maps[file] = np.memmap(self._files[file], np.int32, mode="r")
    start = (i - int(self._ends[file - 1]) if file else i) * self._length
    return np.array(self._maps[file][start : start + self._length])

  def forget(self) -> None:
    """Drops the mappings: a training corpus exceeds memory, so each window is touched once."""
    self._maps = {}


def _epochs(
    start: Callable[[], Iterable[Any]],
    rows: int,
    spec: Spec,
    tokens: Callable[[Any], Any] = lambda batch: batch,
) -> child.Loader:
  """Wraps a loader that ends after each epoch."""
  batches = iter(())

  def restart() -> None:
    nonlocal batches
    batches = iter(())  # ends the workers of the last epoch before new ones start
    batches = iter(start())

  restart()
  buffered = _PREFETCH * spec["workers"] + 1
  take = lambda: tokens(next(batches))  # noqa: E731
  return child.Loader(take, buffered, rows // spec["batch"], restart)


def _workers(spec: Spec) -> dict[str, Any]:
  """Returns the arguments of a torch DataLoader."""
  if not spec["workers"]:
    return {"num_workers": 0}
  return {"num_workers": spec["workers"], "prefetch_factor": _PREFETCH, "persistent_workers": True}


def open_maxtext(spec: Spec) -> child.Loader:
  """Opens MaxText's own `olmo_grain`."""
  from absl import flags
  from maxtext.input_pipeline import olmo_data
  from maxtext.input_pipeline import olmo_data_grain

  flags.FLAGS.mark_as_parsed()
  entries = [(path, "web") for path in spec["files"]]
  header = lambda path: olmo_data.read_raw_metadata_from_path(path, "uint32")  # noqa: E731
  index = olmo_data.build_index(entries, spec["length"], tokenizer="dolma2", header_reader=header)
  host = dict(shard_index=0, shard_count=1, batch_size=spec["batch"])
  workers = dict(grain_worker_count=spec["workers"], grain_worker_buffer_size=_PREFETCH)
  loader = olmo_data_grain.make_olmo_grain_data_loader(
      index, seed=0, apply_ngram_filter=spec["filter"], **host, **workers
  )
  batches = iter(loader)
  # Grain's DataLoader reads 500 records ahead in each worker, and each worker keeps some batches.
  buffered = (500 // spec["batch"] + _PREFETCH + 2) * max(1, spec["workers"])
  return child.Loader(lambda: next(batches)["inputs"], buffered)


def open_olmo_core(spec: Spec) -> child.Loader:
  """Opens OLMo-core's dataset of windows, or of packed documents, and its loader."""
  from olmo_core.data import collator as collator_lib
  from olmo_core.data import data_loader
  from olmo_core.data import numpy_dataset

  filter_ = numpy_dataset.InstanceFilterConfig() if spec["filter"] else None
  ids = dict(pad_token_id=spec["pad_id"], vocab_size=spec["vocab_size"])
  kind: Any = numpy_dataset.NumpyFSLDataset
  how: dict[str, Any] = {}
  if spec["group_size"]:
    kind = numpy_dataset.NumpyPackedFSLDataset
    how = dict(source_group_size=spec["group_size"], generate_doc_lengths=True)
  if spec["masks"]:
    how["label_mask_paths"] = [path.replace(".npy", ".mask") for path in spec["files"]]
  dataset = kind(
      *spec["files"],
      sequence_length=spec["length"],
      eos_token_id=spec["eos_id"],
      dtype=np.uint32,
      include_instance_metadata=False,
      instance_filter_config=filter_,
      **how,
      **ids,
  )
  dataset.work_dir = os.path.join(spec["directory"], "olmo_core")
  dataset.prepare()
  loader = data_loader.NumpyDataLoaderBase.wrap_numpy_dataset(
      dataset,
      global_batch_size=spec["batch"] * spec["length"],
      collator=collator_lib.DataCollator(**ids),
      work_dir=dataset.work_dir,
      num_workers=spec["workers"],
      prefetch_factor=_PREFETCH if spec["workers"] else None,
  )

  def start() -> Any:
    loader.reset()
    loader.reshuffle(epoch=1)
    return loader

  return _epochs(start, len(dataset), spec, lambda batch: batch["input_ids"])


def open_torch(spec: Spec) -> child.Loader:
  """Opens torch's DataLoader over `np.memmap`, with its default collation."""
  from torch.utils import data

  windows = Windows(spec["files"], spec["length"])
  loader = data.DataLoader(windows, spec["batch"], shuffle=True, drop_last=True, **_workers(spec))

  def start() -> Any:
    windows.forget()
    return loader

  return _epochs(start, len(windows), spec)


def open_grain(spec: Spec) -> child.Loader:
  """Opens a pipeline of Grain's Dataset API over `np.memmap`."""
  import grain
  from absl import flags

  flags.FLAGS.mark_as_parsed()
  windows = Windows(spec["files"], spec["length"])
  rows = grain.MapDataset.source(windows).shuffle(seed=0).repeat().batch(spec["batch"])
  batches = iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
  return child.Loader(lambda: next(batches), restart=windows.forget)


def open_litdata(spec: Spec) -> child.Loader:
  """Opens litdata's streaming dataset of tokens, from local chunks."""
  import litdata

  out = os.path.join(spec["directory"], "converted", "litdata")
  if not os.path.exists(os.path.join(out, "index.json")):
    how = dict(chunk_bytes="64MB", item_loader=litdata.TokensLoader(), num_workers=1)
    litdata.optimize(fn=_read_tokens, inputs=list(spec["files"]), output_dir=out, **how)
  blocks = litdata.TokensLoader(block_size=spec["length"])
  dataset = litdata.StreamingDataset(out, item_loader=blocks, shuffle=True, drop_last=True)
  loader = litdata.StreamingDataLoader(
      dataset, batch_size=spec["batch"], drop_last=True, **_workers(spec)
  )
  return _epochs(lambda: loader, len(dataset), spec)


def _read_tokens(path: str) -> Any:
  import torch

  return torch.from_numpy(np.fromfile(path, np.int32))


def import_streaming() -> Any:
  """Imports mosaicml-streaming, whose image datasets import torchvision; tokens do not need it."""
  for name in ("", ".datasets", ".transforms", ".transforms.functional"):
    module = sys.modules["torchvision" + name] = types.ModuleType("torchvision" + name)
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.VisionDataset = module.to_tensor = object  # type: ignore[attr-defined]
  import streaming

  return streaming


def open_streaming(spec: Spec) -> child.Loader:
  """Opens mosaicml-streaming from local, uncompressed shards."""
  from torch.utils import data

  streaming = import_streaming()
  out = os.path.join(spec["directory"], "converted", "streaming")
  if not os.path.exists(os.path.join(out, "index.json")):
    windows = Windows(spec["files"], spec["length"])
    columns = {"tokens": f"ndarray:int32:{spec['length']}"}
    with streaming.MDSWriter(out=out, columns=columns, compression=None) as writer:
      for i in range(len(windows)):
        writer.write({"tokens": windows[i]})
  streaming.base.util.clean_stale_shared_memory()
  dataset = streaming.StreamingDataset(local=out, shuffle=True, batch_size=spec["batch"])
  loader = data.DataLoader(dataset, spec["batch"], drop_last=True, **_workers(spec))
  return _epochs(lambda: loader, len(dataset), spec, lambda batch: batch["tokens"])
