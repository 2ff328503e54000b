"""Hosts in network namespaces: each has its own name and address, and a cable that can be cut.

    switch (a namespace with a bridge)
      port0 ── eth0 of host0, 10.213.7.1
      port1 ── eth0 of host1, 10.213.7.2

The machine's own network is not touched. `close` removes everything; what a killed test has left is
removed when the next test begins.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_PREFIX = "olmo-test"
_FOLDERS = pathlib.Path("/etc/netns")  # `ip netns exec` mounts these files over those in /etc.
_SUBNET = "10.213.7"
# Sets the name of the host before the command runs, under the same process id.
_RENAME = 'hostname "$0" && exec "$@"'


def why_not() -> str:
  """Returns why namespaces cannot be used here; empty if they can."""
  if os.geteuid() != 0:
    return "Network namespaces need root."
  for tool in ("ip", "unshare", "hostname"):
    if shutil.which(tool) is None:
      return f"There is no command `{tool}` (iproute2, util-linux, hostname)."
  probe = f"{_PREFIX}-{os.getpid()}-probe"
  done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
  if done.returncode:
    return f"Network namespaces cannot be created here: {done.stderr.strip()}"
  _ip("netns", "delete", probe)
  return ""


class Network:
  """A switch and hosts that are connected to it."""

  def __init__(self, hosts: int):
    _remove_leftovers()
    self._names = [f"{_PREFIX}-{os.getpid()}-{i}" for i in range(hosts)]
    self._switch = f"{_PREFIX}-{os.getpid()}-switch"
    self.addresses = [f"{_SUBNET}.{i + 1}" for i in range(hosts)]
    self.names = [f"host{i}" for i in range(hosts)]
    self._processes: list[subprocess.Popen[str]] = []
    try:
      self._make()
    except BaseException:
      self.close()
      raise

  def _make(self) -> None:
    _ip("netns", "add", self._switch)
    _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", self._switch, "link", "set", "bridge", "up")
    hosts = "".join(f"{a} {name}\n" for a, name in zip(self.addresses, self.names))
    for i, name in enumerate(self._names):
      folder = _FOLDERS / name
      folder.mkdir(parents=True)
      (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
      _ip("netns", "add", name)
      peer = ("peer", "name", "eth0", "netns", name)
      _ip("-n", self._switch, "link", "add", f"port{i}", "type", "veth", *peer)
      _ip("-n", self._switch, "link", "set", f"port{i}", "master", "bridge", "up")
      _ip("-n", name, "address", "add", f"{self.addresses[i]}/24", "dev", "eth0")
      _ip("-n", name, "link", "set", "eth0", "up")
      _ip("-n", name, "link", "set", "lo", "up")

  def start(
      self, host: int, command: Sequence[str], env: Mapping[str, str], output: IO[str]
  ) -> subprocess.Popen[str]:
    """Starts a command on a host; its process id is that of the command itself."""
    enter = ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c", _RENAME]
    process = subprocess.Popen(
        [*enter, self.names[host], *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
    self._processes.append(process)
    return process

  def cut(self, host: int) -> None:
    """Cuts the cable of a host: packets are lost, and nobody is told."""
    _ip("-n", self._switch, "link", "set", f"port{host}", "down")

  def heal(self, host: int) -> None:
    """Connects a host again."""
    _ip("-n", self._switch, "link", "set", f"port{host}", "up")

  def delay(self, host: int, milliseconds: int) -> bool:
    """Delays each packet that a host sends; returns False if the kernel cannot do that."""
    words = ["qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{milliseconds}ms"]
    done = subprocess.run(
        ["ip", "netns", "exec", self._names[host], "tc", *words], capture_output=True, check=False
    )
    return done.returncode == 0

  def close(self) -> None:
    """Ends what was started, and removes the hosts."""
    for process in self._processes:
      process.kill()
      process.wait()
    for name in (*self._names, self._switch):
      _remove(name)


def _ip(*words: str) -> None:
  subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _remove(name: str) -> None:
  subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
  shutil.rmtree(_FOLDERS / name, ignore_errors=True)
  with contextlib.suppress(OSError):  # Others may use it.
    _FOLDERS.rmdir()


def _remove_leftovers() -> None:
  """Removes the hosts of tests that were killed."""
  listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
  names = {*listed.stdout.split()}
  if _FOLDERS.is_dir():
    names |= {path.name for path in _FOLDERS.iterdir()}
  for name in names:
    found = re.match(rf"{_PREFIX}-(\d+)-", name)
    if found and not pathlib.Path("/proc", found[1]).exists():
      _remove(name)
