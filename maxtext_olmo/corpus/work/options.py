"""How work over a corpus is done: by which engine, which part of it, and where results are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import tempfile

from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus.work import results as results_lib
from maxtext_olmo.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class WorkOptions:
  """How work over a corpus is done.

  Attributes:
    workers: Number of threads or processes; one per core by default.
    processes: Whether to use processes instead of threads on this machine.
    dask: Address of a Dask scheduler, or "local" for a cluster on this machine; "" does not use
      Dask.
    ray: Address of a Ray cluster, or "auto"; "" does not use Ray.
    results: Directory or URL for the results of items; "" keeps them in the memory of this process.
    part: (i, n) processes only items i, i + n, i + 2n, …; None processes all.
    merge: Whether to process nothing and only use the results of the parts.
    retry_failed: Whether to retry items that failed in an earlier run.
  """

  workers: int | None = None
  processes: bool = False
  dask: str = ""
  ray: str = ""
  results: str = ""
  part: tuple[int, int] | None = None
  merge: bool = False
  retry_failed: bool = False

  def __post_init__(self) -> None:
    if self.workers is not None and self.workers < 1:
      raise ConfigError(f"workers must be at least 1, got {self.workers}.")
    if self.processes + bool(self.dask) + bool(self.ray) > 1:
      raise ConfigError("Choose only one of --processes, --dask and --ray.")
    if self.part is not None and not 0 <= self.part[0] < self.part[1]:
      raise ConfigError(
          f"--part must be at least 0 and below --of, got --part {self.part[0]} --of"
          f" {self.part[1]}. Parts are numbered from 0."
      )
    if self.part is not None and self.merge:
      raise ConfigError("Choose either --part or --merge: a merge needs the results of all parts.")
    if self.merge and self.retry_failed:
      raise ConfigError(
          "Choose either --merge or --retry-failed: a merge processes nothing itself. First run"
          " the parts, or the command without --merge, with --retry-failed."
      )
    if not self.results and (self.in_other_processes or self.part is not None or self.merge):
      raise ConfigError("Results shared by several processes need a directory or URL (--results).")

  @property
  def in_other_processes(self) -> bool:
    """Whether the work is done outside this process."""
    return self.processes or bool(self.dask or self.ray)

  @property
  def on_other_machines(self) -> bool:
    """Whether other machines may need the results."""
    return bool(self.ray or self.part or self.merge or (self.dask and self.dask != "local"))


def default_results(path: str) -> str:
  """Returns the directory for results of work whose subject or output is `path`.

  It is `path.work` or, if that cannot be written, a directory of this user below the system's
  temporary directory. In both cases, the run after a killed run finds the same directory.
  """
  if not urls.is_url(path):
    directory = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(directory):
      directory = os.path.dirname(directory)
    if os.access(directory, os.W_OK | os.X_OK):
      return os.path.abspath(path) + results_lib.OWN_SUFFIX
  return private_directory()


def is_next_to(results: str, path: str) -> bool:
  """Returns whether results go next to a local path, and not to a temporary directory."""
  return not urls.is_url(path) and results == os.path.abspath(path) + results_lib.OWN_SUFFIX


def private_directory() -> str:
  """Returns a directory for results below the temporary directory that only this user can write."""
  path = os.path.join(tempfile.gettempdir(), f"maxtext-olmo-{os.getuid()}{results_lib.OWN_SUFFIX}")
  with contextlib.suppress(FileExistsError):
    os.mkdir(path, 0o700)
  found = os.lstat(path)
  mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
  if mine and not found.st_mode & 0o022:
    return path
  # Another user created it, and could put results there.
  return tempfile.mkdtemp(prefix="maxtext-olmo-", suffix=results_lib.OWN_SUFFIX)
