"""Readers of an object store, measured in processes of their own by `cloud.py`.

    python -m tests.benchmarks.cloud_readers JOB

The job is JSON: `reader`, `endpoint`, `paths` (objects in the bucket `bucket`), `length` (tokens of
4 bytes per row), `batch`, `rows` (to read), `parallelism`, and what a reader needs besides. Prints
`{"rows": …, "seconds": …, "cpu": …}` for the rows after a warm-up. Other environments lack this
package, so its imports are in the reader that needs them.
"""

import concurrent.futures
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.benchmarks import peers

Job = dict[str, Any]


def places(job: Job) -> list[tuple[str, int]]:
  """Returns the object and the first byte of each row, in the same random order for all readers."""
  size = 4 * job["length"]
  everything = [
      (path, offset)
      for path, whole in zip(job["paths"], job["sizes"])
      for offset in range(0, whole - size + 1, size)
  ]
  order = np.random.default_rng(3).permutation(len(everything)).tolist()
  return [everything[i] for i in order]


def read_ours(job: Job) -> Iterator[int]:
  """Reads batches with this package, as a trainer's process does, up to the arrays for a device.

  Without the filter of repetitions, which the others do not have.
  """
  from maxtext_olmo.corpus import index_builder
  from maxtext_olmo.corpus import token_files
  from maxtext_olmo.corpus.storage import open_storage
  from maxtext_olmo.corpus.storage import stores
  from maxtext_olmo.order import schedule
  from maxtext_olmo.order import stream
  from maxtext_olmo.rows import content
  from maxtext_olmo.rows import reader
  from maxtext_olmo.rows import segments
  from maxtext_olmo.rows import steps
  from maxtext_olmo.rows import windows

  index = index_builder.load_index(job["index"])
  options = stores.StoreOptions(endpoint=job["endpoint"], anonymous=True)
  files = token_files.TokenFiles.of_index(index, storage=open_storage(options))
  batch = job["batch"]
  dataset = steps.StepDataset(
      windows.WindowRows(index, segments.SegmentRule()),
      reader.FileReader(files),
      stream.train_stream(index, order="feistel", seed=0),
      schedule.BatchSchedule.constant(batch),
      {batch: np.arange(batch)},
      content=content.Content(ngram_filter=False),
  )
  reader.compile_reads(index.token_dtype)  # In the background by default, during the first steps.
  yield 0
  step = 0
  while True:
    assert dataset[step]["tokens"].shape == (batch, job["length"])
    step += 1
    yield batch


def read_obstore(job: Job) -> Iterator[int]:
  """Reads with a plain loop over obstore in threads, into one array per batch."""
  import obstore
  from obstore import store as store_lib

  store = store_lib.S3Store(
      "bucket",
      config={"endpoint": job["endpoint"], "skip_signature": True},
      client_options={"allow_http": True},
  )
  size = 4 * job["length"]

  def read(place: tuple[str, int], out: np.ndarray) -> None:
    data = obstore.get_range(store, place[0], start=place[1], length=size)
    out[:] = np.frombuffer(data, np.uint8)

  pool = concurrent.futures.ThreadPoolExecutor(job["parallelism"])
  yield from _in_batches(job, lambda place, out: pool.submit(read, place, out))


def read_tensorstore(job: Job) -> Iterator[int]:
  """Reads with tensorstore's key-value store, which has threads of its own."""
  import tensorstore as ts

  spec = {"driver": "http", "base_url": f"{job['endpoint']}/bucket/"}
  context = ts.Context({"http_request_concurrency": {"limit": job["parallelism"]}})
  store = ts.KvStore.open(spec, context=context).result()
  size = 4 * job["length"]

  class Pending:

    def __init__(self, place: tuple[str, int], out: np.ndarray):
      self._future = store.read(place[0], byte_range=slice(place[1], place[1] + size))
      self._out = out

    def result(self) -> None:
      self._out[:] = np.frombuffer(self._future.result().value, np.uint8)

  yield from _in_batches(job, Pending)


def read_s3fs(job: Job) -> Iterator[int]:
  """Reads with s3fs, many at a time in its event loop."""
  import asyncio

  import fsspec.asyn
  import s3fs

  files = s3fs.S3FileSystem(
      anon=True,
      client_kwargs={"endpoint_url": job["endpoint"], "region_name": "us-east-1"},
      config_kwargs={"max_pool_connections": job["parallelism"]},
  )
  size = 4 * job["length"]

  async def read(place: tuple[str, int], out: np.ndarray) -> None:
    data = await files._cat_file(f"bucket/{place[0]}", start=place[1], end=place[1] + size)
    out[:] = np.frombuffer(data, np.uint8)

  loop = fsspec.asyn.get_loop()
  yield from _in_batches(
      job, lambda place, out: asyncio.run_coroutine_threadsafe(read(place, out), loop)
  )


def read_mosaic(job: Job) -> Iterator[int]:
  """Reads with MosaicML's Streaming, from shards of its own format in the same bucket."""
  import tempfile

  os.environ.update(
      S3_ENDPOINT_URL=job["endpoint"],
      AWS_ACCESS_KEY_ID="none",
      AWS_SECRET_ACCESS_KEY="none",
      AWS_DEFAULT_REGION="us-east-1",
  )
  streaming = peers.import_streaming()
  streaming.base.util.clean_stale_shared_memory()
  dataset = streaming.StreamingDataset(
      remote="s3://bucket/mosaic",
      local=tempfile.mkdtemp(prefix="mosaic_"),
      shuffle=True,
      batch_size=job["batch"],
      predownload=8 * job["batch"],
      num_canonical_nodes=1,
  )
  yield 0
  while True:
    count = 0
    for sample in dataset:
      assert sample["tokens"].shape == (job["length"],)
      count += 1
      if count == job["batch"]:
        yield count
        count = 0


def write_mosaic(job: Job) -> None:
  """Writes the rows as shards of MosaicML's Streaming, of its default size."""
  streaming = peers.import_streaming()
  with streaming.MDSWriter(
      out=job["output"], columns={"tokens": f"ndarray:int32:{job['length']}"}
  ) as out:
    for path in job["files"]:
      for row in np.fromfile(path, np.int32).reshape(-1, job["length"]):
        out.write({"tokens": row})


def _in_batches(job: Job, start: Callable[[tuple[str, int], np.ndarray], Any]) -> Iterator[int]:
  """Keeps `parallelism` reads in flight; yields when the next batch is complete."""
  yield 0
  batch, size = job["batch"], 4 * job["length"]
  ahead = -(-job["parallelism"] // batch)
  wanted = places(job)
  pending: list[list[Any]] = []
  first = 0
  while True:
    while len(pending) <= ahead:
      out = np.empty((batch, size), np.uint8)
      rows = [wanted[(first + i) % len(wanted)] for i in range(batch)]
      pending.append([start(place, out[i]) for i, place in enumerate(rows)])
      first += batch
    for read in pending.pop(0):
      read.result()
    yield batch


READERS = {
    "ours": read_ours,
    "obstore": read_obstore,
    "obstore, 32": lambda job: read_obstore({**job, "parallelism": 32}),
    "tensorstore": read_tensorstore,
    "s3fs": read_s3fs,
    "mosaic": read_mosaic,
}


def _cpu() -> float:
  used = resource.getrusage(resource.RUSAGE_SELF)
  return used.ru_utime + used.ru_stime


def main(job: Job) -> None:
  """Runs one reader and prints what it took."""
  if job["reader"] == "write_mosaic":
    write_mosaic(job)
    return
  reader = READERS[job["reader"]](job)
  next(reader)  # Opened.
  began = time.monotonic()
  next(reader)
  first = time.monotonic() - began
  while time.monotonic() - began < job["warm_up"]:
    next(reader)
  rows, cpu, began = 0, _cpu(), time.monotonic()
  while rows < job["rows"] and time.monotonic() - began < job["seconds"]:
    rows += next(reader)
  passed = time.monotonic() - began
  answer = {"rows": rows, "seconds": passed, "cpu": _cpu() - cpu, "first": first}
  print(json.dumps(answer), flush=True)
  os._exit(0)  # Without waiting for reads in flight.


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
