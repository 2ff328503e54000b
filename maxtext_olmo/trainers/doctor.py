"""Checks made before a run, in one process or in all of them: `maxtext-olmo doctor`.

Every process checks its own host (`doctor_host`). Then the processes connect as the trainer does,
and send what they found through the coordinator's key-value store, which works even if the devices
do not. Process 0 compares the reports: versions, code, config and index must be the same
everywhere, the clocks must agree, and all must see the same checkpoint_dir. The processes may run
different releases of this package, so a report may have fewer or more entries than that of
process 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from maxtext_olmo import config as data_keys
from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.loader import wiring
from maxtext_olmo.trainers import cluster
from maxtext_olmo.trainers import doctor_host
from maxtext_olmo.trainers import lease
from maxtext_olmo.trainers.doctor_host import Finding
from maxtext_olmo.trainers.tiny import config as config_lib
from maxtext_olmo.trainers.tiny import model

_REPORTS = "maxtext_olmo/doctor/report/"
_VERDICT = "maxtext_olmo/doctor/verdict"
_CLOCK = "maxtext_olmo/doctor/clock/"
_PROBE = "maxtext_olmo/doctor/probe"
# Signed requests to object stores fail if a clock is off by five to fifteen minutes.
_CLOCK_WARNING, _CLOCK_WRONG = 1.0, 60.0
# A busy host may leave a barrier late, but hardly every time.
_CLOCK_BARRIERS = 5
_SEE_GUIDE = "see docs/guides/clusters.md"
_UNKNOWN = "unknown"
_NAMES = {"python": "versions", "indexes": "index"}  # Facts that are part of another check.


@dataclasses.dataclass(frozen=True)
class Report:
  """What one process has found."""

  host: str
  clocks: list[float]  # When all processes passed each of a few barriers, by this host's clock.
  devices: int
  findings: list[Finding]
  facts: dict[str, Any]

  def to_json(self) -> str:
    """Returns the report as text."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> Report:
    """Returns the report that `to_json`, perhaps of another release, turned into text."""
    values = json.loads(text)
    return cls(
        values.get("host", _UNKNOWN),
        values.get("clocks", []),
        values.get("devices", 0),
        [_read_finding(found) for found in values.get("findings", [])],
        values.get("facts", {}),
    )


def _read_finding(values: dict[str, Any]) -> Finding:
  names = [field.name for field in dataclasses.fields(Finding)]
  return Finding(**{name: values.get(name, _UNKNOWN) for name in names})


def examine(
    config: ConfigDict | None,
    *,
    wait_seconds: int = cluster.WAIT_SECONDS,
    give_up: Callable[[list[Finding]], None] = lambda findings: None,
) -> tuple[list[Finding], bool]:
  """Returns the findings about all processes, and whether nothing is wrong.

  All processes of a run call this together. The findings are complete on process 0, and empty on
  the others, which get the verdict.

  Args:
    config: The config of the run; if it is None, only the checks that need no config are made.
    wait_seconds: How long to wait for other processes.
    give_up: Called with what was found so far if the other processes do not connect; then the
      process ends.
  """
  findings, facts = doctor_host.check_host(config)
  place = (
      ()
      if config is None
      else (config.coordinator_address, config.num_processes, config.process_id)
  )
  alone = functools.partial(_alone, findings)
  try:
    cluster.connect(*place, wait_seconds=wait_seconds, give_up=lambda error: give_up(alone(error)))
  except errors.ConfigError as error:
    return alone(error), False
  run = cluster.coordinator()
  findings += doctor_host.run_check("devices", _SEE_GUIDE, lambda: _check_devices(config))
  if config is not None and findings_ok(findings, "config") and findings_ok(findings, "devices"):
    remedy = "change global_batch_size_to_load or mesh_shape"
    findings += doctor_host.run_check("batch", remedy, lambda: _check_batch(config))
  directory = "" if config is None or not config.enable_checkpointing else config.checkpoint_dir
  try:
    with contextlib.ExitStack() as stack:
      findings += _check_directory(run, directory, stack, wait_seconds)
      clocks = _read_clocks(run, wait_seconds)
    devices = jax.local_device_count() if findings_ok(findings, "devices") else 0
    mine = Report(socket.gethostname(), clocks, devices, findings, facts)
    return _exchange(run, mine, wait_seconds)
  except Exception as error:  # JAX has its own types for a process that has ended.
    return alone(error), False


def _read_clocks(run: cluster.Coordinator | None, wait_seconds: int) -> list[float]:
  if run is None:
    return [time.time()]
  times = []
  for number in range(_CLOCK_BARRIERS):
    run.client.wait_at_barrier(f"{_CLOCK}{number}", 1000 * wait_seconds)
    times.append(time.time())
  return times


def _alone(findings: list[Finding], error: Exception) -> list[Finding]:
  text = doctor_host.one_line(error)
  if not isinstance(error, errors.MaxtextOlmoError):
    text = f"{type(error).__name__}: {text}"
  return [*findings, Finding("wrong", "processes", text, _SEE_GUIDE)]


def findings_ok(findings: Sequence[Finding], check: str = "") -> bool:
  """Returns whether nothing is wrong, in all checks or in one of them."""
  return not any(found.level == "wrong" and check in ("", found.check) for found in findings)


def _exchange(
    run: cluster.Coordinator | None, mine: Report, wait_seconds: int
) -> tuple[list[Finding], bool]:
  if run is None:
    found = list(compare([mine]))
    return found, findings_ok(found)
  milliseconds = 1000 * wait_seconds
  if run.process != 0:
    run.client.key_value_set(f"{_REPORTS}{run.process}", mine.to_json())
    return [], run.client.blocking_key_value_get(_VERDICT, milliseconds) == "ok"
  reports, ok = [mine], False
  try:
    for process in range(1, run.processes):
      text = run.client.blocking_key_value_get(f"{_REPORTS}{process}", milliseconds)
      reports.append(Report.from_json(text))
    found = list(compare(reports))
    ok = findings_ok(found)
  finally:  # The others wait for the verdict, even if there is nothing to base it on.
    run.client.key_value_set(_VERDICT, "ok" if ok else "wrong")
  return found, ok


def compare(reports: Sequence[Report]) -> Iterator[Finding]:
  """Yields the findings of all processes: those of process 0, then what differs elsewhere."""
  hosts = list(dict.fromkeys(report.host for report in reports))
  more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
  count = f"{len(reports)} of {len(reports)}" if len(reports) > 1 else "1 (no cluster was found)"
  yield Finding("ok", "processes", f"{count}, on {', '.join(hosts[:8])}{more}")
  seen = set()
  for process, report in enumerate(reports):
    for found in report.findings:
      if (process == 0 or found.level != "ok") and found not in seen:
        seen.add(found)
        where = f"process {process} on {report.host}: " if process else ""
        yield dataclasses.replace(found, found=where + found.found)
  if len(reports) > 1:
    yield from _compare_facts(reports)
    yield _compare_devices(reports)
  yield _compare_clocks(reports)


def _compare_facts(reports: Sequence[Report]) -> Iterator[Finding]:
  first = reports[0]
  same = True
  for process, report in enumerate(reports):
    for name in dict.fromkeys([*first.facts, *report.facts]):
      found, expected = (facts.get(name, _UNKNOWN) for facts in (report.facts, first.facts))
      if found != expected:
        same = False
        yield Finding(
            "wrong",
            _NAMES.get(name, name),
            f"{name}: process {process} on {report.host} and process 0 on {first.host} differ:"
            f" {_difference(found, expected)}",
            "start all processes with the same code, environment, config and index",
        )
  if same:
    yield Finding("ok", "hosts agree", "the same versions, code, config and index on all processes")


def _difference(found: Any, expected: Any) -> str:
  if not isinstance(found, dict) or not isinstance(expected, dict):
    return " and ".join("known" if isinstance(v, dict) else str(v) for v in (found, expected))
  names = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
  return "; ".join(f"{n}: {found.get(n)!r} and {expected.get(n)!r}" for n in names)


def _compare_devices(reports: Sequence[Report]) -> Finding:
  counts = sorted({report.devices for report in reports})
  if len(counts) == 1:
    return Finding("ok", "devices", f"{counts[0]} on each process")
  return Finding(
      "warning",
      "devices",
      f"between {counts[0]} and {counts[-1]} per process",
      "check the hosts with fewer devices, unless this is intended",
  )


def _compare_clocks(reports: Sequence[Report]) -> Finding:
  if len(reports) == 1:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(reports[0].clocks[0]))
    return Finding("ok", "clock", f"{now}; there is no other host to compare with")
  barriers = list(zip(*(report.clocks for report in reports)))
  if not barriers:
    return Finding("warning", "clock", "not all processes reported their time", _SEE_GUIDE)
  clocks = min(barriers, key=lambda clocks: max(clocks) - min(clocks))
  skew = max(clocks) - min(clocks)
  level: doctor_host.Level = "ok"
  if skew > _CLOCK_WARNING:
    level = "wrong" if skew > _CLOCK_WRONG else "warning"
  slowest = reports[clocks.index(min(clocks))].host
  fastest = reports[clocks.index(max(clocks))].host
  return Finding(
      level,
      "clock",
      f"hosts agree within {skew:.2g} s"
      if level == "ok"
      else f"{fastest} is {skew:.1f} s ahead of" f" {slowest}",
      "" if level == "ok" else "synchronize the clocks (chrony or systemd-timesyncd)",
  )


def _check_devices(config: ConfigDict | None) -> Iterator[Finding]:
  cluster.check_processes()
  kinds = ", ".join(sorted({device.device_kind for device in jax.devices()}))
  yield Finding("ok", "devices", f"{jax.device_count()} in total ({kinds})")
  if unused := doctor_host.unused_accelerators(jax.default_backend()):
    yield Finding(
        "warning",
        "devices",
        f"JAX computes on the CPU, but this host has {', '.join(unused)}",
        "install JAX for this hardware, such as jax[cuda13] or jax[tpu]",
    )
  if config is not None:
    model.make_mesh(config)


def _check_batch(config: ConfigDict) -> Iterator[Finding]:
  """Checks that the batches of a valid config divide evenly over its mesh."""
  options = data_keys.Options.read(config_lib.for_data(config))
  sizes = wiring.layouts(options, model.make_mesh(config), options.schedule())
  rows = ", ".join(str(layout.batch) for layout in sizes.values())
  devices = english.count(jax.device_count(), "device")
  yield Finding("ok", "batch", f"{rows} rows divide evenly over {devices}")


def _check_directory(
    run: cluster.Coordinator | None,
    directory: str,
    stack: contextlib.ExitStack,
    wait_seconds: int,
) -> Iterator[Finding]:
  """Checks that process 0 can write to a directory, and that the others see what it writes.

  Process 0 always tells the others the name of its file, because they wait for it.
  """
  wrong = holder = ""
  if run is None or run.process == 0:
    name = f".doctor-{uuid.uuid4().hex}"
    try:
      if directory:
        _write_probe(epath.Path(directory), name, stack)
        holder = _find_holder(directory)
    except Exception as error:  # Such as an ImportError for a bucket.
      wrong = f"{directory} cannot be written to: {doctor_host.one_line(error)}"
    if run is not None:
      run.client.key_value_set(_PROBE, name)
  else:
    name = run.client.blocking_key_value_get(_PROBE, 1000 * wait_seconds)
    try:
      if directory and not (epath.Path(directory) / name).exists():
        wrong = f"{directory} does not contain the file that process 0 wrote there"
    except Exception as error:
      wrong = f"{directory} cannot be read: {doctor_host.one_line(error)}"
  if wrong:
    remedy = "choose a directory that all hosts share and that the run may write to"
    yield Finding("wrong", "checkpoint_dir", wrong, remedy)
  elif holder:
    yield Finding(
        "warning",
        "checkpoint_dir",
        f"{directory} {holder}",
        "make sure that only one run uses the directory",
    )
  elif directory:
    yield Finding("ok", "checkpoint_dir", f"{directory} can be written to")


def _find_holder(directory: str) -> str:
  """Returns what is to be said about the lease of a directory; empty if a run can take it."""
  try:
    holder = lease.find_holder(directory)
  except Exception as error:  # Such as a ConfigError for a missing package.
    return f"can be written to, but its lease cannot be read: {doctor_host.one_line(error)}"
  if not holder:
    return ""
  return (
      f"is in use by {holder}; a run that starts now is refused, unless that one ends within five"
      " minutes"
  )


def _write_probe(directory: epath.Path, name: str, stack: contextlib.ExitStack) -> None:
  if not directory.exists():
    directory.mkdir(parents=True)
    stack.callback(_remove, directory)
  (directory / name).write_text("Written by `maxtext-olmo doctor`, and removed immediately.")
  stack.callback(_remove, directory / name)


def _remove(path: epath.Path) -> None:
  with contextlib.suppress(Exception):  # Stores raise their own types.
    if path.is_dir():
      path.rmdir()
    else:
      path.unlink()
