"""This library and its yardsticks: plain copies, and a compiled loop of `pread`s over its parts."""

import functools
import itertools
import math
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

import maxtext_olmo
from maxtext_olmo.loader import delivery
from maxtext_olmo.rows import prefetch
from maxtext_olmo.trainers.tiny import config as tiny_config
from maxtext_olmo.trainers.tiny import model
from tests import corpora
from tests.benchmarks import child

Spec = Mapping[str, Any]
_STEP_SECONDS = 0.1

_pread: Any = numba.types.ExternalFunction(
    "pread",
    numba.types.int64(numba.types.intc, numba.types.int64, numba.types.int64, numba.types.int64),
)


def _buffers(size: int) -> Iterator[np.ndarray]:
  """Yields two page-aligned arrays of bytes in turn: one is in use while the next batch is made."""
  return itertools.cycle(np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(2))


def open_limit(spec: Spec) -> child.Loader:
  """Copies random windows out of memory maps, with one NumPy call per batch."""
  maps = [np.memmap(path, np.uint32, mode="r") for path in spec["files"]]
  windows = [tokens.reshape(-1, spec["length"]) for tokens in maps]
  for tokens in windows:
    tokens.max()  # maps its pages
  rng = np.random.default_rng(1)
  picks = [(w, rng.integers(0, len(w), spec["batch"])) for w in windows for _ in range(50)]
  rng.shuffle(picks)  # type: ignore[arg-type]
  shape = spec["batch"], spec["length"]
  turns, buffers = itertools.cycle(picks), _buffers(4 * math.prod(shape))

  def take() -> np.ndarray:
    tokens, ids = next(turns)
    return np.take(tokens, ids, 0, next(buffers).view(np.uint32).reshape(shape), mode="clip")

  return child.Loader(take)


@numba.njit
def _read_parts(descriptors, offsets, sizes, places, address):
  for i in range(len(sizes)):
    if _pread(descriptors[i], address + places[i], sizes[i], offsets[i]) != sizes[i]:
      return i
  return -1


def open_bare(spec: Spec) -> child.Loader:
  """Reads the parts of one epoch's steps, computed beforehand, by a compiled loop of `pread`s.

  Reads the loss masks of the parts as well, if there are any.
  """
  batches = _iterator(spec).host_batches()
  shape = spec["batch"], spec["length"]
  tables: list[list[np.ndarray]] = []
  for step in range(sum(map(os.path.getsize, spec["files"])) // (4 * math.prod(shape))):
    parts, lists, begin = batches.parts(step), [], 0
    for files in batches.files:
      width = files.dtype.itemsize
      lists.append(
          (
              _descriptors(tuple(files.paths))[parts.source],
              np.asarray(files.data_offsets)[parts.source] + parts.first * width,
              parts.count.astype(np.int64) * width,
              begin + (parts.row * spec["length"] + parts.column) * width,
          )
      )
      begin += width * math.prod(shape)
    tables.append([np.concatenate(columns) for columns in zip(*lists)])
  turns, buffers = itertools.cycle(tables), _buffers(begin)

  def take() -> np.ndarray:
    out = next(buffers)
    failed = _read_parts(*next(turns), out.ctypes.data)
    if failed >= 0:
      raise OSError(f"part {failed} could not be read whole")
    return out[: 4 * math.prod(shape)].view(np.uint32).reshape(shape)

  expected, unread = batches[0]["tokens"], np.uint32(2**32 - 1)
  for _ in range(2):
    next(buffers).fill(255)
  found = take()
  if not np.array_equal(found, np.where(found == unread, unread, expected)):
    raise ValueError("the parts of step 0 do not hold its tokens")
  return child.Loader(take)


@functools.cache
def _descriptors(paths: tuple[str, ...]) -> np.ndarray:
  return np.array([os.open(path, os.O_RDONLY) for path in paths], np.int32)


def _config(spec: Spec, config: Any) -> Any:
  config.update(
      olmo_index_path=os.path.join(spec["directory"], "index.json"),
      max_target_length=spec["length"],
      global_batch_size_to_load=spec["batch"],
      vocab_size=spec["vocab_size"],
      **spec["keys"],
  )
  if spec.get("masks"):
    config.olmo_label_masks = (os.path.join(spec["directory"], "data", "*.mask"),)
  return config


def _mesh() -> jax.sharding.Mesh:
  return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def _iterator(spec: Spec) -> Any:
  config = _config(spec, maxtext_olmo.get_config())
  return maxtext_olmo.create_data_iterator(config, _mesh())[0]


def _warm(loader: child.Loader, batches: int = 50) -> child.Loader:
  """Takes batches until what is compiled in the background is ready: the steady state counts."""
  for _ in range(batches):
    loader.take()
  for thread in threading.enumerate():
    if thread.name.startswith("compile"):
      thread.join()
  return loader


def open_inline(spec: Spec) -> child.Loader:
  """Makes each batch when it is asked for, by one thread, as NumPy arrays."""
  batches = _iterator(spec).host_batches()
  steps = itertools.count()
  return _warm(child.Loader(lambda: batches[next(steps)]["tokens"]))


def open_ahead(spec: Spec) -> child.Loader:
  """Makes batches ahead by the default number of threads, as NumPy arrays."""
  batches, default = _iterator(spec).host_batches(), delivery.Prefetch()
  ahead = prefetch.Prefetcher(batches.__getitem__, default.batches, default.threads)
  return _warm(child.Loader(lambda: ahead.take()["tokens"], buffered=default.batches))


def open_devices(spec: Spec) -> child.Loader:
  """Takes global batches as a trainer does."""
  train = _iterator(spec)
  take = lambda: jax.block_until_ready(next(train))["inputs"]  # noqa: E731
  return _warm(child.Loader(take, 4, counters=train.metrics))


def open_trainer(spec: Spec) -> child.Loader:
  """Takes batches between steps that compute on all cores for about 100 ms."""
  train = _iterator(spec)

  @jax.jit
  def compute(tokens: jax.Array, repeats: int) -> jax.Array:
    matrix = jnp.full((1024, 1024), 1e-3) + tokens[0, 0] * 1e-9
    return jax.lax.fori_loop(0, repeats, lambda _, x: x @ matrix, matrix)

  tokens = next(train)["inputs"]
  compute(tokens, 1).block_until_ready()
  began = time.perf_counter()
  compute(tokens, 20).block_until_ready()
  repeats = max(1, round(20 * _STEP_SECONDS / (time.perf_counter() - began)))
  return _training(train, lambda tokens: compute(tokens["inputs"], repeats))


def open_tiny(spec: Spec) -> child.Loader:
  """Trains the tiny trainer's model."""
  directory = tempfile.mkdtemp(dir=spec["directory"])
  corpora.write_corpus(
      directory, tokens_per_file=(1 << 21,), sequence_length=spec["length"], vocab_size=512
  )
  spec = {**spec, "directory": directory, "vocab_size": 512}
  config = _config(spec, tiny_config.get_config())
  mesh = model.make_mesh(config)
  learner = model.Learner(config, mesh)
  train, _ = maxtext_olmo.create_data_iterator(tiny_config.for_data(config), mesh)
  state = learner.init()

  def step(batch: Any) -> Any:
    nonlocal state
    state, metrics = learner.train_step(state, batch)
    return metrics

  return _training(train, step)


def _training(train: Any, step: Callable[[Any], Any]) -> child.Loader:
  def take() -> jax.Array:
    batch = next(train)
    jax.block_until_ready(step(batch))
    return batch["inputs"]

  return _warm(child.Loader(take, buffered=4, counters=train.metrics), 10)
