"""Simulated devices: a mesh of thousands of devices that do not exist, to lay out batches on.

The layout of a batch needs only the shape of the mesh and the process of each device. So the rows
of every host of a fleet can be computed on one machine:

    mesh = make_mesh({"data": 4096}, hosts=1024)
    BatchLayout(mesh, PartitionSpec("data"), 8192, 8192, process=1023).rows
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np

from maxtext_olmo import errors


@dataclasses.dataclass(frozen=True)
class SimulatedDevice:
  """A device that computes nothing, with the attributes that a mesh reads.

  Attributes:
    id: The number of the device, unique in the mesh.
    process_index: The process that the device belongs to.
    platform: The name of the platform.
    device_kind: The name of the kind of device.
  """

  id: int
  process_index: int
  platform: str = "simulated"
  device_kind: str = "simulated"


def make_mesh(axes: Mapping[str, int], hosts: int) -> jax.sharding.Mesh:
  """Returns a mesh of simulated devices, host after host in the order of the axes.

  Args:
    axes: The name and size of each axis. The last axis varies fastest.
    hosts: The number of hosts. Each has the same number of devices and one process.

  Raises:
    ConfigError: The devices cannot be divided evenly over the hosts.

  Example:
    >>> make_mesh({"data": 4, "tensor": 2}, hosts=2).shape["data"]
    4
  """
  count = math.prod(axes.values())
  if hosts < 1 or count < 1 or count % hosts:
    raise errors.ConfigError(
        f"A mesh of {dict(axes)} has {count} devices, which cannot be divided evenly over"
        f" {hosts} hosts. Choose axes whose product is a multiple of the number of hosts."
    )
  devices = np.empty(count, object)
  for number in range(count):
    devices[number] = SimulatedDevice(number, number // (count // hosts))
  return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))
