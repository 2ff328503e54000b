"""Checks one host before a run: packages, descriptors, index, storage, code and config.

A check reports what it finds. `run_check` turns an error into a finding, so the remaining checks
still run and no other process waits for this one. `doctor` compares hosts.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import xxhash
from ml_collections import ConfigDict

import maxtext_olmo
from maxtext_olmo import config as data_keys
from maxtext_olmo import config_table
from maxtext_olmo import english
from maxtext_olmo import errors
from maxtext_olmo.corpus import index_builder
from maxtext_olmo.corpus import paths as paths_lib
from maxtext_olmo.corpus import token_files
from maxtext_olmo.corpus import urls
from maxtext_olmo.corpus import verify
from maxtext_olmo.corpus.storage import open_storage
from maxtext_olmo.trainers.tiny import config as config_lib

Level = Literal["ok", "warning", "wrong"]

_PACKAGES = ("jax", "jaxlib", "numpy", "grain", "orbax-checkpoint", "optax", "obstore")
# The share of descriptors that the library uses for token files; the rest is for everything else.
_SHARE_OF_DESCRIPTORS = 0.75
_MOST_OBJECTS = 8  # Objects in stores that are read; each takes two requests.
_SAMPLE_BYTES = 4096
# A run waits longer for a store; a check before the run need not.
PATIENCE_SECONDS = 10.0
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/kfd")
# Keys that may differ between the processes of a run, at the top of a config or in a stage.
_PER_HOST = {key.name for key in config_table.KEYS if key.per_host} - {"olmo_stages"}
_PER_HOST |= {"process_id", "num_processes", "coordinator_address"}


@dataclasses.dataclass(frozen=True)
class Finding:
  """The result of a check: what was found, without credentials, and what to do unless it is ok."""

  level: Level
  check: str
  found: str
  remedy: str = ""

  def __post_init__(self) -> None:
    object.__setattr__(self, "found", urls.redact(self.found))


def check_host(config: ConfigDict | None) -> tuple[list[Finding], dict[str, Any]]:
  """Runs all checks that involve no other process and no device.

  Args:
    config: The config of the run; without one, its index and storage are not checked.

  Returns:
    The findings, and what must be the same on all hosts: JSON values by name.
  """
  code = _digest_of_code()
  found = [_check_versions(), _describe_code(code)]
  values = {} if config is None else dict(config.items())
  indexes: dict[str, str] = {}
  files: list[int] = []
  if config is not None:
    found += run_check("config", "correct these keys", lambda: _check_config(config))
    if found[-1].level == "ok":
      remedy = "make the index and the corpus readable on every host"
      found += run_check("index", remedy, lambda: _check_corpus(config, indexes, files))
  found.append(_check_descriptors(sum(files)))
  facts = {
      "python": platform.python_version(),
      "versions": _versions(),
      "code": code,
      "config": _shared(json.loads(json.dumps(values, default=repr))),
      "indexes": indexes,
  }
  return found, facts


def run_check(check: str, remedy: str, findings: Callable[[], Iterable[Finding]]) -> list[Finding]:
  """Returns the findings of a check; an error that ends it becomes one more finding.

  Args:
    check: The name of the check, for the error.
    remedy: What to do about the error.
    findings: Runs the check and returns its findings.
  """
  found: list[Finding] = []
  try:
    found.extend(findings())
  except errors.MaxtextOlmoError as error:
    found.append(Finding("wrong", check, one_line(error), remedy))
  except Exception as error:  # Devices and stores raise many types, an ImportError among them.
    found.append(Finding("wrong", check, f"{type(error).__name__}: {one_line(error)}", remedy))
  return found


def one_line(error: Exception) -> str:
  """Returns the text of an error on one line, for a table."""
  return " ".join(line.strip() for line in str(error).splitlines())


def unused_accelerators(platform_name: str) -> list[str]:
  """Returns the devices of accelerators on this host, if JAX computes on the CPU instead."""
  if platform_name != "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
    return []
  return sorted(path for pattern in ACCELERATORS for path in glob.glob(pattern))


def _shared(value: Any) -> Any:
  """Returns a JSON value without credentials and without keys that may differ between hosts."""
  if isinstance(value, dict):
    return {name: _shared(item) for name, item in value.items() if name not in _PER_HOST}
  if isinstance(value, list):
    return [_shared(item) for item in value]
  return urls.redact(value) if isinstance(value, str) else value


def _check_versions() -> Finding:
  versions = _versions()
  listed = ", ".join(f"{name} {version}" for name, version in versions.items())
  wrong = list(_outside_bounds(versions))
  return Finding(
      "warning" if wrong else "ok",
      "versions",
      f"Python {platform.python_version()}, {listed}" + "".join(f"; {text}" for text in wrong),
      "install the versions that docs/guides/versions.md lists" if wrong else "",
  )


def _versions() -> dict[str, str]:
  found = {"maxtext_olmo": maxtext_olmo.__version__}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def _outside_bounds(versions: dict[str, str]) -> Iterator[str]:
  """Yields a phrase for each package whose version this package does not allow."""
  try:
    required = importlib.metadata.requires("maxtext-olmo") or []
  except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
    return
  for text in required:
    match = re.match(r"([\w-]+)(?:\[[^]]*\])?\s*([^;]*)$", text)  # Not those with conditions.
    if match is None or match[1] not in versions:
      continue
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", match[2]):
      version = versions[match[1]]
      low = _numbers(version) < _numbers(bound)
      if low == (operator == ">="):
        yield f"{match[1]} {version} is not {operator}{bound}"


def _numbers(version: str) -> tuple[int, ...]:
  return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _describe_code(digest: str) -> Finding:
  folder = os.path.dirname(os.path.abspath(maxtext_olmo.__file__))
  return Finding("ok", "code", f"{folder}, digest {digest}, run by {sys.executable}")


def _digest_of_code() -> str:
  """Returns a digest of all Python files of this package."""
  folder = pathlib.Path(maxtext_olmo.__file__).resolve().parent
  digest = xxhash.xxh3_64()
  for path in sorted(folder.rglob("*.py")):
    digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
  return digest.hexdigest()


def _check_config(config: ConfigDict) -> Iterator[Finding]:
  config_lib.validate(config)
  yield Finding("ok", "config", f"valid, dataset_type={config.dataset_type}")


def _check_corpus(
    config: ConfigDict, fingerprints: dict[str, str], files: list[int]
) -> Iterator[Finding]:
  """Yields the findings about the corpus.

  Args:
    config: The config of the run.
    fingerprints: Dict to which the fingerprint of each index is added, by the role of the index.
    files: List to which the number of files of each index is added.
  """
  options = data_keys.Options.read(config_lib.for_data(config))
  storage = open_storage(
      dataclasses.replace(
          options.store_options, patience=PATIENCE_SECONDS, first_patience=PATIENCE_SECONDS
      )
  )
  for path, roles in _indexes(options).items():
    try:
      index = index_builder.load_index(path, storage=storage)
    except errors.CorpusError as error:
      fingerprints.update(dict.fromkeys(roles, "unreadable"))
      yield Finding("wrong", "index", one_line(error), "make the index readable on every host")
      continue
    fingerprints.update(dict.fromkeys(roles, index.fingerprint))
    files.append(len(index.files))
    yield Finding(
        "ok",
        "index",
        f"{path}: {english.count(len(index.files), 'file')},"
        f" {english.count(index.total_instances, 'instance')}, fingerprint {index.fingerprint}",
    )
    if config.dataset_type == "olmo_grain":
      try:
        index.with_sequence_length(options.max_target_length)
      except errors.CorpusError as error:
        yield Finding("wrong", "index", one_line(error), "change max_target_length or the index")
    try:
      verify.check_sizes(index, path_remap=options.path_remap, storage=storage)
      read = _read_samples(
          token_files.TokenFiles.of_index(index, path_remap=options.path_remap, storage=storage)
      )
    except errors.CorpusError as error:
      yield Finding(
          "wrong",
          "storage",
          one_line(error),
          "mount or copy the corpus on this host; for a bucket, check credentials and network"
          " (`maxtext-olmo storage test`)",
      )
      continue
    yield Finding("ok", "storage", f"all local files have the right size; read {read}")


def _indexes(options: data_keys.Options) -> dict[str, list[str]]:
  """Returns a dict from the path of each index that a run reads to its roles in the run."""
  paths = {name: getattr(options, name) for name in ("olmo_index_path", "olmo_eval_index_path")}
  for number, stage in enumerate(options.olmo_stages, 1):
    paths[f"olmo_stages: stage {number}"] = stage.get("olmo_index_path", "")
  found: dict[str, list[str]] = {}
  for role, path in paths.items():
    if path and options.dataset_type != "synthetic":
      found.setdefault(path, []).append(role)
  return found


def _read_samples(files: token_files.TokenFiles) -> str:
  """Reads the beginning of a local file and of several objects in stores."""
  remote = [path for path in files.paths if paths_lib.is_url(path)]
  local = [path for path in files.paths if not paths_lib.is_url(path)]
  step = max(1, len(remote) // _MOST_OBJECTS)
  chosen = [*local[:1], *remote[::step][:_MOST_OBJECTS]]
  for path in chosen:
    files.storage.read(path, 0, min(_SAMPLE_BYTES, files.storage.size(path)))
  return f"the beginning of {english.count(len(chosen), 'file')}"


def _check_descriptors(files: int) -> Finding:
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  has = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
  found = f"{has} file descriptors"
  if files:
    found += f" for {english.count(files, 'file')} of the corpus"
  if soft != resource.RLIM_INFINITY and files > _SHARE_OF_DESCRIPTORS * soft:
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    needed = int(files / _SHARE_OF_DESCRIPTORS) + 1
    return Finding(
        "warning",
        "descriptors",
        f"{found}: files are constantly closed and reopened, which is slow",
        f"run `ulimit -n {needed}` before you start the run (the hard limit is {most})",
    )
  return Finding("ok", "descriptors", found)
