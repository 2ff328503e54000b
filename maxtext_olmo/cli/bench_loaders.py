"""The measured side of `maxtext-olmo bench throughput`: a process that opens loaders and takes batches from them.

It runs as a script under whatever interpreter a loader needs, so it imports only NumPy at the top, and nothing of this
package but for this library's own loader. Requests and answers are JSON, one per line:

    → {"do": "open", "name": "a", "spec": {"loader": "limit", "batch": 64, ...}}
    ← {"arrays": [["tokens", "uint32", [64, 8192]]], "bytes_per_token": 4.0, "seconds": 0.3, ...}
    → {"do": "run", "name": "a", "batches": 100}
    ← {"batches": 100, "seconds": 0.021, "cpu_seconds": 0.021, "faults": 3, "peak_bytes": 61000000, ...}

Before the clock starts, as many batches are taken as may lie ready in buffers, so that none of them is counted as made in no
time; after it has stopped, the answer waits until the buffers are full again and the process is idle.
"""

import contextlib
import ctypes
import json
import mmap
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_QUIET_SECONDS = 0.06
_QUIET_SHARE = 0.2
_MOST_SETTLING_SECONDS = 5.0


class Opened(NamedTuple):
  """A loader that is ready.

  Attributes:
    take: Gives the next batch.
    arrays: A batch → what it delivers, by name; the first array holds the tokens.
    buffered: How many batches may lie ready while nobody takes any.
    close: Ends it.
    counters: Numbers that grow as batches are made.
    prepare: Told, outside the clock, how many batches will be taken.
    note: What else a reader should know.
  """

  take: Callable[[], Any]
  arrays: Callable[[Any], Mapping[str, Any]]
  buffered: int = 0
  close: Callable[[], None] = lambda: None
  counters: Callable[[], dict[str, float]] = dict
  prepare: Callable[[int], None] = lambda batches: None
  note: str = ""


def open_limit(spec: Mapping[str, Any]) -> Opened:
  """Windows that are in memory already, copied by one NumPy call per batch and array, and nothing else.

  The arrays begin at a page and are used again, two sets in turn, since one batch is in use while the next is made.
  """
  length, batch = spec["length"], spec["batch"]
  windows = map_together(spec["files"]).view(np.uint32)
  windows = windows[: len(windows) // length * length].reshape(-1, length)
  sets = [[_page_aligned(batch, length) for _ in range(spec["arrays"])] for _ in range(2)]
  rng = np.random.default_rng(1)
  blocks = [rng.integers(0, len(windows), batch) for _ in range(4096)]
  turn = 0

  def take() -> list[np.ndarray]:
    nonlocal turn
    turn += 1
    outs = sets[turn % 2]
    for out in outs:
      np.take(windows, blocks[turn % len(blocks)], axis=0, out=out, mode="clip")
    return outs

  return Opened(take, lambda outs: {f"copy {i + 1}": out for i, out in enumerate(outs)})


def map_together(files: Sequence[str]) -> np.ndarray:
  """The bytes of files of whole pages, side by side in one mapping, read into memory."""
  sizes = [os.path.getsize(path) for path in files]
  if any(size % mmap.PAGESIZE for size in sizes):
    raise ValueError("Files can be mapped side by side only where each fills its pages.")
  together = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
  libc = ctypes.CDLL(None, use_errno=True)
  libc.mmap.restype = ctypes.c_void_p
  libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
  fixed = 0x10
  populate = 0x8000
  place = together.ctypes.data
  for path, size in zip(files, sizes):
    fd = os.open(path, os.O_RDONLY)
    flags = mmap.MAP_SHARED | fixed | populate
    if libc.mmap(place, size, mmap.PROT_READ, flags, fd, 0) != place:
      raise OSError(ctypes.get_errno(), f"cannot map {path}")
    os.close(fd)
    place += size
  return together


def _page_aligned(batch: int, length: int) -> np.ndarray:
  memory = mmap.mmap(-1, batch * length * 4)
  with contextlib.suppress(AttributeError, OSError):
    memory.madvise(mmap.MADV_HUGEPAGE)
  array = np.frombuffer(memory, np.uint32).reshape(batch, length)
  array[:] = 0
  return array


def open_ours(spec: Mapping[str, Any]) -> Opened:
  """This library, as `create_data_iterator` makes it; `way` says how far its batches are followed."""
  train = make_iterator(spec)
  if spec["way"] == "device":
    return _to_devices(train)
  if spec["way"] == "prefetch":
    batches = train._open(train._make_dataset(train._beginning))
    ready = max(1, spec["workers"]) * 2 + 1
    return Opened(lambda: next(batches), _compact, ready, batches.close)
  dataset = train._make_dataset(train._beginning)
  steps = iter(range(sys.maxsize))
  made = [0.0, 0.0, 0.0]

  def take() -> Any:
    batch = dataset[next(steps)]
    for i, seconds in enumerate(batch["cost"][:3].tolist()):
      made[i] += seconds
    return batch

  def counters() -> dict[str, float]:
    parts = dict(zip(("order_seconds", "read_seconds", "check_seconds"), made))
    return {**parts, "buffers_made": dataset._pool.made}

  return Opened(take, _compact, counters=counters, note=_filter_note(spec))


def make_iterator(spec: Mapping[str, Any]) -> Any:
  """The train iterator of this library, on all devices of the process."""
  import jax

  import maxtext_olmo
  from maxtext_olmo.rows import inspection
  from maxtext_olmo.rows import repetition

  config = maxtext_olmo.get_config()
  config.update(
      olmo_index_path=spec["index"],
      max_target_length=spec["length"],
      global_batch_size_to_load=spec["batch"],
      vocab_size=spec["vocab_size"],
      checkpoint_dir="",
      olmo_apply_ngram_filter=spec["filter"],
      olmo_document_mask=spec["documents"],
      olmo_eos_id=spec["eos_id"],
      grain_worker_count=spec["workers"],
      # Where nobody sends to devices, no core has to be left for it.
      olmo_device_prefetch=1 if spec["way"] == "device" else 0,
  )
  # The steady state is measured, not the first seconds.
  inspection.compile_reads(np.uint32)
  if spec["filter"]:
    repetition.compile_filter(np.uint32)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  return maxtext_olmo.create_data_iterator(config, mesh)[0]


def _filter_note(spec: Mapping[str, Any]) -> str:
  if not spec["filter"]:
    return ""
  from maxtext_olmo.rows import repetition

  return "filter by numba" if repetition.compile_filter(np.uint32) else "filter by NumPy"


def _compact(batch: Mapping[str, Any]) -> dict[str, Any]:
  return {name: batch[name] for name in ("tokens", "flags")}


def _to_devices(train: Any) -> Opened:
  import jax

  def take() -> Any:
    return jax.block_until_ready(next(train))

  # Counted together, when a batch is sent: those on their way are in all of them.
  def counters() -> dict[str, float]:
    metrics = train.metrics()
    names = ("bytes_to_device", "reads", "read_seconds", "transfer_seconds")
    return {name: metrics[name] for name in names}

  return Opened(take, dict, 8, train.close, counters)


def open_formed(spec: Mapping[str, Any]) -> Opened:
  """Batches of this library whose six arrays are made by the host and sent one by one, as MaxText forms its arrays.

  With MaxText installed its own function does it; else the same calls of JAX: split over the devices, put, join.
  """
  import grain
  import jax

  from maxtext_olmo.rows import steps

  train = make_iterator(spec)
  content = train._content
  arrays = train._make_dataset(train._beginning).map(lambda batch: steps.to_arrays(batch, content))
  batches = iter(arrays.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)))
  form, note = _former(jax.sharding.Mesh(np.array(jax.devices()), ("data",)))
  sent = 0

  def take() -> Any:
    nonlocal sent
    batch = next(batches)
    sent += sum(array.nbytes for array in batch.values())
    return jax.block_until_ready({name: form(name, array) for name, array in batch.items()})

  return Opened(take, dict, 3, train.close, lambda: {"bytes_to_device": sent}, note=note)


def _former(mesh: Any) -> tuple[Callable[[str, np.ndarray], Any], str]:
  import jax

  try:
    from maxtext.input_pipeline import multihost_dataloading as theirs
  except ImportError:
    devices = mesh.local_devices
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))

    def form(name: str, array: np.ndarray) -> Any:
      parts = jax.device_put(np.split(array, len(devices)), devices)
      shape = (jax.process_count() * array.shape[0], *array.shape[1:])
      return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    return form, "the same JAX calls"
  return lambda name, array: theirs._form_global_array((), array, mesh), "MaxText's own function"


class Session:
  """Loaders by name, and what is asked of them."""

  def __init__(self) -> None:
    self._open: dict[str, Opened] = {}

  def do(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers one request."""
    return getattr(self, f"_do_{request['do']}")(request)

  def _do_open(self, request: Mapping[str, Any]) -> dict[str, Any]:
    spec = request["spec"]
    began = time.perf_counter()
    opened = _opener(spec["loader"])(spec)
    batch = opened.take()
    seconds = time.perf_counter() - began
    self._open[request["name"]] = opened
    arrays = opened.arrays(batch)
    tokens = np.asarray(next(iter(arrays.values())))
    size = sum(getattr(array, "nbytes", 0) for array in arrays.values())
    return {
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
        "arrays": [_describe(name, array) for name, array in arrays.items()],
        "bytes_per_token": size / tokens.size,
        "shape": list(tokens.shape),
        "samples": tokens[[0, -1], :8].astype(np.int64).tolist(),
        "note": opened.note,
    }

  def _do_run(self, request: Mapping[str, Any]) -> dict[str, Any]:
    opened = self._open[request["name"]]
    batch = None
    opened.prepare(request["batches"] + opened.buffered + 2)
    for _ in range(opened.buffered + 2):
      batch = opened.take()
    before, cpu, faults = opened.counters(), cpu_seconds(), _faults()
    began = time.perf_counter()
    half = request["batches"] // 2
    for _ in range(half):
      batch = opened.take()
    halfway = time.perf_counter() - began
    for _ in range(request["batches"] - half):
      batch = opened.take()
    seconds = time.perf_counter() - began
    after = opened.counters()
    answer = {
        "batches": request["batches"],
        "buffered": opened.buffered,
        "seconds": seconds,
        "halfway_seconds": halfway,
        "cpu_seconds": cpu_seconds() - cpu,
        "faults": _faults() - faults,
        "peak_bytes": peak_bytes(),
        **{name: after[name] - before[name] for name in after},
    }
    del batch
    settle()
    return answer

  def _do_allocations(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """The most bytes that were allocated at a time while a batch was made, as Python and NumPy count them."""
    opened = self._open[request["name"]]
    batch = opened.take()
    tracemalloc.start()
    most = 0
    for _ in range(request["batches"]):
      before, _ = tracemalloc.get_traced_memory()
      tracemalloc.reset_peak()
      batch = opened.take()
      most = max(most, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    del batch
    return {"largest": most}

  def _do_close(self, request: Mapping[str, Any]) -> dict[str, Any]:
    self._open.pop(request["name"]).close()
    return {}


def _opener(name: str) -> Callable[[Mapping[str, Any]], Opened]:
  own = {"limit": open_limit, "ours": open_ours, "formed": open_formed}
  if name in own:
    return own[name]
  import bench_peers

  return getattr(bench_peers, f"open_{name}")


def _describe(name: str, array: Any) -> list[Any]:
  return [name, str(getattr(array, "dtype", type(array).__name__)), list(np.shape(array))]


def processes() -> list[int]:
  """This process and those below it."""
  found, new = [], [os.getpid()]
  while new:
    pid = new.pop()
    found.append(pid)
    with contextlib.suppress(OSError):
      for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
          new += map(int, file.read().split())
  return found


def cpu_seconds() -> float:
  """What this process and those below it have used."""
  ticks = os.sysconf("SC_CLK_TCK")
  total = time.process_time()
  for pid in processes()[1:]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
      fields = file.read().rpartition(")")[2].split()
      total += (int(fields[11]) + int(fields[12])) / ticks
  return total


def peak_bytes() -> int:
  """The most memory that this process, or one below it, has held."""
  most = 0
  for pid in processes():
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
      for line in file:
        if line.startswith("VmHWM"):
          most = max(most, int(line.split()[1]) * 1024)
  return most


def _faults() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settle() -> None:
  """Waits until this process and those below it are idle."""
  deadline = time.monotonic() + _MOST_SETTLING_SECONDS
  used = cpu_seconds()
  while time.monotonic() < deadline:
    time.sleep(_QUIET_SECONDS)
    before, used = used, cpu_seconds()
    if used - before < _QUIET_SHARE * _QUIET_SECONDS:
      return


def main() -> None:
  """Answers requests until there are no more."""
  # Libraries print as they please; what they print must not get among the answers.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  # This folder is where `bench_peers` is found, also by worker processes, but it must hide no other module.
  sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
  sys.path.append(os.path.dirname(__file__))
  session = Session()
  for line in sys.stdin:
    try:
      answer = session.do(json.loads(line))
    except BaseException as error:  # Whatever a loader does wrong is the answer.
      answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
  main()
