"""The number of CPU cores this process may use.

    affinity mask       0-15        16 cores
    cgroup quota        350 ms of CPU time per 100 ms: 3.5 cores
    available_cores()   4

In a container, `os.cpu_count()` and the affinity mask often show all cores of the host. Threads
beyond the quota would only wait for the next period.
"""

from __future__ import annotations

import math
import os
import pathlib


def available_cores() -> int:
  """Returns the number of CPU cores that the affinity mask and the cgroup quota allow.

  >>> available_cores() >= 1
  True
  """
  if hasattr(os, "sched_getaffinity"):
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count() or 1
  quota = cgroup_quota(pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup"))
  return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cgroup_quota(root: pathlib.Path, membership: pathlib.Path) -> float | None:
  """Returns the CPU quota of a process in cores, or None if it has no quota.

  The smallest quota of the process's cgroup and its ancestors applies.

  Args:
    root: Mount point of cgroup v2, or parent directory of the v1 controllers.
    membership: File with lines of `id:controllers:path`, such as `/proc/self/cgroup`.
  """
  quotas: list[float] = []
  for line in _read(membership).splitlines():
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if not controllers:
      quotas += _quotas(root, path, _quota_v2)
    elif "cpu" in controllers.split(","):
      # The directory is named after all its controllers; many systems also link `cpu` to it.
      mount = next((root / name for name in (controllers, "cpu") if (root / name).is_dir()), None)
      quotas += _quotas(mount, path, _quota_v1) if mount is not None else []
  return min(quotas, default=None)


def _quotas(mount: pathlib.Path, path: str, quota_of) -> list[float]:
  """Returns the quotas of a cgroup and all its ancestors, as far as they are visible."""
  # Without a cgroup namespace, the path in a container is the host's path. Only the root of the
  # mount exists here, which is the container's own cgroup.
  parts = pathlib.PurePosixPath(path).parts[1:]
  found = [quota_of(mount.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
  return [quota for quota in found if quota is not None]


def _quota_v2(directory: pathlib.Path) -> float | None:
  return _ratio(*_read(directory / "cpu.max").split()[:2])


def _quota_v1(directory: pathlib.Path) -> float | None:
  return _ratio(_read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us"))


def _ratio(quota: str = "", period: str = "") -> float | None:
  """Returns quota / period; None for "max", -1 and files that do not exist."""
  try:
    cores = float(quota) / float(period)
  except (ValueError, ZeroDivisionError):
    return None
  return cores if cores > 0 else None


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding="ascii").strip()
  except (OSError, UnicodeDecodeError):
    return ""
