"""A cache file of finished requests, from which a killed evaluation resumes.

Process 0 appends a line per request, `{"key": ..., "result": ...}`, as soon as the result is known.
The key is a hash of the request and of everything else that decides the result, including the
weights of the model. Several checkpoints can share a file, and none of them gets the results of a
different checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from maxtext_olmo import atomic
from maxtext_olmo import errors
from maxtext_olmo.corpus.storage.base import LARGEST_WHOLE
from maxtext_olmo.devices import collectives


class RequestCache:
  """A cache of finished requests. All processes must create it together and call `lookup` together.

  Args:
    path: Path of the cache file; None disables the cache.
  """

  def __init__(self, path: str | os.PathLike[str] | None):
    self._path = os.fspath(path) if path else ""
    self._found: dict[str, Any] = {}
    self._file: atomic.LineWriter | None = None
    if self._path:
      collectives.from_process_0(self._open, "opening the cache of results")

  def _open(self) -> None:
    self._file = atomic.LineWriter(self._path)
    if os.path.getsize(self._path) > LARGEST_WHOLE:
      raise errors.ConfigError(
          f"The cache of results {self._path} has {os.path.getsize(self._path):,} bytes; at most"
          f" {LARGEST_WHOLE:,} can be read. Choose another file."
      )
    try:
      with open(self._path, encoding="utf-8", errors="replace") as file:
        self._found = _read(file)
    except OSError as error:
      raise errors.ConfigError(
          f"The cache of results {self._path} cannot be read: {error.strerror}. Choose another"
          " file."
      ) from error

  def lookup(self, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the results that are cached, by key; process 0 looks them up for all processes."""
    if not self._path:
      return {}
    return collectives.from_process_0(
        lambda: {key: self._found[key] for key in keys if key in self._found},
        "looking up cached results",
    )

  def add(self, key: str, result: Any) -> None:
    """Appends a result; if the file cannot be written any more, warns and stops caching."""
    if self._file is None:
      return
    self._found[key] = result
    try:
      self._file.write(json.dumps({"key": key, "result": result}))
    except errors.WriteError as error:
      logging.warning("Results are no longer cached: %s", error)
      self.close()

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      self._file.close()
      self._file = None


def make_key(*parts: Any) -> str:
  """Returns a hash of JSON values."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(params: Any) -> str:
  """Returns a hash of all weights, which does not depend on their layout on devices.

  A sum of integers that wrap around on overflow does not depend on the order of addition. So each
  device can add up its own weights, however they are sharded.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  sums = jax.jit(lambda arrays: [_checksum(array) for array in arrays])([a for _, a in leaves])
  return make_key(
      [
          (
              jax.tree_util.keystr(path),
              list(np.shape(leaf)),
              str(leaf.dtype),
              np.asarray(s).tolist(),
          )
          for (path, leaf), s in zip(leaves, sums)
      ]
  )


def _checksum(array: jax.Array) -> jax.Array:
  array = jnp.asarray(array)
  width = 8 * array.dtype.itemsize
  if array.dtype == jnp.bool_ or width > 32:
    bits = array.astype(jnp.uint32)
  else:
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  # Each element has its own factor, so that swapping two elements changes the sum. The factors are
  # odd, because multiplying by an even number would lose information.
  weight = (place * jnp.uint32(2654435761)) ^ (place >> 13) | jnp.uint32(1)
  mixed = (bits ^ (bits >> 16)) * jnp.uint32(0x45D9F3B)
  return jnp.stack([jnp.sum(bits * weight), jnp.sum(mixed * (weight ^ jnp.uint32(0x9E3779B8)))])


def _read(file: IO[str]) -> dict[str, Any]:
  found = {}
  for line in file:
    try:
      entry = json.loads(line)
      found[entry["key"]] = entry["result"]
    except (ValueError, KeyError, TypeError, RecursionError):
      # A killed process may have left an incomplete line.
      continue
  return found
