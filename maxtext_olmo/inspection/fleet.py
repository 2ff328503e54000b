"""A simulated fleet: what each of thousands of hosts would read, computed on one machine.

A host is made of the same objects as in training: the layout of the batch on the mesh, the step
dataset and the reader. Only the devices are simulated, and the storage counts reads instead of
making them:

    mesh of simulated devices ──▶ BatchLayout of host h ──▶ StepDataset ──▶ Reader ──▶ counts
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from maxtext_olmo import config as config_lib
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import verify
from maxtext_olmo.inspection import counting_storage
from maxtext_olmo.inspection import run_plan
from maxtext_olmo.loader import wiring
from maxtext_olmo.rows import loss_mask
from maxtext_olmo.rows import reader as reader_lib
from maxtext_olmo.rows import row_source
from maxtext_olmo.rows import steps as steps_lib


@dataclasses.dataclass(frozen=True)
class HostSteps:
  """What one host does in a step, averaged over some steps.

  Attributes:
    process: The number of the host.
    rows: Rows of the global batch that the host holds.
    parts: Ranges of files that make up these rows.
    reads: Reads of local files.
    requests: Requests to object stores.
    bytes: Bytes to read.
    files: Largest number of files that a step reads from.
    seconds: Time to find the parts of a step on this machine. Steps are computed in blocks; this
      is the share of one step.
  """

  process: int
  rows: int
  parts: float
  reads: float
  requests: float
  bytes: float
  files: int
  seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedFleet:
  """The hosts of a run.

  Attributes:
    options: The data keys of the run.
    mesh: A mesh, usually of simulated devices.
    run: The run: its corpus, schedule and stream.
    rows: The row source, which maps rows to parts.
    reader: The reader of the parts, which reads from `storage`.
    storage: The storage that counts reads instead of making them.
  """

  options: config_lib.Options
  mesh: jax.sharding.Mesh
  run: run_plan.OpenedRun
  rows: row_source.RowSource
  reader: reader_lib.FileReader
  storage: counting_storage.CountingStorage

  @classmethod
  def of_run(
      cls, options: config_lib.Options, mesh: jax.sharding.Mesh, run: run_plan.OpenedRun
  ) -> SimulatedFleet:
    """Returns the fleet that trains a run on a mesh."""
    rows, index, remap = run.make_rows(), run.files, options.path_remap
    sizes = {
        paths_lib.remap(index.resolve(i), remap): index.expected_size(i)
        for i in range(len(index.files))
    }
    sizes |= {path: entry.n_tokens for path, entry in zip(rows.mask_paths or (), index.files)}
    storage = counting_storage.CountingStorage(sizes)
    files = token_files.TokenFiles.of_index(index, path_remap=remap, storage=storage)
    return cls(options, mesh, run, rows, reader_lib.FileReader(files), storage)

  @property
  def hosts(self) -> int:
    """The number of hosts."""
    return 1 + max(device.process_index for device in self.mesh.devices.flat)

  def rows_of(self, process: int) -> dict[int, np.ndarray]:
    """Returns the rows of the global batch that a host holds, for each batch size."""
    schedule = self.run.start.schedule
    layouts = wiring.layouts(self.options, self.mesh, schedule, process)
    return {size: layout.rows for size, layout in layouts.items()}

  def steps_of(
      self, process: int, first_step: int = 0, block_steps: int = 0
  ) -> steps_lib.StepDataset:
    """Returns the step dataset of a host, from which it reads its share of each batch."""
    start = self.run.start
    return steps_lib.StepDataset(
        self.rows,
        self.reader,
        start.stream,
        start.schedule,
        self.rows_of(process),
        first_step=first_step,
        block_steps=block_steps,
    )

  def sample(self, process: int, steps: Sequence[int]) -> HostSteps:
    """Returns what a host does in some steps; reads nothing.

    Args:
      process: The number of the host.
      steps: The steps, ascending.
    """
    dataset, storage = self.steps_of(process), self.storage
    before = storage.reads, storage.requests, storage.bytes
    began = time.perf_counter()
    dataset.parts(steps[0])
    seconds = time.perf_counter() - began
    tables = [dataset.parts(step) for step in steps]
    for parts in tables:
      for files in dataset.files:
        out = np.empty((parts.num_rows, self.rows.row_length), files.dtype)
        reader_lib.FileReader(files).filler(parts, out)(slice(None))
    count = len(steps)
    return HostSteps(
        process,
        tables[0].num_rows,
        sum(len(parts.source) for parts in tables) / count,
        (storage.reads - before[0]) / count,
        (storage.requests - before[1]) / count,
        (storage.bytes - before[2]) / count,
        max(len(np.unique(parts.source)) for parts in tables),
        seconds / dataset.block_steps,
    )

  def check_files(self) -> int:
    """Checks the files as each host does when it starts; returns how many sizes it asks for."""
    before = self.storage.sizes_asked
    verify.check_sizes(self.run.files, path_remap=self.options.path_remap, storage=self.storage)
    loss_mask.digest(self.rows, self.reader)
    return self.storage.sizes_asked - before
