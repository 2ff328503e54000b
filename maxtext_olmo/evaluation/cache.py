"""Finished requests in a file, so that an evaluation that was killed continues where it stopped.

A line per request, `{"key": ..., "result": ...}`, appended by process 0 as soon as the result is
known. The key is a hash of the request and of everything else that decides the result, the weights
of the model included, so that one file can serve many checkpoints and never answers for the wrong
one.
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

from maxtext_olmo.devices import collectives


class RequestCache:
  """The finished requests; all processes call `lookup` together.

  Args:
    path: The file; without one nothing is kept.
  """

  def __init__(self, path: str | os.PathLike[str] | None):
    self._enabled = bool(path)
    self._found: dict[str, Any] = {}
    self._file: IO[str] | None = None
    if path and jax.process_index() == 0:
      os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
      # A line that is not text is skipped, as one that is not JSON is.
      self._file = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
      self._found = _read(self._file)

  def lookup(self, keys: Sequence[str]) -> dict[str, Any]:
    """The results that are there already; what process 0 found, on all."""
    if not self._enabled:
      return {}
    return collectives.from_process_0(
        lambda: {key: self._found[key] for key in keys if key in self._found},
        "looking up cached results",
    )

  def add(self, key: str, result: Any) -> None:
    """Keeps a result."""
    if self._file is None:
      return
    self._found[key] = result
    self._file.write(json.dumps({"key": key, "result": result}) + "\n")
    # With the operating system, a line outlives this process.
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    if self._file is not None:
      self._file.close()
      self._file = None


def make_key(*parts: Any) -> str:
  """A hash of JSON values."""
  return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(params: Any) -> str:
  """A hash of all weights, the same however they are laid out on devices.

  Integers that wrap around may be added in any order, so each device adds up what it holds.
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
  # A weight per place, so that two values that change places change the sum; odd ones lose nothing.
  weight = (place * jnp.uint32(2654435761)) ^ (place >> 13) | jnp.uint32(1)
  mixed = (bits ^ (bits >> 16)) * jnp.uint32(0x45D9F3B)
  return jnp.stack([jnp.sum(bits * weight), jnp.sum(mixed * (weight ^ jnp.uint32(0x9E3779B8)))])


def _read(file: IO[str]) -> dict[str, Any]:
  found = {}
  file.seek(0)
  whole = True
  for line in file:
    whole = line.endswith("\n")
    try:
      entry = json.loads(line)
      found[entry["key"]] = entry["result"]
    except (ValueError, KeyError, TypeError, RecursionError):
      # A killed process may have left half a line.
      continue
  if not whole:
    file.write("\n")
  return found
